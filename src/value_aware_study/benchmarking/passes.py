"""The passes that are timed: functions of one method at one length, and the layer they run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hydra.utils import instantiate
from jaxtyping import Float
from torch import Tensor, nn

from value_aware_attention.approximations import Approximation
from value_aware_attention.call import Call
from value_aware_attention.error import Sizes, budget
from value_aware_attention.kernels import Exponential, Kernel

Work = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """Holds the sizes of the layer and the machine's settings, equal for all methods."""

    width: int
    heads: int
    feedforward: int
    batch: int
    device: str
    dtype: str
    threads: int
    seed: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}; it must be divisible by heads = {self.heads}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"benchmark.layer.device is {self.device} and there is no GPU; auto takes the CPU"
            )

    @classmethod
    def here(cls, layer: Mapping[str, Any]) -> "Setting":
        """Takes sizes from a config, with this machine's device and threads where none is named."""
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        device = automatic if layer["device"] == "auto" else layer["device"]
        threads = layer["threads"] or torch.get_num_threads()
        return cls(**{**layer, "device": device, "threads": threads})

    def random(self, *shape: int) -> Tensor:
        """Draws standard Gaussian numbers from the seed, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(shape, generator=generator).to(self.device, getattr(torch, self.dtype))


@dataclass(frozen=True)
class Subject:
    """Describes one method by its name and its config, an entry of `benchmark.methods`.

    `build` makes its module. `by_length` gives arguments that depend on the length L: [factor,
    power, most] stands for factor * L ** power, rounded, at most `most`, which may be missing.
    With `mixes_hidden` it maps hidden states in place of self-attention and its projections.
    """

    name: str
    config: Mapping[str, Any]

    @property
    def kernel(self) -> Kernel:
        return instantiate(self.config["kernel"]) if "kernel" in self.config else Exponential()

    @property
    def mixes_hidden(self) -> bool:
        return self.config.get("mixes_hidden", False)

    def arguments(self, length: int) -> dict[str, int]:
        """Computes the arguments that depend on the length."""
        return {
            name: int(min([max(1, round(factor * length**power)), *most]))
            for name, (factor, power, *most) in self.config.get("by_length", {}).items()
        }

    def module(self, length: int) -> nn.Module:
        """Builds the method for one length, with the same random weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return instantiate(self.config["build"], **self.arguments(length), _convert_="all")

    def multiply_adds(self, length: int, setting: Setting) -> float | None:
        """Counts those of all heads and queries; None if the method does not (`error.budget`)."""
        method = self.module(length)
        if not hasattr(method, "multiply_adds"):
            return None
        head_dim = setting.width // setting.heads
        each = budget(method, queries=length, keys=length, head_dim=head_dim, value_dim=head_dim)
        return setting.batch * setting.heads * length * each

    def described(self, lengths: Iterable[int], setting: Setting) -> dict[str, Any]:
        """Lists names, arguments, published cost and multiply-adds, for the report."""
        build = dict(self.config["build"])
        return {
            **{key: self.config[key] for key in ("label", "order", "exponent")},
            "class": build.pop("_target_").rpartition(".")[2],
            "arguments": build,
            "by_length": self.config.get("by_length", {}),
            "kernel": repr(self.kernel),
            "multiply_adds": {str(n): self.multiply_adds(n, setting) for n in sorted(lengths)},
        }


class EagerAttention(Approximation):
    """Computes softmax(QK')V with all N x M weights held: the dense attention of the survey.

    `Exact` computes the same with PyTorch's fused kernel, which never holds the weights.
    """

    kernels = (Exponential,)

    def approximate(self, call: Call) -> Float[Tensor, "*batch N V"]:
        return call.weights @ call.value

    def multiply_adds(self, sizes: Sizes) -> float:
        return sizes.kept(sizes.keys) * sizes.one_key


class SelfAttention(nn.Module):
    """Computes multi-head self-attention with `method` in place of exact attention."""

    def __init__(self, width: int, heads: int, method: nn.Module, kernel: Kernel) -> None:
        super().__init__()
        self.heads = heads
        self.kernel = kernel
        self.method = method
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "batch N width"]) -> Float[Tensor, "batch N width"]:
        projected = self.projections(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = self.method(query, key, value, kernel=self.kernel)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class EncoderLayer(nn.Module):
    """Computes x + mixer(norm(x)), then x + feed-forward(norm(x)), with GELU and no dropout.

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


def layer_of(subject: Subject, length: int, setting: Setting) -> EncoderLayer:
    """Builds the encoder layer around the method."""
    mixer = subject.module(length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting.seed)
        if not subject.mixes_hidden:
            mixer = SelfAttention(setting.width, setting.heads, mixer, subject.kernel)
        layer = EncoderLayer(setting.width, setting.feedforward, mixer)
    return layer.to(setting.device, getattr(torch, setting.dtype))


def forward(subject: Subject, length: int, setting: Setting) -> Work:
    """Prepares the layer's forward pass, which keeps nothing for a backward pass."""
    layer = layer_of(subject, length, setting).eval()
    x = setting.random(setting.batch, length, setting.width)
    return torch.no_grad()(partial(layer, x))


def forward_backward(subject: Subject, length: int, setting: Setting) -> Work:
    """Prepares the layer's forward pass and the gradients of its input and parameters."""
    layer = layer_of(subject, length, setting)
    x = setting.random(setting.batch, length, setting.width).requires_grad_()
    inputs = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x).square().mean(), inputs)


def attention(subject: Subject, length: int, setting: Setting) -> Work:
    """Prepares the forward pass of the method alone, on q, k and v or on hidden states."""
    method = subject.module(length).to(setting.device).eval()
    if subject.mixes_hidden:
        x = setting.random(setting.batch, length, setting.width)
        return torch.no_grad()(partial(method.to(x.dtype), x))
    shape = (3, setting.batch, setting.heads, length, setting.width // setting.heads)
    query, key, value = setting.random(*shape).unbind()
    return torch.no_grad()(partial(method, query, key, value, kernel=subject.kernel))


PASSES: dict[str, Callable[[Subject, int, Setting], Work]] = {
    "forward": forward,
    "forward_backward": forward_backward,
    "attention": attention,
}
