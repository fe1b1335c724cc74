"""Models that decode with compressed caches: quality against memory and against time."""

from collections.abc import Sequence

import altair as alt
import numpy as np
import pandas as pd

from value_aware_attention.measurement.cache_record import FULL, DecodingRecord
from value_aware_attention.measurement.estimate import DASH, number, with_interval
from value_aware_study.report.charts import curves, direction, figure, powers
from value_aware_study.report.exhibit import Exhibit, Table
from value_aware_study.report.exhibits.caches import OPENS, OWN_COLOURS
from value_aware_study.report.frame import FLOOR
from value_aware_study.report.look import Mark, Panel
from value_aware_study.report.words import sentences


def by_cache(records: Sequence[DecodingRecord]) -> Exhibit | None:
    """Draws KL against bytes and the time of a token for every cache, a choice a text."""
    if not records:
        return None
    places = {task: place for place, task in enumerate(OPENS)}
    ordered = sorted(records, key=lambda record: places.get(record.task, len(places)))
    data = pd.concat([_frame(record) for record in ordered], ignore_index=True)
    of_texts = {str(name): frame for name, frame in data.groupby("texts", sort=False)}
    return Exhibit(
        "decoding",
        "Decoding with a compressed cache",
        "A prompt is read exactly, its cache is compressed, and the tokens after it are decoded "
        "one by one: KL from the model with its full cache, against the bytes of the cache and the "
        "time of a token.",
        [
            "KL is in nats a token, with the text's tokens given. The shares of right answers and "
            "of equal tokens are of freely decoded tokens (always the most likely one), counted "
            "where the task asks for an answer. In texts and Markov chains, a right token is the "
            "text's own. Bytes are those that the layers hold of a compressed prompt: keys, "
            "values, and the places of keys.",
            "Time is the processor's for one token, in parts of the full cache's. With short "
            "prompts and small models it is that of the program around the attention; for long "
            "prompts see python -m benchmarks.decoding. Choosing is done once a prompt.",
            "95% intervals over texts; of the time, over the parts in which texts were read.",
        ],
        [
            _panel(frame, against, title)
            for frame in of_texts.values()
            for against, title in (
                (frame["bytes"] / frame["full_bytes"], "bytes"),
                (frame["time"], "time a token"),
            )
        ],
        Table(data, _display(data)),
        choices=list(of_texts),
    )


def _frame(record: DecodingRecord) -> pd.DataFrame:
    """Lists the cells of a record, a row each."""
    rows = []
    for cell in record.cells:
        row = {
            "texts": record.task, "cache": cell.cache, "keep": cell.keep, "r": cell.r,
            "bytes": cell.bytes, "full_bytes": cell.full_bytes, "ms": cell.milliseconds,
            "prompt_seconds": cell.prompt_seconds, "choosing_seconds": cell.choosing_seconds,
        }  # fmt: skip
        for name in ("kl", "nats", "right", "same", "time"):
            ends = getattr(cell, name)
            row |= {name: ends.value, f"{name}_low": ends.low, f"{name}_high": ends.high}
        rows.append(row)
    return pd.DataFrame(rows)


def _display(data: pd.DataFrame) -> pd.DataFrame:
    def shares(name: str, digits: int, times: float = 1.0) -> list[str]:
        rows = data[[name, f"{name}_low", f"{name}_high"]].astype(float) * times
        return [with_interval(v, low, high, digits) for v, low, high in rows.to_numpy()]

    def numbers(values: pd.Series, digits: int) -> list[str]:
        return [number(value, digits) for value in values]

    of_full = (data["cache"] == FULL).to_numpy()
    return data[["texts", "cache"]].assign(
        **{
            "keys kept, %": numbers(100 * data["keep"], 1),
            "KL, nats": np.where(of_full, DASH, shares("kl", 4)),
            "right, %": shares("right", 1, 100),
            "as the full cache, %": shares("same", 1, 100),
            "KiB": numbers(data["bytes"] / 1024, 1),
            "bytes, %": numbers(100 * data["bytes"] / data["full_bytes"], 1),
            "ms a token": numbers(data["ms"], 2),
            "choosing, s": np.where(of_full, DASH, numbers(data["choosing_seconds"], 3)),
        }
    )


def _panel(frame: pd.DataFrame, against: pd.Series, title: str) -> Panel:
    """Draws KL against bytes or time, in parts of the full cache's."""
    compressed = (frame["cache"] != FULL).to_numpy()
    frame, against = frame[compressed], against[compressed]
    ends = (
        frame[["kl", "kl_low", "kl_high"]].set_axis(["value", "low", "high"], axis=1).astype(float)
    )
    told = ends.assign(series=frame["cache"], count=against)
    values = ends.clip(lower=FLOOR)
    low, high = values["value"].min() / 2, 2 * values["value"].max()
    points = told.assign(
        value=values["value"],
        **values[["low", "high"]].clip(low, high),
        said=sentences(told, f"{{series}}, {{count:.0%}} of the {title}", " nats"),
    )
    marks = {name: Mark.of(OWN_COLOURS[i]) for i, name in enumerate(frame["cache"].unique())}
    x = alt.X("count:Q", title=f"{title}, of the full cache's", axis=alt.Axis(format=".0%"))
    y = powers(alt.Y, "value", direction("KL, nats", "lower"), [low, high], room=1)
    return figure(curves(points, marks, x, y), f"{frame['texts'].iloc[0]}: {title}")
