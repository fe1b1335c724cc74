"""The README's library example runs, and what it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_the_library_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)[0]
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    oblivious, aware = (float(x) for x in re.findall(r"tensor\(([\d.]+)\)", printed)[:2])
    assert aware < oblivious
    assert "tensor(65)" in printed or "tensor(64)" in printed


def test_the_example_of_any_trained_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/hugging-face.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    exec(compile(example, "hugging-face.md", "exec"), {})
    errors = [float(x) for x in re.findall(r"tensor\((.*?)\)", capsys.readouterr().out)]
    assert len(errors) == 4 and errors[0] > 1e-4 > errors[-1]


def test_every_file_it_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_every_command_it_shows_names_an_app() -> None:
    for app in re.findall(r"python -m pipelines\.(\w+)", TEXT):
        assert (ROOT / "pipelines" / f"{app}.py").exists()
