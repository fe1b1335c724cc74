"""Finds the convex combination of at most r values closest to an attention output, for every r.

The objective is section 3's, min over C_r of ||o - o~||^2. Both engines, compiled.py and
batched.py, grow the set key by key, each time with the best weights on it, so one run covers all
sizes. r = 1 is optimal, as are all r that leave no error, and r = 2 if the "best" search tries all
pairs (pairs.py). Otherwise the result is the best found, an upper bound on the optimal error. Rows
that fp32 does not resolve (`unresolved`) are solved in fp64.

If a problem has a `mean`, it is searched without and with it, and the better result is kept. The
mean is the key `problem.mean_key` among the indices.
"""

from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from value_aware_attention.approximations.closest_combination import batched, compiled, pairs
from value_aware_attention.approximations.closest_combination.problem import (
    SEARCHES,
    Problem,
    flatten,
    unresolved,
)
from value_aware_attention.call import uncompiled

__all__ = [
    "ENGINES",
    "SEARCHES",
    "Problem",
    "engine",
    "flatten",
    "mean_apart",
    "optimal_weights",
    "pairs",
    "solve",
    "solve_path",
    "tries_all_pairs",
    "unresolved",
]

ITERATIONS = 100
"""Limit on the iterations of non-negative least squares, per key"""

ENGINES: dict[str, ModuleType] = {"compiled": compiled, "torch": batched}


def engine(device: str = "cpu") -> str:
    """Returns the default engine of a device, a key of ENGINES.

    It is "compiled" on a CPU if the library can be built, else "torch"; they round differently.
    """
    on_cpu = torch.device(device).type == "cpu"
    return "compiled" if on_cpu and compiled.library() is not None else "torch"


@uncompiled  # a traced tensor has no memory for native code to read
def solve(
    problem: Problem, r: int, search: str, engine: str | None = None
) -> tuple[Int[Tensor, "H N R"], Float[Tensor, "H N R"]]:
    """Returns indices and weights of min(r, M) candidates; at most V + 1 weights are nonzero."""
    keys, width = problem.value.shape[1:]
    slots = min(r, keys, width + 1)
    if r == 2 and tries_all_pairs(problem.value, search):
        return pairs.solve(problem)
    effort = search if slots <= width else "fast"  # V + 1 keys reach the output anyway
    solution = _engine(problem, engine).search(problem, slots, effort, 1)
    indices, weights, undone = solution[0][:, :, 0], solution[1][:, :, 0], solution[2]
    if slots > width:
        _finish(problem, indices, weights, undone)
    indices, weights = (pad(x, (0, min(r, keys) - slots)) for x in (indices, weights))
    for at, exact in problem.in_fp64(undone):
        chosen, mass = solve(exact, r, search, engine)
        again = undone[at][..., None]
        indices[at] = chosen.where(again, indices[at])
        weights[at] = mass.to(weights.dtype).where(again, weights[at])
    return indices, weights


@uncompiled
def solve_path(
    problem: Problem, r: int, search: str, engine: str | None = None
) -> Float[Tensor, "H N R"]:
    """Returns ||o - o~||^2 of the best sets of sizes 1 to r, recomputed from their weights."""
    keys, width = problem.value.shape[1:]
    slots = min(r, keys, width + 1)
    indices, weights, undone = _engine(problem, engine).search(problem, slots, search, slots)
    if slots > width:
        _finish(problem, indices[:, :, -1], weights[:, :, -1], undone)
    errors = _errors(problem, indices, weights)
    is_filled = weights.sum(-1) > 0
    if slots > 1 and tries_all_pairs(problem.value, search):
        of_pairs = _errors(problem, *pairs.solve(problem))
        errors[..., 1] = torch.minimum(errors[..., 1], of_pairs)
    errors = errors.where(is_filled | ~is_filled.any(-1, keepdim=True), torch.inf).cummin(-1).values
    unit = problem.unit[:, None, None]
    errors = errors * unit * unit  # unit^2 may overflow although the error does not
    errors = torch.cat([errors, errors[..., -1:].expand(*errors.shape[:-1], r - slots)], dim=-1)
    for at, exact in problem.in_fp64(undone):
        solved = solve_path(exact, r, search, engine).to(errors.dtype)
        errors[at] = solved.where(undone[at][..., None], errors[at])
    return errors


