"""The README's examples run, and files and apps that it names exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from probed import model, tokenizer, words

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    (example,) = (text for text in examples if "torch.randn" in text)
    assert "torch.randn(1, 8, 512, 64)" in example
    example = example.replace("(1, 8, 512, 64)", "(1, 2, 256, 64)")  # a tenth of the time
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    oblivious, aware = (float(x) for x in re.findall(r"tensor\(([\d.]+)\)", printed)[:2])
    assert aware < oblivious


def test_the_example_of_any_trained_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/hugging-face.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    exec(compile(example, "hugging-face.md", "exec"), {})
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
    text = (ROOT / "docs/probe.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (example,) = (text for text in examples if "probe.probe(" in text)
    exec(compile(example, "probe.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "keys needed" in printed and "Too few windows" in printed
    assert re.search(r"\{'optimal_v_oblivious': \d+, 'optimal_v_aware': \d+\}", printed)


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_every_command_it_shows_names_an_app() -> None:
    for app in re.findall(r"python -m pipelines\.(\w+)", TEXT):
        assert (ROOT / "pipelines" / f"{app}.py").exists()


ELSEWHERE = {"make test", "wandb leet", "wandb sweep", "python -m pipelines.workspace"}
"""Commands that are not run here: this suite, a full-screen program, and those that ask a server"""


def commands() -> list[str]:
    """Lists the README's shell commands in their order, at smoke scale."""
    blocks = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
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
