"""Compares this run, and the experiments of dvc exp run, with the published run of their scale.

    python -m pipelines.experiments

`dvc metrics diff` compares revisions of git, and the published run is none of them. `dvc exp show`
has the path of a metric's file before its name: some 400 columns.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import dvc.api
import pandas as pd

from pipelines.app import ending_with_one_line
from pipelines.fingerprints import refusals_of_dvc
from pipelines.verdict import PUBLISHED, kept, scale_of_run
from value_aware_study.paths import SUMMARY

METRIC = re.compile(r".*/(?P<scale>\w+)/summary/(?P<model>\w+)\.json:(?P<name>\w+)")
OURS, THEIRS, DIFFERENCE = "this run", "published", "difference"
UNITS = {"causal": "perplexity", "masked": "error in %"}
Run = Mapping[str, Mapping[str, float]]
"""The metrics of a run by model and name"""


def main() -> None:
    with ending_with_one_line():
        scale = scale_of_run()
        with refusals_of_dvc():
            shown = dvc.api.exp_show()
        found = runs(shown, scale)
        if not found:
            raise ValueError(f"no metrics of scale {scale} here yet; run make repro first")
        published = {THEIRS: kept(PUBLISHED / scale / SUMMARY)}
        print("\n\n".join(tables({**published, **found}, shutil.get_terminal_size().columns)))


def runs(shown: Iterable[Mapping[str, Any]], scale: str) -> Mapping[str, Run]:
    """Returns the metrics of each revision that has some; `shown` is what dvc.api.exp_show gives.

    DVC has "!" or None for what is neither in git nor in the cache.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in shown:
        name = OURS if row["rev"] == "workspace" else row["Experiment"] or row["rev"]
        for key, value in row.items():
            known = METRIC.fullmatch(key)
            if known and known["scale"] == scale and isinstance(value, (int, float)):
                found.setdefault(name, {}).setdefault(known["model"], {})[known["name"]] = value
    return found


def tables(found: Mapping[str, Run], width: int) -> Iterator[str]:
    """Yields a table of each model, a row for each run, as many columns as fit."""
    for model in sorted({model for name, run in found.items() if name != THEIRS for model in run}):
        rows = {name: run[model] for name, run in found.items() if model in run}
        if {OURS, THEIRS} <= rows.keys():
            ours, theirs = rows[OURS], rows[THEIRS]
            change = {name: ours[name] - theirs[name] for name in ours.keys() & theirs.keys()}
            rows = {THEIRS: theirs, OURS: ours, DIFFERENCE: change} | rows
        frame = pd.DataFrame.from_dict(rows, orient="index")
        frame = frame[sorted(frame, key=place)]
        text = pd.DataFrame(
            {name: [written(name, *one) for one in frame[name].items()] for name in frame},
            frame.index,
        )
        while len(text.columns) > 1 and text.to_string().index("\n") > width:
            text = text.iloc[:, :-1]
        unit = UNITS.get(model.partition("_")[0], "")
        yield f"{model}: {unit} (match_4: keys)\n{text.to_string()}"


def place(metric: str) -> tuple[bool, int, str]:
    """Orders exact attention, then both choices by their number of keys, then match_4."""
    choice, _, keys = metric.partition("_")
    return choice == "match", int(keys or 0), {"OVA": "OVO+"}.get(choice, choice)


def written(metric: str, row: Any, value: float) -> str:
    """Writes a number of keys as a whole number, and a difference with its sign."""
    sign, digits = "+" if row == DIFFERENCE else "", 0 if metric.startswith("match") else 2
    return "–" if pd.isna(value) else f"{value:{sign}.{digits}f}"


if __name__ == "__main__":
    main()
