"""AfterPrefix by its definition, for one cache at a time, in loops over rows and keys."""

import torch
from torch import Tensor

from value_aware_attention import attention
from value_aware_attention.attention import attention_state, masked_softmax
from value_aware_attention.caches import AfterPrefix, KeptKeys, Observed
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.layer import Layer


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

    @property
    def observing(self) -> Tensor:
        """The mask of observed queries: a row of a text that is padding sees nothing."""
        is_text = self.mask.shape[-2] == self.mask.shape[-1]
        return self.mask & self.available[:, None] if is_text else self.mask

    def through(self, method: AfterPrefix) -> Tensor:
        """Computes the output (G, N, V), choice by choice."""
        output = attention(
            self.query, self.key, self.value, kernel=self.kernel, attn_mask=self.mask
        )
        length, start = len(self.key), method.prefix
        pool = torch.arange(start)
        while start < length:
            kept = method.method.keep(self.observed(method, pool, start))
            stop = length if method.every is None else min(length, start + method.every)
            output[:, start:stop] = self.served(kept, pool, range(start, stop), start)
            pool = torch.cat([pool[kept.indices], torch.arange(start, stop)])
            start = stop
        return output

    def without_prefix(self, method: AfterPrefix) -> Tensor:
        """Computes the output where one set serves every query."""
        pool = torch.arange(len(self.key))
        kept = method.method.keep(self.observed(method, pool, len(self.key)))
        return self.served(kept, pool, range(self.query.shape[1]), len(self.key))

    def served(self, kept: KeptKeys, pool: Tensor, rows: range, start: int) -> Tensor:
        """Attends to what was kept, with its weights and values, and to the keys from `start`."""
        named = pool[kept.indices]
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
        visible, places = self.observing[:, rows][..., pool], torch.tensor(rows)
        if method.observed == "continued":
            beside = self.state(
                query[:, rows], self.key, self.value, self.again(rows, len(self.key))
            )
        if method.observed in ("noncausal", "continued") and method.prefix is not None:
            visible = self.unpadded(rows, pool)
            places = places + start
            if self.layer.rotary is not None:
                query = self.layer.rotary(query, torch.full((query.shape[1],), start))
        if method.observed == "repeat":
            query, key, value = self.layer.repeated
            rows = spaced(range(query.shape[1]), method.rows, method.seed)
            visible, places = self.unpadded(rows, pool), torch.tensor(rows) + start
            beside = self.state(query[:, rows], key, value, self.again(rows, len(key)))
        elif method.observed == "hindsight" and start < len(self.key):
            later = self.mask[:, rows][..., start:]
            beside = self.state(query[:, rows], self.key[start:], self.value[start:], later)
        return Observed(
            query=query[:, rows],
            key=self.key[pool],
            value=self.value[pool].where(self.available[pool, None], 0.0),
            kernel=self.kernel,
            visible=visible,
            protected=self.protected(method, pool),
            projection=self.layer.projection,
            rotary=self.layer.rotary,
            positions=places,
            start=start,
            available=self.available[pool],
            beside=beside,
        )

    def state(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor):
        return attention_state(self.kernel.log_similarity(query, key), value, visible)

    def unpadded(self, rows: list[int], pool: Tensor) -> Tensor:
        """Marks every pair of a row and a key of which neither is padding."""
        return (self.available[rows][:, None] & self.available[pool]).expand(
            len(self.query), -1, -1
        )

    def again(self, rows: list[int], keys: int) -> Tensor:
        """Marks the causal pairs of the prefix read once more, without padding."""
        causal = torch.tensor([[key <= row for key in range(keys)] for row in rows])
        unpadded = self.available[rows][:, None] & self.available[:keys]
        return (causal & unpadded).expand(len(self.query), -1, -1)

    def protected(self, method: AfterPrefix, pool: Tensor) -> Tensor | None:
        """Finds the places in the pool of the first and last keys that are not padding."""
        if method.prefix is None:
            return None
        places = [place for place, name in enumerate(pool) if self.available[name]]
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
