"""FlexAttention and plain torch compute the same, and nothing falls back unseen."""

from collections.abc import Callable, Iterator

import pytest
import torch
from methods import KERNELS
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from value_aware_attention import flex
from value_aware_attention.approximations import (
    Fixed,
    Longformer,
    SlidingWindow,
    Strided,
    fixed_pattern,
)
from value_aware_attention.approximations.fixed_pattern import FixedPattern
from value_aware_attention.kernels import Exponential, Kernel

KEYS = 150
# torch's own, on first use of its compiler
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")


@pytest.fixture(scope="module", autouse=True)
def _few_compilations() -> Iterator[None]:
    """Seconds each: one for every kernel and pattern here, of which there are six."""
    before = counters["stats"]["unique_graphs"]
    yield
    assert counters["stats"]["unique_graphs"] - before <= 8


def draw(queries: int = KEYS, keys: int = KEYS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 16, generator=generator) for n in (queries, keys, keys)]


def agree(build: Callable[[str], FixedPattern], kernel: Kernel, **options: object) -> None:
    ours, theirs = (build(e)(*draw(), kernel=kernel, **options) for e in ("torch", "flex"))
    torch.testing.assert_close(theirs, ours, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_strided_and_padding(kernel: Kernel) -> None:
    """The same compiled function without and with hidden keys, and with none left to see."""
    for seen in ((KEYS, KEYS), (100, 0)):
        visible = torch.arange(KEYS) < torch.tensor(seen).view(2, 1, 1, 1)
        agree(lambda engine: Strided(7, engine=engine), kernel, attn_mask=visible)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_causal_window(kernel: Kernel) -> None:
    agree(lambda engine: SlidingWindow(9, engine=engine), kernel, is_causal=True)


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
    monkeypatch.setattr(flex, "_has_compiler", lambda *names: False)
    with torch.no_grad(), pytest.raises(ValueError, match=r"C\+\+ compiler"):
        method(*tensors)


def test_no_queries_need_no_compiler() -> None:
    query, key, value = draw(0)
    assert SlidingWindow(9, engine="flex")(query, key, value).shape == (2, 2, 0, 16)
