import re

import pytest

from value_aware_study.reporting.measurements import keys_needed_sentence
from value_aware_study.reporting.pretrained import of_pretrained, write_pretrained

FILES = {
    *("output_error.png", "matching_keys.png", "skewness_gap.png"),
    *("keys_needed.csv", "keys_needed.md", "index.html"),
}


@pytest.fixture(scope="module")
def record(records):
    """A synthetic record in the format of the pretrained model's."""
    by_kernel = {r["kernel"]: r["output_error"] for r in records if r["task"] == "causal"}
    kernels = {kernel: {"output_error": errors} for kernel, errors in by_kernel.items()}
    kernels["exponential"]["skewness_gap"] = records[0]["skewness_gap"]
    return {
        "model": "invented-encoder",
        "head_dim": 64,
        "text": "two <invented> texts",
        "run_on": {"hardware": "none", "versions": {"torch": "0.0"}},
        "kernels": kernels,
    }


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_record_gives_the_same_files(record, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "output_error.json").write_text("kept")
    write_pretrained(record, tmp_path / "a")
    turned = {**record, "kernels": dict(reversed(record["kernels"].items()))}
    write_pretrained(turned, tmp_path / "b")
    written = contents(tmp_path / "a")
    assert written.pop("output_error.json") == b"kept"
    assert written == contents(tmp_path / "b")
    assert set(written) == FILES


def test_the_page_says_what_was_measured_on_what(record, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "value_aware_study.reporting.figures.save", lambda chart, path: path.write_bytes(b"")
    )
    write_pretrained(record, tmp_path)
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    for words in ("invented-encoder", "heads of 64 dimensions", "torch 0.0", "best found"):
        assert words in text
    assert "two &lt;invented&gt; texts" in text and "<invented>" not in text
    for measures in record["kernels"].values():
        assert keys_needed_sentence(measures["output_error"]) in text
    links = re.findall(r"(?:src|href)='([^']*)'", text)
    assert len(links) == 5 and all((tmp_path / link).is_file() for link in links)


def test_only_the_models_own_kernel_is_called_its_own(record):
    labels = [item.label for item in of_pretrained(record)]
    assert labels == ["exponential, its own", "polynomial (deg 2), post hoc", "elu, post hoc"]
