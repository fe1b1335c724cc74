"""Builds the causal language model of section 4 and A.2, fairseq's `transformer_lm`, any kernel."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from value_aware_attention.approximations import Exact
from value_aware_attention.hugging_face.attending import own_attention
from value_aware_attention.kernels import KERNELS, Kernel
from value_aware_attention.models.trained_attention import TrainedAttention


class CausalLanguageModelConfig(PreTrainedConfig):
    """Holds sizes, kernel and attention of a `CausalLanguageModel` as plain values.

    `kernel` is stored as the name and arguments of its class, `trained_attention` as its target and
    arguments; None = exact attention. Sizes are also available under transformers' names
    (`hidden_size`). Raises ValueError unless `width` is even and divisible by `heads`.
    """

    model_type = "value_aware_causal_lm"
    has_no_defaults_at_init = True
    attribute_map = {  # noqa: RUF012 (transformers' convention)
        "vocab_size": "vocabulary_size",
        "num_hidden_layers": "layers",
        "hidden_size": "width",
        "num_attention_heads": "heads",
        "intermediate_size": "feedforward",
    }

    def __init__(
        self,
        *,
        vocabulary_size: int,
        layers: int,
        width: int,
        heads: int,
        feedforward: int,
        kernel: Kernel | Mapping[str, Any],
        dropout: float,
        trained_attention: TrainedAttention | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if width % heads or width % 2:
            raise ValueError(f"width is {width}; it must be even and divisible by heads = {heads}")
        self.vocabulary_size = vocabulary_size
        self.layers, self.width, self.heads, self.feedforward = layers, width, heads, feedforward
        if not isinstance(kernel, Mapping):
            kernel = {
                "name": type(kernel).__name__,
                "arguments": asdict(kernel),  # type: ignore[call-overload]
            }
        self.kernel = kernel
        self.dropout = dropout
        if isinstance(trained_attention, TrainedAttention):
            trained_attention = asdict(trained_attention)
        self.trained_attention = trained_attention
        super().__init__(**options)

    @classmethod
    def get_config_dict(cls, *names: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads config.json; ValueError if it is not that of a `CausalLanguageModel`."""
        config, rest = super().get_config_dict(*names, **options)
        if config.get("model_type") != cls.model_type:
            raise ValueError(
                f"{names[0]} does not describe a CausalLanguageModel of model_type "
                f"{cls.model_type}: train the model again"
            )
        return config, rest


class CausalLanguageModel(PreTrainedModel):
    """Models text with a pre-norm Transformer decoder; all layers attend with `kernel`.

    It has sinusoidal positions, embeddings times sqrt(width), ReLU, a norm after the last layer,
    and tied input and output embeddings. At the paper's size (6 layers, width 512, 8 heads,
    feedforward 2048, vocabulary 267,744) it has 156,000,256 parameters.

    It is built from a config or, with random weights, from the config's arguments.
    """

    config_class = CausalLanguageModelConfig
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"

    def __init__(self, config: CausalLanguageModelConfig | None = None, **arguments: Any) -> None:
        config = config or CausalLanguageModelConfig(**arguments)
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocabulary_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *names: Any, **options: Any) -> "CausalLanguageModel":
        """Loads what `save_pretrained` wrote, in evaluation mode; only safetensors are read."""
        return super().from_pretrained(*names, **options | {"use_safetensors": True})

    def hidden(
        self, input_ids: Int[Tensor, "batch N"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch N width"]:
        """Computes the final hidden states: position n has seen tokens 0 .. n."""
        weight = self.embedding.weight
        width = weight.shape[1]
        positions = sinusoidal_positions(input_ids.shape[1], width, device=weight.device)
        x = self.embedding(input_ids) * math.sqrt(width)
        x = self.dropout(x + positions.to(weight.dtype))
        mask = (
            None  # a causal mask needs no matrix
            if attention_mask is None
            else create_causal_mask(self.config, x, attention_mask, past_key_values=None)
        )
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_norm(x)

    def forward(
        self,
        input_ids: Int[Tensor, "batch N"],
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Returns logits (batch, N, vocabulary) of the token after each position.

        `attention_mask` is (batch, N) with 0 = padding, as in transformers. There is no cache.
        """
        return CausalLMOutput(
            logits=nn.functional.linear(
                self.hidden(input_ids, attention_mask), self.embedding.weight
            )
        )

    def init_weights(self) -> None:
        """Does nothing: the modules' constructors have initialised the weights."""

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing; transformers calls it if a checkpoint lacks weights."""
        raise ValueError(
            f"{self.name_or_path} lacks weights of {type(module).__name__}: train the model again"
        )


class _Layer(GradientCheckpointingLayer):
    def __init__(self, config: CausalLanguageModelConfig, index: int) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _CausalAttention(config, index)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            _linear(width, config.feedforward), nn.ReLU(), _linear(config.feedforward, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.feedforward(self.feedforward_norm(x)))


class _CausalAttention(nn.Module):
    is_causal = True

    def __init__(self, config: CausalLanguageModelConfig, index: int) -> None:
        super().__init__()
        self.config, self.heads = config, config.heads
        name, kernels = config.kernel["name"], {kernel.__name__: kernel for kernel in KERNELS}
        if name not in kernels:
            raise ValueError(f"kernel {name!r} is not one of value_aware_attention.kernels")
        self.kernel: Kernel = kernels[name](**config.kernel["arguments"])
        # Xavier on the stacked matrix equals fairseq's gain of 1/sqrt(2) for each of q, k and v
        self.query_key_value = _linear(config.width, 3 * config.width)
        self.output = _linear(config.width, config.width)
        attention = TrainedAttention.of(config)
        self.approximation: nn.Module = attention(index) if attention else Exact()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, own_attention
        )
        mixed, _ = attend(self, query, key, value, mask)
        return self.output(mixed.flatten(2))


def sinusoidal_positions(
    length: int, width: int, *, device: torch.device | None = None
) -> Float[Tensor, "N width"]:
    """Computes sin(n w_i), then cos(n w_i), as fairseq does; w_i = 10000^(-i / (width/2 - 1))."""
    steps = torch.arange(width // 2, device=device, dtype=torch.float32)
    frequencies = torch.exp(steps * (-math.log(10000.0) / max(1, width // 2 - 1)))
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


AutoConfig.register(CausalLanguageModelConfig.model_type, CausalLanguageModelConfig)
AutoModelForCausalLM.register(CausalLanguageModelConfig, CausalLanguageModel)
