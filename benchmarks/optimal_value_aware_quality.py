"""Measures how close each search comes to the optimum, on the attention of a pretrained encoder.

    python -m benchmarks.optimal_value_aware_quality            # some minutes on two cores
    python -m benchmarks.optimal_value_aware_quality --quick    # one kernel; writes nothing

With 18 keys, at most 5 kept, searches are compared with brute force over all supports. With 512
keys they are compared with the smallest error of the three searches and a beam of 64, and at r = 2
also with the best of all pairs. Writes results/benchmarks/optimal_value_aware_quality.json and .md.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

from benchmarks.record import finish, header, markdown, options, setting
from tests.reference import solver as reference_solver
from value_aware_attention.approximations import OptimalValueAware
from value_aware_attention.approximations.closest_combination import SEARCHES, batched
from value_aware_attention.attention import attention_weights
from value_aware_attention.call import Call
from value_aware_attention.hugging_face import own_kernel
from value_aware_attention.kernels import Kernel
from value_aware_attention.measurement.measure import weights_hash
from value_aware_attention.measurement.task import Task
from value_aware_attention.measurement.windows import text_windows, windows_task
from value_aware_attention.models.checkpoints import load_model, load_tokenizer
from value_aware_study.evaluation.pretrained import weights_of

LENGTH, WINDOWS = 512, 8
FEW_KEYS, FEW_QUERIES = 18, 32
WIDE_BEAM = 64
Inputs = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    quick = options(__doc__).parse_args().quick
    with initialize_config_dir(str(Path("conf").resolve()), version_base=None):
        cfg = compose("pretrained").pretrained
    task = encoder(cfg)
    calls = [
        Call.joined(layer) for layer in zip(*map(task.layer_calls, range(task.parts)), strict=True)
    ]
    kernels = [own_kernel(task.model), *map(instantiate, cfg.probe.kernels)]
    record = header("optimal_value_aware_quality") | described(cfg, task, calls)
    record |= {"few_keys": {}, "all_keys": {}}
    for kernel in tqdm(kernels[: 1 if quick else None]):
        name = type(kernel).__name__.lower()
        record["few_keys"][name] = against_brute_force(few_keys(calls), kernel)
        record["all_keys"][name] = against_best_known(all_keys(calls), kernel)
    finish("optimal_value_aware_quality", record, page(record), keep=not quick)


def encoder(cfg: DictConfig) -> Task:
    """Loads the pretrained encoder, on windows of its texts."""
    folder = str(weights_of(cfg))
    tokenizer = load_tokenizer(folder)
    texts = [document.text for source in cfg.texts.values() for document in instantiate(source)]
    read = text_windows(texts, tokenizer, length=LENGTH, windows=WINDOWS)
    model = load_model(folder)
    return windows_task(model, tokenizer, read)


def described(cfg: DictConfig, task: Task, calls: list[Call]) -> dict[str, Any]:
    """Describes the model and its text."""
    batch, heads, keys, head_dim = calls[0].key.shape
    return {
        "model": cfg.model,
        "package": cfg.requirement,
        "weights_sha256": weights_hash(task.model),
        "layers": len(calls),
        "heads": heads,
        "head_dim": head_dim,
        "text": f"{cfg.description}: {batch} windows of {keys} tokens",
    }


def all_keys(calls: list[Call]) -> Inputs:
    """Takes a query of every layer and head with all keys of its window: (72, 1, D), (72, M, D)."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for call in calls:
        heads, keys = call.key.shape[1:3]
        row = torch.randint(keys, (heads,), generator=generator)
        query = call.query[0, torch.arange(heads), row][:, None]
        parts.append((query, call.key[0], call.value[0]))
    query, key, value = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
    return query, key, value


