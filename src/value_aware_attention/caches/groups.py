"""Finds which leading dimensions of a call have separate caches, and which share one."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from value_aware_attention.call import Call, Layer


@dataclass(frozen=True)
class Groups:
    """Holds which leading dimensions of a call have separate caches, and which share one.

    Queries share a cache along dimensions where keys and values have size 1. Grouped-query
    attention is query (B, heads, G, N, D) with key and value (B, heads, 1, M, .).

    Attributes:
        separate: Dimensions along which caches differ.
        shared: Dimensions along which queries share one.
    """

    leading: tuple[int, ...]
    separate: tuple[int, ...]
    shared: tuple[int, ...]

    @classmethod
    def of(cls, call: Call) -> "Groups":
        """Finds the groups from the shapes of a call."""
        leading = call.batch
        caches = torch.broadcast_shapes(
            call.key.shape[:-2], call.value.shape[:-2], (1,) * len(leading)
        )
        shared = tuple(d for d, size in enumerate(leading) if size > 1 and caches[d] == 1)
        return cls(leading, tuple(d for d in range(len(leading)) if d not in shared), shared)

    @property
    def _has_last(self) -> bool:
        """Returns whether only the last dimension is shared, so that no dimension has to move."""
        return self.shared == (len(self.leading) - 1,)

    def call(self, call: Call) -> Call:
        """Returns the call as query (*own, G, N, D), key (*own, 1, M, D), value (*own, 1, M, V)."""
        query, key, value = call.query, call.key, call.value
        if query.shape[:-2] != self.leading:
            query = query.expand(*self.leading, -1, -1)
        mask = None if call.attn_mask is None else self.of_queries(call.attn_mask)
        if not (self._has_last and key.shape[:-2] == value.shape[:-2] == (*self.leading[:-1], 1)):
            key, value = (self.of_keys(x)[..., None, :, :] for x in (key, value))
        return replace(
            call, query=self.of_queries(query), key=key, value=value, attn_mask=mask,
            layer=self._layer(call.layer),
        )  # fmt: skip

    def _layer(self, layer: Layer) -> Layer:
        """Returns the layer with its heads in the same order."""
        projection, repeated = layer.projection, layer.repeated
        if projection is not None:
            projection = self.of_queries(projection)
        if repeated is not None:
            query, key, value = repeated
            repeated = (self.of_queries(query), self.of_keys(key), self.of_keys(value))
        return replace(layer, projection=projection, repeated=repeated)

    def of_queries(self, x: Tensor) -> Tensor:
        """Moves the shared dimensions of (..., a, b) last and flattens them: (*own, G, a, b).

        A broadcast dimension keeps size 1.
        """
        x = x.reshape(*(1,) * (len(self.leading) + 2 - x.ndim), *x.shape)
        if self._has_last:
            return x
        if any(x.shape[d] > 1 for d in self.shared):
            sizes = [self.leading[d] if d in self.shared else x.shape[d] for d in range(x.ndim - 2)]
            x = x.expand(*sizes, -1, -1)
        x = x.permute(*self.separate, *self.shared, -2, -1)
        return x.reshape(*x.shape[: len(self.separate)], -1, *x.shape[-2:])

    def of_keys(self, x: Tensor) -> Tensor:
        """Drops the shared dimensions, of size 1, from keys or values: (*own, M, .)."""
        x = x.reshape(*(1,) * (len(self.leading) + 2 - x.ndim), *x.shape)
        sizes = [self.leading[d] for d in self.separate]
        x = x.permute(*self.separate, *self.shared, -2, -1)
        return x.reshape(*x.shape[: len(sizes)], *x.shape[-2:]).expand(*sizes, -1, -1)

    def restored(self, x: Float[Tensor, "*own G N V"]) -> Float[Tensor, "*batch N V"]:
        """Restores the order of the call's leading dimensions."""
        order = [*self.separate, *self.shared]
        x = x.reshape(*(self.leading[d] for d in order), *x.shape[-2:])
        return x.permute(*sorted(range(len(order)), key=order.__getitem__), -2, -1)


def visible_pairs(call: Call) -> Bool[Tensor, "*#own #G N M"] | None:
    """Returns the visible pairs of a call, with as many dimensions as its queries; None = all."""
    if (visible := call.visible) is None:
        return None
    return visible.reshape(*(1,) * (call.query.ndim - visible.ndim), *visible.shape)
