"""Exchanges cache methods with kvpress, whose presses have `score`; it need not be installed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.arguments import check_choice, described
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.after_prefix import AfterPrefix
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.call import Layer
from value_aware_attention.kernels import Exponential


class Press(CacheMethod):
    """Keeps the r keys with the largest scores of a press of kvpress, such as `SnapKVPress()`.

    `press` is any object with kvpress' score(module, hidden_states, keys, values, attentions,
    kwargs) -> (B, H, M). It is given the observed queries as the hidden states of a module that
    projects nothing, rotated already, and their attention weights; `compression_ratio`, where it
    has one, is set to that of r keys. A press protects keys by its own scores: as published it is
    used with sinks = recent = 0 and `observed="last"`, with as many rows as the prefix has. Raises
    ValueError where it reads more of a module than that, such as `rotary_emb` or `k_proj`.
    """

    kernels = (Exponential,)

    def __init__(self, r: int, press: Any) -> None:
        super().__init__(r)
        if isinstance(press, type) or not callable(getattr(press, "score", None)):
            raise ValueError(f"press is {described(press)}; it must have the score of kvpress")
        self.press = press

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        if len(seen.batch) < 2:
            raise ValueError(f"keys have dimensions {tuple(seen.batch)}; a press has texts x heads")
        if hasattr(self.press, "compression_ratio"):
            self.press.compression_ratio = 1 - (self.r + 0.5) / seen.keys
        query, weights = (x.flatten(1, -3) for x in (seen.query, seen.weights))
        turn = torch.ones_like(query[:, 0])
        try:
            found: Tensor = self.press.score(
                _module(seen), query.transpose(1, 2).flatten(2),
                seen.key.flatten(1, -3), seen.value.flatten(1, -3), weights.to(seen.key.dtype),
                {"position_embeddings": (turn, torch.zeros_like(turn))},
            )  # fmt: skip
        except AttributeError as error:
            raise ValueError(
                f"{type(self.press).__name__} needs more than queries, keys and values: {error}"
            ) from error
        return working_precision(found).view(*seen.batch, -1)


def _module(seen: Observed) -> SimpleNamespace:
    """Returns what presses read of an attention module, with an identity for its projection."""
    heads, (groups, _, width) = seen.batch[1:].numel(), seen.query.shape[-3:]
    weight = None if seen.projection is None else seen.projection.flatten(0, -2).mT
    config = SimpleNamespace(
        num_attention_heads=heads * groups,
        num_key_value_heads=heads,
        hidden_size=heads * groups * width if weight is None else len(weight),
        head_dim=width,
    )
    return SimpleNamespace(
        q_proj=nn.Identity(),
        o_proj=SimpleNamespace(weight=weight),
        head_dim=width,
        num_key_value_groups=groups,
        config=config,
    )


def as_press(
    method: Callable[[int], CacheMethod], *, observed: str = "last", **options: Any
) -> Any:
    """Makes a press of kvpress of a cache method, with `score` and `compression_ratio`.

    `method` builds one that keeps r keys; `observed` is "last" or "causal"; `options` are `rows`,
    `sinks`, `recent` and `seed` of `AfterPrefix`. Keys that are kept score 1, others 0. The press
    is a `ScorerPress`, for modules whose queries are as Llama's: raises ImportError where kvpress
    is not installed, and ValueError for a method that refits values.
    """
    from kvpress import ScorerPress  # type: ignore[import-not-found]
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from value_aware_attention.hugging_face.cache_layers import output_projection

    check_choice(("last", "causal"), observed=observed)
    if method(1).refits:
        raise ValueError(f"{type(method(1)).__name__} refits values; a press drops keys")

    class CacheMethodPress(ScorerPress):
        def score(
            self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor,
            attentions: Tensor | None, kwargs: dict[str, Any],
        ) -> Float[Tensor, "B H M"]:  # fmt: skip
            r = max(1, int(keys.shape[-2] * (1 - self.compression_ratio)))  # as kvpress counts
            after = AfterPrefix(method(r), prefix=keys.shape[-2], observed=observed, **options)
            query = module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim))
            query = getattr(module, "q_norm", nn.Identity())(query).transpose(1, 2)
            query, _ = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
            query = query.unflatten(1, (keys.shape[1], -1))
            seen = after.observe(
                query, keys[:, :, None], values[:, :, None], is_causal=True,
                kernel=Exponential(getattr(module, "scaling", None)),
                layer=Layer(output_projection(module, query.shape[1:3], values.shape[-1])),
            )  # fmt: skip
            none = torch.zeros(keys.shape[:-1], device=keys.device)
            return none.scatter(-1, after.method.keep(seen).indices.flatten(1, -2), 1.0)

    return CacheMethodPress()
