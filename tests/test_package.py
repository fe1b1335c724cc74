"""Wheel and sdist hold the library alone, which imports its own dependencies and no user of it."""

import ast
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from email.parser import Parser
from graphlib import TopologicalSorter
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from tests.apps import ROOT, copy_of_the_project

LIBRARY = ROOT / "src/value_aware_attention"
FILES = {
    file.relative_to(ROOT / "src").as_posix()
    for pattern in ("*.py", "*.cpp", "*.h", "*.toml", "py.typed")
    for file in LIBRARY.rglob(pattern)
}
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds both from a copy, because setuptools leaves folders behind."""
    files = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
    copy = copy_of_the_project(tmp_path_factory.mktemp("copy"), *files, "src", "pipelines", "docs")
    (copy / "tests").mkdir()
    shutil.copy(__file__, copy / "tests")
    (copy / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    return copy / "dist"


def test_the_wheel_holds_the_library_alone(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with ZipFile(wheel) as opened:
        names = set(opened.namelist())
        text = opened.read(next(name for name in names if name.endswith("/METADATA")))
    assert {name for name in names if ".dist-info/" not in name} == FILES
    assert {f"value_aware_attention/{file}" for file in ("caches/drops.cpp", "py.typed")} < FILES
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    metadata = Parser().parsestr(text.decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert metadata.get_all("Classifier")


def test_the_sdist_holds_the_library_alone(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {member.name.split("/", 1)[1] for member in opened if member.isfile()}
    made = {name for name in names if ".egg-info/" in name}
    made |= {"PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
    assert names - made == {f"src/{file}" for file in FILES}


def test_citation_and_changelog_name_the_version_and_one_day() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == version
    assert f"\n## {version} - {cited['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()


STUDY = ROOT / "src/value_aware_study"
TOPS = (LIBRARY, STUDY, ROOT / "pipelines")


def imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Finds the imports in a tree, within functions too; not those of a face, for types alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node)


def names(tree: ast.AST, files: Mapping[str, Path] | None = None) -> set[str]:
    """Finds the modules that a tree imports; `files` has those that a package may be asked for."""
    dotted: set[str] = set()
    for node in imports(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
            continue
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            dotted.add(inner if inner in (files or {}) else str(node.module))
    return dotted


def packages(folder: Path) -> set[str]:
    """Finds the top packages that the files of a folder import."""
    files = folder.rglob("*.py")
    return {name.partition(".")[0] for file in files for name in names(ast.parse(file.read_text()))}


def modules() -> dict[str, Path]:
    """Maps the modules of src and pipelines to their files."""
    return {
        ".".join(file.relative_to(top.parent).with_suffix("").parts).removesuffix(".__init__"): file
        for top in TOPS
        for file in top.rglob("*.py")
    }


def test_the_library_imports_its_dependencies_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["gguf"]]
    named.append("triton")  # which comes with PyTorch for CUDA
    required = {name.partition(">")[0] for name in named}
    assert packages(LIBRARY) - set(sys.stdlib_module_names) - {LIBRARY.name} <= required


def test_the_study_imports_no_runner_and_its_report_nothing_heavy() -> None:
    assert not packages(STUDY) & {"dvc", "wandb"}
    heavy = {"torch", "transformers", "pytorch_lightning", "hydra"}
    assert not packages(STUDY / "report") & heavy


@pytest.mark.parametrize("folder", [LIBRARY, STUDY], ids=lambda folder: folder.name)
def test_no_package_imports_one_that_uses_it_nor_names_it_in_a_string(folder: Path) -> None:
    users = {STUDY.name, "pipelines", "benchmarks", "checks"} - {folder.name}
    assert not users & packages(folder)
    for file in LIBRARY.rglob("*.py"):
        assert f'"{STUDY.name}' not in file.read_text(), file


def test_no_file_imports_one_that_imports_it_nor_does_a_folder_of_the_library() -> None:
    files = modules()
    by_file: dict[str, set[str]] = {}
    by_folder: dict[Path, set[Path]] = {}
    for module, file in files.items():
        by_file[module] = names(ast.parse(file.read_text()), files) & files.keys()
        below = {files[other].parent for other in by_file[module]}
        if LIBRARY in file.parents:
            by_folder.setdefault(file.parent, set()).update(below - {file.parent, LIBRARY})
    TopologicalSorter(by_file).prepare()  # raises CycleError
    TopologicalSorter(by_folder).prepare()


def test_a_constant_of_a_module_has_a_name_of_its_own() -> None:
    homes: dict[str, set[str]] = {}
    for module, file in modules().items():
        for node in ast.parse(file.read_text()).body:
            for name in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ():
                is_bound = isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
                if is_bound and name.id.isupper():
                    homes.setdefault(name.id.lstrip("_"), set()).add(module)
    assert not {name: places for name, places in homes.items() if len(places) > 1}


def test_caches_and_models_know_nothing_of_each_other_but_in_decoding() -> None:
    """But for types that a face offers."""
    for room, other in (("caches", "hugging_face"), ("hugging_face", "caches")):
        for file in (LIBRARY / room).rglob("*.py"):
            below = names(ast.parse(file.read_text()))
            assert not {name for name in below if f".{other}" in name}, file


def test_the_import_does_not_bring_the_compiler() -> None:
    code = (
        "import sys, value_aware_attention as v; v.attention, v.approximations; v.__version__; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
