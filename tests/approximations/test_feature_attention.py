"""Attention through feature maps equals slow references, is causal, and takes O(L) memory."""

import importlib
import math
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import LargestTensor, draw
from torch import Tensor

from tests.reference import approximations as reference
from value_aware_attention import attention, kernels
from value_aware_attention.approximations import (
    LinearAttention,
    OrthogonalRandomFeatures,
    RandomFourierFeatures,
    chunked,
    feature_attention,
)
from value_aware_attention.approximations.feature_attention import CHUNK_SIZE, FeatureAttention
from value_aware_attention.approximations.random_features import orthogonal_gaussian
from value_aware_attention.error import relative_output_error

LENGTH = 2 * CHUNK_SIZE + 21  # three chunks, the last one short
METHODS: dict[str, tuple[FeatureAttention, kernels.Kernel]] = {
    "linear": (LinearAttention(), kernels.Elu()),
    "orf": (OrthogonalRandomFeatures(20, 3), kernels.Exponential()),
    "orf_paper": (OrthogonalRandomFeatures(20, 3, "paper"), kernels.Exponential()),
    "fourier": (RandomFourierFeatures(24, 3), kernels.Exponential()),
}


of_every_method = pytest.mark.parametrize(("method", "kernel"), METHODS.values(), ids=METHODS)


def reference_weights(method: FeatureAttention, query: Tensor, key: Tensor) -> Tensor:
    """Computes the weights of one query on the keys it sees."""
    if isinstance(method, LinearAttention):
        visible = torch.ones(len(key), dtype=torch.bool)
        return reference.attention_weights(query, key, reference.elu, visible)
    if isinstance(method, OrthogonalRandomFeatures):
        projection = method.projection(len(query)).double()
        return reference.random_feature_weights(query, key, projection)
    assert isinstance(method, RandomFourierFeatures)
    frequencies = orthogonal_gaussian(method.features, len(query), method.seed).double()
    return reference.random_fourier_weights(query, key, frequencies)


@of_every_method
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hidden", [0, 3, CHUNK_SIZE + 5])
def test_against_the_reference(
    method: FeatureAttention, kernel: kernels.Kernel, causal: bool, hidden: int
) -> None:
    """Also where the first keys are hidden, so that the first causal rows see none."""
    query, key, value = draw(1, LENGTH, 6)
    mask = None if hidden == 0 else torch.arange(LENGTH) >= hidden
    output = method(query / 2, key / 2, value, kernel=kernel, is_causal=causal, attn_mask=mask)
    for row in (0, 3, CHUNK_SIZE - 1, CHUNK_SIZE, LENGTH - 1):
        visible = slice(hidden, row + 1 if causal else LENGTH)
        expected = torch.zeros(6, dtype=torch.float64)
        if key[visible].numel():
            weights = reference_weights(method, query[row] / 2, key[visible] / 2)
            expected = weights @ value[visible]
        torch.testing.assert_close(output[row], expected, atol=1e-6, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 40), rows=st.integers(1, 45), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_blocks_and_chunks_of_any_size_give_the_same(length: int, rows: int, scale: float) -> None:
    query, key, value = draw(length, 2, length, 4)
    for method, kernel in METHODS.values():
        inputs = (query * scale, key * scale, value)
        for causal in (False, True):
            whole = method(*inputs, kernel=kernel, is_causal=causal)
            with pytest.MonkeyPatch.context() as patch, chunked(100):
                patch.setattr(feature_attention, "CHUNK_SIZE", rows)
                patch.setattr(feature_attention, "ROWS_IN_CACHE", rows)
                parts = method(*inputs, kernel=kernel, is_causal=causal)
            torch.testing.assert_close(parts, whole, atol=1e-7, rtol=1e-6)


