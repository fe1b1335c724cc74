"""The parts of a report: a page of sections, their exhibits, and each exhibit's table."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import pandas as pd

from value_aware_study.evaluation.exploration import Exploration
from value_aware_study.report.look import Panel
from value_aware_study.safe_text import escaped

# A number at the start of a text, in page.js too: "× 1.25", "−0.3 (−0.5 to −0.1)", "<.01".
NUMBER = re.compile(r"(× |<)?[+−-]?\.?\d")
# Characters that pdfLaTeX cannot read without more packages.
MATHEMATICAL = str.maketrans(
    {"−": "$-$", "×": r"$\times$", "≤": r"$\leq$", "≥": r"$\geq$", "α": r"$\alpha$"}
)


@dataclass(frozen=True)
class Table:
    """`data` holds the numbers and goes to CSV; `display` holds the same rows as text to read.

    Both may be anything that makes a data frame: columns by name, or rows. The first column of a
    `grouped` one is shown as headings above the rows that share it.
    """

    data: pd.DataFrame
    display: pd.DataFrame
    grouped: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "display"):
            object.__setattr__(self, name, pd.DataFrame(getattr(self, name)))
        if len(self.data) != len(self.display):
            raise ValueError(
                f"a table has {len(self.data)} rows of data and {len(self.display)} of text; "
                "it needs a text for every row"
            )

    def csv(self) -> str:
        """Writes the numbers, to eight digits."""
        return self.data.to_csv(index=False, lineterminator="\n", float_format="%.8g")

    def markdown(self) -> str:
        """Writes the text as a Markdown table; markup in it appears as text."""
        text = self._text().map(escaped).rename(columns=escaped)
        return (
            text.to_markdown(
                index=False,
                disable_numparse=True,
                colalign=["right" if numbers else "left" for numbers in self.numeric()],
            )
            + "\n"
        )

    def latex(self) -> str:
        """Writes the text as a LaTeX tabular with booktabs rules."""
        style = self._text().style.hide(axis="index").format(escape="latex")
        text: str = style.format_index(escape="latex", axis="columns").to_latex(
            hrules=True,
            column_format="".join("r" if numbers else "l" for numbers in self.numeric()),
        )
        return text.translate(MATHEMATICAL)

    def rows(self) -> list[list[str]]:
        """Returns the cells' text; the page sorts them by the number at their start."""
        return self._text().to_numpy().tolist()

    def numeric(self) -> list[bool]:
        """Reports which columns hold only numbers, to be aligned right; the first never does."""
        columns = [
            [text for text in column if text not in ("", "–")]
            for column in zip(*self.rows(), strict=True)
        ]
        numeric = [bool(texts) and all(map(NUMBER.match, texts)) for texts in columns]
        return [False, *numeric[1:]] if numeric else [False] * self.display.shape[1]

    def _text(self) -> pd.DataFrame:
        return self.display.astype(str).rename(columns=str).reset_index(drop=True)


@dataclass(frozen=True)
class Exhibit:
    """A figure, a table, or the exploration of a text, with one line on its meaning.

    `name` is its anchor and the stem of its files. `listed` is its name in the contents list; empty
    = the title's beginning. `notes` are folded paragraphs. `charts` are the figure's panels, each
    as wide as its place. `table` holds their numbers, or stands alone. `choices` name equal groups
    of panels; the page shows one group. The page shows a `folded` exhibit once it is opened. The
    picture of a `shared` one is also used outside the page: it has the title, and a version for
    dark backgrounds.
    """

    name: str
    title: str
    caption: str
    notes: Sequence[str] = ()
    charts: Sequence[Panel] = ()
    table: Table | None = None
    exploration: Exploration | None = None
    choices: Sequence[str] = ()
    folded: bool = False
    shared: bool = False
    listed: str = ""

    def __post_init__(self) -> None:
        if self.table is None and self.exploration is None:
            raise ValueError(f"the exhibit {self.name} has neither a table nor an exploration")
        if self.choices and len(self.charts) % len(self.choices):
            raise ValueError(
                f"the exhibit {self.name} has {len(self.charts)} panels for {len(self.choices)} "
                "choices; every choice needs as many"
            )

    @property
    def entry(self) -> str:
        """Its name in a few words: "Table 1", "Token by token"."""
        return self.listed or re.split("[.:;] ", self.title)[0]


@dataclass(frozen=True)
class Section:
    """Exhibits that answer one question; `name` is the anchor.

    `machines` pair measurements with their machine, for the page's last section. `within` are
    subsections, after the exhibits.
    """

    name: str
    title: str
    lead: str
    exhibits: Sequence[Exhibit]
    machines: Sequence[tuple[str, str]] = ()
    within: Sequence["Section"] = ()


@dataclass(frozen=True)
class Page:
    """The whole report; its first section holds the answer.

    `origin` names the code that made it; "" if unknown. `links` lead to code and manual.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    origin: str = ""
    links: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [
            *(section.name for section in self.every_section()),
            *(exhibit.name for exhibit in self.exhibits()),
        ]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two parts of the page are named {twice[0]}; names are anchors")

    def exhibits(self) -> Iterator[Exhibit]:
        return chain.from_iterable(section.exhibits for section in self.every_section())

    def every_section(self) -> Iterator[Section]:
        """Returns every section, each before the sections within it."""
        return chain.from_iterable((section, *section.within) for section in self.sections)
