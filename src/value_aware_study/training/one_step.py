"""One optimizer step: does a model of this size train on this machine, and at what cost?"""

import resource
import sys
import time

import torch

from value_aware_study.data.batches import Batch
from value_aware_study.training.modules import LanguageModeling


def one_step(module: LanguageModeling, batch: Batch) -> dict[str, float]:
    """Measures loss (nats), seconds and peak memory (GiB) of a training step on `batch`.

    The module and the batch are on the same device. Memory is that of the GPU, or the most the
    process ever held. Raises ValueError where the loss or a parameter is not finite afterwards.
    """
    on_gpu = module.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(module.device)
    optimizer = module.train().configure_optimizers()["optimizer"]
    start = time.perf_counter()
    loss = module.loss(batch)
    loss.backward()
    optimizer.step()
    value = float(loss.detach())
    if on_gpu:
        torch.cuda.synchronize(module.device)
    seconds = time.perf_counter() - start
    finite = all(bool(p.isfinite().all()) for p in module.parameters())
    if not (finite and torch.isfinite(loss)):
        raise ValueError(f"the loss is {value} and the parameters are not all finite after a step")
    memory = torch.cuda.max_memory_allocated(module.device) if on_gpu else _peak_resident_bytes()
    return {"loss": value, "seconds": seconds, "peak_memory_gib": memory / 2**30}


def _peak_resident_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
