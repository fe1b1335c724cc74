"""How concentrated the attention weights of each model and layer are (section 3)."""

import pandas as pd

from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.formatting import number
from value_aware_study.report.results import Results

__all__ = ["exhibit"]

MEASURES = {
    "largest_weight": ("mean largest weight", 3),
    "rows_over_half": ("queries with a weight over 1/2, %", 1),
    "effective_keys": ("effective keys", 1),
    "keys_for_90_percent": ("keys holding 90% of the weight", 1),
}


def exhibit(results: Results) -> Exhibit | None:
    """One row a model and layer, with the kernel that its cells have; None where not measured."""
    head = ["model", "kernel", "layer"]
    rows = [
        {"model": record.model, "kernel": record.kernel, **vars(layer)}
        for record in results.records
        for attention in record.attention[:1]
        for layer in attention.skewness
    ]
    if not rows:
        return None
    data = pd.DataFrame(rows, columns=[*head, *MEASURES])
    display = data[head].astype(str)
    for name, (label, digits) in MEASURES.items():
        scale = 100 if name == "rows_over_half" else 1
        display[label] = [number(value * scale, digits) for value in data[name].astype(float)]
    note = (
        "A flat row (small largest weight, many effective keys) is one where the values decide "
        "which keys matter (section 3). Means over the recorded queries of all heads; effective "
        f"keys: exp of the entropy; layers count from 0. {captions.recorded_on(results.records)}"
    )
    return Exhibit(
        "skewness",
        "Skewness of the attention weights",
        "How many keys the attention of every layer rests on.",
        [note],
        table=Table(data, display),
        folded=True,
    )
