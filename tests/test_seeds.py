"""Kept trainings stand for their stages only where these are unchanged."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from dvc.repo import Repo

from checks import stamp
from pipelines.app.choice import choose
from pipelines.app.seeds import keep, take, waiting
from pipelines.fingerprints import stages_of_page
from pipelines.repro import QUIET, made, made_again, make, seed_of
from tests.refusals import assert_refused

pytestmark = pytest.mark.filterwarnings("ignore")

STAGES = """
stages:
  fingerprints:
    cmd: mkdir -p outputs/a/fingerprints && cp code.json outputs/a/fingerprints/train.json
      && cp text outputs/a/fingerprints/corpus.json
    deps: [code.json]
    outs: ['outputs/a/fingerprints': {persist: true}]
  corpus:
    cmd: mkdir -p outputs/a/corpus && cp text outputs/a/corpus
    deps: [text]
    outs: [outputs/a/corpus]
  train:
    cmd: mkdir -p outputs/a/models/m outputs/a/records && echo weights > outputs/a/models/m/weights
      && echo loss > outputs/a/records/m.json
    deps: [outputs/a/fingerprints/train.json, outputs/a/corpus]
    outs: [outputs/a/models/m, outputs/a/records/m.json]
  report:
    cmd: mkdir report && cp outputs/a/records/m.json report
    deps: [outputs/a/records]
    outs: [report: {cache: false}]
  broken: {cmd: 'false'}
"""
NAMES = ("fingerprints", "corpus", "train")
OUTPUTS, SEEDS, RECORD = (
    Path("outputs/a"),
    Path("results/seeds/a"),
    Path("outputs/a/records/m.json"),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a pipeline and keeps its training; all else that the run made is lost."""
    project = tmp_path_factory.mktemp("project")
    with contextlib.chdir(project):
        Repo.init(no_scm=True)
        Path("dvc.yaml").write_text(STAGES)
        Path("text").write_text('{"values": {}}')
        Path("code.json").write_text(json.dumps({"values": {"steps": 1}, "code": {"a": "1"}}))
        assert [*make(NAMES)] == [*NAMES] and not make(NAMES)
        assert keep(OUTPUTS, SEEDS) == 1
        shutil.rmtree("outputs")
        shutil.rmtree(".dvc/cache")
        Path("dvc.lock").unlink()
    return project


@pytest.fixture
def clone(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(published, tmp_path / "clone"))


def test_a_kept_training_stands_for_its_stages(clone: None) -> None:
    assert waiting(NAMES[1:]) == "corpus"
    take_all()
    make(["fingerprints"])
    assert waiting(NAMES[1:]) is None
    assert RECORD.read_text() == "loss\n"
    assert sorted(path.name for path in OUTPUTS.iterdir()) == ["fingerprints", "records"]
    RECORD.unlink()
    assert waiting(NAMES) == "train"
    assert keep(OUTPUTS, SEEDS.with_name("b")) == 0


def test_equal_trainings_make_equal_archives(clone: None) -> None:
    before = {path.name: path.read_bytes() for path in SEEDS.iterdir()}
    take_all()
    keep(OUTPUTS, SEEDS)
    assert {path.name: path.read_bytes() for path in SEEDS.iterdir()} == before


def take_all() -> None:
    take(SEEDS, "a", stages_of_page().values())


def change_code() -> None:
    Path("code.json").write_text(json.dumps({"values": {"steps": 1}, "code": {"b": "2"}}))


def change_text() -> None:
    Path("text").write_text("another")


def train() -> None:
    RECORD.write_text("of my own")


@pytest.mark.parametrize(
    ("change", "stage"), [(change_code, "train"), (change_text, "corpus"), (train, "train")]
)
def test_a_changed_stage_runs_again(clone: None, change: Callable[[], None], stage: str) -> None:
    take_all()
    change()
    make(["fingerprints"])
    assert waiting(NAMES) == stage
    take_all()  # replaces nothing
    assert waiting(NAMES) == stage
    assert [*chain.from_iterable(made_again([*NAMES, "report"]))] == ["corpus", "train"]
    assert waiting(NAMES) is None and (OUTPUTS / "models/m/weights").exists()


def test_the_lock_file_of_this_scale_stays_and_that_of_another_goes(clone: None) -> None:
    lock, kept = Path("dvc.lock"), (SEEDS / "dvc.lock").read_text()
    lock.write_text(mine := kept + "# mine\n")
    take_all()
    assert lock.read_text() == mine
    lock.write_text(kept.replace("outputs/a/", "outputs/b/"))
    take_all()
    assert lock.read_text() == kept


def test_a_training_that_is_not_of_the_run_is_left_out(clone: None) -> None:
    take(SEEDS, "a", [])
    assert [path.name for path in OUTPUTS.iterdir()] == ["fingerprints"]
    take(Path("results/seeds/none"), "a", [])


def test_a_damaged_training_is_named(clone: None) -> None:
    (SEEDS / "records.zip").write_bytes(b"PK")
    assert_refused(r"records\.zip is damaged .*: restore it", take_all)


def test_a_stage_that_fails_is_named(clone: None) -> None:
    assert_refused("failed to reproduce 'broken'", make, ["broken"])


def test_rows_run_at_once_after_the_stages_that_they_share(
    clone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (*QUIET, "OMP_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # put back afterwards
    shared, *rows = made([["fingerprints", "corpus"], ["fingerprints"]])
    assert [*shared] == ["fingerprints"] and [[*row] for row in rows] == [["corpus"], []]


def test_code_that_changes_no_value_is_stamped(
    clone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamp, "write", lambda _: make(["fingerprints"]))
    take_all()
    change_code()
    stamp.stamp(OUTPUTS / "fingerprints")
    assert waiting(NAMES) is None
    Path("code.json").write_text('{"values": {"steps": 2}, "code": {}}')
    assert_refused(r"train has another value, .*: steps = 2", stamp.stamp, OUTPUTS / "fingerprints")
    assert waiting(NAMES) == "train"
    stamp.stamp(OUTPUTS / "fingerprints", values_may_differ=True)
    assert waiting(NAMES) is None


def test_every_evaluation_belongs_to_a_seed() -> None:
    assert seed_of("evaluate_masked_again@long-third") == "third"
    assert seed_of("evaluate_causal@elu") == "first"


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["hours", "minilm"])
def test_the_kept_trainings_are_those_of_todays_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: str
) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", Path(__file__).parents[1], clone], check=True)
    monkeypatch.chdir(clone)
    cfg, stages = choose([f"scale={scale}"]), stages_of_page()
    take(Path(cfg.paths.seeds), cfg.scale, stages.values())
    make(["fingerprints"])
    assert waiting(name for name in stages if name != "report") is None
