"""Tables and titles of the synthetic run's page are those kept in golden/.

Renew them: RENEW=1 pytest tests/report/test_golden.py
"""

import os

import golden
import pytest


@pytest.mark.slow
def test_the_page_of_the_synthetic_run_is_the_kept_one(tmp_path):
    golden.stages(tmp_path / "run")
    texts = dict(golden.kept(golden.page(tmp_path / "run")))
    if os.environ.get("RENEW"):
        golden.renew(texts)
    golden_texts = {file.name: file.read_text(encoding="utf-8") for file in golden.KEPT.iterdir()}
    changed = sorted(
        name for name in texts | golden_texts if texts.get(name) != golden_texts.get(name)
    )
    assert not changed, "look at each, then renew them (RENEW=1)"
