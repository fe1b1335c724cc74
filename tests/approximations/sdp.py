"""A certified lower bound on the error of every combination of at most r values."""

import clarabel
import numpy as np
from scipy import sparse
from torch import Tensor


def lower_bound(value: Tensor, output: Tensor, r: int) -> float:
    """No convex combination of at most r values is closer to the output than this, squared.

    With w_i = v_i - o, W_ij = <w_i, w_j> and weights b on the set z in {0, 1}^M, the error is
    <W, X> at X = b b'. Letting X be any matrix with

        X psd, X >= 0, 1'X1 = 1, b = X1, b_i^2 <= X_ii z_i, b <= z <= 1, sum z <= r

    can only lower the minimum. It is read off the dual solution y: for every feasible x,
    c'x >= -h'y + (c + G'y)'x and |x_k| <= 1, so that the solver's tolerance makes it smaller, never
    wrong.
    """
    centred = value.double() - output.double()
    gram = (centred @ centred.T).numpy()
    scale = float(np.trace(gram)) / len(gram)
    cost, constraints, right, cones = _relaxation(gram / scale, r)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    nothing = sparse.csc_matrix((len(cost), len(cost)))
    solver = clarabel.DefaultSolver(nothing, cost, constraints, right, cones, settings)
    dual = np.array(solver.solve().z)
    residual = np.abs(cost + constraints.T @ dual).sum()
    return scale * float(-right @ dual - residual)


def _relaxation(
    gram: np.ndarray, r: int
) -> tuple[np.ndarray, sparse.csc_matrix, np.ndarray, list[object]]:
    """min cost'x over right - constraints x in cones; x = upper triangle of X by columns, then z.

    Off-diagonal entries of X carry a factor sqrt(2), so that <W, X> is a dot product and the
    triangle is what the solver's psd cone expects.
    """
    size = len(gram)
    columns, rows = np.tril_indices(size)
    entries = len(rows)
    factor = np.where(rows == columns, 1.0, np.sqrt(2.0))
    cost = np.concatenate([gram[rows, columns] * factor, np.zeros(size)])
    plain = sparse.diags(1 / factor) @ sparse.eye(entries, entries + size)  # entries of X
    diagonal = plain.tocsr()[np.flatnonzero(rows == columns)]
    allowed = sparse.hstack([sparse.csr_matrix((size, entries)), sparse.eye(size)]).tocsr()  # z
    sums = _row_sums(rows, columns) @ plain  # b = X1
    perspective = [  # ||(2 b_i, X_ii - z_i)|| <= X_ii + z_i
        sparse.vstack([diagonal[i] + allowed[i], 2 * sums[i], diagonal[i] - allowed[i]])
        for i in range(size)
    ]
    blocks = [
        (-sparse.csr_matrix(np.ones(size)) @ sums, -np.ones(1), clarabel.ZeroConeT(1)),
        (-plain, np.zeros(entries), clarabel.NonnegativeConeT(entries)),
        (sums - allowed, np.zeros(size), clarabel.NonnegativeConeT(size)),
        (allowed, np.ones(size), clarabel.NonnegativeConeT(size)),
        (sparse.csr_matrix(allowed.sum(axis=0)), np.full(1, r), clarabel.NonnegativeConeT(1)),
        *((-cone, np.zeros(3), clarabel.SecondOrderConeT(3)) for cone in perspective),
        (-sparse.eye(entries, entries + size), np.zeros(entries), clarabel.PSDTriangleConeT(size)),
    ]
    constraints = sparse.vstack([block for block, _, _ in blocks]).tocsc()
    right = np.concatenate([bound for _, bound, _ in blocks]).astype(float)
    return cost, constraints, right, [cone for _, _, cone in blocks]


def _row_sums(rows: np.ndarray, columns: np.ndarray) -> sparse.csr_matrix:
    """The matrix that takes the triangle of X to X1."""
    entry = np.arange(len(rows))
    off = rows != columns
    where = np.concatenate([rows, columns[off]])
    return sparse.csr_matrix((np.ones(len(where)), (where, np.concatenate([entry, entry[off]]))))
