"""A later token over kept keys is the plain definition in fp64, by each way to compute it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen
from transformers import DynamicCache

from tests.decoding.test_compressed_cache import Uneven
from tests.hugging_face.models import sharp
from value_aware_attention import native
from value_aware_attention.decoding import compressed, fused, later_token
from value_aware_attention.decoding.kept_layer import KeptLayer
from value_aware_attention.decoding.pages import ROOM, Slots
from value_aware_attention.hugging_face import compressed_cache
from value_aware_attention.kernels import Exponential, Polynomial

FORMS = ("compiled", "pages", "padded", "sequences")
KERNEL = Exponential(0.3)


def of_sequences(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor,
    most_queries: int, most_keys: int, *, seqused_k: Tensor, return_aux: object, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes `varlen_attn` of one head, with FlashAttention's zeros and inf of no keys."""
    assert query_bounds.dtype == key_bounds.dtype == seqused_k.dtype == torch.int32
    assert seqused_k.max() <= most_keys and query_bounds.diff().max() <= most_queries
    assert (seqused_k <= key_bounds.diff()).all() and key_bounds[-1] == len(key)
    outputs, totals = [], []
    for number, count in enumerate(seqused_k.tolist()):
        q = query[query_bounds[number] : query_bounds[number + 1], 0]
        keys = slice(int(key_bounds[number]), int(key_bounds[number]) + count)
        scores = scale * q @ key[keys, 0].mT
        outputs.append(scores.softmax(dim=-1) @ value[keys, 0])
        totals.append(scores.logsumexp(dim=-1) if count else scores.new_full((len(q),), torch.inf))
    return torch.cat(outputs)[:, None], torch.cat(totals)[None]


@contextmanager
def computed_by(form: str) -> Iterator[None]:
    """Lets one form alone compute attention, as on a machine that has it."""
    with pytest.MonkeyPatch.context() as changed:
        if form != "compiled":
            changed.setattr(later_token, "attend", lambda *_, **__: None)
        if form in ("padded", "sequences"):
            changed.setattr(fused, "is_fused", lambda x: True)
            changed.setattr(fused, "WASTE", 1.0 if form == "padded" else -1e-9)
            changed.setattr(fused, "has_varlen", lambda *_: True)
            changed.setattr(varlen, "varlen_attn", of_sequences)
        yield


def in_int8(x: Tensor) -> Tensor:
    """Rounds each vector to 255 equal steps between its largest magnitude and the negative."""
    rows = [127 * row / row.abs().max() for row in x.double().flatten(0, -2)]
    largest = x.double().abs().amax(dim=-1, keepdim=True)
    return torch.stack([row.round() for row in rows]).view_as(x) * largest / 127


@dataclass
class Texts:
    """Holds kept keys of (B, H) caches with R slots each, and a layer over them."""

    slots: Slots
    layer: KeptLayer
    later: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, counts: Tensor, dim: int, width: int, *, weighted: bool = False, later: int = 0,
        bits: int | None = None,
    ) -> "Texts":  # fmt: skip
        places = torch.arange(int(counts.max()))
        bias = torch.randn(*counts.shape, len(places)) * weighted
        bias = bias.masked_fill(places >= counts[..., None], -torch.inf)
        slots = Slots(torch.randn(*bias.shape, dim), torch.randn(*bias.shape, width), bias)
        of_later = tuple(torch.randn(*counts.shape, later, x) for x in (dim, width))
        layer = KeptLayer(slots, 2 * len(places), lambda: True, bits)
        if bits is not None:
            slots = Slots(*(in_int8(x) for x in (slots.key, slots.value)), bias)
        return cls(slots, layer, of_later)

    def read(self, tokens: int) -> None:
        """Appends further tokens."""
        key, value = (
            torch.randn(*x.shape[:2], tokens, x.shape[3])
            for x in (self.slots.key, self.slots.value)
        )
        self.layer.update(key, value)
        self.later = tuple(
            torch.cat([x, y], dim=2) for x, y in zip(self.later, (key, value), strict=True)
        )

    def expected(self, query: Tensor, visible: Tensor | None = None) -> Tensor:
        """Computes attention in fp64 by its definition."""
        key, value = (
            torch.cat([x, y], dim=2).double()
            for x, y in zip((self.slots.key, self.slots.value), self.later, strict=True)
        )
        groups, rows = query.shape[1] // key.shape[1], query.shape[2]
        key, value, bias = (
            x.repeat_interleave(groups, dim=1) for x in (key, value, self.slots.bias.double())
        )
        later = self.later[0].shape[2]
        pairs = torch.ones(rows, later, dtype=torch.bool).tril(later - rows)
        pairs = pairs if visible is None else pairs & visible
        hidden = torch.zeros(pairs.shape).masked_fill(~pairs, -torch.inf).double()
        hidden = hidden.expand(*query.shape[:3], -1)
        added = torch.cat([bias[:, :, None].expand(*query.shape[:3], -1), hidden], dim=-1)
        scores = KERNEL.log_similarity(query.double(), key) + added
        return scores.softmax(dim=-1) @ value


