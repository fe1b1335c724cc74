"""Measures the loss of each layer or head alone by the keys that it keeps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from value_aware_attention.caches.observed import KeptKeys
from value_aware_attention.call import Call
from value_aware_attention.decoding.after_prefix import AfterPrefix, Given
from value_aware_attention.decoding.compressed import built
from value_aware_attention.hugging_face.adapter import replace_attention
from value_aware_attention.hugging_face.recording import recording

SIZES = 15
"""Numbers of keys at which a profile is measured"""


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
        **options: The other options of `AfterPrefix`: observed, rows, sinks, recent, seed.
    """
    by = check_choice(("layer", "head"), by=by)
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
    by_batch = [_Profiled.of(model, tokens, like).curves(method, asked, by) for tokens in batches]
    kl = np.average(by_batch, axis=0, weights=[len(tokens) for tokens in batches])
    heads = 1 if by == "layer" else kl.shape[1]
    return CacheProfile(
        sizes=tuple(asked),
        kl=tuple(tuple(tuple(map(float, head)) for head in layer[:heads]) for layer in kl),
        key_value_heads=kl.shape[1],
    )


@dataclass(frozen=True)
class _Profiled:
    """Holds a batch of texts as the exact model reads them."""

    model: PreTrainedModel
    tokens: Int[Tensor, "B N"]
    like: AfterPrefix
    calls: Sequence[Call]
    served: Float[Tensor, "B n K"]
    """Log-probabilities of the exact model after the prefix"""

    @classmethod
    def of(cls, model: PreTrainedModel, tokens: Tensor, like: AfterPrefix) -> "_Profiled":
        repeated = like.prefix if like.observed == "repeat" else None
        with recording(model, shares_keys=True, repeated=repeated) as calls:
            exact = model(input_ids=tokens, use_cache=False)[0]
        return cls(model, tokens, like, calls, exact[:, like.prefix :].float().log_softmax(-1))

    def curves(
        self, method: Callable[[int], CacheMethod], sizes: Sequence[int], by: str
    ) -> list[list[list[float]]]:
        """Measures the KL of each layer, head (alike for all heads of a layer) and size."""
        by_layer: list[list[list[float]]] = []
        for layer, call in enumerate(self.calls):
            observed = self.like.observe(**call.arguments(), layer=call.layer)
            ranking = self.like.method.rank(observed)
            heads = ranking.by_head.shape[1]
            alone = [range(heads)] if by == "layer" else [[head] for head in range(heads)]
            curves = []
            for chosen in alone:
                counts = torch.full(
                    (len(ranking.keys), heads), sizes[-1], device=observed.key.device
                )
                curve = []
                for r in sizes[:-1]:
                    counts[:, list(chosen)] = r
                    choice = method(r).cut(observed, ranking, counts.view(observed.batch))
                    curve.append(self.divergence(layer, choice))
                curves.append([*curve, 0.0])
            by_layer.append(curves * (heads // len(curves)))
        return by_layer

    def divergence(self, layer: int, choice: KeptKeys) -> float:
        """Computes the mean KL with these keys kept in one layer."""
        after = AfterPrefix(Given(choice), prefix=self.like.prefix, sinks=0, recent=0)
        with replace_attention(self.model, after, layers=[layer]):
            logits = self.model(input_ids=self.tokens, use_cache=False)[0][:, self.like.prefix :]
        logs = logits.float().log_softmax(-1)
        kl = kl_div(logs, self.served, log_target=True, reduction="none")
        return float(kl.sum(-1).mean())
