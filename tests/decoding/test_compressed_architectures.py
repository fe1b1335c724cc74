"""Every causal architecture decodes with a compressed cache as in one pass, or is refused by name.

A sixteenth of them by default, the same ones at every run; ARCHITECTURES=all tries all (a minute).
"""

import os
import re

import pytest

from docs.compressed import SHOWN, causal, choices_in_bf16, try_architecture, verdict
from tests.hugging_face.test_architectures import ROOT, of_the_pinned_release

pytestmark = [pytest.mark.filterwarnings("ignore"), of_the_pinned_release]
EVERY = 1 if os.environ.get("ARCHITECTURES") == "all" else 16


def documented() -> dict[str, str]:
    """Reads the verdict on each architecture from the table of the docs."""
    text = (ROOT / "docs/decoding.md").read_text()
    table = text.partition("| | architectures |")[2].partition("</details>")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", table, flags=re.MULTILINE)
    return {kind: what for what, kinds in rows for kind in kinds.split(", ")}


@pytest.mark.parametrize("kind", causal()[::EVERY])
def test_an_architecture_decodes_as_in_one_pass_or_is_refused_by_name(kind: str) -> None:
    result = try_architecture(kind)
    assert verdict(result) == documented()[kind]
    if verdict(result) == "equal to one pass":
        assert result.dropped > 1e-2


def test_the_table_of_the_docs_has_every_causal_architecture() -> None:
    """`python -m docs.compressed` prints it."""
    assert set(documented()) - {"---"} == set(causal())


@pytest.mark.slow
def test_choices_in_bf16_are_nearly_those_in_fp32() -> None:
    table = choices_in_bf16()
    shares = [float(share) for share in re.findall(r"([\d.]+)%", table)]
    assert len(shares) == 2 * len(SHOWN) and min(shares) > 90
