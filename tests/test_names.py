"""A name stays in its folder, wherever it comes from, and is refused before any work."""

from pathlib import Path

import pytest

from tests.apps import run_app
from tests.refusals import assert_refused
from tests.test_cluster import write_run
from value_aware_study.data.corpora import write_corpus
from value_aware_study.data.text import Document
from value_aware_study.paths import LONGEST, inside

pytestmark = pytest.mark.filterwarnings("ignore")
HOSTILE = ("", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0b", "a\nb", "\ud800", "ä" * LONGEST)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_name_that_leads_elsewhere_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    assert_refused("cannot name a file in", inside, tmp_path, name, ".json")


@pytest.mark.parametrize("name", ["causal_elu", "all-MiniLM-L6-v2", "modèle 2.0", ".a", "..a", 5])
def test_other_names_are_files_of_the_folder(tmp_path: Path, name: str | int) -> None:
    file = inside(tmp_path, name, ".json")
    file.write_text("")
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"] == [file.name]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    (folder / "text.txt").write_text("w1 w2 w3")
    return write_run(folder / "run")


APPS = (
    "train_causal kernel=elu attention=sliding_window attention.name=",
    "train_causal kernel=elu train_causal.name=",
    "evaluate kernel=elu model.name=",
    "survey kernel=elu model.name=",
    "probe model=run/outputs/smoke/models/causal_elu text={text} probe.name=",
    "probe pretrained=minilm pretrained.model=",
    "publish publish.scale=",
)


@pytest.mark.parametrize("command", APPS)
def test_an_app_writes_nothing_elsewhere(root: Path, command: str) -> None:
    before = sorted(path for path in root.parent.rglob("*") if "logs" not in path.parts)
    assert_refused(
        r"^error: [^\n]*(cannot name a file in|must be a name of|must be that of scale,) [^\n]*$",
        run_app,
        command.format(text=root.parent / "text.txt") + "../../x",
        root,
        error=SystemExit,
    )
    after = sorted(path for path in root.parent.rglob("*") if "logs" not in path.parts)
    assert [path for path in after if ".cache" not in path.parts] == before


def test_a_source_of_a_corpus_is_a_folder_of_it(tmp_path: Path) -> None:
    documents = [Document("a text", "train"), Document("another", "evaluation")]
    assert_refused(
        r"'\.\./x' cannot name a file in",
        write_corpus,
        {"../x": documents},
        tmp_path / "corpus",
        0,
        0.5,
    )
    assert not list(tmp_path.iterdir())
