"""Rules for matrices with ragged sides: the padding becomes a block of its own that changes nothing.

A square matrix is bordered with the identity: factors, solutions and determinants of `[[A, 0], [0, I]]`
hold those of `A` in their valid part. A tall matrix is extended with rows of zeros. What would mix the
two blocks (eigenvalues come out sorted) is refused.
"""

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from ._context import Context, Padded, select
from ._registry import define


def bordered(ctx: Context, x: Padded) -> Any:
    """Return matrices (in the last two axes) whose padding is that of the identity."""
    rows, columns = len(x.shape) - 2, len(x.shape) - 1
    mask = ctx.valid(x.shape, [rows, columns])
    if mask is None:
        return x.data
    eye = jnp.eye(x.data.shape[rows], x.data.shape[columns], dtype=x.dtype)
    return select(mask, x.data, lax.broadcast_in_dim(eye, x.data.shape, (rows, columns)))


def _zeros(ctx: Context, x: Padded) -> Any:
    return ctx.fill(x, [len(x.shape) - 2, len(x.shape) - 1], 0)


def _square(x: Padded) -> bool:
    return bool(x.shape[-1] == x.shape[-2])


@define("cholesky", "linear algebra")
def _cholesky(ctx: Context, eqn: Any, x: Padded) -> Any:
    return ctx.bind(eqn, bordered(ctx, x))


@define("triangular_solve", "linear algebra")
def _triangular_solve(ctx: Context, eqn: Any, a: Padded, b: Padded) -> Any:
    return ctx.bind(eqn, bordered(ctx, a), _zeros(ctx, b))


@define(
    "lu", "linear algebra", status="conditional", note="a square matrix, or one with a single ragged side"
)
def _lu(ctx: Context, eqn: Any, x: Padded) -> Any:
    if not _square(x) and len(x.ragged([len(x.shape) - 2, len(x.shape) - 1])) == 2:
        ctx.refuse(eqn, "factors a matrix with two different ragged sides.")
    return ctx.bind(eqn, bordered(ctx, x) if _square(x) else _zeros(ctx, x))


@define("lu_pivots_to_permutation", "linear algebra")
def _pivots(ctx: Context, eqn: Any, pivots: Padded) -> Any:
    own = lax.broadcasted_iota(pivots.dtype, pivots.data.shape, pivots.data.ndim - 1)
    mask = ctx.valid(pivots.shape, [len(pivots.shape) - 1])
    return ctx.bind(eqn, pivots.data if mask is None else select(mask, pivots.data, own))


@define(
    "qr", "linear algebra", status="conditional", note="a fixed number of columns, thin factors, no pivoting"
)
def _qr(ctx: Context, eqn: Any, x: Padded) -> Any:
    if x.ragged([len(x.shape) - 1]) or eqn.params.get("full_matrices") or eqn.params.get("pivoting"):
        ctx.refuse(eqn, "factors a matrix whose number of columns is ragged, fully, or with pivots.")
    return ctx.bind(eqn, _zeros(ctx, x))


@define("svd", "linear algebra", status="conditional", note="singular values alone; vectors are not unique")
def _svd(ctx: Context, eqn: Any, x: Padded) -> Any:
    if eqn.params["compute_uv"] and x.ragged([len(x.shape) - 2, len(x.shape) - 1]):
        ctx.refuse(
            eqn, "finds singular vectors, which are not unique and may come out different when padded."
        )
    return ctx.bind(eqn, _zeros(ctx, x))


@define("tridiagonal_solve", "linear algebra")
def _tridiagonal_solve(ctx: Context, eqn: Any, lower: Padded, main: Padded, upper: Padded, b: Padded) -> Any:
    last = len(main.shape) - 1
    # The last valid entry of the upper diagonal and the first of the lower one are not part of the matrix.
    size = ctx.length(main.shape[last])
    column = lax.broadcasted_iota(np.int32, upper.data.shape, last)
    upper_data = select(column < size - 1, upper.data, 0) if upper.ragged([last]) else upper.data
    return ctx.bind(eqn, ctx.fill(lower, [last], 0), ctx.fill(main, [last], 1), upper_data, _zeros(ctx, b))


@define("custom_linear_solve", "linear algebra")
def _custom_linear_solve(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    consts = xs[before : before + lengths.solve]
    operands = xs[before + lengths.solve + lengths.transpose_solve :]
    return ctx.run(*_compat.open_jaxpr(jaxprs.solve), [x.data for x in (*consts, *operands)])
