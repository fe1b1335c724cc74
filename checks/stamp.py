"""Records today's code as that of the trainings that are kept in results/seeds/<scale>.

    python -m checks.stamp hours [values]

For a change of structure alone, after checks.golden printed `equal`: such a change would make every
stage run again. Nothing runs: the fingerprints and the dvc.lock of the kept trainings are written
anew, and their records stay as they are. Where a value has changed, the stage is named instead,
unless `values` is given: for values that went without an effect, as golden numbers say.
"""

import sys
from pathlib import Path

from dvc.repo import Repo

from pipelines.app import ending_with_one_line
from pipelines.app.choice import choose
from pipelines.app.seeds import keep, take
from pipelines.fingerprints import differences, stages_of_page, write
from value_aware_attention.files import load_json

MOVED = "_target_"
"""Key of the place of code, which a change of structure may move"""


def main() -> None:
    """Stamps the kept trainings of a scale, in a fresh clone."""
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["values"]):
        sys.exit("error: give the scale of the kept trainings, and `values` if values may differ")
    with ending_with_one_line():
        cfg = choose([f"scale={sys.argv[1]}"])
        outputs, seeds = Path(cfg.paths.outputs), Path(cfg.paths.seeds)
        if outputs.exists():
            raise ValueError(f"{outputs} is there: work in a fresh clone, where it is not")
        take(seeds, cfg.scale, stages_of_page().values())
        stamp(outputs / "fingerprints", values_may_differ=len(sys.argv) == 3)
        print(f"{seeds} has {keep(outputs, seeds)} files, as of today's code")


def stamp(folder: Path, *, values_may_differ: bool = False) -> None:
    """Writes today's fingerprints and enters them into dvc.lock for the stages of the page.

    Raises ValueError, with dvc.lock as it was, for a value that has changed where none may.
    """
    names = [name for name in stages_of_page() if name not in ("fingerprints", "report")]
    before = {name: load_json(folder / f"{name}.json")["values"] for name in names}
    write(folder)
    for name, values in before.items():
        changes = differences(values, load_json(folder / f"{name}.json")["values"], "values")
        change = next((change for change in changes if MOVED not in change), None)
        if change and not values_may_differ:
            raise ValueError(f"{name} has another value, so that it has to run: {change}")
    repo = Repo()
    with repo.lock:
        for stage in [stage for stage in repo.index.stages if stage.addressing in before]:
            stage.save(allow_missing=True, run_cache=False)
            stage.dump(update_pipeline=False)


if __name__ == "__main__":
    main()