def few_keys(calls: list[Call]) -> Inputs:
    """Takes runs of 18 tokens from random layers, windows and heads, one query each."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(FEW_QUERIES):
        call = calls[_below(len(calls), generator)]
        batch, heads, keys = call.key.shape[:3]
        at = _below(batch, generator), _below(heads, generator)
        first = _below(keys - FEW_KEYS, generator)
        run = slice(first, first + FEW_KEYS)
        row = first + _below(FEW_KEYS, generator)
        parts.append((call.query[at][row : row + 1], call.key[at][run], call.value[at][run]))
    query, key, value = (torch.stack(tensors).double() for tensors in zip(*parts, strict=True))
    return query, key, value


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))


def errors(
    inputs: Inputs, kernel: Kernel, r: int, search: str, engine: str | None = None
) -> Tensor:
    method = OptimalValueAware(r, search, engine)
    return method.select(*inputs, kernel=kernel).error[:, 0]


def outputs(inputs: Inputs, kernel: Kernel) -> Tensor:
    query, key, value = inputs
    return (attention_weights(query, key, kernel=kernel) @ value)[:, 0]


def against_brute_force(inputs: Inputs, kernel: Kernel) -> dict[str, dict[str, float]]:
    """Computes the geometric mean of error / optimum for each size and search."""
    record = {}
    exact = outputs(inputs, kernel)
    for r in (2, 3, 4, 5):
        pairs = list(zip(inputs[2], exact, strict=True))
        best = torch.stack(
            [_squared(v, o, reference_solver.brute_force(v, o, r)) for v, o in pairs]
        )
        by_search = {search: errors(inputs, kernel, r, search) for search in SEARCHES}
        record[str(r)] = {
            search: float((error / best).log().mean().exp()) for search, error in by_search.items()
        }
    return record


def _squared(value: Tensor, output: Tensor, weights: Tensor) -> Tensor:
    return reference_solver.squared_error(weights, value, output)


def against_best_known(inputs: Inputs, kernel: Kernel) -> dict[str, dict[str, float]]:
    """Computes mean error over that of the best known, and relative errors, by size and search."""
    record = {}
    exact = outputs(inputs, kernel)
    for r in (2, 4, 8, 16):
        by_name = {search: errors(inputs, kernel, r, search) for search in SEARCHES}
        with patch.object(batched, "BEAM", WIDE_BEAM):
            by_name[f"beam of {WIDE_BEAM}"] = errors(inputs, kernel, r, "best", "torch")
        if r == 2:
            pairs = zip(inputs[2], exact, strict=True)
            best = [_squared(v, o, reference_solver.all_pairs(v, o)) for v, o in pairs]
            by_name["all pairs"] = torch.stack(best)
        best_known = torch.stack(list(by_name.values())).amin(0).mean()
        record[str(r)] = {name: float(error.mean() / best_known) for name, error in by_name.items()}
        record[str(r)]["relative output error of the best"] = float(
            best_known / exact.square().sum(-1).mean()
        )
    return record


def page(record: dict[str, Any]) -> str:
    """Renders the record as Markdown."""
    return (
        "# optimal-v-aware-r: error over the optimum\n\n"
        f"{record['model']}, heads of {record['head_dim']} numbers, {record['text']}, fp64; "
        f"polynomial (degree 2) and elu in place of its own kernel. {setting(record)}\n\n"
        f"## {FEW_KEYS} keys, {FEW_QUERIES} queries a kernel: geometric mean over brute force\n\n"
        f"{_table(record['few_keys'])}\n\n"
        "## All keys, one query of every layer and head: mean over the best known\n\n"
        f"Best known: the smallest of the searches and a beam of {WIDE_BEAM} on the same queries; "
        f"at r = 2 also of all pairs, which is the optimum.\n\n{_table(record['all_keys'])}\n"
    )


def _table(kernels: dict[str, dict[str, dict[str, float]]]) -> str:
    columns = list(
        dict.fromkeys(n for sizes in kernels.values() for x in sizes.values() for n in x)
    )
    rows = [
        [kernel, r, *(f"{values[name]:.3g}" if name in values else "" for name in columns)]
        for kernel, sizes in kernels.items()
        for r, values in sizes.items()
    ]
    return markdown(["kernel", "r", *columns], rows)


if __name__ == "__main__":
    main()
