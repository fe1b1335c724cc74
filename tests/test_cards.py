"""A mistake in a method card is said in one line, with its file and key."""

import shutil
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import HydraException
from hydra.utils import get_class

from pipelines.app import hydra_app, one_line
from pipelines.app.method_cards import register_methods
from tests.apps import refusal
from value_aware_study.cards import APPROXIMATIONS, Card, cards
from value_aware_study.evaluation.grid import setting

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copies the cards, to be spoilt."""
    return Path(shutil.copytree(APPROXIMATIONS, tmp_path / "conf/approximation"))


@pytest.mark.parametrize(
    ("card", "before", "after", "said"),
    [
        ("nystrom", "  label: Nyström\n", "", "nystrom.yaml: card.label is missing"),
        ("nystrom", "card:", "cart:", "nystrom.yaml: card.label is missing"),
        ("nystrom", "_target_: value", "target: value", "nystrom.yaml: _target_ is missing"),
        (
            "nystrom",
            "label: Nyström",
            "label: LSH",
            "nystrom.yaml: card.label is 'LSH', as in conf",
        ),
        ("nystrom", "  keeps:", "  keep:", "nystrom.yaml: card.keep is unknown; a card has label,"),
        ("nystrom", "  keeps:", "  keeps: [", "nystrom.yaml: while parsing"),
    ],
)
def test_a_bad_card_ends_an_app_with_one_line_that_names_file_and_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, card: str, before: str, after: str, said: str
) -> None:
    file = folder / f"{card}.yaml"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after, 1))
    monkeypatch.setattr(hydra_app, "register_methods", partial(register_methods, folder=folder))
    line = refusal("plan", folder.parent)
    assert line.startswith("error: conf/approximation/") and said in line


@pytest.mark.parametrize("card", cards().values(), ids=lambda card: card.name)
def test_every_argument_that_a_card_names_is_one_of_its_class(card: Card) -> None:
    survey = dict(card.survey or {})
    vary = survey.pop("vary", None)
    named = [card.arguments, card.axes, card.curves, survey, card.train or {}]
    known = set(signature(get_class(card.target)).parameters)
    assert {vary} - {None} <= known and set().union(*named) <= known


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round": 4}, "unexpected keyword argument 'round'"),
        ({"_target_": "value_aware_attention.approximations.Nowhere"}, "Nowhere"),
    ],
)
def test_a_card_that_names_something_else_ends_in_one_line_when_its_method_is_built(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(HydraException) as stop:
        setting("lsh", cards()["lsh"].build(**changes)).build(0)
    line = one_line(stop.value)
    assert said in line and "\n" not in line


def test_no_cards_are_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no method cards"):
        cards(tmp_path)


def test_cards_come_in_the_order_of_their_places() -> None:
    places = [card.place for card in cards().values()]
    assert places == sorted(set(places)) and next(iter(cards())) == "exact"
