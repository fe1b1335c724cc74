"""Names the attention, or the mixing, that a model is trained with."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.arguments import check_at_least, check_seed
from value_aware_attention.kernels import Kernel


class Mixing(nn.Module, ABC):
    """Mixes hidden states over positions and over width, without queries, keys or values."""

    @abstractmethod
    def forward(self, hidden: Float[Tensor, "*batch N width"]) -> Float[Tensor, "*batch N width"]:
        """Returns the mixed hidden states."""


class FourierMixing(Mixing):
    """Takes the real Fourier transform over positions and width (Lee-Thorp et al., 2021).

    Y = Re(F_N X F_width), unscaled as in FNet: fft2(x).real, O(N log N), nothing to learn. bf16 and
    fp16 are transformed in fp32.
    """

    def forward(self, hidden: Float[Tensor, "*batch N width"]) -> Float[Tensor, "*batch N width"]:
        with torch.autocast(hidden.device.type, enabled=False):
            exact = hidden.float() if hidden.dtype in (torch.bfloat16, torch.float16) else hidden
            return torch.fft.fft2(exact).real.to(hidden.dtype)


class _MatrixMixing(Mixing):
    """Computes Y = S X W with an S for `length` positions and a W of width x width.

    A shorter sequence uses the first rows and columns of S; a longer one raises ValueError.
    """

    positions: Tensor
    hidden: Tensor

    def __init__(self, length: int, width: int, seed: int) -> None:
        super().__init__()
        self.length = check_at_least(1, length=length)
        self.width = check_at_least(1, width=width)
        self.seed = check_seed(seed)

    def forward(self, hidden: Float[Tensor, "*batch N width"]) -> Float[Tensor, "*batch N width"]:
        length, width = hidden.shape[-2:]
        if length > self.length or width != self.width:
            raise ValueError(
                f"{type(self).__name__} got hidden states of {length} x {width}; it mixes at most "
                f"{self.length} positions, of width {self.width}"
            )
        return self.positions[:length, :length] @ (hidden @ self.hidden)

    def extra_repr(self) -> str:
        return f"length={self.length}, width={self.width}, seed={self.seed}"

    def _drawn(self, deviations: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """Draws S and W with independent normal entries, from the seed alone."""
        generator = torch.Generator().manual_seed(self.seed)
        draws = (torch.randn(n, n, generator=generator) for n in (self.length, self.width))
        positions, hidden = (x * std for x, std in zip(draws, deviations, strict=True))
        return positions, hidden


class LinearMixing(_MatrixMixing):
    """Computes Y = S X W with learned S and W, the paper's Linear encoder (Lee-Thorp et al., 2021).

    Entries start from N(0, 0.02^2), as in FNet's code.
    """

    def __init__(self, length: int, width: int, seed: int) -> None:
        super().__init__(length, width, seed)
        positions, hidden = self._drawn((0.02, 0.02))
        self.positions, self.hidden = nn.Parameter(positions), nn.Parameter(hidden)


class RandomMixing(_MatrixMixing):
    """Computes Y = S X W with random S and W that never change, the paper's Random encoder.

    Entries are normal with variance 1 / length and 1 / width: the scale is kept, as in FNet's code.
    """

    def __init__(self, length: int, width: int, seed: int) -> None:
        super().__init__(length, width, seed)
        positions, hidden = self._drawn((length**-0.5, width**-0.5))
        self.positions, self.hidden = nn.Buffer(positions), nn.Buffer(hidden)


class MixingSublayer(nn.Module):
    """Computes norm(x + mixing(x)), in the place of a RoBERTa layer's self-attention sublayer.

    As in FNet there is no output projection and no dropout. In FNet the content of padded positions
    moves the others; here padded positions enter the mixing as zeros. Their number still matters,
    because the transform is of the padded length.
    """

    def __init__(self, mixing: Mixing, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.mixing = mixing
        self.output = nn.ModuleDict({"LayerNorm": norm})  # keeps the name it has in RoBERTa

    def forward(
        self,
        hidden_states: Float[Tensor, "batch N width"],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Float[Tensor, "batch N width"], None]:
        entering = hidden_states
        if attention_mask is not None:
            mask = attention_mask[:, 0, 0, :, None]  # (batch, 1, N, N), boolean or additive
            seen = mask if mask.dtype == torch.bool else mask == 0
            entering = hidden_states.where(seen, 0.0)
        return self.output["LayerNorm"](hidden_states + self.mixing(entering)), None


SEEDS_PER_LAYER = 1000
"""Layer l of a random method with seed s gets the seed 1000 s + l."""

LIBRARY = __name__.partition(".")[0] + "."


@dataclass(frozen=True)
class TrainedAttention:
    """Names an `Approximation` or a `Mixing` by its full name, with its arguments.

    Called with a layer's index it makes that layer's own module, with a seed of its own where
    `seed` is among the arguments. Raises ValueError where `target` is neither, or takes others.
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
        """Tells whether the model mixes tokens without any attention."""
        return issubclass(self.method_class(), Mixing)

    @property
    def kernels(self) -> tuple[type, ...]:
        """Returns the kernels that it computes; empty = every kernel."""
        return getattr(self.method_class(), "kernels", ())

    def method_class(self) -> type[nn.Module]:
        """Returns the class named by `target`."""
        module, _, name = self.target.rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            found = None
        if not (isinstance(found, type) and issubclass(found, (Approximation, Mixing))):
            raise ValueError(f"{self.target} is neither an approximation of attention nor a mixing")
        return found

    def check_trainable(
        self, *, kernel: Kernel, length: int, head_dim: int, is_causal: bool
    ) -> None:
        """Raises ValueError unless a model of this size can be trained with it.

        It is called once on random numbers, so that it refuses a causal mask, a kernel, or a budget
        too large for the length now. Gradients must reach the queries or the keys (LSH may share
        one for both): without them a model would not learn where to look.
        """
        if self.is_mixing:
            if is_causal:
                raise ValueError(f"{self.name} lets every position see all others: never causal")
            return
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(3, 1, 1, length, head_dim, generator=generator)
        query, key, value = (x.requires_grad_() for x in inputs)
        output = self(0)(query, key, value, kernel=kernel, is_causal=is_causal)
        gradients = torch.autograd.grad(output.square().sum(), (query, key), allow_unused=True)
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                f"{self.name} gives no gradients to queries or keys; a model cannot be trained "
                f"with it"
            )

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "TrainedAttention | None":
        """Reads the `trained_attention` of a model's config; None where attention is exact.

        A config may come from anyone, so nothing is imported for it but this library: a method of
        another module is found only where the program has imported that itself. Raises ValueError
        for other modules, and for fields that describe no method.
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
        if not described.target.startswith(LIBRARY) and module not in sys.modules:
            raise ValueError(
                f"the model's config asks for {described.target}, and only methods of "
                f"{LIBRARY[:-1]} are imported for a checkpoint; import {module} first if you "
                f"trust it"
            )
        return described
