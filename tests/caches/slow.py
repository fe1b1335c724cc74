"""AfterPrefix by its definition, for one cache at a time, in loops over rows and keys."""

from dataclasses import replace

import torch
from torch import Tensor

from value_aware_attention import attention
from value_aware_attention.attention import attention_state, masked_softmax
from value_aware_attention.caches import AfterPrefix, KeptKeys, Observed
from value_aware_attention.call import Layer
from value_aware_attention.kernels import Exponential, Kernel


class OneCache:
    """The text of one key-value head: query (G, N, D), key (M, D), value (M, V), mask (G, N, M)."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        kernel: Kernel = Exponential(),
        layer: Layer | None = None,
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.kernel, self.layer = kernel, layer or Layer()
        self.available = mask.any(dim=(0, 1))

    def without_padding(self) -> tuple["OneCache", Tensor]:
        """Takes the tokens of the text alone; returns their positions too."""
        tokens = self.available.nonzero()[:, 0]
        mask, query, layer = self.mask[..., tokens], self.query, self.layer
        if query.shape[1] == len(self.key):
            query, mask = query[:, tokens], mask[:, tokens]
        if layer.repeated is not None:
            read = [x[..., tokens[tokens < x.shape[-2]], :] for x in layer.repeated]
            layer = replace(layer, repeated=tuple(read))
        return OneCache(
            query, self.key[tokens], self.value[tokens], mask, self.kernel, layer
        ), tokens

    def through(self, method: AfterPrefix) -> Tensor:
        """Computes the output (G, N, V), choice by choice."""
        output = attention(
            self.query, self.key, self.value, kernel=self.kernel, attn_mask=self.mask
        )
        length, start = len(self.key), method.prefix
        pool = torch.arange(start)
        while start < length:
            kept = self.kept(method, pool, start)
            stop = length if method.every is None else min(length, start + method.every)
            output[:, start:stop] = self.served(kept, range(start, stop), start)
            pool = torch.cat([kept.indices, torch.arange(start, stop)])
            start = stop
        return output

    def without_prefix(self, method: AfterPrefix) -> Tensor:
        """Computes the output where one set serves every query."""
        kept = self.kept(method, torch.arange(len(self.key)), len(self.key))
        return self.served(kept, range(self.query.shape[1]), len(self.key))

    def kept(self, method: AfterPrefix, pool: Tensor, start: int) -> KeptKeys:
        """Lets the method choose in the text without its padding, or keeps all where r are more."""
        text, tokens = self.without_padding()
        pool = pool[self.available[pool]]
        pool = torch.searchsorted(tokens, pool)
        kept = KeptKeys(torch.arange(len(pool)), torch.zeros(len(pool)))
        if len(pool) >= method.method.r:
            kept = method.method.keep(text.observed(method, pool, int((tokens < start).sum())))
        return replace(kept, indices=tokens[pool[kept.indices]])

    def served(self, kept: KeptKeys, rows: range, start: int) -> Tensor:
        """Attends to what was kept, with its weights and values, and to the keys from `start`."""
        named = kept.indices
        key = torch.cat([self.key[named], self.key[start:]])
        own = self.value[named] if kept.value is None else kept.value
        value = torch.cat([own, self.value[start:]])
        bias = torch.cat([kept.log_weight, torch.zeros(len(self.key) - start)])
        mask = torch.cat([self.mask[..., named], self.mask[..., start:]], dim=-1)[:, list(rows)]
        scores = self.kernel.log_similarity(self.query[:, list(rows)], key)
        return masked_softmax(scores + bias, mask & (bias > -torch.inf)) @ value

    def observed(self, method: AfterPrefix, pool: Tensor, start: int) -> Observed:
        """Builds what the method may look at, by the sentences that describe `observed`."""
        past = range(self.query.shape[1]) if method.prefix is None else range(start)
        served = past if method.prefix is None else range(start, self.query.shape[1])
        rows, query, beside = spaced(past, method.rows, method.seed), self.query, None
        if method.observed == "last":
            rows = list(past)[-method.rows :]
        if method.observed == "hindsight":
            left = [row for row in served if row not in rows]
            new = left if method.prefix is None and left else list(served)
            count = min(method.rows, len(new))
            rows = [new[place * len(new) // count] for place in range(count)]
        visible, places = self.mask[:, rows][..., pool], torch.tensor(rows)
        if method.observed == "continued":
            beside = self.state(
                query[:, rows], self.key, self.value, self.again(rows, len(self.key))
            )
        if method.observed in ("noncausal", "continued") and method.prefix is not None:
            visible = torch.ones_like(visible)
            places = places + start
            if self.layer.rotary is not None:
                query = self.layer.rotary(query, torch.full((query.shape[1],), start))
        if method.observed == "repeat":
            query, key, value = self.layer.repeated
            rows = spaced(range(query.shape[1]), method.rows, method.seed)
            visible = torch.ones(len(query), len(rows), len(pool), dtype=torch.bool)
            places = torch.tensor(rows) + start
            beside = self.state(query[:, rows], key, value, self.again(rows, len(key)))
        elif method.observed == "hindsight" and start < len(self.key):
            later = self.mask[:, rows][..., start:]
            beside = self.state(query[:, rows], self.key[start:], self.value[start:], later)
        return Observed(
            query=query[:, rows],
            key=self.key[pool],
            value=self.value[pool],
            available=self.mask[:, start:, pool].any(dim=(0, 1)) if start < len(self.key) else None,
            kernel=self.kernel,
            visible=visible,
            protected=self.protected(method, pool),
            projection=self.layer.projection,
            rotary=self.layer.rotary,
            positions=places,
            start=start,
            beside=beside,
        )

    def state(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor):
        return attention_state(self.kernel.log_similarity(query, key), value, visible)

    def again(self, rows: list[int], keys: int) -> Tensor:
        """Marks the causal pairs of the prefix read once more."""
        causal = torch.tensor([[key <= row for key in range(keys)] for row in rows])
        return causal.expand(len(self.query), -1, -1)

    def protected(self, method: AfterPrefix, pool: Tensor) -> Tensor | None:
        """Finds the places in the pool of the first and last keys."""
        if method.prefix is None:
            return None
        places = list(range(len(pool)))
        recent = places[-method.recent :] if method.recent else []
        return torch.tensor(places[: method.sinks] + recent, dtype=torch.long)


def spaced(among: range, count: int, seed: int) -> list[int]:
    """Draws one of these rows from each of at most `count` equal strides."""
    count = min(count, len(among))
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = []
    for place, share in enumerate(drawn):
        first, after = place * len(among) // count, (place + 1) * len(among) // count
        rows.append(among[first + int(share * (after - first))])
    return rows
