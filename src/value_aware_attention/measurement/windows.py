"""Any trained language model or encoder on token windows: its end metric, its layers' inputs."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from value_aware_attention.call import Call
from value_aware_attention.hugging_face import attention_layers, own_kernel, replace_attention
from value_aware_attention.hugging_face.checkpoints import auto_class
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.masking import mask_tokens
from value_aware_attention.measurement.recorded import recording
from value_aware_attention.measurement.tasks import Layerwise, UnitSums, exactly
from value_aware_attention.measurement.text_windows import TextWindows

__all__ = [
    "CausalWindows",
    "EncoderWindows",
    "MaskedWindows",
    "WindowTask",
    "positions",
    "task_class",
]

MASKED_FRACTION = 0.15


class WindowTask(ABC):
    """A trained model and the windows of text it reads, one at a time.

    `kernel` None is the model's own. A window's targets are scored exactly once; that of window i
    depends on `seed` and the window alone.
    """

    metric: str
    unit = "window"
    reads_on = False
    """A model that predicts what comes next: its windows are not closed by special tokens."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        windows: TextWindows,
        seed: int,
        kernel: Kernel | None,
    ) -> None:
        self.model = model.eval()
        self.tokenizer, self.windows = tokenizer, windows
        self.seed, self.given_kernel = seed, kernel
        self.kernel = kernel or own_kernel(model)
        self.length, self.parts = windows.length, len(windows)
        self.device = next(model.parameters()).device

    @abstractmethod
    def score(self, method: Layerwise, window: int) -> tuple[float, int]:
        """The summed loss over the targets of one window with attention replaced; their number."""

    @torch.inference_mode()
    def run(self, method: Layerwise | None, part: int = 0) -> UnitSums:
        """The end metric's sums on one window; None = exact attention."""
        total, count = self.score(method or exactly, part)
        return UnitSums(np.array([total], dtype=np.float64), np.array([count], dtype=np.float64))

    @torch.inference_mode()
    def layer_calls(self, part: int = 0) -> list[Call]:
        """What each layer's attention is called with when the model reads a window.

        A layer that the model runs several times (ALBERT) counts as several. Raises ValueError,
        with the layer, where exact attention gives what is not a number.
        """
        with recording(self.model, kernel=self.given_kernel) as calls:
            output = self.read(self.inputs(part))
        if output.isnan().any():
            lost = [i for i, call in enumerate(calls) if call.query.isnan().any()]
            layer = max(lost[0] - 1, 0) if lost else len(calls) - 1
            raise ValueError(
                f"the model's output is not a number from layer {layer} on: scores of its "
                f"attention overflow, or weights are no numbers"
            )
        return calls

    def first_tokens(self, count: int, unit: int = 0) -> list[int]:
        return self.windows.tokens[unit, :count].tolist()

    @cached_property
    def head_dim(self) -> int:
        return self.layer_calls()[0].value.shape[-1]

    def digest(self, part: int) -> str:
        """Hash of everything that the window alone decides: its tokens and its masks."""
        parts = (self.windows.tokens[part], self.inputs(part).cpu())
        return sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()

    def inputs(self, window: int) -> Int[Tensor, "1 L"]:
        """What the model reads for a window."""
        return self.windows.tokens[window : window + 1].to(self.device)

    def read(self, tokens: Int[Tensor, "1 L"]) -> Tensor:
        """The model's output: logits, or hidden states where it has no head."""
        return self.model(input_ids=tokens, **self._options(tokens))[0]

    def attending(self, method: Layerwise) -> AbstractContextManager[Any]:
        """Within the context, layer i attends with method(i), under this task's kernel."""
        return replace_attention(self.model, method, kernel=self.given_kernel)

    def _options(self, tokens: Tensor) -> dict[str, Any]:
        # A model that finds pads in the tokens would hide them; windows have none.
        return {"attention_mask": torch.ones_like(tokens)}


