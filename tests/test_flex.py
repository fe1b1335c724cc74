"""FlexAttention agrees with plain torch, and every fallback is announced."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from methods import KERNELS
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from value_aware_attention import attention, flex
from value_aware_attention.approximations import (
    Fixed,
    Longformer,
    SlidingWindow,
    Strided,
    fixed_pattern,
)
from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.kernels import Elu, Exponential, Kernel, Polynomial
from value_aware_attention.models import CausalLanguageModel

KEYS = 150
# torch's own, on first use of its compiler
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


@pytest.fixture(scope="module", autouse=True)
def _few_compilations() -> Iterator[None]:
    """Limits compilations, which take seconds each, to ten."""
    before = counters["stats"]["unique_graphs"]
    yield
    assert counters["stats"]["unique_graphs"] - before <= 10


def draw(queries: int = KEYS, keys: int = KEYS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 16, generator=generator) for n in (queries, keys, keys)]


def agree(build: Callable[[str], FixedPattern], kernel: Kernel, **options: object) -> None:
    ours, theirs = (build(e)(*draw(), kernel=kernel, **options) for e in ("torch", "flex"))
    torch.testing.assert_close(theirs, ours, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_strided_and_padding() -> None:
    """One compiled function serves texts without padding, with padding, and of padding alone."""
    for seen in ((KEYS, KEYS), (100, 0)):
        visible = torch.arange(KEYS) < torch.tensor(seen).view(2, 1, 1, 1)
        agree(lambda engine: Strided(7, engine=engine), Exponential(), attn_mask=visible)


def test_causal_window() -> None:
    agree(lambda engine: SlidingWindow(9, engine=engine), Exponential(), is_causal=True)


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets exact attention prefer FlexAttention, as it does on CUDA."""
    monkeypatch.setattr(flex, "is_preferred", lambda query, key: True)


@pytest.mark.parametrize(
    ("kernel", "is_causal", "masked"),
    [
        (Polynomial(), True, True),
        (Elu(), False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (Polynomial(), False, False),
                (Polynomial(), True, False),
                (Polynomial(), False, True),
                (Elu(), True, True),
            ]
        ),
    ],
    ids=str,
)
def test_exact_attention_by_flex(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, is_causal: bool, masked: bool
) -> None:
    """150 keys fill no block; of the second sequence every key is hidden, which gives zeros."""
    visible = torch.arange(KEYS) < torch.tensor([100, 0]).view(2, 1, 1, 1)
    options: dict[str, Any] = {"kernel": kernel, "is_causal": is_causal}
    options |= {"attn_mask": visible if masked else None}
    expected = attention(*draw(), **options)
    compiled = counters["stats"]["unique_graphs"]
    monkeypatch.setattr(flex, "is_preferred", lambda query, key: True)
    output = attention(*draw(), **options)
    assert counters["stats"]["unique_graphs"] == compiled + 1
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)
    assert not masked or (output[1] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_scores_gradient_is_that_of_the_kernel(kernel: Kernel) -> None:
    """On CUDA FlexAttention differentiates the score by itself; here autograd does, also at 0."""
    query, key, _ = (x.requires_grad_() for x in draw(7, 9))
    with torch.no_grad():
        query[..., ::3, :] = 0.0
    upstream = 1e3 * torch.randn(2, 2, 7, 9, generator=torch.Generator().manual_seed(2))
    features = [kernel.features(x) if isinstance(kernel, Elu) else x for x in (query, key)]
    scale = kernel.scale_for(16) if isinstance(kernel, Exponential) else 1.0
    ours = flex.log_similarity(scale * features[0] @ features[1].mT, kernel)
    expected = kernel.log_similarity(query, key)
    torch.testing.assert_close(ours, expected)
    gradients, theirs = (torch.autograd.grad(x, (query, key), upstream) for x in (ours, expected))
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(gradients, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("preferred")
def test_what_flex_cannot_take_is_taken_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "flex_kernel_attention", None)
    query, key, value = draw()
    leaf = value.clone().requires_grad_()
    attention(query, key, leaf, kernel=Elu()).sum().backward()  # no gradients on a CPU
    assert leaf.grad is not None and (leaf.grad > 0).all()
    double = attention(query.double(), key.double(), value.double(), kernel=Elu())
    torch.testing.assert_close(double.float(), attention(query, key, leaf, kernel=Elu()))


def test_more_shapes_than_are_compiled_for_are_taken_by_torch_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, preferred: None
) -> None:
    def full(*arguments: object) -> Tensor:
        raise FailOnRecompileLimitHit("")

    monkeypatch.setattr(flex, "flex_kernel_attention", full)
    query, key, value = draw(5, 5)
    with pytest.warns(UserWarning, match="more than 64 shapes"):
        output = attention(query, key, value, kernel=Polynomial(), is_causal=True)
    scores = (query @ key.mT).square().tril()
    torch.testing.assert_close(output, scores / scores.sum(-1, keepdim=True) @ value)


@pytest.mark.usefixtures("preferred")
def test_under_autocast_a_model_gives_flex_its_low_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def record(query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        seen.append((query.dtype, key.dtype, value.dtype, *options))
        return value

    monkeypatch.setattr(flex, "flex_kernel_attention", record)
    size = {"vocabulary_size": 9, "layers": 1, "width": 16, "heads": 1, "feedforward": 16}
    model = CausalLanguageModel(**size, kernel=Polynomial(), dropout=0.0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 7, dtype=torch.long))
    assert seen == [(*[torch.bfloat16] * 3, Polynomial(), None, flex.causal_mask)]


