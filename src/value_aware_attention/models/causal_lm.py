"""The causal language model of section 4 and A.2: fairseq's `transformer_lm`, any kernel."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from value_aware_attention import kernels
from value_aware_attention.approximations import Exact
from value_aware_attention.kernels import Kernel
from value_aware_attention.models.trained_attention import TrainedAttention

__all__ = ["CausalLanguageModel", "sinusoidal_positions"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"


class CausalLanguageModel(nn.Module):
    """A pre-norm Transformer decoder whose every layer attends with `kernel`.

    Sinusoidal positions, embeddings times sqrt(width), ReLU, a norm after the last layer, input and
    output embeddings tied. At the paper's size (6 layers, width 512, 8 heads, feedforward 2048,
    vocabulary 267,744) it has 156,000,256 parameters.
    """

    attention: TrainedAttention | None = None
    """What its layers attend with; None = exact attention."""
    checkpoint_activations: bool = False
    """Whether training keeps each layer's input alone and computes the rest again for gradients."""

    def __init__(
        self,
        *,
        vocabulary_size: int,
        layers: int,
        width: int,
        heads: int,
        feedforward: int,
        kernel: Kernel,
        dropout: float,
    ) -> None:
        super().__init__()
        if width % heads or width % 2:
            raise ValueError(f"width is {width}; it must be even and divisible by heads = {heads}")
        self.arguments = {
            "vocabulary_size": vocabulary_size,
            "layers": layers,
            "width": width,
            "heads": heads,
            "feedforward": feedforward,
            "dropout": dropout,
        }
        self.kernel = kernel
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            _Layer(width, heads, feedforward, kernel, dropout) for _ in range(layers)
        )
        self.final_norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def hidden(self, tokens: Int[Tensor, "batch N"]) -> Float[Tensor, "batch N width"]:
        """What the output embeddings are multiplied with: position n has seen tokens 0 .. n."""
        weight = self.embedding.weight
        width = weight.shape[1]
        positions = sinusoidal_positions(tokens.shape[1], width, device=weight.device)
        x = self.dropout(self.embedding(tokens) * math.sqrt(width) + positions.to(weight.dtype))
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return self.final_norm(x)

    def forward(self, tokens: Int[Tensor, "batch N"]) -> Float[Tensor, "batch N vocabulary"]:
        """Logits of the token after each position."""
        return nn.functional.linear(self.hidden(tokens), self.embedding.weight)

    @contextmanager
    def replaced_attention(
        self, approximation: nn.Module | Callable[[int], nn.Module]
    ) -> Iterator["CausalLanguageModel"]:
        """Within the context, every layer attends with `approximation`.

        It is a module, or a callable layer_index -> module. On exit, also after an exception, the
        model is as it was; contexts nest.
        """
        layers = self._attention_layers()
        before = [layer.method for layer in layers]
        after = [_method(approximation, index) for index in range(len(layers))]
        try:
            for layer, method in zip(layers, after, strict=True):
                layer.method = method
            yield self
        finally:
            for layer, method in zip(layers, before, strict=True):
                layer.method = method

    def attend_with(self, attention: TrainedAttention) -> "CausalLanguageModel":
        """Gives every layer its own module of `attention`, and returns the model.

        The modules are part of the model from then on: trained, counted, saved.
        """
        for index, layer in enumerate(self._attention_layers()):
            layer.method = attention(index)
        self.attention = attention
        return self

    def _attention_layers(self) -> list["_CausalAttention"]:
        return [module for module in self.modules() if isinstance(module, _CausalAttention)]

    def save(self, folder: Path) -> None:
        """Writes model.safetensors, and config.json with the arguments and the kernel.

        attention.json says what its layers attend with, where that is not exact attention.
        """
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.arguments, "kernel": _kernel_as_dict(self.kernel)}
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_file(self.state_dict(), folder / WEIGHTS)
        if self.attention is not None:
            self.attention.save(folder)

    @classmethod
    def load(
        cls, folder: Path, *, kernel: Kernel | None = None, vocabulary_size: int | None = None
    ) -> "CausalLanguageModel":
        """The model that `save` wrote, in evaluation mode.

        Raises FileNotFoundError where there is none, ValueError where the folder holds a model of
        another kernel or vocabulary than the ones given.
        """
        config = _read_config(folder)
        saved = _kernel_from_dict(config.pop("kernel"))
        if kernel is not None and saved != kernel:
            raise ValueError(f"{folder} holds a model with kernel {saved}, not {kernel}")
        if vocabulary_size not in (None, config["vocabulary_size"]):
            raise ValueError(
                f"{folder} holds a model with {config['vocabulary_size']} tokens, "
                f"the vocabulary has {vocabulary_size}"
            )
        with torch.device("meta"):  # no time spent on initial values that are thrown away
            model = cls(**config, kernel=saved)
        if attention := TrainedAttention.load(folder):
            model.attend_with(attention)
        model.load_state_dict(load_file(folder / WEIGHTS), assign=True)
        return model.eval()


class _Layer(nn.Module):
    def __init__(
        self, width: int, heads: int, feedforward: int, kernel: Kernel, dropout: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _CausalAttention(width, heads, kernel)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            _linear(width, feedforward), nn.ReLU(), _linear(feedforward, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class _CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int, kernel: Kernel) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        # Xavier over the stacked matrix is fairseq's gain of 1/sqrt(2) for each of q, k and v
        self.query_key_value = _linear(width, 3 * width)
        self.output = _linear(width, width)
        self.method: nn.Module = Exact()

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = self.method(query, key, value, kernel=self.kernel, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def sinusoidal_positions(
    length: int, width: int, *, device: torch.device | None = None
) -> Float[Tensor, "N width"]:
    """sin(n w_i) then cos(n w_i), w_i = 10000^(-i / (width/2 - 1)): fairseq's halves."""
    steps = torch.arange(width // 2, device=device, dtype=torch.float32)
    frequencies = torch.exp(steps * (-math.log(10000.0) / max(1, width // 2 - 1)))
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _method(approximation: nn.Module | Callable[[int], nn.Module], layer: int) -> nn.Module:
    return approximation if isinstance(approximation, nn.Module) else approximation(layer)


def _kernel_as_dict(kernel: Kernel) -> dict[str, Any]:
    return {"name": type(kernel).__name__, "arguments": asdict(kernel)}  # type: ignore[call-overload]


def _kernel_from_dict(config: dict[str, Any]) -> Kernel:
    if config["name"] not in kernels.__all__:
        raise ValueError(f"kernel {config['name']!r} is not one of value_aware_attention.kernels")
    kernel: Kernel = getattr(kernels, config["name"])(**config["arguments"])
    return kernel


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing: train the model first")
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    if "kernel" not in config:
        raise ValueError(f"{folder / CONFIG} does not describe a CausalLanguageModel")
    return config
