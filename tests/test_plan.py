"""What pipelines.plan estimates; the operations of a step are those of tests/training."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pipelines import plan

ROOT = Path(__file__).parents[1]


def planned(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return compose("plan", list(overrides)).plan


@pytest.mark.filterwarnings("ignore")
def test_the_gpu_scale_is_half_an_hour_of_training() -> None:
    """At a quarter of an A100's bf16 peak, which is what its file says."""
    cfg = planned("scale=gpu")
    rows = plan.rows(cfg, ["scale=gpu"])
    operations = plan.operations(rows)
    assert cfg.operations_per_second == pytest.approx(312e12 / 4)
    assert 0.4 < plan.hours_of(cfg, operations) < 0.55
    assert rows[0]["operations"] == pytest.approx(3 * 286.9e6 * 1600 * 128 * 512, rel=1e-3)
    assert all("hours" in plan.with_hours(cfg, row) for row in rows)


@pytest.mark.filterwarnings("ignore")
def test_a_scale_for_the_cpu_has_no_hours() -> None:
    cfg = planned("scale=laptop")
    row = plan.with_hours(cfg, plan.rows(cfg, ["scale=laptop"])[0])
    assert "hours" not in row and list(row)[-1] == "optimizer"
    assert "Hours" not in plan.assumptions(cfg, row["operations"])