class OnCuda(Tensor):
    """Claims to be on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        ((2, 2, 128, 64), (2, 2, 128, 64), True),
        ((2, 2, 127, 64), (2, 2, 500, 64), False),
        ((0, 2, 128, 64), (0, 2, 128, 64), False),
        ((2, 2, 128, 64), (2, 2, 0, 64), False),
    ],
)
def test_flex_is_preferred_from_a_block_of_queries_on(
    query: tuple[int, ...], key: tuple[int, ...], expected: bool
) -> None:
    tensors = torch.empty(query), torch.empty(key)
    on_cuda = (x.as_subclass(OnCuda) for x in tensors)
    assert flex.is_preferred(*on_cuda) is expected
    assert not flex.is_preferred(*tensors)


def test_what_compiling_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = flex.missing_compiler.__wrapped__
    monkeypatch.setattr(flex, "find_spec", lambda name: name == "triton")
    assert missing("cpu") is None and missing("cuda") is None
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert missing("cuda") == "it needs Triton and a C compiler on CUDA"
    monkeypatch.setattr("shutil.which", lambda name: None)
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    assert missing("cpu") == "it needs a C++ compiler on the CPU"


def test_one_shape_too_many_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "SHAPES", 1)
    monkeypatch.setattr(flex, "_compiled", flex._compiled.__wrapped__)
    pattern = SlidingWindow(9).pattern(KEYS, is_causal=True)
    compiled = flex._compiled(Exponential(), pattern)
    monkeypatch.setattr(flex, "_compiled", lambda kernel, pattern: compiled)
    method = SlidingWindow(9, engine="flex")
    method(*draw(), is_causal=True)
    with pytest.raises(FailOnRecompileLimitHit):
        method(*draw(100, 100), is_causal=True)


@pytest.mark.parametrize(
    "method",
    [SlidingWindow(200), SlidingWindow(30), Strided(64), Fixed(130, 3), Longformer(40, 2, (0, 9))],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(512, 512), (300, 700), (1, 129), (128, 128), (130, 1000)])
def test_block_masks_are_those_that_torch_makes(
    method: FixedPattern, sizes: tuple[int, int]
) -> None:
    queries, keys = sizes
    pattern, offset = method.pattern(keys), keys - queries
    ours = flex.block_mask(pattern, queries, keys, torch.device("cpu"))
    theirs = create_block_mask(
        lambda b, h, i, j: pattern(i + offset, j), None, None, queries, keys, device="cpu"
    )
    assert ours.seq_lengths == theirs.seq_lengths
    for kind in ("kv", "full_kv"):
        counts, expected = (getattr(m, f"{kind}_num_blocks")[0, 0] for m in (ours, theirs))
        assert torch.equal(counts, expected)
        columns = [getattr(m, f"{kind}_indices")[0, 0].tolist() for m in (ours, theirs)]
        for count, *rows in zip(counts.tolist(), *columns, strict=True):
            assert rows[0][:count] == rows[1][:count]


def test_a_block_mask_first_made_for_an_evaluation_serves_training() -> None:
    """Autograd saves it for the backward pass, which it refuses to do with inference tensors."""
    flex.block_mask.cache_clear()
    with torch.inference_mode():
        mask = flex.block_mask(flex.causal_mask, KEYS, KEYS, torch.device("cpu"))
    assert mask is flex.block_mask(flex.causal_mask, KEYS, KEYS, torch.device("cpu"))
    assert not any(x.is_inference() for x in mask.as_tuple() if isinstance(x, Tensor))


def test_a_compiled_model_keeps_its_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are cached by identity: a new one in every call would be compiled every time."""
    seen = []

    def record(query: Tensor, key: Tensor, value: Tensor, *options: object) -> Tensor:
        seen.append(options[-1])
        return value

    monkeypatch.setattr(fixed_pattern, "flex_kernel_attention", record)
    monkeypatch.setitem(counters["stats"], "unique_graphs", 0)  # put back: these cost no seconds
    compiled = torch.compile(Strided(7, engine="flex"), backend="eager")
    for _ in range(2):
        compiled(*draw())
    assert seen[0] is seen[1]


def test_without_a_choice_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_pattern, "flex_kernel_attention", None)
    with torch.no_grad():
        assert SlidingWindow(9)(*draw()).isfinite().all()


def test_flex_refuses_what_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    method, tensors = SlidingWindow(9, engine="flex"), draw()
    with pytest.raises(ValueError, match="fp64; use engine='torch'"):
        method(*(x.double() for x in tensors))
    with pytest.raises(ValueError, match="no gradients on the CPU"):
        method(tensors[0], tensors[1], tensors[2].requires_grad_())

    class Other:
        def log_similarity(self, query: Tensor, key: Tensor) -> Tensor:
            return Exponential().log_similarity(query, key)

    with pytest.raises(ValueError, match="Exponential, Polynomial and Elu"):
        method(*tensors, kernel=Other())
    monkeypatch.setattr(flex, "missing_compiler", lambda device: "it needs a compiler")
    with torch.no_grad(), pytest.raises(ValueError, match="it needs a compiler; use engine="):
        method(*tensors)


def test_no_queries_need_no_compiler() -> None:
    query, key, value = draw(0)
    assert SlidingWindow(9, engine="flex")(query, key, value).shape == (2, 2, 0, 16)
