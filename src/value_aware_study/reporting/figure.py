"""A figure of the report: what is drawn, and what is said about it."""

from dataclasses import dataclass

from value_aware_study.reporting.style import Chart


@dataclass(frozen=True)
class Figure:
    """`name` is its file's without the suffix."""

    name: str
    title: str
    caption: str
    chart: Chart
