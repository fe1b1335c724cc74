"""Every option of every config group builds what it names; a bad card is one line."""

import shutil
from functools import cache, partial
from inspect import signature
from pathlib import Path
from string import Template
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from pipelines.app import composed, hydra_app, one_line, plain
from pipelines.app.method_cards import register_methods
from pipelines.app.training import trained_attention
from pipelines.app.values import TRAINER, leaves, read_params, value_of, values_of_scale
from tests.apps import ROOT, refusal
from tests.refusals import assert_refused
from value_aware_attention.approximations import Approximation
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.measurement import Setting
from value_aware_attention.models import TrainedAttention
from value_aware_attention.models.masked_lm import masked_kernel
from value_aware_attention.models.mixing import Mixing
from value_aware_study.cards import APPROXIMATIONS, Card, cards
from value_aware_study.data.tokenization import ByteLevelBPE, PretrainedTokenizer, WordLevel
from value_aware_study.evaluation.grid import grid, setting
from value_aware_study.report.published import TABLE_1

CONF = ROOT / "conf"
SHARED = ("base", "paths")
APPS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem not in SHARED)
ASKED = {"probe": ["probe.model=x", "probe.text=x"], "corpus=local": ["corpus.path=docs"]}
"""Values that a user must give to an app or a group's option"""


TOKENIZERS = (ByteLevelBPE, PretrainedTokenizer, WordLevel)


def options(group: str) -> list[str]:
    """Lists a group's options, of files and of cards."""
    register_methods("evaluate")
    store = ConfigStore.instance()
    stored = store.list(group) if group in store.repo else []
    return sorted({path.stem for path in [*(CONF / group).glob("*.yaml"), *map(Path, stored)]})


@cache
def shipped(app: str) -> DictConfig:
    """Composes an app's config as it is shipped."""
    return composed(app, [])


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("app", "scale"),
    [  # all scales but laptop are slow, as other tests run smoke
        pytest.param(app, scale, marks=[] if scale == "laptop" else [pytest.mark.slow])
        for app in APPS
        for scale in options("scale")
    ],
)
def test_every_app_composes_at_every_scale_and_its_help_shows_a_command(
    app: str, scale: str
) -> None:
    given = [f"scale={scale}", f"hydra.job.name={app}", *ASKED.get(app, [])]
    cfg = composed(app, given, return_hydra_config=True)
    assert cfg.scale == scale
    first, _, rest = cfg.hydra.help.header.partition("\n")
    assert "Hydra" not in first and f"python -m pipelines.{app}" in rest
    assert rest.count("\n") < 10
    shown = Template(cfg.hydra.help.template).substitute(APP_CONFIG_GROUPS="groups")
    section = (CONF / f"{app}.yaml").read_text().partition(f"\n{app}:\n")[2]
    assert section and section.strip() in shown and "--cfg job prints" in shown
    assert OmegaConf.to_container(cfg[app], resolve=False)
    for key in cfg[app]:
        if key != "choice":  # known only when Hydra runs the app
            value = cfg[app][key]
            if OmegaConf.is_config(value):
                OmegaConf.resolve(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "chosen"),
    [
        (app, f"{group}={name}")
        for app, group in [
            *(("corpus", "corpus"), ("tokens", "tokenizer@tokens.causal_tokenizer")),
            *(("evaluate", "model"), ("train_masked", "length")),
            *(("train_causal", group) for group in ("attention", "logger", "replicate", "trainer")),
        ]
        for name in options(group.partition("@")[0])
    ],
)
def test_no_choice_has_a_value_that_is_refused(app: str, chosen: str) -> None:
    composed(app, [chosen, *ASKED.get(chosen, [])])


@pytest.mark.parametrize("name", options("kernel"))
def test_every_kernel_builds_and_names_itself(name: str) -> None:
    kernel = composed("train_causal", [f"kernel={name}"]).kernel
    assert isinstance(instantiate(kernel.function), Kernel) and kernel.name.endswith(name)


@pytest.mark.parametrize("name", options("tokenizer"))
def test_every_tokenizer_builds(name: str) -> None:
    tokens = composed("tokens", [f"tokenizer@tokens.causal_tokenizer={name}"]).tokens
    assert isinstance(instantiate(tokens.causal_tokenizer), TOKENIZERS)


