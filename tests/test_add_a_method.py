"""The pages that add a method, followed to the letter in a copy of the project."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("conf", "docs", "pipelines", "src", "tests")
FILES = ("README.md", "params.yaml", "pyproject.toml", "requirements.txt")
PAGES = {"add-a-method": 5, "your-cache-method": 4}
"""Page -> the number of places that a method takes"""


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def blocks(name: str) -> dict[str, str]:
    """Returns the code blocks of a page that belong into a file, by the file's name."""
    return dict(re.findall(r"\(`([\w/.-]+)`\):\n\n```\w+\n(.*?)```", page(name), flags=re.DOTALL))


def command(name: str) -> list[str]:
    """Returns the arguments of the page's last block, which runs the tests of the method."""
    return shlex.split(page(name).split("```\n")[-2])[1:]


@pytest.mark.parametrize(("name", "places"), PAGES.items())
def test_a_page_has_a_block_for_every_place(name: str, places: int) -> None:
    assert len(blocks(name)) == places


@pytest.fixture(params=PAGES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Copies the project and adds the method of a page; returns the page's name and the folder."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    for name, text in blocks(request.param).items():
        file = tmp_path / name
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if file.name == "__init__.py":
            exported = text.split()[-1]
            content = text + before.replace("__all__ = [", f'__all__ = [\n    "{exported}",')
        elif text.startswith("|"):  # the last row of the first table
            content = re.sub(r"(\n\|.*\n)(?=\n)", rf"\g<1>{text}", before, count=1)
        else:
            content = "\n\n".join(filter(None, (before, text)))
        file.write_text(content, encoding="utf-8")
    return request.param, tmp_path


def python(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_method_of_a_page_passes_the_tests_of_every_method(project: tuple[str, Path]) -> None:
    name, folder = project
    (card,) = (Path(file).stem for file in blocks(name) if file.startswith("conf/"))
    if "docs.methods_table" in page(name):
        python(folder, "-m", "docs.methods_table")
        assert "| `LargestValues(r)` |" in (folder / "docs/methods.md").read_text(encoding="utf-8")
    chosen = command(name)
    outcomes = python(folder, "-m", "pytest", "-v", "-p", "no:cacheprovider", *chosen)
    assert not re.search(r"FAILED|ERROR", outcomes)
    for place in (argument for argument in chosen if argument.startswith("tests/")):
        assert re.search(rf"^{place}.*\[.*{card}.*PASSED", outcomes, flags=re.MULTILINE), place
