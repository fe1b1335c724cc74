"""docs/add-a-method.md, followed to the letter in a copy of the project."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
COPIED = ("conf", "docs", "pipelines", "src", "tests")
FILES = ("README.md", "params.yaml", "pyproject.toml")
TESTED = (
    "tests/approximations/test_every_method.py",  # by the tests' list of methods
    "tests/approximations/test_support.py",
    "tests/approximations/test_baselines.py",
    "tests/test_conf.py",  # in the survey, and an attention to train with
    "tests/test_evaluate_options.py",  # a cell of a causal and of a masked model
    "tests/report/exhibits/test_every_r.py",  # its label and mark
)


def blocks() -> dict[str, str]:
    """Every code block of the page that belongs into a file, by the file's name."""
    return dict(re.findall(r"\(`([\w/.]+)`\):\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the method of the page."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name, text in blocks().items():
        file = folder / name
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if file.name == "__init__.py":
            added = text.split()[-1]
            before, text = text + before.replace("__all__ = [", f'__all__ = [\n    "{added}",'), ""
        file.write_text(before + ("\n\n" if before and text else "") + text, encoding="utf-8")
    return folder


def python(folder: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_adds_five_places() -> None:
    assert len(blocks()) == 5


@pytest.mark.slow
def test_the_method_of_the_page_passes_the_tests_of_every_method(project: Path) -> None:
    python(project, "-m", "docs.methods_table")
    assert "| `LargestValues(r)` |" in (project / "docs/methods.md").read_text(encoding="utf-8")
    chosen = ("-k", "largest_values or LargestValues or up_to_date or every_public_method")
    said = python(project, "-m", "pytest", "-v", "-p", "no:cacheprovider", *chosen, *TESTED)
    assert not re.search(r"FAILED|ERROR", said)
    for file in TESTED:
        assert re.search(rf"^{file}.*\[.*largest_values.*PASSED", said, flags=re.MULTILINE), file
