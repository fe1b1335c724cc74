"""Sets up all tests: one thread, so that workers do not fight over two cores, and no network."""

import gc
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from tests.shapes import CHECKED, check_shapes

check_shapes(*CHECKED)

# The same examples at every run, so that only a change of the code turns a test red;
# HYPOTHESIS_PROFILE=explore draws new ones, to look for what nobody has seen yet. No example has a
# deadline: what it takes depends on what else the machine does.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", derandomize=False, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _few_collections() -> None:
    """Spares what the imports made from every search for garbage, a fifth of an app's run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the pictures of a page out: drawing them takes most of its time."""
    monkeypatch.setattr("value_aware_study.report.page.png", lambda *_: b"")


@pytest.fixture
def generator() -> torch.Generator:
    """Returns a generator with a fixed seed."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs a package that holds a GGUF file, and must be found without an import."""
    from tests.models.gguf_files import llama, write_gguf

    folder = tmp_path / "site/tiny_decoder"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it is found, not imported')")
    write_gguf(llama(), folder / "tiny.gguf")
    words = "the thing that they thought of then was with them "
    (tmp_path / "text.txt").write_text(40 * words)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path
