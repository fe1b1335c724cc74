"""Describes the attention of a model trained with non-exact attention."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.kernels import Kernel
from value_aware_attention.models.mixing import Mixing

SEEDS_PER_LAYER = 1000
"""Layer l of a random method with seed s has seed 1000 s + l."""

OWN_PREFIX = __name__.partition(".")[0] + "."


@dataclass(frozen=True)
class TrainedAttention:
    """Describes an `Approximation` or a `Mixing` by its full name and arguments.

    Calling it with a layer's index creates that layer's module, with a separate seed if `seed` is
    among the arguments. Raises ValueError if `target` is neither, or takes other arguments.
    """

    target: str
    arguments: Mapping[str, Any]

    def __call__(self, layer: int) -> nn.Module:
        seed = self.arguments.get("seed")
        seeded = {} if seed is None else {"seed": seed * SEEDS_PER_LAYER + layer}
        made = self.method_class()
        try:
            signature(made).bind(**self.arguments)
        except TypeError as error:
            raise ValueError(f"{self}: {error}") from None
        return made(**{**self.arguments, **seeded})

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.name}({arguments})"

    @property
    def name(self) -> str:
        """Returns the name of the class."""
        return self.target.rpartition(".")[2]

    @property
    def is_mixing(self) -> bool:
        """Returns whether the model mixes tokens without attention."""
        return issubclass(self.method_class(), Mixing)

    @property
    def kernels(self) -> tuple[type, ...]:
        """Returns the supported kernels; empty = all kernels."""
        return getattr(self.method_class(), "kernels", ())

    def method_class(self) -> type[nn.Module]:
        """Returns the class named by `target`."""
        module, _, name = self.target.rpartition(".")
        try:
            method = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            method = None
        if not (isinstance(method, type) and issubclass(method, (Approximation, Mixing))):
            raise ValueError(f"{self.target} is neither an approximation of attention nor a mixing")
        return method

    def check_trainable(
        self, *, kernel: Kernel, length: int, head_dim: int, is_causal: bool
    ) -> None:
        """Raises ValueError unless a model of this size can be trained with it.

        It is called once on random numbers, so that an unsupported causal mask, kernel or too large
        budget raises its error now. Gradients must reach the queries or the keys (LSH may share one
        for both); otherwise a model would not learn where to attend.
        """
        if self.is_mixing:
            if is_causal:
                raise ValueError(f"{self.name} lets every position see all others: never causal")
            return
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            x.requires_grad_() for x in torch.randn(3, 1, 1, length, head_dim, generator=generator)
        )
        output = self(0)(query, key, value, kernel=kernel, is_causal=is_causal)
        gradients = torch.autograd.grad(output.square().sum(), (query, key), allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                f"{self.name} gives no gradients to queries or keys; a model cannot be trained "
                f"with it"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TrainedAttention | None":
        """Reads the `trained_attention` of a model's config; None for exact attention.

        A config is untrusted, so only this library is imported for it; a method of another module
        is found only if the program has already imported that module. Raises ValueError for other
        modules, and for fields that do not describe a method.
        """
        fields = getattr(config, "trained_attention", None)
        if fields is None:
            return None
        try:
            described = cls(**fields)
            module = described.target.rpartition(".")[0]
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"trained_attention is {fields!r} in the model's config ({error}): train it again"
            ) from None
        if not described.target.startswith(OWN_PREFIX) and module not in sys.modules:
            raise ValueError(
                f"the model's config asks for {described.target}, and only methods of "
                f"{OWN_PREFIX[:-1]} are imported for a checkpoint; import {module} first if you "
                f"trust it"
            )
        return described
