"""Every option of every config group builds what it names."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from value_aware_attention.approximations import Approximation
from value_aware_attention.kernels import Kernel

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
APPS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem not in ("base", "paths"))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def composed(app: str, *overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose(app, list(overrides))


@pytest.mark.parametrize("app", APPS)
@pytest.mark.parametrize("scale", options("scale"))
def test_every_app_composes_at_every_scale(app: str, scale: str) -> None:
    cfg = composed(app, f"scale={scale}")
    assert cfg.scale == scale
    section = OmegaConf.to_container(cfg[app], resolve=False)
    assert section
    for key in cfg[app]:
        if key != "choice":  # known only when Hydra runs the app
            value = cfg[app][key]
            if OmegaConf.is_config(value):
                OmegaConf.resolve(value)


@pytest.mark.parametrize("name", options("kernel"))
def test_every_kernel_builds(name: str) -> None:
    kernel = composed("train_causal", f"kernel={name}").kernel
    assert kernel.name == name
    assert isinstance(instantiate(kernel.function), Kernel)


@pytest.mark.parametrize("name", options("approximation"))
def test_every_approximation_builds_and_is_in_the_grid(name: str) -> None:
    cfg = composed("evaluate", f"approximation={name}")
    method = instantiate(cfg.approximation)
    assert isinstance(method, Approximation) and isinstance(method, nn.Module)
    assert cfg.approximation == cfg.evaluate.methods[name]


@pytest.mark.parametrize("name", options("corpus"))
def test_every_corpus_names_its_sources(name: str) -> None:
    cfg = composed("corpus", f"corpus={name}", *(["corpus.path=x"] if name == "local" else []))
    assert cfg.corpus.description
    for source in cfg.corpus.sources.values():
        assert instantiate(source.documents) is not None
        assert {"train_instances", "evaluation_instances"} <= set(source)


@pytest.mark.parametrize("name", options("tokenizer"))
def test_every_tokenizer_builds(name: str) -> None:
    cfg = composed("tokens", f"tokenizer@tokens.causal_tokenizer={name}")
    assert callable(instantiate(cfg.tokens.causal_tokenizer).build)


@pytest.mark.parametrize("length", options("length"))
def test_lengths_and_models_name_their_checkpoints(length: str) -> None:
    cfg = composed("evaluate", "model=masked", f"length={length}")
    assert cfg.evaluate.checkpoint.endswith(f"masked_{length}")


@pytest.mark.parametrize("name", options("trainer"))
def test_every_trainer_builds(name: str) -> None:
    import inspect

    from value_aware_attention.training.fit import fit

    trainer = composed("train_causal", f"trainer={name}").train_causal.trainer
    assert set(trainer) <= set(inspect.signature(fit).parameters)


@pytest.mark.parametrize("name", options("logger"))
def test_every_logger_names_a_function(name: str) -> None:
    from hydra.utils import get_method

    assert callable(get_method(composed("train_causal", f"logger={name}").logger._target_))


def test_laptop_replaces_nothing() -> None:
    assert OmegaConf.load(CONF / "scale/laptop.yaml") == {"scale": "laptop"}


def test_the_paper_scale_is_the_papers() -> None:
    cfg = composed("plan", "scale=paper")
    assert (cfg.causal.steps, cfg.causal.batch_size, cfg.causal.context) == (31520, 128, 400)
    long, short = cfg.masked.long, cfg.masked.short
    assert long.length == 8 * short.length == 4096
    assert short.batch_size * short.length == long.batch_size * long.length
    assert long.steps == short.steps == 2_476_000
    quotas = {name: s.train_instances for name, s in cfg.corpus.sources.items()}
    assert quotas["wikipedia"] + quotas["arxiv"] + quotas["pg19"] == 7_000_000