@pytest.mark.parametrize("name", options("corpus"))
def test_every_corpus_names_its_sources(name: str) -> None:
    cfg = composed("corpus", [f"corpus={name}", *ASKED.get(f"corpus={name}", [])])
    assert cfg.corpus.description
    for source in cfg.corpus.sources.values():
        assert instantiate(source.documents) is not None
        assert {"train_instances", "evaluation_instances"} <= set(source)


@pytest.mark.parametrize("name", options("approximation"))
def test_every_approximation_builds_and_is_what_the_apps_compose_by_its_name(name: str) -> None:
    card = cards()[name]
    model = "causal" if card.causal else "masked"
    kernel = card.kernels[0] if card.kernels else "exponential"
    cfg = composed("evaluate", [f"approximation={name}", f"model={model}", f"kernel={kernel}"])
    method = setting(name, plain(cfg.approximation)).build(0)
    assert isinstance(method, Approximation) and isinstance(method, nn.Module)
    evaluated, surveyed = cfg.evaluate, shipped("survey").survey
    assert (name in evaluated.methods) is (name in evaluated.axes) is bool(card.axes)
    assert (name in surveyed.methods) is (name in surveyed.vary) is (card.survey is not None)
    if card.axes:
        assert plain(evaluated.methods[name]) == card.build()
    if card.survey:
        changed = {key: value for key, value in card.survey.items() if key != "vary"}
        assert plain(surveyed.methods[name]) == card.build(**changed)


def shipped_grid(length: int, *overrides: str) -> list[Setting]:
    cfg = composed("evaluate", overrides).evaluate
    return grid(plain(cfg.methods), plain(cfg.axes), length)


def test_the_grid_has_the_methods_of_the_papers_figure_first() -> None:
    cells = shipped_grid(512, "model=masked")
    assert list(dict.fromkeys(cell.approximation for cell in cells)) == [
        *("optimal_v_oblivious", "sliding_window", "optimal_v_aware", "optimal_v_aware_mean"),
        *("oblivious_keys_optimal_weights", "value_aware_keys_attention_weights"),
        *("norm_weighted_keys", "leave_one_out_keys", "sampled_keys", "lsh", "orf"),
    ]
    random = [cell for cell in cells if cell.approximation in ("sampled_keys", "lsh", "orf")]
    assert {cell.parameters["seed"] for cell in random} == {0, 1, 2}
    causal = {cell.approximation for cell in shipped_grid(256)}
    assert len(causal) == 9 and not causal & {"lsh", "orf"}


@pytest.mark.parametrize("name", options("attention"))
def test_every_attention_builds_and_names_the_model(name: str) -> None:
    trained = composed("train_masked", [f"attention={name}", "scale=smoke"]).train_masked
    attention, suffix = trained_attention(trained), "" if name == "exact" else f"_{name}"
    assert trained.name == f"masked_long{suffix}"
    assert (attention is None) is (name == "exact")
    if attention is not None:
        assert isinstance(attention(0), Mixing if attention.is_mixing else Approximation)


@pytest.mark.parametrize("model", options("model"))
def test_another_checkpoint_or_text_is_another_everywhere(model: str) -> None:
    """A path that stood in two places would be overridden in one of them."""
    others = ("model.checkpoint=/other/model", "model.tokens=/other/text")
    for app in ("evaluate", "survey"):
        cfg = composed(app, [f"model={model}", *others])[app]
        section = OmegaConf.to_yaml(cfg.task, resolve=True)
        assert "/other/model" in section and "/other/text" in section
        assert "outputs/" not in section


@pytest.mark.parametrize("name", options("approximation"))
def test_an_approximation_is_an_attention_to_train_with_where_it_has_gradients(name: str) -> None:
    card = cards()[name]
    attention = TrainedAttention(card.target, card.arguments)
    try:
        kernel = masked_kernel(attention) or Exponential()
        attention.check_trainable(kernel=kernel, length=128, head_dim=8, is_causal=False)
    except ValueError as error:
        assert "no gradients" in str(error)
        assert name not in options("attention")
    else:
        assert name in options("attention")


@pytest.mark.parametrize("name", options("trainer"))
def test_every_trainer_builds(name: str) -> None:
    from pytorch_lightning import Trainer

    from value_aware_study.training.fit import fit

    trainer = composed("train_causal", [f"trainer={name}"]).train_causal.trainer
    parameters = {*signature(fit).parameters, *signature(Trainer).parameters}
    assert set(trainer) <= parameters | {"nodes", "accumulate"}
    assert set(TRAINER) <= set(signature(Trainer).parameters)  # which may be added


