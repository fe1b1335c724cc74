"""Defines the report's colours in light and dark, its marks, and the theme of its charts.

Colours are CSS variables, so that a chart on the page follows the page's theme. Files use the light
colours.
"""

import json
import math
import re
import warnings
from collections.abc import Sequence
from io import BytesIO
from itertools import cycle
from textwrap import wrap
from typing import Any, NamedTuple

import altair as alt
import pandas as pd
import vl_convert
from PIL import Image

from value_aware_attention.records.record import AWARE, OBLIVIOUS, Record
from value_aware_study.cards import Card, cards
from value_aware_study.report.words import KERNEL_LABELS, ORACLES

# Light, dark. The series use Okabe and Ito's palette, whose colours differ for all common colour
# blindnesses. On light they are darkened to a contrast of at least 3:1, on dark they are lightened.
# A colour of a series means the same on the whole page. The card of a method has its colour.
COLOURS = {
    "ground": ("#ffffff", "#14171b"),
    "raised": ("#f3f5f7", "#20252b"),
    "ink": ("#1a1e23", "#e7eaee"),
    "muted": ("#56606b", "#a3adb8"),
    "line": ("#d9dde2", "#353c45"),
    "blue": ("#0072b2", "#4aa5dc"),  # chosen for the output
    "sky": ("#3a8fc4", "#7cc6f0"),  # chosen for the output, the mean one of the candidates
    "vermillion": ("#d55e00", "#f07f35"),  # chosen by weight
    "olive": ("#6b7a00", "#b5c437"),  # by weight, with a slot for the mean of the rest
    "slate": ("#5b6699", "#aab4e3"),  # a score of weight and value
    "green": ("#008a64", "#1fb58b"),  # windows and other fixed patterns
    "orange": ("#b07800", "#e69f00"),  # features of the kernel
    "purple": ("#b65d91", "#c2719f"),  # hashing and low rank; plum and wine: more rounds
    "plum": ("#8a2d6c", "#e6a6cc"),
    "wine": ("#56123f", "#f7d3e8"),
    "teal": ("#00838f", "#3fc1cf"),  # KVzip
    "deep": ("#0a3a66", "#cfe6fa"),  # the exponential kernel
    "brown": ("#8c5a2b", "#c99a6b"),  # the polynomial kernel
    "rose": ("#c2255c", "#ff8fb3"),  # the elu kernel
    "grey": ("#737373", "#9a9a9a"),  # all others, and random choices
}
SERIES = tuple(COLOURS)[5:]

FIGURE_WIDTH, FIGURE_GAP = 640, 40
"""Pixels, in files: the width of a figure's panels together, and the gap between two"""
NEAREST_MARK = "near"
"""Name of the selection of the mark nearest to the pointer"""

Panel = alt.Chart | alt.LayerChart | alt.FacetChart


class Mark(NamedTuple):
    """The look of a series: a colour in CSS and a Vega shape."""

    colour: str
    shape: str = "circle"

    @classmethod
    def of(cls, name: str, shape: str = "circle") -> "Mark":
        """Returns a mark in one of the colours of `SERIES`."""
        if name not in SERIES:
            raise ValueError(f"{name!r} is not a colour of a series; they are {', '.join(SERIES)}")
        return cls(f"var(--{name})", shape)


THEME: dict[str, Any] = {
    "font": "system-ui, Liberation Sans, sans-serif",
    "background": "transparent",
    "padding": 4,
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "gridColor": "var(--line)",
        "domainColor": "var(--muted)",
        "tickColor": "var(--muted)",
        "labelFontSize": 13,
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelPadding": 6,
        "labelLimit": 260,
    },
    "legend": {
        "title": None,
        "labelColor": "var(--ink)",
        "labelFontSize": 14,
        "labelLimit": 320,
        "titleColor": "var(--muted)",
        "titleFontSize": 13,
        "titleFontWeight": "normal",
        "symbolSize": 130,
        "symbolOpacity": 1,
        "columnPadding": 10,
    },
    "title": {"color": "var(--ink)", "fontSize": 14, "anchor": "start"},
    "text": {"color": "var(--ink)", "fontSize": 13},
    "rule": {"color": "var(--muted)"},
}

SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
RAMP = (
    Mark.of("purple"),
    Mark.of("plum", "square"),
    Mark.of("wine", "triangle-up"),
    Mark.of("orange", "diamond"),
    Mark.of("grey", "cross"),
    Mark.of("teal", "triangle-down"),
    Mark.of("sky", "diamond"),
    Mark.of("olive"),
    Mark.of("brown", "cross"),
    Mark.of("deep", "triangle-down"),
    Mark.of("green", "cross"),
    Mark.of("vermillion", "triangle-up"),
    Mark.of("blue", "diamond"),
    Mark.of("plum", "triangle-down"),
    Mark.of("orange", "triangle-up"),
    Mark.of("teal", "square"),
    Mark.of("purple", "cross"),
    Mark.of("sky", "triangle-down"),
    Mark.of("wine", "diamond"),
    Mark.of("brown", "triangle-down"),
)
"""Marks of curves without their own, in order of use"""


def ramp(names: Sequence[str]) -> dict[str, Mark]:
    """Builds marks of series without a colour, such as sizes: ink and grey, told by shape."""
    colours = cycle(("var(--ink)", "var(--grey)"))
    pairs = zip(names, cycle(SHAPES), strict=False)
    return {name: Mark(next(colours), shape) for name, shape in pairs}


