"""The site builds without a warning and a network; modules and files that pages name exist."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import getdoc, signature
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from playwright.sync_api import sync_playwright

import value_aware_attention
from docs import stages
from tests.hugging_face.models import sharp
from value_aware_attention import approximations, caches, hugging_face, measurement, probe

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMED = ("CONTRIBUTING.md", "Makefile", "mkdocs.yml", "params.yaml", "dvc.yaml")
PROSE = [*PAGES, *(ROOT / name for name in NAMED), *(ROOT / "conf").rglob("*.yaml")]
PACKAGES = "value_aware_attention|value_aware_study|pipelines|benchmarks|checks"
MODULE = re.compile(rf"\b(?:{PACKAGES})(?:\.\w+)+")
FOLDERS = r"conf|docs|src|pipelines|tests|benchmarks|checks|notebooks|\.github"
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+)`")
EXAMPLE = re.compile(
    "largest_values|LargestValues|[Ll]arge_?[Vv]alues|nadam"
)  # of pages that are run
FETCHED = re.compile(r"""<(?:script|img|iframe)[^>]*src=["']?https?:|<link[^>]*href=["']?https?:""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://localhost:9"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


@pytest.mark.slow
def test_the_site_builds_from_a_checkout_alone(site: Path) -> None:
    for module in value_aware_attention.__all__:
        assert f"<code>{module}</code>" in (site / "api/index.html").read_text()
    methods = (site / "api/approximations.html").read_text()
    for name in approximations.__all__:
        assert f'id="{approximations.__name__}.{name}"' in methods
    for package, page in ((caches, "caches"), (hugging_face, "hugging-face")):
        text = (site / f"api/{page}.html").read_text()
        assert all(re.search(rf'id="[\w.]+\.{name}"', text) for name in package.__all__)
    assert "exp(scale ⟨q, k⟩)" in (site / "api/kernels.html").read_text()
    for page, formulas in (("optimal-value-aware", 1), ("caches", 1), ("cache-optimum", 1)):
        assert (site / f"{page}.html").read_text().count('<div class="math"><math') == formulas
    assert (site / "results/hours/index.html").exists()
    for page in site.glob("**/*.html"):
        assert not FETCHED.search(page.read_text()), page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_site_is_searched_from_disk_without_a_request(site: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((site / "api/probe.html").as_uri())
        page.locator("input.md-search__input").fill("compressed cache")
        page.wait_for_selector(".md-search-result__item")
        browser.close()
    assert requests and all(url.startswith(("file:", "blob:", "data:")) for url in requests)


@pytest.mark.parametrize(
    "function",
    [
        caches.AfterPrefix,
        hugging_face.compressed_cache,
        hugging_face.replace_attention,
        measurement.measure,
        probe.probe,
    ],
    ids=lambda function: function.__name__,
)
def test_every_parameter_of_a_large_function_is_explained(function: Callable[..., object]) -> None:
    _, _, rows = str(getdoc(function)).partition("\nArgs:\n")
    assert re.findall(r"^    \**(\w+): ", rows, re.MULTILINE) == list(
        signature(function).parameters
    )


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
    assert "256 tokens: 64.0 keys a head" in said and "equal over 56 tokens" in said


def test_the_class_for_a_harness_scores_over_the_kept_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval is not installed: of its class the page uses `model`, `device` and `max_length`."""
    model = sharp("llama")
    harness = SimpleNamespace(HFLM=object)
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, harness)
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/harness.md").read_text(), flags=re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(compile(example, "harness.md", "exec"), names)
    scorer = names["CompressedLM"]()
    scorer.model, scorer.device, scorer.max_length = model, "cpu", 64
    tokens = torch.randint(5, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    context, continuation = tokens[0, :37].tolist(), tokens[0, 37:].tolist()
    scorer.keep = 1 / 2
    ((score, is_greedy),) = scorer._loglikelihood_tokens([(None, context, continuation)])
    method = caches.AfterPrefix(
        caches.LeaveOneOut(18), prefix=36, observed="continued", pool="model"
    )
    with hugging_face.replace_attention(model, method), torch.no_grad():
        logs = model(tokens, use_cache=False).logits[0, 36:-1].log_softmax(dim=-1)
    expected = logs.gather(-1, tokens[0, 37:, None]).sum()
    assert score == pytest.approx(float(expected), rel=1e-4)
    assert is_greedy == bool((logs.argmax(dim=-1) == tokens[0, 37:]).all())
    assert scorer.report.caches[0].was_read
    ((alone, _),) = scorer._loglikelihood_tokens([(None, context[:1], continuation)])
    with torch.no_grad():
        logs = model(torch.tensor([[*context[:1], *continuation[:-1]]])).logits[0]
    exact = logs.log_softmax(dim=-1).gather(-1, tokens[0, 37:, None]).sum()
    assert alone == pytest.approx(float(exact), rel=1e-5)


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
