"""The wheel and the sdist hold the library, its C++ sources, README and licence, and no more."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src/value_aware_attention"
FILES = {
    file.relative_to(ROOT / "src").as_posix()
    for pattern in ("*.py", "*.cpp", "*.h", "*.toml")
    for file in LIBRARY.rglob(pattern)
}
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds both from a copy, because setuptools leaves folders behind."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("src", "pipelines", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
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
    assert {"value_aware_attention/caches/drops.cpp"} < FILES
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    check_described(Parser().parsestr(text.decode()))


def check_described(metadata: Message) -> None:
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
