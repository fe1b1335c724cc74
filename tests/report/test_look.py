"""Colours have enough contrast, and layers of a chart encode their columns."""

import altair as alt
import pytest
import vl_convert

from tests.refusals import assert_refused
from tests.report.pages import MARKS, numbers
from value_aware_study.report import charts, look


def luminance(colour: str) -> float:
    """Returns the relative luminance of WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_are_seen_on_both_grounds(theme: int) -> None:
    ground = look.COLOURS["ground"][theme]
    for name in look.SERIES:
        assert contrast(look.COLOURS[name][theme], ground) >= 3, name
    for name in ("ink", "muted", "blue"):
        for behind in (ground, look.COLOURS["raised"][theme]):
            assert contrast(look.COLOURS[name][theme], behind) >= 4.5, name


def test_a_colour_that_is_none_of_the_series_is_refused() -> None:
    assert_refused("'red' is not a colour of a series; they are blue", look.Mark.of, "red")


def test_dots_are_sorted_and_published_values_are_hollow() -> None:
    layers = charts.dots(numbers().iloc[::-1], MARKS, alt.X("value:Q"), numbers().head(1))
    rules, points, outlined = (layer.to_dict() for layer in layers)
    assert points["encoding"]["y"]["sort"] == ["var(--x)", "LSH"]
    assert rules["encoding"]["x"]["field"] == "low" and rules["encoding"]["x2"]["field"] == "high"
    assert points["mark"]["filled"] and not outlined["mark"]["filled"]
    assert points["encoding"]["tooltip"]["field"] == "said"
    assert "LSH, by weight: 100 (99 to 101)" in set(layers[1].data["said"])


def test_powers_of_ten_are_written_in_one_form() -> None:
    frame = numbers().assign(value=[1e-4, 1.0, 100.0, 1e-2], low=1e-5, high=1e3)
    dots = charts.dots(frame, MARKS, charts.log_axis("error"))
    chart = charts.toggled(dots).properties(width=600)
    svg = vl_convert.vegalite_to_svg(look.specification(chart))
    assert {f">{label}<" in svg for label in ("10⁻⁴", "0.01", "1", "100")} == {True}