def mean_apart(
    problem: Problem, indices: Int[Tensor, "*rows R"], weights: Float[Tensor, "*rows R"]
) -> tuple[Int[Tensor, "*rows R"], Float[Tensor, "*rows W"]]:
    """Moves the weight of the mean into a last column, beyond the indices."""
    is_mean = indices == problem.mean_key
    mean_weight = (weights * is_mean).sum(dim=-1, keepdim=True)
    indices, weights = indices.masked_fill(is_mean, 0), weights.masked_fill(is_mean, 0.0)
    return indices, torch.cat([weights, mean_weight], dim=-1)


def tries_all_pairs(value: Float[Tensor, "*batch M V"], search: str) -> bool:
    """Returns whether a search tries all pairs of these values, so that r = 2 is optimal."""
    keys, width = value.shape[-2:]
    return search == "best" and width > 1 and 2 <= keys <= pairs.PAIR_KEYS


@uncompiled
def optimal_weights(
    problem: Problem, indices: Int[Tensor, "H N R"], engine: str | None = None
) -> Float[Tensor, "H N R"]:
    """Solves for the closest weights on given keys; hidden or repeated keys get weight 0."""
    weights, undone = _engine(problem, engine).weigh(problem, indices)
    for at, exact in problem.in_fp64(undone):
        solved = optimal_weights(exact, indices[at], engine).to(weights.dtype)
        weights[at] = solved.where(undone[at][..., None], weights[at])
    return weights


def _engine(problem: Problem, name: str | None) -> ModuleType:
    """Returns the engine of that name; None is the compiled one if it runs, else the torch one."""
    if name == "compiled" and problem.value.device.type != "cpu":
        raise ValueError(f"engine is 'compiled' on {problem.value.device}; it needs the CPU")
    return ENGINES[name or engine(problem.value.device.type)]


def _errors(
    problem: Problem, indices: Int[Tensor, "H N *sizes R"], weights: Float[Tensor, "H N *sizes R"]
) -> Float[Tensor, "H N *sizes"]:
    """Computes the errors of choices without gathering values."""
    (heads, keys), shape = (
        problem.value.shape[:2],
        (*indices.shape[:2], *[1] * (indices.dim() - 3), -1),
    )
    output = problem.output.view(shape)
    if problem.mean is not None:
        indices, weights = mean_apart(problem, indices, weights)
        weights, share = weights.tensor_split([-1], dim=-1)
        output = output - share * problem.mean.view(shape)
    first = (keys * torch.arange(heads, device=indices.device)).view(-1, *[1] * (indices.dim() - 1))
    bags = embedding_bag(
        (indices + first).flatten(0, -2),
        problem.value.flatten(0, 1),
        per_sample_weights=weights.flatten(0, -2).contiguous(), mode="sum",
    )  # fmt: skip
    return bags.unflatten(0, indices.shape[:-1]).sub_(output).square_().sum(-1)


def _finish(problem: Problem, indices: Tensor, weights: Tensor, undone: Tensor) -> None:
    """Solves rows again that rounding stopped too early: V + 1 keys can reach every output."""
    left = _errors(problem, indices, weights)
    for head, row in ((left > 25 * problem.zero()) & ~undone).nonzero().tolist():
        try:
            keys, mass = _exact(problem.value[head], problem.weights[head, row])
        except RuntimeError:  # not solved within ITERATIONS: keep the result of the search
            continue
        indices[head, row] = pad(keys, (0, indices.shape[-1] - len(keys)))
        weights[head, row] = pad(mass, (0, weights.shape[-1] - len(mass)))


def _exact(value: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Solves one row by non-negative least squares; its active set is linearly independent."""
    alive = alpha.nonzero()[:, 0]
    points = value[alive].double()
    share = alpha[alive].double() / alpha[alive].double().sum()
    points = points - share @ points
    scale = points.norm(dim=-1).max().clamp_min(torch.finfo(torch.float64).tiny)
    lifted = torch.cat([points / scale, torch.ones_like(points[:, :1])], dim=1)
    target = torch.zeros_like(lifted[0])
    target[-1] = 1
    from scipy.optimize import nnls  # takes a second to import, and few calls need it

    limit = ITERATIONS * len(alive)  # scipy's default, 3 per key, was too few for a trained model
    solution, _ = nnls(lifted.T.cpu().numpy(), target.cpu().numpy(), maxiter=limit)
    mass = torch.from_numpy(solution).to(alpha.device)
    used = mass.nonzero()[:, 0]
    return alive[used], (mass[used] / mass.sum()).to(alpha.dtype)
