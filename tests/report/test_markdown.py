"""Strings from data stay text in Markdown: they make no element, link or cell."""

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import probed

from value_aware_attention.records.record import Record
from value_aware_study.report.contents import report_page
from value_aware_study.report.frame import Results
from value_aware_study.report.page import write_page
from value_aware_study.safe_text import escaped
from value_aware_study.training.model_card import model_card

SLY = "<img src=x> | `code` \\| [a](b)\n\n# head"
SAFE = r"&lt;img src=x&gt; \| \`code\` \\\| \[a\](b)  # head"


def test_what_would_be_markup_is_escaped_and_lines_are_one() -> None:
    assert escaped(SLY) == SAFE
    assert escaped("causal_elu, 4 keys (−0.3) α‖v‖ 5 %") == "causal_elu, 4 keys (−0.3) α‖v‖ 5 %"
    assert escaped("a & b &lt;") == "a &amp; b &amp;lt;"


@pytest.mark.usefixtures("undrawn")
def test_names_and_descriptions_of_a_report(
    records: list[Record], training: dict, tokens: dict, tmp_path: Path
) -> None:
    """All rows of a table have as many cells, and no markup of the data is left."""
    few = [content for content in records if content.model in ("causal_elu", "masked_short")]
    sly = [
        replace(content, model=content.model + SLY, text=replace(content.text, description=SLY))
        for content in few
    ]
    metrics = {name + SLY: content | {"model": name + SLY} for name, content in training.items()}
    sources = {f"{SLY} {name}": counts for name, counts in tokens["sources"].items()}
    probe = replace(probed(), model=SLY)
    results = Results.of(sly, metrics, tokens | {"sources": sources}, probed=[probe])
    write_page(report_page(results), tmp_path)
    assert SAFE in (tmp_path / "hero.md").read_text()
    for file in tmp_path.glob("*.md"):
        text = file.read_text()
        assert "<img" not in text and "\n# head" not in text and "[a](" not in text, file.name
        rows = [line.replace(r"\\", "").replace(r"\|", "") for line in text.splitlines()]
        assert len({row.count("|") for row in rows if row.startswith("|")}) <= 1, file.name


def test_a_model_card() -> None:
    metrics = {
        "model": SLY, "parameters": 1, "steps": 1, "tokens": 1, "loss": 1.0, "perplexity": 2.0,
        "curve": [{"step": 1, "loss": 1.0, "perplexity": 2.0}],
        "hyperparameters": {"optimizer": "Muon", "attention": SLY, "data": SLY},
    }  # fmt: skip
    body = model_card(metrics, data=SLY, scale=SLY, kernel=SLY).split("---\n", 2)[2]
    text, _, rest = body.partition("```python")
    code, _, tables = rest.partition("```\n")
    assert "<img" in code and "\n# head" not in code  # Python's string, on one line
    for prose in (text, tables):
        assert SAFE in prose and "<img" not in prose and "\n# head" not in prose