def assert_close(output: Tensor, expected: Tensor, share: float = 2e-6) -> None:
    assert output.shape == expected.shape
    assert (output - expected).abs().max() <= share * expected.abs().max()


COUNTS = {
    "equal": [[5, 5, 5]],
    "one key": [[1, 9], [4, 2]],
    "nearly equal": [[9, 10, 10], [10, 9, 10]],
    "very unequal": [[1, 400, 3]],
    "none": [[0, 7]],
    "one head": [[3], [70]],
}


@torch.no_grad()
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 99),
    counts=st.sampled_from([*COUNTS]),
    groups=st.sampled_from([1, 2, 3, 4, 9]),
    sizes=st.sampled_from([(8, 8), (64, 64), (12, 5), (3, 40), (16, 72)]),
    tokens=st.sampled_from([(1,), (3,), (2, 1, 1), (ROOM, 7, 1)]),
    weighted=st.booleans(),
    padding=st.booleans(),
    threads=st.sampled_from([1, 2]),
    bits=st.sampled_from([None, 8]),
)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_definition(
    form: str, seed: int, counts: str, groups: int, sizes: tuple[int, int],
    tokens: tuple[int, ...], weighted: bool, padding: bool, threads: int, bits: int | None,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    with (
        computed_by(form),
        patch.object(torch, "get_num_threads", return_value=threads),
        patch.object(later_token, "PER_THREAD", 1),
    ):
        texts = Texts.of(torch.tensor(COUNTS[counts]), *sizes, weighted=weighted, bits=bits)
        assert texts.layer.pages is None or form != "padded" or bits
        for rows in tokens:
            texts.read(rows)
            later = texts.later[0].shape[2]
            query = torch.randn(
                len(COUNTS[counts]), rows, groups * len(COUNTS[counts][0]), sizes[0]
            )
            query, visible = query.transpose(1, 2), None  # as models have it in memory
            if padding:
                visible = torch.rand(len(query), 1, 1, later) > 0.3
                visible[..., -rows:] = True
            assert_close(texts.layer.serve(query, KERNEL, visible), texts.expected(query, visible))


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", ["equal", "one key"])
def test_later_keys_are_appended_in_place_and_outgrow_their_room(form: str, counts: str) -> None:
    torch.manual_seed(0)
    with computed_by(form):
        texts, places = Texts.of(torch.tensor(COUNTS[counts]), 8, 8), set()
        for _ in range(3 * ROOM):
            texts.read(1)
            places.add(texts.layer.keys.data_ptr())
        caches = texts.layer.counts.numel()
        assert len(places) == 3
        query = torch.randn(len(COUNTS[counts]), 4 * len(COUNTS[counts][0]), 1, 8)
        assert_close(texts.layer.serve(query, KERNEL, None), texts.expected(query))
        with pytest.raises(ValueError, match="only the 192 after the compressed prefix"):
            texts.layer.crop(-3 * ROOM - 1)
    room = texts.layer.nbytes - 2 * 4 * 8 * (texts.layer.held + caches * 3 * ROOM)
    assert 0 < room < 2 * 4 * 8 * caches * ROOM + 999  # and what says where keys lie


MOVES: dict[str, tuple[Callable[[KeptLayer], None], list[int]]] = {
    "beams": (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    "repeated": (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "selected": (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
}


@torch.no_grad()
@pytest.mark.parametrize(("form", "bits"), [*product(FORMS, [None]), ("compiled", 8)])
@pytest.mark.parametrize("move", MOVES)
def test_texts_move_with_their_room_and_copies_have_their_own(
    form: str, bits: int | None, move: str
) -> None:
    torch.manual_seed(0)
    change, rows = MOVES[move]
    with computed_by(form):
        weighted, counts = form != "sequences", torch.tensor(COUNTS["one key"])
        texts = Texts.of(counts, 8, 8, weighted=weighted, bits=bits)
        texts.read(3)
        texts.layer.crop(-2)
        texts.later = tuple(x[:, :, :1] for x in texts.later)
        copied, query = deepcopy(texts), torch.randn(2, 4, 1, 8)
        texts.read(1)
        copied.read(2)  # into the same places of another room
        assert_close(texts.layer.serve(query, KERNEL, None), texts.expected(query))
        assert_close(copied.layer.serve(query, KERNEL, None), copied.expected(query))
        change(texts.layer)
        slots = texts.slots
        texts.slots = Slots(slots.key[rows], slots.value[rows], slots.bias[rows])
        texts.later = tuple(x[rows] for x in texts.later)
        texts.read(1)
        query = torch.randn(len(rows), 4, 1, 8)
        assert_close(texts.layer.serve(query, KERNEL, None), texts.expected(query))


def test_what_is_not_compiled_is_computed_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels and precisions, gradients, long chunks, and machines without a compiler."""
    texts, query = Texts.of(torch.tensor(COUNTS["one key"]), 8, 8), torch.randn(2, 4, 1, 8)
    held = (*(x[:, :, :0] for x in (texts.slots.key, texts.slots.value)),)
    options = {"pages": texts.layer.pages, "bias": None, "slots": 0}
    token = [torch.cat([x, torch.randn(2, 2, 1, 8)], dim=2) for x in held]

    def is_compiled(q: Tensor, key: Tensor, value: Tensor, kernel: object = KERNEL) -> bool:
        return later_token.attend(q, key, value, kernel, None, 0, **options) is not None  # type: ignore[arg-type]

    assert is_compiled(query, *token)
    assert not is_compiled(query, *token, Polynomial(2))
    assert not is_compiled(query.double(), *(x.double() for x in token))
    assert not is_compiled(query.half(), *(x.half() for x in token))
    assert not is_compiled(torch.randn(2, 4, later_token.LARGEST_CALL + 1, 8), *token)
    with torch.no_grad():
        assert is_compiled(query.requires_grad_(), *token)
    assert not is_compiled(query, *token)
    monkeypatch.setattr(native, "library", lambda *_: None)
    assert not is_compiled(query.detach(), *token)


def test_half_precision_that_would_overflow_is_summed_in_fp32() -> None:
    texts = Texts.of(torch.tensor(COUNTS["one key"]), 8, 8)
    slots = Slots(texts.slots.key.half() * 200, texts.slots.value.half(), texts.slots.bias)
    layer, query = KeptLayer(slots, 20, lambda: True), torch.full((2, 2, 1, 8), 300.0).half()
    with torch.no_grad():
        layer.update(*torch.randn(2, 2, 2, 1, 8).half())
        assert layer.serve(query, KERNEL, None).isfinite().all()


@pytest.mark.slow  # it compiles
def test_a_compiler_without_wide_vectors_builds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    texts, query = Texts.of(torch.tensor(COUNTS["very unequal"]), 12, 20), torch.randn(1, 9, 1, 12)
    monkeypatch.setenv("CXX", "c++ -mno-avx -mno-avx2 -mno-avx512f -mno-fma")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    native.compiler.cache_clear()
    try:
        with torch.no_grad():
            texts.read(1)
            assert (
                native.library(later_token.TOKEN_SOURCE, *later_token.TOKEN_CONSTANTS) is not None
            )
            assert_close(texts.layer.serve(query, KERNEL, None), texts.expected(query))
    finally:
        native.library.cache_clear()
        native.compiler.cache_clear()


@torch.no_grad()
def test_a_pass_is_checked_once_and_its_logits_are_those_of_pages() -> None:
    model, prompt, logits = sharp("llama"), torch.arange(5, 65).view(2, 30), {}
    with patch.object(compressed, "check_call", wraps=compressed.check_call) as checked:
        for form in ("compiled", "pages"):
            with computed_by(form), compressed_cache(model, Uneven, keep=1 / 3):
                cache = DynamicCache(config=model.config)
                model(prompt, past_key_values=cache)
                checked.reset_mock()
                logits[form] = [
                    model(prompt[:, :rows], past_key_values=cache).logits for rows in (1, 3, 1)
                ]
                assert checked.call_count == 3
    for compiled, paged in zip(*logits.values(), strict=True):
        assert_close(compiled, paged, 1e-5)  # several layers of sharp attention


@pytest.mark.parametrize(("first", "problem"), [("wrong", "off by 1"), ("raises", "no kernel")])
def test_a_fused_form_that_errs_is_left_with_one_warning(
    first: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_TRUSTED", {})
    expected = torch.ones(3)

    def compute() -> Tensor:
        if first == "raises":
            raise RuntimeError("no kernel\nat all")
        return 2 * expected

    with pytest.warns(UserWarning, match=f"{problem}.*later tokens are read by pages"):
        assert fused.trusted(expected.device, compute, lambda: expected) is None
    assert fused.trusted(expected.device, compute, lambda: expected) is None


def test_a_fused_form_that_agrees_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_TRUSTED", {})
    results = iter([torch.ones(3), None, torch.zeros(3)])
    outputs = [
        fused.trusted(torch.device("cpu"), lambda: next(results), lambda: torch.ones(3))
        for _ in range(3)
    ]
    assert outputs[1] is None and outputs[2] is not None and (outputs[2] == 0).all()
