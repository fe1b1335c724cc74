"""pipelines.plan estimates hours from operations, which tests/training checks."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipelines import plan
from value_aware_study.training.plan import assumptions, with_hours

ROOT = Path(__file__).parents[1]


def planned(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose("plan", list(overrides)).plan


@pytest.mark.filterwarnings("ignore")
def test_the_gpu_scale_is_half_an_hour_of_training() -> None:
    """Its file assumes a quarter of an A100's bf16 peak."""
    cfg = planned("scale=gpu")
    rows = plan.rows(cfg, ["scale=gpu"])
    operations = plan.total_operations(rows)
    assert cfg.operations_per_second == pytest.approx(312e12 / 4)
    assert 0.4 < operations / cfg.operations_per_second / 3600 < 0.55
    assert rows[0]["operations"] == pytest.approx(3 * 286.9e6 * 800 * 256 * 512, rel=1e-3)
    with_time = with_hours(rows[0], cfg.operations_per_second)
    assert with_time["hours"] > 0 and list(with_time)[-1] == "optimizer"


@pytest.mark.filterwarnings("ignore")
def test_a_scale_for_the_cpu_has_no_hours() -> None:
    row = with_hours(plan.rows(planned("scale=laptop"), ["scale=laptop"])[0], None)
    assert "hours" not in row and list(row)[-1] == "optimizer"
    assert "Hours" not in assumptions(row["operations"], None)
