"""The library imports its own dependencies alone, and no two of its folders import each other."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY, STUDY = (ROOT / "src" / name for name in ("value_aware_attention", "value_aware_study"))


def imported(file: Path) -> set[str]:
    """Finds the modules that a file imports, within functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return names


def packages(folder: Path) -> set[str]:
    """Finds the top packages that the files of a folder import."""
    return {name.partition(".")[0] for file in folder.rglob("*.py") for name in imported(file)}


def test_the_library_imports_its_dependencies_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {name.partition(">")[0] for name in project["dependencies"]}
    imports = packages(LIBRARY) - set(sys.stdlib_module_names) - {LIBRARY.name}
    assert imports <= required | {"kvpress"}  # whose presses caches.as_press makes, where installed


@pytest.mark.parametrize("folder", [LIBRARY, STUDY], ids=lambda folder: folder.name)
def test_no_package_imports_one_that_uses_it(folder: Path) -> None:
    users = {STUDY.name, "pipelines", "benchmarks", "checks"} - {folder.name}
    assert not users & packages(folder)


def test_no_folder_of_the_library_imports_one_that_imports_it() -> None:
    below: dict[Path, set[Path]] = {}
    for file in LIBRARY.rglob("*.py"):
        paths = {LIBRARY.parent.joinpath(*name.split(".")) for name in imported(file)}
        folders = {
            path if path.is_dir() else path.parent for path in paths if LIBRARY in path.parents
        }
        below.setdefault(file.parent, set()).update(folders - {file.parent, LIBRARY})
    TopologicalSorter(below).prepare()  # raises CycleError


def test_the_import_does_not_bring_the_compiler() -> None:
    code = (
        "import sys, value_aware_attention as v; v.attention, v.approximations; v.__version__; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
