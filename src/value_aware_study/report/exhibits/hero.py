"""The answer as one bar chart: keys by weight that match a few keys chosen for the output."""

from collections.abc import Sequence
from dataclasses import replace

from value_aware_attention.measurement.record import Record
from value_aware_study.report import captions
from value_aware_study.report.exhibit import Exhibit
from value_aware_study.report.exhibits.match_bars import LARGEST, panel
from value_aware_study.report.exhibits.matching_keys import CONSERVATIVE, counts, table
from value_aware_study.report.labels import model_label
from value_aware_study.report.measurements import Measured, of_kernels, own
from value_aware_study.report.results import Results

__all__ = ["exhibit"]

TITLED = 4


def exhibit(records: Sequence[Record], results: Results) -> Exhibit | None:
    """Of the first of these records in which matching keys were counted; None where in none.

    With the range over the trainings of the model, where the results have others of it.
    """
    for record in records:
        for measured in of_kernels(record)[:1]:
            if measured.output_error.matching_keys:
                again = own(results.replicates_of(record))
                said = captions.seeds(results) if again else ""
                return _exhibit(record, replace(measured, replicates=again), said)
    return None


def _exhibit(record: Record, measured: Measured, said: str) -> Exhibit:
    every = counts([measured])
    found = every[(every["layer"] == "all") & (every["r"] <= LARGEST)].reset_index(drop=True)
    named = found[found["r"] == TITLED]
    row = (named if len(named) else found.tail(1)).iloc[0]
    name = model_label(record) if record.scale else record.model  # ours, or a probed one
    return Exhibit(
        "hero",
        f"The same output with {row['r']} keys as with {row['keys_needed']}, if chosen for it",
        f"Keys that a query needs for the same output error ({name}, all layers pooled).{said}",
        [
            f"{captions.MATCH} {captions.MATCH_OF_QUERIES}",
            f"{captions.OPTIMAL} {captions.BEST_FOUND} {CONSERVATIVE}",
        ],
        [panel(measured)],
        table(found.assign(model=name)),
    )
