"""The site builds, examples and the notebook run, and modules and files that pages name exist."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import getdoc, signature
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import nbformat
import pandas as pd
import pytest
import torch
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode
from playwright.sync_api import sync_playwright
from probed import model, tokenizer, words

import value_aware_attention
from docs import stages
from tests.apps import ROOT, copy_of_the_project, write_run
from tests.hugging_face.models import sharp
from value_aware_attention import approximations, caches, hugging_face, measurement, probe

CHROMIUM = shutil.which("chromium")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMED = ("README.md", "CONTRIBUTING.md", "Makefile", "mkdocs.yml", "params.yaml", "dvc.yaml")
PROSE = [*PAGES, *(ROOT / name for name in NAMED), *(ROOT / "conf").rglob("*.yaml")]
PACKAGES = "value_aware_attention|value_aware_study|pipelines|benchmarks|checks"
MODULE = re.compile(rf"\b(?:{PACKAGES})(?:\.\w+)+")
FOLDERS = r"conf|docs|examples|src|pipelines|tests|benchmarks|checks|notebooks|\.github"
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


def examples(page: str, words: str = "") -> list[str]:
    """Returns the Python examples of a page that have these words."""
    texts = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [text for text in texts if words in text]


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_decoding_run_and_check_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in examples("docs/decoding.md"):
        exec(compile(example, "decoding.md", "exec"), names)
    said = capsys.readouterr().out
    for line in (
        "256 tokens: 64.0 keys a head",
        "LeaveOneOut, keep=64, ",
        "equal over 56 tokens",
    ):
        assert line in said


def test_the_class_for_a_harness_scores_over_the_kept_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval is not installed: of its class the page uses `model`, `device` and `max_length`."""
    model = sharp("llama")
    harness = SimpleNamespace(HFLM=object)
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, harness)
    (example,) = examples("docs/harness.md")
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


TEXT = (ROOT / "README.md").read_text()


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = examples("README.md", "torch.randn")
    assert "torch.randn(1, 8, 512, 64)" in example
    example = example.replace("(1, 8, 512, 64)", "(1, 2, 256, 64)")  # a tenth of the time
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    oblivious, aware = (float(x) for x in re.findall(r"tensor\(([\d.]+)\)", printed)[:2])
    assert aware < oblivious


def test_the_example_of_any_trained_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(examples("docs/hugging-face.md")[0], "hugging-face.md", "exec"), {})
    errors = [float(x) for x in re.findall(r"tensor\((.*?)\)", capsys.readouterr().out)]
    assert len(errors) == 4 and errors[0] > 1e-4 > errors[-1]


