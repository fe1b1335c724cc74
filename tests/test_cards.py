"""Method cards: what is wrong with one is said in one line, with its file and key."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from pipelines import app
from pipelines.methods import check_methods, register_methods
from tests.test_apps import run_app
from value_aware_study.cards import CARDS, cards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the cards, to spoil."""
    return Path(shutil.copytree(CARDS, tmp_path / "conf/approximation"))


@pytest.mark.parametrize(
    ("card", "before", "after", "said"),
    [
        (
            "lsh",
            "rounds: 4",
            "round: 4",
            "lsh.yaml: round: LSH takes no 'round'; it takes r, ",
        ),
        ("lsh", "vary: r", "vary: keys", "lsh.yaml: card.survey.vary: LSH takes no 'keys'"),
        ("orf", "{features: model", "{feature: model", "orf.yaml: card.axes.feature: Orthogonal"),
        ("nystrom", "by_length: {landmarks", "by_length: {marks", "nystrom.by_length.marks: Nyst"),
        ("nystrom", "  label: Nyström\n", "", "nystrom.yaml: card.label is missing"),
        ("nystrom", "card:", "cart:", "nystrom.yaml: card.label is missing"),
        ("nystrom", "_target_: value", "target: value", "nystrom.yaml: _target_ is missing"),
        ("nystrom", ".Nystrom", ".Nyström", "nystrom.yaml: _target_ is value_aware_attention.app"),
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
    monkeypatch.setattr(app, "register_methods", partial(register_methods, folder))
    monkeypatch.setattr(app, "check_methods", partial(check_methods, folder))
    with pytest.raises(SystemExit) as stop:
        run_app("plan", folder.parent)
    message = str(stop.value)
    assert message.startswith("error: conf/approximation/") and said in message
    assert "\n" not in message


def test_no_cards_are_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no method cards"):
        cards(tmp_path)


def test_cards_come_in_the_order_of_their_places() -> None:
    places = [card.place for card in cards().values()]
    assert places == sorted(set(places)) and next(iter(cards())) == "exact"
