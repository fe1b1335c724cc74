"""Exchanges cache methods with kvpress, whose presses have `score`; it need not be installed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.arguments import described
from value_aware_attention.attention import working_precision
from value_aware_attention.caches.after_prefix import AfterPrefix
from value_aware_attention.caches.method import CacheMethod
from value_aware_attention.caches.observed import Observed
from value_aware_attention.kernels import Exponential


class Press(CacheMethod):
    """Keeps the r keys with the largest scores of a press of kvpress, such as `SnapKVPress()`.

    `press` is any object with kvpress' score(module, hidden_states, keys, values, attentions,
    kwargs) -> (B, H, M). It is given the observed queries as hidden states of a module that
    projects nothing, rotated already, and their attention weights; `compression_ratio`, where it
    has one, is set to that of r keys. A press that needs unrotated queries, a key projection or
    hidden states of its own gets none of them. As published it protects keys by its own scores:
    `sinks=0, recent=0`, and `observed="last"` with more rows than its window.
    """

    kernels = (Exponential,)

    def __init__(self, r: int, press: Any) -> None:
        super().__init__(r)
        if not callable(getattr(press, "score", None)):
            raise ValueError(f"press is {described(press)}; it must have kvpress' score")
        self.press = press

    def scores(self, seen: Observed) -> Float[Tensor, "*batch M"]:
        if len(seen.batch) != 2:
            raise ValueError(
                f"a press scores (batch, heads) of keys; these are {tuple(seen.batch)}"
            )
        if hasattr(self.press, "compression_ratio"):
            self.press.compression_ratio = 1 - (self.r + 0.5) / seen.keys
        query = seen.query.flatten(1, 2)
        turn = torch.ones_like(query[:, 0])
        found: Tensor = self.press.score(
            _module(seen), query.transpose(1, 2).flatten(2), seen.key, seen.value,
            seen.weights.flatten(1, 2).to(seen.key.dtype),
            {"position_embeddings": (turn, torch.zeros_like(turn))},
        )  # fmt: skip
        return working_precision(found)


def _module(seen: Observed) -> SimpleNamespace:
    """Returns what presses read of an attention module, with an identity for its projection."""
    (heads, groups), width = (seen.batch[1], seen.query.shape[-3]), seen.query.shape[-1]
    weight = None if seen.projection is None else seen.projection.flatten(0, -2).mT
    config = SimpleNamespace(
        num_attention_heads=heads * groups,
        num_key_value_heads=heads,
        head_dim=width,
        hidden_size=heads * groups * width,
        _attn_implementation="eager",
    )
    return SimpleNamespace(
        q_proj=nn.Identity(),
        o_proj=SimpleNamespace(weight=weight),
        head_dim=width,
        num_key_value_groups=groups,
        config=config,
    )


def as_press(method: Callable[[int], CacheMethod], **options: Any) -> Any:
    """Makes a press of kvpress of a cache method, with `score` and `compression_ratio`.

    `method` builds one that keeps r keys; `options` are those of `AfterPrefix` (without `prefix`,
    `pool` and `every`). Kept keys score above all others. A subclass of kvpress' ScorerPress:
    raises ImportError where kvpress is not installed.
    """
    from kvpress import ScorerPress  # type: ignore[import-not-found]

    class CacheMethodPress(ScorerPress):
        def score(
            self, module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor,
            attentions: Tensor | None, kwargs: dict[str, Any],
        ) -> Float[Tensor, "B H M"]:  # fmt: skip
            count = keys.shape[-2]
            r = max(1, int(count * (1 - self.compression_ratio)))
            query = _queries(module, hidden_states, kwargs["position_embeddings"])
            after = AfterPrefix(method(r), prefix=count, **options)
            seen = after.observe(
                query.unflatten(1, (keys.shape[1], -1)), keys[:, :, None], values[:, :, None],
                kernel=Exponential(getattr(module, "scaling", None)), is_causal=True,
            )  # fmt: skip
            kept = after.method.keep(seen)
            if kept.value is not None:
                raise ValueError(f"{type(after.method).__name__} refits values; a press drops keys")
            scores = torch.zeros(keys.shape[:-1], device=keys.device)
            return scores.scatter(-1, kept.indices, kept.log_weight.exp().to(scores.dtype))

    return CacheMethodPress()


def _queries(
    module: Any, hidden: Float[Tensor, "B N E"], turn: tuple[Tensor, Tensor]
) -> Float[Tensor, "B H N D"]:
    """Computes a module's rotated queries, as Llama, Qwen and Mistral do."""
    query = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
    query = getattr(module, "q_norm", nn.Identity())(query).transpose(1, 2)
    first, second = query.chunk(2, dim=-1)
    cos, sin = (x.unsqueeze(1) for x in turn)
    return query * cos + torch.cat([-second, first], dim=-1) * sin
