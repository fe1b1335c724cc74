"""Names the successor of each command that was removed in 1.1, for one release."""

import sys

SUCCESSORS = {
    "pipelines.repro": "make repro, decoder, caches, survey and seed run dvc repro",
    "pipelines.run": "python -m pipelines.scale SCALE overrides && make repro",
    "pipelines.verdict": "the claims on the page have a column with the published verdicts",
    "pipelines.decode": "python -m pipelines.caches model=PATH text=FILE decoding=true",
    "pipelines.pretrained": "python -m pipelines.probe pretrained=smollm2",
    "pipelines.benchmark": "python -m benchmarks.survey measures time and memory",
    "checks.stamp": "nothing is needed: a fingerprint holds only the code that its stage runs",
}


class Removed:
    """The last finder of `sys.meta_path`: Python asks it for modules that are in no folder."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Ends the program with one line and exit code 2 at a command that was removed."""
        if name in SUCCESSORS:
            print(f"error: {name} was removed in 1.1: {SUCCESSORS[name]}", file=sys.stderr)
            sys.exit(2)