@of_every_method
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.0, 60.0])
def test_outputs_and_gradients_are_finite_and_those_of_all_pairs(
    method: FeatureAttention, kernel: kernels.Kernel, causal: bool, scale: float
) -> None:
    """A mask of every pair takes the other path: one log-similarity for each of them."""
    query, key, value = draw(5, LENGTH, 8)
    grids = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    grids = grids.tril() if causal else grids
    results = []
    for options in ({"is_causal": causal}, {"attn_mask": grids}):
        leaves = [(query * scale), (key * scale), value.clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        output = method(*leaves, kernel=kernel, **options)
        output.sin().sum().backward()
        results.append([output, *(leaf.grad for leaf in leaves)])
    for fast, slow in zip(*results, strict=True):
        assert fast.isfinite().all()
        torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": True}, {}])
def test_queries_and_keys_large_in_different_features(options: dict[str, bool]) -> None:
    """Similarities of e^-300 and e^-200 are zeros in fp32, and still the second key has it all."""
    query = torch.tensor([[-300.0, 50.0]] * 2)
    key, value = torch.tensor([[50.0, -300.0], [50.0, -200.0]]), torch.eye(2)
    expected = torch.tensor([[0.0, 1.0]] * 2)
    if options:
        expected[0] = torch.tensor([1.0, 0.0])
    if "attn_mask" in options:
        options = {"attn_mask": torch.ones(2, 2, dtype=torch.bool).tril()}
    query.requires_grad_()
    output = LinearAttention()(query, key, value, kernel=kernels.Elu(), **options)
    torch.testing.assert_close(output, expected)
    output.sin().sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_long_queries_keep_their_digits(causal: bool) -> None:
    """||q||^2 / 2 cancels in the normalisation; added to Rq it would take its digits first."""
    query, key, value = (x.float() for x in draw(5, 96, 16))
    inputs = 200 * query, key, value
    precise = (x.double() for x in inputs)
    method = OrthogonalRandomFeatures(64, 0)
    error = relative_output_error(
        method(*inputs, is_causal=causal).double(), method(*precise, is_causal=causal)
    )
    assert error.sqrt().max() < 5e-4


def mean_errors(build: Callable[[int, int], FeatureAttention]) -> list[float]:
    """Computes the relative errors of 16, 256 and 4096 features, each the mean of three seeds."""
    query, key, value = draw(7, 4, 96, 8)
    query, key = query / 2, key / 2  # at large norms any number of features is too few
    exact = attention(query, key, value)
    return [
        float(
            sum(
                relative_output_error(build(features, seed)(query, key, value), exact).mean()
                for seed in range(3)
            )
            / 3
        )
        for features in (16, 256, 4096)
    ]


def test_features_converge_but_the_papers_random_ones() -> None:
    fourier = mean_errors(RandomFourierFeatures)
    assert fourier[0] > 4 * fourier[1] > 16 * fourier[2] and fourier[2] < 0.02
    performer = mean_errors(OrthogonalRandomFeatures)
    assert performer[0] > 2 * performer[1] > 4 * performer[2]
    paper = mean_errors(partial(OrthogonalRandomFeatures, scaling="paper"))
    assert paper[2] > 0.8 * paper[0]


def test_the_papers_projection_has_orthonormal_columns_and_performers_orthogonal_rows() -> None:
    paper = OrthogonalRandomFeatures(64, 0, "paper").projection(16)
    torch.testing.assert_close(paper.T @ paper, torch.eye(16), atol=1e-5, rtol=0)
    assert paper.norm(dim=1).mean() == pytest.approx(math.sqrt(16 / 64), rel=0.1)
    performer = OrthogonalRandomFeatures(16, 0).projection(16)
    gram = performer @ performer.T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), atol=1e-4, rtol=0)


def test_a_fourier_normaliser_near_zero_keeps_the_output_bounded() -> None:
    """One key whose cosine passes zero: the exact ratio is 1 / 0, ours stays below F |v|."""
    frequency = orthogonal_gaussian(1, 1, 0).double()
    query = torch.linspace(-9, 9, 4001, dtype=torch.float64)[:, None] / frequency.abs()
    key, value = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    output = RandomFourierFeatures(1, 0)(query, key, value)
    torch.testing.assert_close(output, (query * frequency).cos().abs())  # cos / +-1
    both = [torch.cat([x, x + 1]) for x in (key, value)]
    output = RandomFourierFeatures(4, 0)(query, *both)
    assert output.abs().max() <= 2 * 4 * 2 and (output < 0).any()


@of_every_method
@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_linearly(
    method: FeatureAttention, kernel: kernels.Kernel, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At four times the length the largest tensor is at most four times as large."""

    def largest(length: int) -> int:
        inputs = draw(10, 1, length, 8, dtype=torch.float32)
        with LargestTensor() as tensor, torch.inference_mode():
            mask = torch.ones(1, 1, length, dtype=torch.bool)
            method(*inputs, kernel=kernel, is_causal=causal, attn_mask=mask)
        return tensor.size

    monkeypatch.setattr(feature_attention, "ROWS_IN_CACHE", 64)
    assert largest(2048) <= 4 * largest(512)


def test_orf_equals_performer_pytorch_with_its_projection() -> None:
    """FastAttention(dim_heads, nb_features), non-causal; it adds 1e-4 to each feature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports distutils and torch.cuda.amp
        performer = importlib.import_module("performer_pytorch.performer_pytorch")
        peer = performer.FastAttention(8, nb_features=20)
    method = OrthogonalRandomFeatures(20, 0)
    peer.projection_matrix = method.projection(8)
    query, key, value = (x / 4 for x in draw(11, 1, 2, 50, 8, dtype=torch.float32))
    torch.testing.assert_close(
        method(query, key, value), peer(query, key, value), atol=1e-4, rtol=0
    )
