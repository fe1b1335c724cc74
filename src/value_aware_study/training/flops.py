"""Floating-point operations of a training step, and what a GPU could do in its time at best."""

from collections.abc import Iterable

from torch import nn

__all__ = ["dense_parameters", "peak_flops", "training_flops"]

PEAKS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""bf16 and fp16 products a second by a part of torch's name of the device, the longer one first.

From NVIDIA's data sheets, without sparsity. Lightning has such a table too, but it counts sparsity
for some GPUs and not for others, and does not find an H200 by the name torch gives.
"""


def training_flops(
    tokens: float, *, parameters: int, layers: int, width: int, length: int
) -> float:
    """Computes tokens (6 N + 12 layers width length), both passes (Chowdhery et al. 2022, App. B).

    A multiply-add is two operations and the backward pass twice the forward one. N = `parameters`
    are the weights that every token is multiplied with: the output layer's, not the embeddings,
    which are looked up. Attention is counted as exact and in full, also where a causal mask hides
    half of it or an approximation leaves out more; recomputed activations are not counted.
    """
    return tokens * (6.0 * parameters + 12.0 * layers * width * length)


def dense_parameters(modules: Iterable[nn.Module]) -> int:
    """Counts the weights of all linear layers, biases left out."""
    linear = (m for module in modules for m in module.modules() if isinstance(m, nn.Linear))
    return sum(layer.weight.numel() for layer in linear)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Looks up a named GPU's peak operations a second; None where that is not known.

    `precision` is Lightning's: known are those whose products are bf16 or fp16.
    """
    if not precision.startswith(("bf16", "16")):
        return None
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
