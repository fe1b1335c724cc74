"""Mixes tokens without attention, by linear maps that do not depend on the tokens (FNet)."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.arguments import arguments_shown, check_at_least, check_seed
from value_aware_attention.attention import working_precision


class Mixing(nn.Module, ABC):
    """Mixes hidden states over positions and over width, without queries, keys or values."""

    @abstractmethod
    def forward(self, hidden: Float[Tensor, "*batch N width"]) -> Float[Tensor, "*batch N width"]:
        """Returns the mixed hidden states."""


class FourierMixing(Mixing):
    """Takes the real Fourier transform over positions and width (Lee-Thorp et al., 2021).

    Y = Re(F_N X F_width), unscaled as in FNet: fft2(x).real, O(N log N), without parameters. bf16
    and fp16 are transformed in fp32.
    """

    def forward(self, hidden: Float[Tensor, "*batch N width"]) -> Float[Tensor, "*batch N width"]:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.fft.fft2(working_precision(hidden)).real.to(hidden.dtype)


class _MatrixMixing(Mixing):
    """Computes Y = S X W, where S is length x length and W is width x width.

    A shorter sequence uses the first rows and columns of S; a longer one raises ValueError.
    """

    positions: Tensor
    hidden: Tensor

    def __init__(
        self,
        length: int,
        width: int,
        seed: int,
        *,
        deviation: Callable[[int], float],
        kind: Callable[[Tensor], Tensor],
    ) -> None:
        """Draws S and W, from the seed alone, with normal entries of a deviation by their size."""
        super().__init__()
        self.length = check_at_least(1, length=length)
        self.width = check_at_least(1, width=width)
        self.seed = check_seed(seed)
        generator = torch.Generator().manual_seed(self.seed)
        self.positions, self.hidden = (
            kind(torch.randn(n, n, generator=generator) * deviation(n))
            for n in (self.length, self.width)
        )

    def forward(self, hidden: Float[Tensor, "*batch N width"]) -> Float[Tensor, "*batch N width"]:
        length, width = hidden.shape[-2:]
        if length > self.length or width != self.width:
            raise ValueError(
                f"{type(self).__name__} got hidden states of {length} x {width}; it mixes at most "
                f"{self.length} positions, of width {self.width}"
            )
        return self.positions[:length, :length] @ (hidden @ self.hidden)

    def extra_repr(self) -> str:
        return arguments_shown(self)


class LinearMixing(_MatrixMixing):
    """Computes Y = S X W with learned S and W, the paper's Linear encoder (Lee-Thorp et al., 2021).

    Entries start from N(0, 0.02^2), as in FNet's code.
    """

    def __init__(self, length: int, width: int, seed: int) -> None:
        super().__init__(length, width, seed, deviation=lambda size: 0.02, kind=nn.Parameter)


class RandomMixing(_MatrixMixing):
    """Computes Y = S X W with fixed random S and W, the paper's Random encoder.

    Entries are normal with variance 1 / length and 1 / width, to keep the scale, as in FNet's code.
    """

    def __init__(self, length: int, width: int, seed: int) -> None:
        super().__init__(length, width, seed, deviation=lambda size: size**-0.5, kind=nn.Buffer)


class MixingSublayer(nn.Module):
    """Computes norm(x + mixing(x)), replacing a RoBERTa layer's self-attention sublayer.

    As in FNet there is no output projection and no dropout. In FNet the content of padded positions
    affects the others; here padded positions enter the mixing as zeros. Their number still matters,
    because the transform has the padded length.
    """

    def __init__(self, mixing: Mixing, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.mixing = mixing
        self.output = nn.ModuleDict({"LayerNorm": norm})  # keeps its name in RoBERTa

    def forward(
        self,
        hidden_states: Float[Tensor, "batch N width"],
        attention_mask: Tensor | None = None,
        **options: object,
    ) -> tuple[Float[Tensor, "batch N width"], None]:
        entering = hidden_states
        if attention_mask is not None:
            mask = attention_mask[:, 0, 0, :, None]  # (batch, 1, N, N), boolean or additive
            visible = mask if mask.dtype == torch.bool else mask == 0
            entering = hidden_states.where(visible, 0.0)
        return self.output["LayerNorm"](hidden_states + self.mixing(entering)), None