def test_no_scale_sets_what_params_lacks_and_laptop_is_params_alone() -> None:
    params = read_params()
    for name in options("scale"):
        assert values_of_scale(name).keys() <= dict(leaves(params)).keys()
    cfg = composed("plan", ["scale=laptop"])
    assert {**params, "scale": "laptop"} == {key: value_of(cfg, key) for key in params} | {
        key: {name: value_of(cfg, f"{key}.{name}") for name in params[key]}
        for key in ("corpus", "tokens", "causal", "masked")
    }


def test_the_gpu_scale_has_the_papers_width_and_lengths_and_every_cell_of_its_tables() -> None:
    cfg, paper = composed("plan", ["scale=gpu"]), composed("plan", ["scale=paper"])
    for name in ("layers", "width", "heads", "feedforward", "length", "context"):
        assert cfg.causal[name] == paper.causal[name]
    assert (cfg.masked.block, cfg.masked.long.length) == (512, 4096)
    assert cfg.masked.short.length == cfg.masked.block and cfg.masked.warm_start is None
    assert cfg.trainer == paper.trainer and cfg.tokens.vocabulary_size <= 2**16
    evaluate = composed("evaluate", ["scale=gpu", "model=masked", "length=long"])
    assert evaluate.evaluate.task.sequences.length == 4096
    for cell in TABLE_1:
        axes = evaluate.evaluate.axes.get(cell.approximation, {})
        for name, value in cell.parameters.items():
            assert value in axes[name], cell
    assert cfg.grid.value_aware_keys == composed("plan", []).grid.value_aware_keys


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copies the cards, to be spoilt."""
    return Path(shutil.copytree(APPROXIMATIONS, tmp_path / "conf/approximation"))


@pytest.mark.parametrize(
    ("card", "before", "after", "said"),
    [
        ("nystrom", "  label: Nyström\n", "", "nystrom.yaml: card.label is missing"),
        ("nystrom", "card:", "cart:", "nystrom.yaml: card.label is missing"),
        ("nystrom", "_target_: value", "target: value", "nystrom.yaml: _target_ is missing"),
        (
            "nystrom",
            "label: Nyström",
            "label: LSH",
            "nystrom.yaml: card.label is 'LSH', as in conf",
        ),
        ("nystrom", "  keeps:", "  keep:", "nystrom.yaml: card.keep is unknown; a card has label,"),
        ("nystrom", "  keeps:", "  keeps: [", "nystrom.yaml: while parsing"),
    ],
)
def test_a_bad_card_ends_an_app_with_one_line_that_names_file_and_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, card: str, before: str, after: str, said: str
) -> None:
    file = folder / f"{card}.yaml"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after, 1))
    monkeypatch.setattr(hydra_app, "register_methods", partial(register_methods, folder=folder))
    line = refusal("plan", folder.parent)
    assert line.startswith("error: conf/approximation/") and said in line


@pytest.mark.parametrize("card", cards().values(), ids=lambda card: card.name)
def test_every_argument_that_a_card_names_is_one_of_its_class(card: Card) -> None:
    survey = dict(card.survey or {})
    vary = survey.pop("vary", None)
    named = [card.arguments, card.axes, card.curves, survey, card.train or {}]
    known = set(signature(get_class(card.target)).parameters)
    assert {vary} - {None} <= known and set().union(*named) <= known


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round": 4}, "unexpected keyword argument 'round'"),
        ({"_target_": "value_aware_attention.approximations.Nowhere"}, "Nowhere"),
    ],
)
def test_a_card_that_names_something_else_ends_in_one_line_when_its_method_is_built(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(HydraException) as stop:
        setting("lsh", cards()["lsh"].build(**changes)).build(0)
    line = one_line(stop.value)
    assert said in line and "\n" not in line


def test_no_cards_are_said_to_be_missing(tmp_path: Path) -> None:
    assert_refused("holds no method cards", cards, tmp_path, error=FileNotFoundError)


def test_cards_come_in_the_order_of_their_places() -> None:
    places = [card.place for card in cards().values()]
    assert places == sorted(set(places)) and next(iter(cards())) == "exact"