SHARE_SHAPES = {0.5: "circle", 0.25: "square", 0.125: "triangle-up"}
"""Share of the keys -> its shape, in every figure of caches; another share is a diamond"""
KERNEL_MARKS = {
    "exponential": Mark.of("deep"),
    "polynomial (deg 2)": Mark.of("brown", "triangle-up"),
    "elu": Mark.of("rose", "square"),
}
ORACLE_MARKS = {
    ORACLES[AWARE]: Mark.of("blue", "square"),
    ORACLES[OBLIVIOUS]: Mark.of("vermillion", "circle"),
}
CACHE_COLOURS = {
    "single losses": "blue",
    "joint set": "blue",
    "mean attention": "vermillion",
    "DropKV": "slate",
    "recent": "green",
    "KVzip": "teal",
}
"""Beginning of a cache's name, which says what chooses its keys -> colour; others are grey"""
SHORT_MARK, LONG_MARK = Mark.of("grey", "square"), Mark("var(--ink)", "cross")
OTHER = Mark.of("grey")
"""The mark of a series without its own"""


def cache_mark(cache: str) -> Mark:
    """Returns the colour of what chooses a cache's keys."""
    colours = (colour for begins, colour in CACHE_COLOURS.items() if cache.startswith(begins))
    return Mark.of(next(colours, "grey"))


def kernel_mark(kernel: str) -> Mark:
    return KERNEL_MARKS.get(KERNEL_LABELS.get(kernel, kernel), OTHER)


def model_mark(record: Record) -> Mark:
    """Returns a causal model's mark by its kernel, a masked one's by its length."""
    if record.task == "causal":
        return kernel_mark(str(record.kernel))
    return LONG_MARK if record.model == "masked_long" else SHORT_MARK


def method_marks(settings: pd.DataFrame) -> dict[str, Mark]:
    """Returns the mark of each curve (`series`) in legend order, from the cards.

    Curves without their own get those of `RAMP` that no method has.
    """
    present = set(settings["series"])
    marks = {
        name: Mark.of(mark["colour"], mark["shape"])
        for card in cards().values()
        for name, mark in card.marks().items()
        if name in present
    }
    for card in cards().values():
        marks |= _shades(card, settings)
    others, free = sorted(present - set(marks)), set(RAMP) - set(marks.values())
    unused = [mark for mark in RAMP if mark in free] or [OTHER]
    return marks | {name: unused[n % len(unused)] for n, name in enumerate(others)}


def oracle_marks(drawn: pd.DataFrame) -> dict[str, Mark]:
    """Returns the marks of curves, with the oracles first, under their full names."""
    return ORACLE_MARKS | {
        name: mark for name, mark in method_marks(drawn).items() if name not in ORACLE_MARKS
    }


def _shades(card: Card, settings: pd.DataFrame) -> dict[str, Mark]:
    """Returns shades of one hue for a method's curves, by the argument that distinguishes them."""
    of_card = settings[settings["approximation"] == card.name]
    if "shades" not in card.mark or of_card.empty:
        return {}
    names = of_card.sort_values(list(card.curves))["series"].unique()
    shades = card.mark["shades"]
    last, steps = len(shades) - 1, max(len(names) - 1, 1)
    places = (round(place * last / steps) for place in range(len(names)))
    return {n: Mark.of(shades[p], card.mark["shape"]) for n, p in zip(names, places, strict=True)}


def specification(chart: Panel | alt.ConcatChart) -> dict[str, Any]:
    """Writes a chart as Vega-Lite with six digits; the page's script adds the theme."""
    with alt.data_transformers.enable("default", max_rows=None):
        text = chart.to_json()
    content: dict[str, Any] = json.loads(text, parse_float=lambda x: float(f"{float(x):.6g}"))
    return {name: value for name, value in content.items() if name not in ("$schema", "config")}


def still(chart: Panel) -> Panel:
    """Returns a panel without the layer that follows the pointer; Altair cannot join two."""
    if not isinstance(chart, alt.LayerChart) or chart.params is alt.Undefined:
        return chart
    params: Any = chart.params
    copied = chart.copy()
    views = {view for param in params if param.name == NEAREST_MARK for view in param.views}
    copied.layer = [layer for layer in chart.layer if layer.name not in views]
    copied.params = [param for param in params if param.name != NEAREST_MARK]
    return copied


def png(charts: Sequence[Panel], rows: int = 1, title: str = "", dark: bool = False) -> bytes:
    """Renders rows of panels as a PNG at twice its size, or less for several rows.

    It keeps the 256 most used colours: a fifth of the size, for git's history.
    """
    columns = math.ceil(len(charts) / rows)
    width = (FIGURE_WIDTH - FIGURE_GAP * (columns - 1)) // columns
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Automatically deduplicated selection parameter")
        panels = alt.concat(
            *(still(chart).properties(width=width) for chart in charts), columns=columns
        )
    if title:
        panels = panels.properties(title=alt.Title(wrap(title, 80), fontSize=16, offset=16))
    theme = {**THEME, "background": "var(--ground)", "concat": {"spacing": FIGURE_GAP}}
    series = set(re.findall(r'"domain": (\["[^]]*)', json.dumps(specification(panels))))
    legend: Any = "shared" if len(series) == 1 else "independent"  # sharing would mix up series
    panels = panels.resolve_scale(color=legend, shape=legend)
    text = json.dumps(specification(panels) | {"config": theme})
    names = rf"var\(--({'|'.join(COLOURS)})\)"
    coloured = re.sub(names, lambda name: COLOURS[name[1]][dark], text)
    drawn = vl_convert.vegalite_to_png(coloured, scale=2 if rows == 1 or title else 1.25)
    packed = BytesIO()
    Image.open(BytesIO(drawn)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        packed, "PNG", optimize=True
    )
    return packed.getvalue()
