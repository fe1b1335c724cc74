"""Tables in every format, colours with enough contrast, and charts that encode their columns."""

from dataclasses import replace

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert

from tests.refusals import assert_refused
from tests.report.pages import MARKS, SLY, exploration, numbers
from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report import charts, look
from value_aware_study.report.exhibit import Exhibit, Page, Section, Table
from value_aware_study.report.exhibits.model import MEAN_IS_ONE, explorer


@pytest.fixture
def table() -> Table:
    data = pd.DataFrame({"model": ["a_b", "c|d"], "error": [1031.123456789, 0.25], "paper": 2.0})
    text = {"model": ["a_b", "c|d"], "error": ["1,031.1", "0.2"], "× exact": ["× 1.5", "−2.5 %"]}
    return Table(data, pd.DataFrame(text))


def test_csv_holds_the_numbers_and_markdown_the_text_with_escaped_bars(table: Table) -> None:
    assert table.csv() == "model,error,paper\na_b,1031.1235,2\nc|d,0.25,2\n"
    heading, rule, *rows = table.markdown().splitlines()
    assert [cell.strip() for cell in heading.split("|")] == ["", "model", "error", "× exact", ""]
    assert rule.count(":") == 3 and rule.startswith("|:")
    assert rows[1].startswith(r"| c\|d")


def test_latex_is_booktabs_and_escaped() -> None:
    words = ["a_b & c", "5 % of #1", "$x$ {y}", "~^\\", "−1 × 2 ≤ α"]
    frame = pd.DataFrame({"a&b": words, "n_1": ["1"] * 5})
    assert Table(frame, frame).latex().splitlines() == [
        r"\begin{tabular}{lr}", r"\toprule", r"a\&b & n\_1 \\", r"\midrule",
        r"a\_b \& c & 1 \\", r"5 \% of \#1 & 1 \\", r"\$x\$ \{y\} & 1 \\",
        r"\textasciitilde \textasciicircum \textbackslash  & 1 \\",
        r"$-$1 $\times$ 2 $\leq$ $\alpha$ & 1 \\", r"\bottomrule", r"\end{tabular}",
    ]  # fmt: skip


def test_the_explorer_tells_the_errors_of_what_its_first_model_was_recorded_with() -> None:
    now = explorer(exploration(), {"tiny": "A", SLY: "B"})
    then = explorer(exploration(), {SLY: "B"})
    assert now and then
    two = "25% for keys chosen by weight and 1.0% for keys chosen for the output."
    assert f"With 2 keys the median error in B is {two}" in then.caption
    three = (
        "100% for keys chosen by weight, 1.0% for keys chosen for the output and 0.5% for keys "
        "beside the mean."
    )
    assert f"With 2 keys the median error in A is {three}" in now.caption
    assert [MEAN_IS_ONE in shown.notes for shown in (now, then)] == [True, False]
    other = replace(exploration(), sizes=(3,))
    assert_refused("explorations join with equal sizes", Exploration.of, [exploration(), other])


def test_columns_of_texts_that_begin_with_a_number_are_numeric(table: Table) -> None:
    assert table.rows() == [["a_b", "1,031.1", "× 1.5"], ["c|d", "0.2", "−2.5 %"]]
    assert table.numeric() == [False, True, True]
    texts = {"p": ["<.01", ".2", "–"], "unknown": ["–", "–", ""], "words": ["1", "r = 1", "2"]}
    frame = pd.DataFrame({"model": ""} | texts, index=range(3))
    assert Table(frame, frame).numeric() == [False, True, False, False]


def test_a_table_without_rows_is_a_heading() -> None:
    frame = pd.DataFrame(columns=["model", "error"])
    table = Table(frame, frame)
    assert table.rows() == [] and table.csv() == "model,error\n"
    assert "model" in table.markdown() and r"model & error \\" in table.latex()


def test_parts_that_make_no_page_are_refused_in_one_line(table: Table) -> None:
    exhibit = Exhibit("twice", "A table", "", table=table)
    assert_refused("2 rows of data and 1 of text", Table, table.data, table.display.head(1))
    assert_refused("empty has neither a table nor an exploration", Exhibit, "empty", "", "")
    odd = {"charts": [alt.Chart()], "table": table, "choices": ["a", "b"]}
    assert_refused("odd has 1 panels for 2 choices", Exhibit, "odd", "", "", **odd)
    sections = [Section("twice", "", "", [exhibit])]
    assert_refused("two parts of the page are named twice", Page, "", "", sections)


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
    axis = charts.powers(alt.X, "value", "error", frame["value"].tolist())
    dots = charts.dots(frame, MARKS, axis)
    chart = charts.toggled(dots).properties(width=600)
    svg = vl_convert.vegalite_to_svg(look.specification(chart))
    assert {f">{label}<" in svg for label in ("10⁻⁴", "0.01", "1", "100")} == {True}


def test_names_on_lines_stand_in_the_panel_and_off_all_other_lines() -> None:
    places = {"count": [1.0, 8.0, 64.0] * 3, "series": np.repeat(["low", "high", "steep"], 3)}
    frame = pd.DataFrame(places | {"value": [50.0, 50, 50, 52, 52, 52, 900, 95, 2]})
    x = alt.X("count:Q", scale=alt.Scale(type="log", domain=[0.9, 70]))
    y = alt.Y("value:Q", scale=alt.Scale(type="linear", domain=[0, 100]))
    named = charts.name_places(frame, x, y, 30.0).set_index("series")
    assert named.loc["low", "dy"] > 0 > named.loc["high", "dy"]  # the two are 6 pixels apart
    other = charts.name_places(frame, x, y, 47.0).set_index("series")
    assert other.loc["low", "dy"] < 0  # the dashed line is under it
    assert named.loc["steep", "count"] != 1  # its first point is above the panel
    marks = {name: MARKS["by output"] for name in named.index}
    layers = charts.on_lines(frame, marks, x, y, 30.0)
    texts = [row["series"] for layer in layers[-2:] for row in layer.data.to_dict("records")]
    assert texts and charts.figure(layers).to_dict()["layer"][2]["mark"]["clip"]
    svg = vl_convert.vegalite_to_svg(look.specification(charts.figure(layers)))
    assert all(f">{name}<" in svg for name in named.index) and "legend-label" not in svg