@pytest.mark.filterwarnings("ignore")
def test_the_probe_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model("bert").save_pretrained(tmp_path / "my-model")
    tokenizer().save_pretrained(tmp_path / "my-model")
    (tmp_path / "text.txt").write_text(words(40))
    monkeypatch.chdir(tmp_path)
    (example,) = examples("docs/probe.md", "probe.probe(")
    exec(compile(example, "probe.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "keys needed" in printed and "Too few windows" in printed
    assert re.search(r"\{'optimal_v_oblivious': \d+, 'optimal_v_aware': \d+\}", printed)


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


ELSEWHERE = {"pip install", "make page", "wandb leet"}
"""Commands that are not run here: an installation, the page of tests/report, and a program that
takes the screen"""


def commands() -> list[str]:
    """Lists the README's shell commands, of blocks and of its table, in their order, at smoke."""
    found = re.findall(
        r"```bash\n(.*?)```|^\|[^|\n]*\| `([^`\n]+)` \|", TEXT, flags=re.DOTALL | re.M
    )
    lines = "\n".join(block or command for block, command in found).splitlines()
    shown = [line.partition("#")[0].strip() for line in lines]
    small = [re.sub(r"\bmake repro\b", "make repro SCALE=smoke", line) for line in shown]
    # an edit of a value that smoke sets is refused
    small = [line.replace("-S causal.steps=400", "-S training.log_every=5") for line in small]
    return [line for line in small if line and not line.startswith(tuple(ELSEWHERE))]


@pytest.mark.slow
def test_every_command_runs_in_a_fresh_clone_in_its_order(tmp_path: Path) -> None:
    """The environment is this one; git has nothing to say after all of them."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    (folder / ".venv").symlink_to(sys.prefix)
    installed = 'make() { command make -o .venv/.installed -o .venv/.installed-dev "$@"; }'
    script = "\n".join(["set -ex", installed, *commands()])
    env = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, text=True, capture_output=True, timeout=3000
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert (folder / "report/index.html").as_uri() in ran.stdout  # the last line of a run
    left = subprocess.run(["git", "status", "--short"], cwd=folder, text=True, capture_output=True)
    assert set(left.stdout.split()) <= {"M", "dvc.lock", "params.yaml"}, left.stdout


EXAMPLES = {
    "probe_a_model.py": r"layer 5: .*\nOn minilm .*at 64 tokens, ",
    "ask_five_questions.py": r"keeper\? .*Anna Weiss.*built\? .*1871.*\d tokens: [\d.]+ keys",
    "a_method_of_your_own.py": r"LargestValues\(.*OptimalValueAware\(r=8.*cosine 0\.9",
    "sweep.sh": r"optimal_v_aware +16 .*sweep\.csv\n.*sweep\.png\n",
}
"""Files of examples/ and patterns of what they print"""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").iterdir()))
def test_an_example_runs_and_prints_what_it_says(name: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert text.count("\n") <= 40 and f" examples/{name}" in text
    command = [shutil.which("sh") if name.endswith(".sh") else sys.executable, f"examples/{name}"]
    if name == "sweep.sh":
        root = write_run(tmp_path)
        command += ["scale=smoke", "kernel=elu", "logger=none", f"paths.root={root}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert re.search(EXAMPLES[name], ran.stdout, re.DOTALL), ran.stdout


NOTEBOOK = ROOT / "notebooks/minilm.ipynb"
DECODER = ROOT / "notebooks/smollm2.ipynb"


@pytest.mark.parametrize("file", [NOTEBOOK, DECODER], ids=lambda file: file.stem)
def test_a_notebook_is_kept_as_it_ran(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell.outputs):
        assert output.get("name") != "stderr", output.text
        assert not re.search(r"Warning|IProgress|(^|[\s'\"])/\w+/", output.get("text", ""))


def test_the_encoders_notebook_has_the_numbers_of_readme() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    controls = pd.read_csv(ROOT / "results/hours/model_control.csv")
    control = controls.query("r == 4 and layer == 'all'").iloc[0]
    said, last = printed(notebook, "probe"), notebook.cells[-1].source
    assert f"4 value-aware keys match {control.keys_needed:.0f} " in said
    assert re.search(rf"match\s{control.keys_needed:.0f} of {control['keys']:.0f}", last)
    for way in ("aware", "oblivious"):
        cosine = control[f"cosine_optimal_v_{way}"]
        assert f"{cosine:.4f} (" in said and f"{cosine:.3f}" in last


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_value_aware_keys_are_far_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900).execute(cwd=NOTEBOOK.parent)
    by_weight, slot, aware = map(float, re.findall(r"\): (\d\.\d+)", printed(notebook, "cosines")))
    assert aware > 0.95 > 0.85 > by_weight and aware > slot > by_weight
    (matching,) = re.findall(r"4 value-aware keys match (\d+)", printed(notebook, "probe"))
    assert int(matching) >= 20
    (random,) = re.findall(r"With random weights they match (\d+)", printed(notebook, "probe"))
    assert int(random) >= int(matching) - 5
    (drawn,) = cell(notebook, "chart").outputs
    assert "<svg" in drawn.data["image/svg+xml"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_value_aware_keys_lose_least_in_a_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(DECODER, as_version=4)
    NotebookClient(notebook, timeout=900).execute(cwd=DECODER.parent)
    ratios = [float(x) for x in re.findall(r"x (\d+\.\d+)", printed(notebook, "perplexities"))]
    assert ratios[:4] == sorted(ratios[:4]) and ratios[3] > 1.5
    assert printed(notebook, "compressed").count("Anna Weiss") == 2


def printed(notebook: NotebookNode, name: str) -> str:
    return "".join(output.get("text", "") for output in cell(notebook, name).outputs)


def cell(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if cell.id == name)


COPIED = (
    *("conf", "docs", "pipelines", "src", "tests"),
    *("README.md", "params.yaml", "pyproject.toml", "requirements.txt"),
)
METHOD_PAGES = {"add-a-method": 5, "your-cache-method": 4}
"""Page that adds a method -> the number of places that it takes"""


def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def code_blocks(name: str) -> dict[str, str]:
    """Returns the code blocks of a page that belong into a file, by the file's name."""
    return dict(re.findall(r"\(`([\w/.-]+)`\):\n\n```\w+\n(.*?)```", page(name), flags=re.DOTALL))


def chosen_tests(name: str) -> list[str]:
    """Returns the arguments of the page's last block, which runs the tests of the method."""
    return shlex.split(page(name).split("```\n")[-2])[1:]


@pytest.mark.parametrize(("name", "places"), METHOD_PAGES.items())
def test_a_page_has_a_block_for_every_place(name: str, places: int) -> None:
    assert len(code_blocks(name)) == places


@pytest.fixture(params=METHOD_PAGES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Copies the project and adds the method of a page; returns the page's name and the folder."""
    copy_of_the_project(tmp_path, *COPIED)
    for name, text in code_blocks(request.param).items():
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
    (card,) = (Path(file).stem for file in code_blocks(name) if file.startswith("conf/"))
    if "docs.methods_table" in page(name):
        python(folder, "-m", "docs.methods_table")
        assert "| `LargestValues(r)` |" in (folder / "docs/methods.md").read_text(encoding="utf-8")
    chosen = chosen_tests(name)
    outcomes = python(folder, "-m", "pytest", "-v", "-p", "no:cacheprovider", *chosen)
    assert not re.search(r"FAILED|ERROR", outcomes)
    for place in (argument for argument in chosen if argument.startswith("tests/")):
        assert re.search(rf"^{place}.*\[.*{card}.*PASSED", outcomes, flags=re.MULTILINE), place
