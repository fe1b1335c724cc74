"""Prints the losses of this run and of the experiments of dvc exp run, no wider than the terminal.

python -m pipelines.experiments

`dvc exp show` itself has the path of a metric's file before its name: some 400 columns.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import dvc.api
import pandas as pd

from pipelines.app import ending_with_one_line
from pipelines.fingerprints import refusals_of_dvc

METRIC = re.compile(r".*/(?:causal|masked)_(\w+)\.json:(exact|OVA_4)")


def main() -> None:
    with ending_with_one_line():
        with refusals_of_dvc():
            shown = dvc.api.exp_show()
        found = table(shown, shutil.get_terminal_size().columns)
        if not found:
            raise ValueError("no metrics here yet; run make repro first")
        print(found)


def table(shown: Iterable[Mapping[str, Any]], width: int) -> str:
    """Tabulates the revisions: exact attention and 4 keys for the output, by model.

    `shown` are the rows of dvc.api.exp_show; what it could not read ("!") is a dash.
    """
    rows = {
        row["Experiment"] or row["rev"]: {
            metric.groups(): value for name, value in row.items() if (metric := METRIC.match(name))
        }
        for row in shown
    }
    frame = pd.DataFrame.from_dict(rows, orient="index").apply(pd.to_numeric, errors="coerce")
    if frame.empty:
        return ""
    frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    return frame.to_string(float_format="{:.2f}".format, na_rep="–", line_width=width)


if __name__ == "__main__":
    main()
