"""dvc plots show draws loss against r on a logarithmic axis, and the curves of training."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import pytest
import vl_convert

from pipelines.app.values import read_params
from tests.apps import ROOT

SPEC = re.compile(r"var spec = (.+);$", re.MULTILINE)
MODELS = ("causal_exponential", "causal_polynomial", "causal_elu", "masked_short", "masked_long")
CURVE = {"curve": [{"step": step, "loss": 5 - step / 100} for step in (50, 100, 150)], "loss": 3.5}


@pytest.fixture(scope="module")
def titles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Draws the plots of a run's files; returns the SVG of each by its title."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / ".dvc" / "plots", folder / ".dvc" / "plots")
    with contextlib.chdir(folder):
        outputs = folder / "outputs" / read_params()["scale"]
        for name in ("plots", "metrics/train"):
            (outputs / name).mkdir(parents=True)
        for model in (*MODELS, "causal_elu_second"):
            (outputs / f"plots/{model}.csv").write_text("r,OVO,OVA\n1,9.5,8\n4,7,6\n65,5,5\n")
            (outputs / f"metrics/train/{model}.json").write_text(json.dumps(CURVE))
        dvc = [sys.executable, "-m", "dvc"]
        subprocess.run([*dvc, "config", "--local", "core.no_scm", "true"], check=True)
        subprocess.run([*dvc, "plots", "show"], check=True)
    page = (folder / "dvc_plots" / "index.html").read_text()
    drawn = [vl_convert.vegalite_to_svg(json.loads(spec)) for spec in SPEC.findall(page)]
    return {re.findall(r"<text[^>]*>([^<]*: [^<]*)<", svg)[-1]: svg for svg in drawn}


def test_every_model_has_its_loss_against_r_and_its_learning_curve(titles: dict[str, str]) -> None:
    against_r = {title for title in titles if not title.endswith("loss on validation text")}
    assert against_r == {
        *(f"{model}: perplexity" for model in (*MODELS[:3], "causal_elu_second")),
        *(f"{model}: error in %" for model in MODELS[3:]),
    }
    assert {f"{title.partition(':')[0]}: loss on validation text" for title in against_r} == {
        *titles.keys() - against_r
    }
    assert ">optimizer step<" in titles["masked_long: loss on validation text"]
    for word in (">OVO<", ">OVA<", ">r, keys kept<"):
        assert word in titles["masked_long: error in %"]


def test_r_is_on_a_logarithmic_axis(titles: dict[str, str]) -> None:
    """The ticks at 4 and 16 keys are as far apart as those at 1 and 4."""
    tick = r'<text[^>]*translate\(([\d.]+),[\d.]+\)"[^>]*>{}<'
    svg = titles["causal_elu_second: perplexity"]
    at_1, at_4, at_16 = (
        float(re.search(tick.format(r), svg)[1])  # type: ignore[index]
        for r in (1, 4, 16)
    )
    assert at_16 - at_4 == pytest.approx(at_4 - at_1, abs=0.5)