class MaskedWindows(WindowTask):
    """Masked LM: 15% of each window's ordinary tokens are hidden, by (seed, place in the text)."""

    metric = "error"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.tokenizer.mask_token_id is None:
            raise ValueError("the tokenizer has no mask token; a masked language model needs one")
        rows = [self._masked(window) for window in range(len(self.windows))]
        self.masked, self.labels = (torch.stack(parts) for parts in zip(*rows, strict=True))

    def _masked(self, window: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        place = self.windows.places[window]
        seed = torch.randint(2**62, (place + 1,), generator=generator)[place]
        return mask_tokens(
            self.windows.tokens[window],
            generator=torch.Generator().manual_seed(int(seed)),
            mask_token=self.tokenizer.mask_token_id,
            special_tokens=self.tokenizer.all_special_ids,
            vocabulary_size=min(len(self.tokenizer), vocabulary_size(self.model)),
            fraction=MASKED_FRACTION,
        )

    def inputs(self, window: int) -> Int[Tensor, "1 L"]:
        return self.masked[window : window + 1].to(self.device)

    def score(self, method: Layerwise, window: int) -> tuple[float, int]:
        """Wrong predictions among the hidden tokens."""
        with self.attending(method):
            logits = self.read(self.inputs(window))[0]
        labels = self.labels[window]
        asked = labels >= 0
        predicted = logits[asked.to(logits.device)].argmax(dim=-1).cpu()
        return float((predicted != labels[asked]).sum()), int(asked.sum())


class CausalWindows(WindowTask):
    """Causal LM: nats of every token of a window after its first, given those before it."""

    metric = "perplexity"
    reads_on = True

    def score(self, method: Layerwise, window: int) -> tuple[float, int]:
        """Summed nats."""
        tokens = self.inputs(window)
        with self.attending(method):
            logits = self.read(tokens)[0, :-1].float()
        nats = cross_entropy(logits, tokens[0, 1:], reduction="none").double().sum()
        return float(nats), self.length - 1

    def _options(self, tokens: Tensor) -> dict[str, Any]:
        return super()._options(tokens) | {"use_cache": False}


class EncoderWindows(WindowTask):
    """A model without a language-model head: cosine of its last hidden states to the exact ones.

    The mean over tokens; 1 = exact, higher is better.
    """

    metric = "cosine"

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.exact: dict[int, Tensor] = {}

    def score(self, method: Layerwise, window: int) -> tuple[float, int]:
        """Summed cosine."""
        exact, approximate = self._exact_states(window), self._states(method, window)
        cosine = cosine_similarity(approximate, exact, dim=-1)
        return float(cosine.sum()), self.length

    def _exact_states(self, window: int) -> Float[Tensor, "L width"]:
        if window not in self.exact:
            self.exact[window] = self._states(exactly, window)
        return self.exact[window]

    def _states(self, method: Layerwise, window: int) -> Float[Tensor, "L width"]:
        with self.attending(method):
            return self.read(self.inputs(window))[0].double()


def task_class(model: PreTrainedModel) -> type[WindowTask]:
    """Which metric fits a model: by the head of its class, as transformers lists them.

    Raises ValueError for an encoder with a decoder, and for a model whose attention cannot be
    replaced.
    """
    attention_layers(model)
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder with a decoder; give a masked or a causal "
            f"language model, or an encoder alone"
        )
    tasks: dict[Any, type[WindowTask]] = {
        AutoModelForMaskedLM: MaskedWindows,
        AutoModelForCausalLM: CausalWindows,
    }
    return tasks.get(auto_class(model.config, type(model).__name__), EncoderWindows)


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens a model knows. Raises ValueError for one that reads no text alone."""
    with suppress(NotImplementedError):  # as of a model of images
        size = getattr(model.get_input_embeddings(), "num_embeddings", None)
        if isinstance(size, int) and model.main_input_name == "input_ids":
            return size
    raise ValueError(
        f"{type(model).__name__} reads no text, or not text alone; give a language model or an "
        f"encoder of text"
    )


def positions(model: PreTrainedModel) -> int | None:
    """The longest sequence a model can read, special tokens included; None = no limit is known."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        if limit is not None and padding is not None and hasattr(module, "position_embeddings"):
            return limit - padding - 1  # RoBERTa and its kin count from padding_idx + 1
    return limit
