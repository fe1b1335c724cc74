"""Measures the loss of each layer or head alone by the keys that it keeps."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel

from value_aware_attention.arguments import check_at_least, check_choice, check_integers
from value_aware_attention.caches.budgets import CacheProfile
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.decoding.after_prefix import AfterPrefix, Given
from value_aware_attention.decoding.compressed import built
from value_aware_attention.hugging_face.adapter import recording, replace_attention

SIZES = 15
"""Numbers of keys at which a profile is measured"""


OPTIONS = ("observed", "rows", "sinks", "recent", "seed")
"""Options of `AfterPrefix` that a profile is measured with; heads share keys by the profile."""


@torch.no_grad()
def profile(
    model: PreTrainedModel,
    batches: Sequence[Int[Tensor, "B N"]],
    method: Callable[[int], CacheMethod],
    *,
    prefix: int,
    sizes: Sequence[int] | None = None,
    by: str = "layer",
    **options: Any,
) -> CacheProfile:
    """Measures KL(exact || compressed) of the next token with each layer or head compressed alone.

    The order of keys is searched once for each layer and cut at every size. Raises ValueError for
    sizes below the protected keys or above the prefix, and as `AfterPrefix` and
    `hugging_face.replace_attention` do.

    Args:
        model: A causal transformers model.
        batches: Token ids of texts, all of one length; those from `prefix` on are served.
        method: Builds the cache method that keeps r keys, with its refit where it has one.
        prefix: Tokens whose keys are compressed.
        sizes: Numbers of keys at which the loss is measured. None: 15, from the protected keys to
            the prefix.
        by: "layer": the heads of a layer are compressed together. "head": each one alone.
        **options: Those of `AfterPrefix` in `OPTIONS`.
    """
    by = check_choice(("layer", "head"), by=by)
    if others := sorted(options.keys() - OPTIONS):
        raise ValueError(f"{others[0]} is no option of a profile; these are: {', '.join(OPTIONS)}")
    like = AfterPrefix(built(method, check_at_least(1, prefix=prefix)), prefix=prefix, **options)
    least = max(1, like.sinks + like.recent)
    spaced = np.geomspace(min(least, prefix), prefix, SIZES).round().astype(int).tolist()
    asked = sorted({*(spaced if sizes is None else check_integers(sizes=sizes)), prefix})
    if not batches or not least <= asked[0] <= asked[-1] <= prefix:
        raise ValueError(
            f"{len(batches)} batches and sizes {asked[0]} to {asked[-1]}; there must be a batch, "
            f"and sizes from the {least} protected keys to the prefix, {prefix}"
        )
    if len(lengths := sorted({tokens.shape[1] for tokens in batches})) > 1 or lengths[0] <= prefix:
        raise ValueError(f"batches have lengths {lengths}; they must have one, above {prefix}")
    by_batch = [_curves(model, tokens, like, method, asked, by) for tokens in batches]
    kl = np.average(by_batch, axis=0, weights=[len(tokens) for tokens in batches])
    heads = 1 if by == "layer" else kl.shape[1]
    return CacheProfile(
        sizes=tuple(asked),
        kl=tuple(tuple(tuple(map(float, head)) for head in layer[:heads]) for layer in kl),
        key_value_heads=kl.shape[1],
    )


def _curves(
    model: PreTrainedModel, tokens: Int[Tensor, "B N"], like: AfterPrefix,
    method: Callable[[int], CacheMethod], sizes: Sequence[int], by: str,
) -> list[list[list[float]]]:  # fmt: skip
    """Measures the KL of each layer, head (alike for all heads of a layer) and size."""
    repeated = like.prefix if like.observed == "repeat" else None
    with recording(model, shares_keys=True, repeated=repeated) as calls:
        exact = model(input_ids=tokens, use_cache=False)[0]
    served = exact[:, like.prefix :].float().log_softmax(-1)
    by_layer = []
    for layer, call in enumerate(calls):
        observed = like.observe(**call.arguments(), layer=call.layer)
        ranking = like.method.rank(observed)
        heads = ranking.by_head.shape[1]
        alone = [range(heads)] if by == "layer" else [[head] for head in range(heads)]
        curves = []
        for chosen in alone:
            counts = torch.full((len(tokens), heads), sizes[-1], device=tokens.device)
            curve = []
            for r in sizes[:-1]:
                counts[:, list(chosen)] = r
                choice = method(r).cut(observed, ranking, counts.view(observed.batch))
                after = AfterPrefix(Given(choice), prefix=like.prefix, sinks=0, recent=0)
                curve.append(_divergence(model, tokens, served, layer, after))
            curves.append([*curve, 0.0])
        by_layer.append(curves * (heads // len(curves)))
    return by_layer


def _divergence(
    model: PreTrainedModel,
    tokens: Int[Tensor, "B N"],
    served: Float[Tensor, "B n K"],
    layer: int,
    after: AfterPrefix,
) -> float:
    """Computes the mean KL from the exact model's log-probabilities with a method in one layer."""
    with replace_attention(model, after, layers=[layer]):
        logits = model(input_ids=tokens, use_cache=False)[0][:, after.prefix :]
    logs = logits.float().log_softmax(-1)
    kl = kl_div(logs, served, log_target=True, reduction="none")
    return float(kl.sum(-1).mean())
