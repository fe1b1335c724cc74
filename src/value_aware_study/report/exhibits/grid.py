"""Every cell of every model, each seed on its own line."""

import pandas as pd

from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import DASH, interval, missing, number, signed
from value_aware_study.report.labels import setting_label
from value_aware_study.report.results import Results

__all__ = ["exhibit"]


def exhibit(results: Results) -> Exhibit:
    """All columns as CSV; as text the metric, its change and the output error."""
    data = results.cells
    ends = zip(data["difference_low"], data["difference_high"], strict=True)
    display = pd.DataFrame(
        {
            "model": data["model"],
            "setting": [setting_label(row) for row in data.to_dict("records")],
            "seed": [number(seed, 0) for seed in data["seed"]],
            "metric": data["metric"],
            "value": [number(value, 2) for value in data["value"]],
            "difference": [signed(value, 2) for value in data["difference"]],
            "95% interval of the difference": [interval(*pair, 2, signed) for pair in ends],
            "output error": [_short(value) for value in data["relative_output_error"]],
        }
    )
    return Exhibit(
        "grid",
        "Every cell",
        f"All {len(data):,} cells of the grid: model, approximation, parameters and seed.",
        ["The CSV has every column: parameters, intervals, output error by layer, and counts."],
        table=Table(data, display),
        folded=True,
    )


def _short(value: float) -> str:
    return DASH if missing(value) else f"{value:.3g}"
