"""A drawing in the plane of the two choices of keys: by weight, and for the output."""

from itertools import combinations
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from value_aware_attention.records.record import AWARE, OBLIVIOUS
from value_aware_study.report import look, words
from value_aware_study.report.exhibit import Exhibit, Table

DRAWN_VALUES = np.array(
    [
        (2.0, 1.6), (2.4, 1.0), (-1.8, 1.2), (-2.2, -1.2), (0.4, -2.0), (1.2, -1.6), (-1.1, 2.2),
        (-1.0, -1.8),
    ]
)  # fmt: skip
DRAWN_WEIGHTS = np.array([0.22, 0.20, 0.15, 0.12, 0.11, 0.08, 0.07, 0.05])
"""Attention weights of one query, one per value in `DRAWN_VALUES`, the largest first"""
INK, MUTED = alt.value("var(--ink)"), alt.value("var(--muted)")
Array = NDArray[np.float64]


def drawing() -> Exhibit:
    """Draws which two of eight values each choice keeps, and their mixture's distance from o."""
    data = pd.concat([_rows(OBLIVIOUS, by_weight()), _rows(AWARE, for_output())])
    numbers = ("x", "y", "weight", "share")
    return Exhibit(
        "drawing",
        "Two ways to choose two of eight keys",
        "Each disc is the value of a key, as large as its attention weight; o is their weighted "
        "mean, the output of attention. Two keys are kept (filled), and their mixture õ stands in "
        "for o: the dashed line is the error.",
        [
            "OVO keeps the two largest weights and renormalises them. OVA keeps the two values "
            "with a mixture nearest to o. With three keys, one more than the plane has dimensions, "
            "OVA would have no error: an output of d numbers is a mixture of at most d + 1 values."
        ],
        [_panel(rows, str(name)) for name, rows in data.groupby("choice", sort=False)],
        Table(
            data,
            data.assign(
                choice=data["choice"].map(words.ORACLES),
                **{name: data[name].map("{:.2f}".format) for name in numbers},
            ),
        ),
        shared=True,
        listed="A drawing",
    )


def by_weight() -> Array:
    """Returns each value's share in the mixture of the two largest weights, Eq. 2."""
    largest = np.where(np.arange(len(DRAWN_WEIGHTS)) < 2, DRAWN_WEIGHTS, 0.0)
    return largest / largest.sum()


def for_output() -> Array:
    """Returns each value's share in the mixture of two values nearest to the output."""
    output, pairs = DRAWN_WEIGHTS @ DRAWN_VALUES, []
    for i, j in combinations(range(len(DRAWN_VALUES)), 2):
        way = DRAWN_VALUES[j] - DRAWN_VALUES[i]
        share = np.clip((output - DRAWN_VALUES[i]) @ way / (way @ way), 0, 1)
        shares = np.zeros(len(DRAWN_VALUES))
        shares[[i, j]] = 1 - share, share
        pairs.append(shares)
    return min(pairs, key=lambda shares: float(((shares @ DRAWN_VALUES - output) ** 2).sum()))


def _rows(choice: str, shares: Array) -> pd.DataFrame:
    """Lists the values, the output and the mixture of a choice, with their places."""
    places = np.vstack([DRAWN_VALUES, DRAWN_WEIGHTS @ DRAWN_VALUES, shares @ DRAWN_VALUES])
    return pd.DataFrame(
        {
            "choice": choice,
            "what": ["value"] * len(DRAWN_VALUES) + ["output o", "mixture õ"],
            "x": places[:, 0],
            "y": places[:, 1],
            "weight": [*DRAWN_WEIGHTS, 1.0, 1.0],
            "share": [*shares, 1.0, 1.0],
        }
    )


def _panel(data: pd.DataFrame, choice: str) -> look.Panel:
    ends = alt.Scale(domain=[-2.8, 2.8])
    place: dict[str, Any] = {
        "x": alt.X("x:Q", axis=None, scale=ends),
        "y": alt.Y("y:Q", axis=None, scale=ends),
    }
    values, error = data[data["what"] == "value"], data[data["what"] != "value"]
    values = values.assign(
        said=[
            f"attention weight {weight:.0%}, share of the mixture {share:.0%}"
            for weight, share in zip(values["weight"], values["share"], strict=True)
        ]
    )
    mixed = alt.Chart(values[values["share"] > 0]).encode(
        **place, color=alt.value(look.ORACLE_MARKS[words.ORACLES[choice]].colour)
    )
    size = alt.Size("weight:Q", scale=alt.Scale(range=[60, 900]), legend=None)
    discs = alt.Chart(values).encode(**place, color=MUTED, size=size, tooltip="said:N")
    line = alt.Chart(error).encode(**place, color=INK)
    layers = [
        mixed.mark_line(strokeWidth=1.6),
        discs.mark_point(strokeWidth=1.4),
        mixed.mark_circle(opacity=1).encode(size=size, tooltip="said:N"),
        line.mark_line(strokeDash=[4, 3], strokeWidth=1.6),
        line.mark_point(filled=True, opacity=1, size=90, shape="diamond"),
    ]
    for name, (dx, dy) in {"output o": (10, 19), "mixture õ": (12, -10)}.items():
        text = alt.Chart(error[error["what"] == name].assign(text=name[-1])).mark_text(
            dx=dx, dy=dy, fontSize=17, fontStyle="italic"
        )
        layers.append(text.encode(**place, text="text:N", color=INK))
    return alt.layer(*layers).properties(
        width="container",
        height=280,
        title={
            OBLIVIOUS: "the two largest weights (OVO)",
            AWARE: "the two with the nearest mixture (OVA)",
        }[choice],
    )
