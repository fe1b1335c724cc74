"""Records of a finished seed are kept, and stand for its stages only where these are unchanged."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.app import seeds
from pipelines.app.seeds import keep, seed_of, take

OWN = {
    "train_causal_again@elu-second": ["models/causal_elu_second", "metrics/train/c.json"],
    "evaluate_masked_again@long-second": ["records/m.json", "plots/m.csv"],
}
STAGES = {"corpus": ["corpus"], "train_causal@elu": ["metrics/train/first.json"], **OWN}


def of(outputs: Path) -> dict[str, Any]:
    return {
        name: SimpleNamespace(outs=[SimpleNamespace(def_path=str(outputs / one)) for one in names])
        for name, names in STAGES.items()
    }


def given(monkeypatch: pytest.MonkeyPatch, outputs: Path, *waiting: str) -> None:
    """Lets DVC know of these stages, of which some have yet to run."""
    repo = SimpleNamespace(status=lambda names: dict.fromkeys(waiting, "changed deps"))
    monkeypatch.setattr(seeds, "Repo", lambda: repo)
    monkeypatch.setattr(seeds, "needed", lambda targets: of(outputs))


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Writes a scale's outputs: a stage's fingerprint, and its files with their names in them."""
    folder = tmp_path / "outputs"
    for name, files in STAGES.items():
        texts = {f"fingerprints/{name}.json": json.dumps({"code": {"a": "1"}})}
        texts |= {file: file for file in files if Path(file).suffix}
        for file, text in texts.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
    (folder / "tokens").mkdir()
    (folder / "tokens/train.npy").write_bytes(b"tokens")
    (folder / "seconds.json").write_text(json.dumps(dict.fromkeys(STAGES, 2.5)))
    return folder


@pytest.fixture
def kept(outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps the second seed."""
    given(monkeypatch, outputs)
    return keep("second", outputs, tmp_path / "seeds")


def lost(outputs: Path) -> list[Path]:
    """Removes the files of the second seed."""
    files = [outputs / name for names in OWN.values() for name in names if Path(name).suffix]
    for file in files:
        file.unlink()
    return files


def test_every_stage_that_trains_or_evaluates_belongs_to_a_seed() -> None:
    assert [seed_of(name) for name in STAGES] == [None, "first", "second", "second"]
    assert seed_of("evaluate_variant@linformer") is seed_of("train_in_context@recall") is None
    assert seed_of("train_masked_short") == "first"


def test_a_kept_seed_stands_for_its_stages(outputs: Path, kept: Path) -> None:
    files, seconds = lost(outputs), outputs / "seconds.json"
    seconds.write_text(json.dumps({"corpus": 1.0}))
    assert take(of(outputs), outputs, kept.parent) == set(OWN)
    assert [file.read_text() for file in files] == [
        str(file.relative_to(outputs)) for file in files
    ]
    assert json.loads(seconds.read_text()) == {"corpus": 1.0, **dict.fromkeys(OWN, 2.5)}
    assert take(of(outputs), outputs, kept.parent) == set(OWN)  # and again, over its own files


def change_code(outputs: Path) -> None:
    (outputs / f"fingerprints/{next(iter(OWN))}.json").write_text('{"code": {"a": "2"}}')


def change_tokens(outputs: Path) -> None:
    (outputs / "tokens/train.npy").write_bytes(b"others")


def train(outputs: Path) -> None:
    (outputs / "records/m.json").write_text("of my own")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (change_code, "train_causal_again@elu-second has changed (a)"),
        (change_tokens, "the tokens are others"),
        (train, "records/m.json is of another training"),
    ],
)
def test_a_changed_seed_is_trained_again(
    outputs: Path,
    kept: Path,
    changed: Callable[[Path], None],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lost(outputs)
    changed(outputs)
    before = sorted(outputs.rglob("*.json"))
    assert take(of(outputs), outputs, kept.parent) == set()
    assert sorted(outputs.rglob("*.json")) == before
    assert reason in capsys.readouterr().out


def test_a_damaged_seed_is_named(outputs: Path, kept: Path) -> None:
    kept.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"second\.json\.gz is damaged .*: restore it"):
        take(of(outputs), outputs, kept.parent)


def test_an_unfinished_seed_is_not_kept(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, outputs, *OWN)
    with pytest.raises(ValueError, match=r"has yet to run: python -m pipelines\.repro second"):
        keep("second", outputs, tmp_path)
    with pytest.raises(ValueError, match="the seed is third; it must be first or second"):
        keep("third", outputs, tmp_path)
