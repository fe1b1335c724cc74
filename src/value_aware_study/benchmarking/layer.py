"""The layer that is measured: a pre-norm Transformer encoder layer around any way of mixing."""

from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes
from value_aware_attention.kernels import Exponential, Kernel

__all__ = ["EagerAttention", "EncoderLayer", "SelfAttention"]


class EagerAttention(Approximation):
    """softmax(QK')V with all N x M weights held: the dense attention that the survey measured.

    `Exact` computes the same with PyTorch's fused kernel, which never holds the weights.
    """

    kernels = (Exponential,)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        return call.weights @ call.value

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(sizes.keys) * sizes.one_key


class SelfAttention(nn.Module):
    """Multi-head self-attention with `method` in place of exact attention."""

    def __init__(self, width: int, heads: int, method: nn.Module, kernel: Kernel) -> None:
        super().__init__()
        self.heads = heads
        self.kernel = kernel
        self.method = method
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "batch N width"]) -> Float[Tensor, "batch N width"]:
        parts = self.projections(x).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = self.method(query, key, value, kernel=self.kernel)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class EncoderLayer(nn.Module):
    """x + mixer(norm(x)), then x + feed-forward(norm(x)), with GELU and no dropout.

    `mixer` maps hidden states (batch, N, width) to the same shape: `SelfAttention`, or a mixing of
    tokens without attention.
    """

    def __init__(self, width: int, feedforward: int, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.mixer_norm = nn.LayerNorm(width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward), nn.GELU(), nn.Linear(feedforward, width)
        )

    def forward(self, x: Float[Tensor, "batch N width"]) -> Float[Tensor, "batch N width"]:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))
