"""The site builds without a warning and a network; modules and files that pages name exist."""

import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import value_aware_attention
from docs import stages
from value_aware_attention import approximations

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PROSE = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "Makefile", "mkdocs.yml"))]
PACKAGES = "value_aware_attention|value_aware_study|pipelines|benchmarks|checks"
MODULE = re.compile(rf"\b(?:{PACKAGES})(?:\.\w+)+")
FOLDERS = r"conf|docs|src|pipelines|tests|benchmarks|checks|notebooks|\.github"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
EXAMPLE = re.compile(
    "largest_values|LargestValues|[Ll]arge_?[Vv]alues|nadam"
)  # of pages that are run
FETCHED = re.compile(r"""<(?:script|img|iframe)[^>]*src=["']?https?:|<link[^>]*href=["']?https?:""")


@pytest.mark.slow
def test_the_site_builds_from_a_checkout_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://localhost:9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for module in value_aware_attention.__all__:
        assert f"<code>{module}</code>" in (tmp_path / "api/index.html").read_text()
    methods = (tmp_path / "api/approximations.html").read_text()
    for name in approximations.__all__:
        assert f'id="{approximations.__name__}.{name}"' in methods
    assert "exp(scale &lt;q, k&gt;)" in (tmp_path / "api/kernels.html").read_text()
    assert (tmp_path / "results/laptop/index.html").exists()
    for page in tmp_path.glob("**/*.html"):
        assert not FETCHED.search(page.read_text()), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_first_what_it_is_for(page: Path) -> None:
    heading, sentence = page.read_text().split("\n\n")[:2]
    assert heading.startswith("# ") and sentence[0].isalpha(), sentence


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_modules_and_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name in MODULE.findall(text):
        if not EXAMPLE.search(name):
            assert exists(name), name
    for file in FILE.findall(text):
        assert EXAMPLE.search(file) or (ROOT / file).exists(), file


def test_modules_that_comments_of_the_configuration_name_exist() -> None:
    for file in [ROOT / "params.yaml", ROOT / "dvc.yaml", *(ROOT / "conf").rglob("*.yaml")]:
        for name in MODULE.findall("\n".join(re.findall("#.*", file.read_text()))):
            assert exists(name), name


def exists(name: str) -> bool:
    """Tells whether a name is a module of ours or an object in one."""
    path = Path(*name.split("."))
    if any((ROOT / above / path).with_suffix(".py").exists() for above in ("", "src")):
        return True
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_decoding_run_and_check_the_cache(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs/decoding.md").read_text()
    names: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(example, "decoding.md", "exec"), names)
    said = capsys.readouterr().out
    assert "256 tokens: 32.0 keys a head" in said and "equal over 56 tokens" in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what DVC imports
def test_the_drawing_of_the_stages_is_that_of_dvc() -> None:
    drawn = (ROOT / stages.DRAWN).read_text()
    assert drawn == stages.drawn(stages.graph()), "python -m docs.stages draws it again"
    names = set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    boxes = {name.removesuffix("_again") for name in names}
    assert boxes <= set(re.findall(r">(\w+)</text>", drawn))
    width = re.search(r'viewBox="0 0 (\d+)', drawn)
    assert width and int(width[1]) <= 800
    assert f"]({stages.DRAWN.name})" in (ROOT / "docs" / "reproduce.md").read_text()
