"""Shows what changed between two runs: values and code, and the numbers of the models.

    python -m pipelines.compare outputs/before outputs/laptop

A model has its metric with exact attention, OVO and OVA. The change of its loss, in nats a token or
a share of wrong predictions, has a paired 95% interval. It is a dash if the texts differ.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tabulate import tabulate

from pipelines.app import ending_with_one_line
from pipelines.app.summary import SHORT_NAMES
from pipelines.fingerprints import differences
from value_aware_attention.files import load_json
from value_aware_attention.records.estimate import DASH, estimate


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, metavar="FOLDER", help="outputs of a run")
    with ending_with_one_line():
        headers = ("stage or model", "what", "before", "after", "change of the loss")
        print(tabulate(moved(*parser.parse_args().runs), headers))


def moved(before: Path, after: Path) -> Iterator[tuple[str, ...]]:
    """Yields a row for each difference of the stages and models that both runs have."""
    files = [*after.glob("fingerprints/*.json"), *after.glob("records/*.json")]
    shared = sorted(file for file in files if (before / file.relative_to(after)).exists())
    if not shared:
        raise ValueError(f"{before} and {after} share no fingerprint or record; give two runs")
    for file in shared:
        old, new = (load_json(run / file.relative_to(after)) for run in (before, after))
        rows = moved_numbers(old, new) if "cells" in new else zip(differences(old, new))
        yield from ((file.stem, *row) for row in rows)


def moved_numbers(old: dict, new: dict) -> Iterator[tuple[str, ...]]:
    """Yields the cells whose numbers differ, with both and the change of the loss."""
    cells = {(cell["approximation"], str(cell["parameters"])): cell for cell in old["cells"]}
    for after in new["cells"]:
        name, r = after["approximation"], after["parameters"].get("r", "")
        before = cells.get((name, str(after["parameters"])), after)
        is_compared = name in ("exact", *SHORT_NAMES) and r in ("", 1, 4, new["head_dim"] + 1)
        if is_compared and before["unit_totals"] != after["unit_totals"]:
            counts, change = after["unit_counts"], DASH
            if (before["unit_counts"], old["hashes"]["data"]) == (counts, new["hashes"]["data"]):
                totals = np.subtract(after["unit_totals"], before["unit_totals"])
                change = f"{estimate(totals, np.array(counts))}"
            what = f"{new['metric']}, {SHORT_NAMES.get(name, name)} {r}"
            yield what, f"{before['value']:.5g}", f"{after['value']:.5g}", change


if __name__ == "__main__":
    main()
