"""Every option of conf/approximation evaluates as one cell with its shipped settings."""

from pathlib import Path

import pytest
from hydra.utils import get_class

from pipelines.app import summary
from tests.apps import refusal, run_app, write_run
from tests.test_distributed import write_masked
from value_aware_attention.kernels import Elu, Exponential
from value_aware_attention.records.record import Cell
from value_aware_study.cards import cards

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MODELS = {
    "kernel=elu": (Elu, True),
    "model=masked length=long": (Exponential, False),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a causal and a masked model, both random."""
    folder = write_run(tmp_path_factory.mktemp("models"))
    write_masked(folder, "long", 128)
    return folder


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """Collects the cells that evaluations return."""
    found: list[Cell] = []
    monkeypatch.setattr(summary, "row", lambda record, cell: found.append(cell))
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", cards())
def test_every_option_is_a_cell_of_a_model_or_refused_by_name(
    root: Path, rows: list[Cell], name: str, model: str
) -> None:
    shipped = dict(cards()[name].arguments)
    method, (kernel, is_causal) = get_class(cards()[name].target), MODELS[model]
    fits = kernel in (method.kernels or (kernel,)) and (method.supports_causal or not is_causal)
    cache = root / ("causal" if is_causal else "masked")
    command = f"evaluate {model} approximation={name} paths.cache={cache}"
    if not fits:
        message = refusal(command, root)
        assert message.startswith(f"error: {name}") and method.__name__ in message
        other = f"got the kernel {kernel.__name__}"
        assert "does not support causal attention" in message or other in message
        assert not rows
        return
    run_app(command, root)
    shipped.pop("search", None)
    (cell,) = rows
    assert (cell.approximation, cell.parameters) == (name, shipped)
