"""Which methods a model may be trained with, and how each layer gets its own."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from tests.refusals import assert_refused
from tests.training.tiny import LearnedScale
from value_aware_attention.kernels import Elu, Exponential
from value_aware_attention.models import TrainedAttention

PACKAGE = "value_aware_attention.approximations"
SIZE = {"kernel": Exponential(), "length": 24, "head_dim": 8}
TRAINABLE = {
    "Exact": {},
    "SlidingWindow": {"r": 5},
    "LSH": {"r": 8, "rounds": 2, "seed": 0},
    "OrthogonalRandomFeatures": {"features": 16, "seed": 0},
}


def attention(name: str, arguments: dict) -> TrainedAttention:
    return TrainedAttention(f"{PACKAGE}.{name}", arguments)


@pytest.mark.parametrize("name", TRAINABLE)
def test_methods_with_gradients_can_be_trained(name: str) -> None:
    attention(name, TRAINABLE[name]).check_trainable(**SIZE, is_causal=False)


def test_methods_without_are_refused_by_name() -> None:
    assert_refused(
        r"^SampledKeys gives no gradients to queries or keys",
        attention("SampledKeys", {"r": 4, "seed": 0}).check_trainable,
        **SIZE,
        is_causal=False,
    )


def test_what_a_method_refuses_it_refuses_before_training() -> None:
    lsh = attention("LSH", TRAINABLE["LSH"])
    assert_refused(r"^LSH does not support is_causal", lsh.check_trainable, **SIZE, is_causal=True)
    features = attention("OrthogonalRandomFeatures", TRAINABLE["OrthogonalRandomFeatures"])
    features.check_trainable(**SIZE, is_causal=True)
    assert_refused(
        r"got the kernel Elu\(\); it approximates Exponential",
        features.check_trainable,
        **{**SIZE, "kernel": Elu()},
        is_causal=True,
    )


def test_every_layer_has_a_module_and_a_seed_of_its_own() -> None:
    lsh = attention("LSH", {"r": 8, "rounds": 2, "seed": 3})
    assert [lsh(layer).seed for layer in (0, 1, 5)] == [3000, 3001, 3005]
    learned = TrainedAttention("tests.training.tiny.LearnedScale", {"head_dim": 4, "seed": 0})
    first, second = learned(0), learned(1)
    assert isinstance(first, LearnedScale) and first is not learned(0)
    assert not torch.equal(first.scale, second.scale)


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        *(
            (target, {}, "is neither an approximation of attention nor a mixing$")
            for target in ("os.system", "torch.nn.Linear", "SlidingWindow", "no.such.At", "", "a.")
        ),
        (f"{PACKAGE}.SlidingWindow", {"width": 4}, r"^SlidingWindow\(width=4\): missing .* 'r'"),
        (
            f"{PACKAGE}.SlidingWindow",
            {"r": 4, "width": 4},
            r"^SlidingWindow\(r=4, width=4\): .*unexpected .*'width'",
        ),
    ],
)
def test_what_is_no_method_or_no_argument_of_one_is_refused(
    target: str, arguments: dict, message: str
) -> None:
    assert_refused(message, TrainedAttention(target, arguments), 0)


def described(value: object) -> PreTrainedConfig:
    """Builds a model's config that names this as its attention."""
    config = PreTrainedConfig()
    config.trained_attention = value
    return config


def test_it_is_described_in_the_models_config() -> None:
    assert TrainedAttention.of(PreTrainedConfig()) is TrainedAttention.of(described(None)) is None
    lsh = attention("LSH", {"r": 8, "rounds": 2, "seed": 3})
    assert TrainedAttention.of(described(asdict(lsh))) == lsh
    assert str(lsh) == "LSH(r=8, rounds=2, seed=3)"


def test_a_checkpoint_runs_no_code_but_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreign_module.py").write_text(
        "from pathlib import Path\n"
        "from value_aware_attention.approximations import Exact\n"
        f"Path({str(tmp_path / 'executed')!r}).touch()\n"
        "class Method(Exact): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign = described({"target": "foreign_module.Method", "arguments": {}})
    assert_refused(
        r"asks for foreign_module\.Method, and only methods of", TrainedAttention.of, foreign
    )
    assert "foreign_module" not in sys.modules and not (tmp_path / "executed").exists()


def test_a_method_of_a_module_that_the_program_imported_is_found() -> None:
    learned = TrainedAttention(
        f"{LearnedScale.__module__}.LearnedScale", {"head_dim": 4, "seed": 0}
    )
    assert TrainedAttention.of(described(asdict(learned))) == learned


@pytest.mark.parametrize("value", ["", [], {}, {"target": 1, "arguments": {}}])
def test_a_damaged_description_is_named(value: object) -> None:
    assert_refused(
        r"^trained_attention is .* in the model's config", TrainedAttention.of, described(value)
    )
