"""Builds, saves and loads RoBERTa with non-exact attention."""

from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import RobertaConfig, RobertaForMaskedLM

from value_aware_attention.approximations.approximation import Approximation
from value_aware_attention.hugging_face.attending import set_attention
from value_aware_attention.kernels import Exponential, Kernel
from value_aware_attention.models.long_roberta import save_folded
from value_aware_attention.models.mixing import Mixing, MixingSublayer
from value_aware_attention.models.trained_attention import TrainedAttention

MODEL_FILE, METHOD_WEIGHTS = "model.safetensors", "attention.safetensors"


def attend_with(model: RobertaForMaskedLM, attention: TrainedAttention) -> RobertaForMaskedLM:
    """Gives every layer of `model` its own module of `attention`, and returns the model.

    The modules become part of the model: they are trained, counted, in its state, and named in its
    config. A mixing replaces the whole self-attention sublayer except its norm.
    """
    model.config.trained_attention = asdict(attention)
    if not attention.is_mixing:
        set_attention(model, attention, kernel=masked_kernel(attention))
        return model
    for index, layer in enumerate(model.roberta.encoder.layer):
        layer.attention = MixingSublayer(
            attention(index),  # type: ignore[arg-type]
            layer.get_submodule("attention.output.LayerNorm"),  # type: ignore[arg-type]
        )
    return model


def masked_kernel(attention: TrainedAttention) -> Kernel | None:
    """Returns the kernel that `attention` needs; None for RoBERTa's exponential kernel."""
    kernels = attention.kernels
    return None if not kernels or Exponential in kernels else kernels[0]()


def save_masked(model: RobertaForMaskedLM, folder: Path) -> None:
    """Writes an ordinary Hugging Face folder (`save_folded`).

    Parameters of a trained attention, which is not ordinary, go to attention.safetensors in it.
    """
    prefixes = tuple(
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, (Approximation, Mixing))
    )
    state = model.state_dict()
    of_methods = {name: state[name].contiguous() for name in state if name.startswith(prefixes)}
    save_folded(model, folder, without=of_methods)
    if TrainedAttention.of(model.config):
        save_file(of_methods, folder / METHOD_WEIGHTS)


def load_masked(folder: Path | str) -> RobertaForMaskedLM:
    """Loads a model written by `save_masked`, with its trained attention, in evaluation mode.

    Raises OSError if there is none, ValueError if its files do not match.
    """
    config = RobertaConfig.from_pretrained(folder)
    attention = TrainedAttention.of(config)
    if attention is None:
        if (Path(folder) / METHOD_WEIGHTS).is_file():
            raise ValueError(f"the config in {folder} names no attention: train the model again")
        return RobertaForMaskedLM.from_pretrained(folder, use_safetensors=True)
    # from_pretrained would report weights that a mixing does not have as missing.
    model = attend_with(RobertaForMaskedLM(config), attention)
    missing, unexpected = model.load_state_dict(
        load_file(Path(folder) / MODEL_FILE) | load_file(Path(folder) / METHOD_WEIGHTS),
        strict=False,
    )
    absent = set(missing) - set(model.all_tied_weights_keys)
    if absent or unexpected:
        names = ", ".join(sorted(absent | set(unexpected)))
        raise ValueError(f"the weights in {folder} are not those of {attention}: {names}")
    return model.eval()
