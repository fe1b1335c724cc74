"""Options of conf/approximation evaluate as one cell; what cannot be evaluated is one line."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import file_digest
from importlib import import_module
from pathlib import Path
from typing import BinaryIO
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from torch.utils._pytree import tree_leaves

from pipelines.app import file_hash, summary
from tests import apps
from tests.apps import run_app, write_run
from tests.refusals import assert_refused
from tests.test_distributed import GRID, write_masked
from value_aware_attention import files
from value_aware_attention.approximations.closest_combination import compiled
from value_aware_attention.kernels import Elu, Exponential
from value_aware_attention.measurement.task import Task, UnitSums
from value_aware_attention.records.record import Cell
from value_aware_study.cards import cards
from value_aware_study.data.corpora import write_corpus
from value_aware_study.data.text import Document
from value_aware_study.safe_text import LONGEST, inside

pytestmark = pytest.mark.filterwarnings("ignore")
MODELS = {
    "kernel=elu": (Elu, True),
    "model=masked length=long": (Exponential, False),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a causal and a masked model, both random."""
    folder = write_run(tmp_path_factory.mktemp("models"))
    write_masked(folder, "long", 128)
    return folder


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Collects the cells that evaluations return, not the rows of exact attention for sweeps."""
    import pipelines.app.tracking  # noqa: F401  keeps the function that is replaced below

    found: list[Cell] = []
    monkeypatch.setattr(summary, "row", lambda record, cell: found.append(cell))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", cards())
def test_every_option_is_a_cell_of_a_model_or_refused_by_name(
    models: Path, rows: list[Cell], name: str, model: str
) -> None:
    shipped = dict(cards()[name].arguments)
    method, (kernel, is_causal) = get_class(cards()[name].target), MODELS[model]
    fits = kernel in (method.kernels or (kernel,)) and (method.supports_causal or not is_causal)
    cache = models / ("causal" if is_causal else "masked")
    command = f"evaluate {model} approximation={name} paths.cache={cache}"
    if not fits:
        message = apps.refusal(command, models)
        assert message.startswith(f"error: {name}") and method.__name__ in message
        other = f" has {kernel.__name__.lower()}"
        assert "does not support causal attention" in message or other in message
        assert not rows
        return
    run_app(command, models)
    shipped.pop("search", None)
    (cell,) = rows
    assert (cell.approximation, cell.parameters) == (name, shipped)


CAUSAL = "outputs/smoke/models/causal_elu"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def refusal(command: str, root: Path) -> str:
    """Returns the one line that a command ends with; no record is left behind."""
    line = apps.refusal(command, root)
    assert not (root / "outputs/smoke/records").exists()
    return line


def with_a_token_of_none(root: Path) -> None:
    stream = np.zeros(4000, dtype=np.uint16)
    stream[-1] = 60
    np.save(root / "outputs/smoke/tokens/causal/evaluation.npy", stream)


def with_a_file_more(root: Path) -> None:
    files.write_checksums(root / CAUSAL)
    (root / CAUSAL / "other.safetensors").touch()


def with_a_masked_model(root: Path) -> None:
    write_masked(root)
    config = root / "outputs/smoke/models/masked_short/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"masked_fraction": 0.15}))


MASKED = "evaluate model=masked length=short"
LAPTOP = OmegaConf.load(apps.ROOT / "params.yaml").causal
SIZES = ("layers", "width", "heads", "feedforward")
SCALES = (
    f"{CAUSAL} holds a model with layers 2, width 64, heads 1, feedforward 64",
    f"scale=laptop asks for {', '.join(f'{name} {LAPTOP[name]}' for name in SIZES)}",
)
SCALED = "kernel=elu scale=laptop paths.outputs={root}/outputs/smoke"
EVALUATE = "evaluate kernel=elu"


@pytest.mark.parametrize(
    ("spoil", "command", "words"),
    [
        (lambda root: (root / CAUSAL / "config.json").unlink(), EVALUATE, ["config.json"]),
        (lambda root: (root / CAUSAL / "model.safetensors").unlink(), EVALUATE, ["model.safet"]),
        (with_a_file_more, EVALUATE, ["other.safetensors"]),
        (with_a_token_of_none, EVALUATE, ["the token 60, the vocabulary has 60"]),
        # the card is read before the model
        (
            lambda root: shutil.rmtree(root / CAUSAL),
            f"{EVALUATE} approximation=lsh",
            ["lsh: LSH does not support causal"],
        ),
        (
            lambda root: shutil.rmtree(root / CAUSAL),
            f"{EVALUATE} approximation=orf",
            ["orf: ", "causal_elu has elu"],
        ),
        (Path.exists, f"evaluate {SCALED}", SCALES),
        (Path.exists, f"survey {SCALED}", SCALES),
        (
            with_a_masked_model,
            f"{MASKED} masked.layers=3",
            ["a model with num_hidden_layers 2; scale=smoke asks for num_hidden_layers 3"],
        ),
        (
            with_a_masked_model,
            f"{MASKED} masked.fraction=0.5",
            ["a model with masked_fraction 0.15; scale=smoke asks for masked_fraction 0.5"],
        ),
        # the first window has no context before it, and no layers are recorded on it
        (
            Path.exists,
            f"{EVALUATE} evaluation.causal_units=1",
            ["none of the 1 windows has 96 tokens", "take more (evaluation.causal_units)"],
        ),
        (
            Path.exists,
            "survey kernel=elu survey.budgets=[100000]",
            ["survey.budgets [100000]", "at most 96"],
        ),
    ],
)
def test_what_does_not_fit_an_evaluation_is_named(
    root: Path, spoil: Callable[[Path], object], command: str, words: Sequence[str]
) -> None:
    spoil(root)
    message = refusal(command.format(root=root), root)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "happens",
    [
        Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")),
        partial(torch.empty, 2**60),
    ],
    ids=["of a GPU", "of this machine"],
)
def test_too_little_memory_names_the_values_to_lower(
    root: Path, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "run", lambda *arguments: happens())
    message = refusal("evaluate kernel=elu evaluation.memory_gib=0.5", root)
    assert "evaluation.memory_gib (it is 0.5)" in message
    assert "evaluation.batch_size (it is 2)" in message


def test_another_error_of_torch_is_no_lack_of_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "run", lambda *arguments: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        run_app("evaluate kernel=elu", root)


def test_less_memory_finds_the_same_cells_again(root: Path) -> None:
    """Blocks of another size change numbers by rounding alone, so none is computed anew."""
    cell = "evaluate kernel=elu approximation=optimal_v_aware approximation.r=4"
    run_app(cell, root)
    cells = {path: path.stat().st_mtime_ns for path in (root / ".cache/cells").iterdir()}
    run_app(f"{cell} evaluation.memory_gib=0.01", root)
    assert {path: path.stat().st_mtime_ns for path in (root / ".cache/cells").iterdir()} == cells


SHORT = f"{MASKED} evaluation.masked_units.short=3"


def test_text_without_a_masked_token_is_refused_and_the_record_stays(tmp_path: Path) -> None:
    write_masked(tmp_path)
    record = tmp_path / "outputs/smoke/records/masked_short.json"
    record.parent.mkdir(parents=True)
    record.write_text("a good record")
    assert_refused(
        r"^error: no masked token in 3 sequences.* 0\.0001",
        run_app,
        f"{SHORT} masked.fraction=0.0001",
        tmp_path,
        error=SystemExit,
    )
    assert record.read_text() == "a good record"


def test_a_record_of_one_sequence_is_json_and_has_no_intervals(tmp_path: Path) -> None:
    write_masked(tmp_path)
    single = SHORT.replace("short=3", "short=1")
    run_app(" ".join([single, "masked.fraction=0.5", *GRID]), tmp_path)
    written = (tmp_path / "outputs/smoke/records/masked_short.json").read_text()
    for cell in json.loads(written, parse_constant=pytest.fail)["cells"]:
        assert cell["value"] is not None
        assert cell["low"] is cell["high"] is cell["difference_low"] is None


def test_a_number_that_is_not_finite_is_named_with_its_cell_and_not_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = import_module("value_aware_attention.measurement.measure")
    whole = measured.end_metric

    def broken(sums: UnitSums, exact: UnitSums, metric: str) -> dict:
        return whole(sums, exact, metric) | ({} if sums is exact else {"value": float("inf")})

    monkeypatch.setattr(measured, "end_metric", broken)
    assert_refused(
        r"^error: sliding_window r=4: value is inf, which JSON",
        run_app,
        "evaluate kernel=elu approximation=sliding_window approximation.r=4",
        root,
        error=SystemExit,
    )
    not_a_number = UnitSums(np.array([np.nan]), np.array([1.0]))
    monkeypatch.setattr(Task, "run", lambda *arguments: not_a_number)
    cells = list((root / ".cache/cells").iterdir())
    assert_refused(
        r"^error: sliding_window r=3: totals.0 is nan, which JSON",
        run_app,
        "evaluate kernel=elu approximation=sliding_window approximation.r=3",
        root,
        error=SystemExit,
    )
    assert list((root / ".cache/cells").iterdir()) == cells


def test_a_checkpoint_given_is_the_one_that_is_evaluated_and_hashed_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(stream: BinaryIO, name: str) -> object:
        hashed.append(Path(stream.name).name)
        return file_digest(stream, name)

    files.write_checksums(root / CAUSAL)
    files._checksum.cache_clear()
    monkeypatch.setattr(files, "file_digest", counted)
    measured = import_module("value_aware_attention.measurement.measure")
    monkeypatch.setattr(measured, "weights_hash", None)
    other = root / "elsewhere/model"
    shutil.move(root / CAUSAL, other)
    tokens = root / "elsewhere/evaluation.npy"
    shutil.move(root / "outputs/smoke/tokens/causal/evaluation.npy", tokens)
    places = (f"model.checkpoint={other}", f"model.tokens={tokens}")
    run_app(" ".join(["evaluate", "kernel=elu", *places, *GRID]), root)
    record = json.loads((root / "outputs/smoke/records/causal_elu.json").read_text())
    assert record["hashes"] == {"checkpoint": file_hash([other]), "data": file_hash([tokens])}
    assert hashed.count("model.safetensors") == 1


@pytest.mark.slow
def test_cells_of_one_engine_are_not_served_to_the_other_and_both_find_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers agree to 1e-4, and to 1e-5 near 0: the engines round differently."""
    others = ("window_keys", "baseline_keys", "sampled_keys")
    few = (*(f"grid.{name}=[]" for name in others), "grid.keys=[4]", "grid.value_aware_keys=[4]")
    engines, values = [], []
    for library in (compiled.library, lambda: None):
        monkeypatch.setattr(compiled, "library", library)
        run_app(" ".join(["evaluate", "kernel=elu", *few]), root)
        record = json.loads((root / "outputs/smoke/records/causal_elu.json").read_text())
        engines.append((record["run_on"]["engine"], len(list((root / ".cache/cells").iterdir()))))
        values.append([x for x in tree_leaves(record["cells"]) if isinstance(x, int | float)])
    (first, count), (second, count_of_both) = engines
    if first == "torch":
        pytest.skip("no C++ compiler")
    assert (first, second) == ("compiled", "torch") and count_of_both == 2 * count - 1  # counts
    assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("app", ["evaluate", "survey"])
