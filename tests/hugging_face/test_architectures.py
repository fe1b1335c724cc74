"""Every text architecture of the installed transformers: equal to eager, or refused by name.

A sixth of them by default, the same ones at every run; ARCHITECTURES=all tries all (a minute).
"""

import os
import re
from pathlib import Path

import pytest
import transformers
import yaml
from packaging.version import Version

from docs.architectures import (
    NOT_TRIED,
    TINY_TOO,
    architectures,
    markdown,
    tiny,
    try_architecture,
)

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
EVERY = 1 if os.environ.get("ARCHITECTURES") == "all" else 6
CHOSEN = [kind for kind in architectures() if kind not in NOT_TRIED][::EVERY]
PINNED = f"transformers=={transformers.__version__}\n" in (ROOT / "requirements.txt").read_text()
of_the_pinned_release = pytest.mark.skipif(not PINNED, reason="another release of transformers")


def documented() -> dict[str, str]:
    """Reads the verdict on each architecture from the table of the docs."""
    text = (ROOT / "docs/hugging-face.md").read_text()
    rows = re.findall(r"^\| (equal|refused|not tried)(.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    pairs = [(kind, what + why) for what, why, kinds in rows for kind in kinds.split(", ")]
    assert len(dict(pairs)) == len(pairs), "an architecture is in the table twice"
    return dict(pairs)


@pytest.mark.parametrize("kind", CHOSEN)
def test_an_architecture_equals_eager_or_is_refused_by_name(kind: str) -> None:
    result = try_architecture(kind)
    assert result.equal or result.refused, f"{kind}: {result}"
    if PINNED:
        expected = f"refused: {result.refused}" if result.refused else "equal to eager"
        assert documented()[kind] == expected


@of_the_pinned_release
def test_the_table_of_the_docs_has_every_architecture_once() -> None:
    """`python -m docs.architectures` prints it."""
    table = documented()
    assert set(table) == set(architectures())
    assert {k: f"not tried: {why}" for k, why in NOT_TRIED.items()} == {
        kind: what for kind, what in table.items() if what.startswith("not tried")
    }


@of_the_pinned_release
@pytest.mark.parametrize("kind", NOT_TRIED)
def test_what_is_not_tried_cannot_be(kind: str) -> None:
    with pytest.raises(Exception):  # noqa: B017  each config fails in its own way
        try_architecture(kind)


@of_the_pinned_release
@pytest.mark.parametrize("kind", sorted(TINY_TOO)[::EVERY])
def test_what_a_config_needs_beside_the_rest_it_needs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert try_architecture(kind).equal
    monkeypatch.delitem(TINY_TOO, kind)
    try:
        without = try_architecture(kind)
    except Exception:
        return
    assert not without.equal


def test_continuous_integration_tries_the_pinned_release_and_an_older_one() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    pinned, older = workflow["jobs"]["transformers"]["strategy"]["matrix"]["release"]
    assert f"transformers=={pinned}\n" in (ROOT / "requirements.txt").read_text()
    assert Version(older) < Version(pinned)


def test_a_tiny_model_is_the_same_at_every_call() -> None:
    one, two = (tiny("llama").lm_head.weight for _ in range(2))
    assert (one == two).all() and (one != tiny("llama", seed=1).lm_head.weight).any()


def test_the_table_groups_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "docs.architectures.architectures"
    few = {kind: architectures()[kind] for kind in ("bert", "gemma2", "gpt2", "mpnet", "zamba")}
    monkeypatch.setattr(module, lambda: few)
    assert markdown().splitlines()[2:] == [
        "| equal to eager | bert, gpt2 |",
        "| not tried: its weights cannot be tied in a few layers | zamba |",
        "| refused: caps its attention scores (logit soft-capping) | gemma2 |",
        "| refused: does not call transformers' attention interface | mpnet |",
    ]