def test_tokens_of_another_tokenizer_are_refused_whatever_its_size(root: Path, app: str) -> None:
    file = root / "outputs/smoke/tokens/causal/tokenizer/tokenizer.json"
    file.write_text(file.read_text().replace("w17", "v17"))
    message = refusal(f"{app} kernel=elu", root)
    assert f"was made with another tokenizer ({file}) than {root / CAUSAL}" in message
    (root / CAUSAL / "tokenizer.json").unlink()
    assert "causal_elu/tokenizer.json is missing: train the" in refusal(f"{app} kernel=elu", root)


def test_a_record_is_replaced_after_what_belongs_to_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **options: object) -> str:
        raise ValueError("no text to explore")

    monkeypatch.setattr(
        import_module("value_aware_study.evaluation.explorer"), "exploration", fails
    )
    assert "no text to explore" in refusal(" ".join(["evaluate", "kernel=elu", *GRID]), root)


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
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def test_an_app_writes_nothing_elsewhere(shared: Path, command: str) -> None:
    before = sorted(path for path in shared.parent.rglob("*") if "logs" not in path.parts)
    assert_refused(
        r"^error: [^\n]*(cannot name a file in|must be a name of|must be that of scale,) [^\n]*$",
        run_app,
        command.format(text=shared.parent / "text.txt") + "../../x",
        shared,
        error=SystemExit,
    )
    after = sorted(path for path in shared.parent.rglob("*") if "logs" not in path.parts)
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
