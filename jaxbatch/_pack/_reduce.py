"""Packed rules for reductions and contractions.

A reduction over the ragged axis becomes one for each segment. A contraction over it reads pairs of cells of
one segment alone: the others are filled with 0 on one side, and on the other what is not finite is
replaced and flags the row, since 0 * NaN is NaN.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import select
from .._mask._registry import rules as mask_rules
from ._context import Row
from ._registry import define
from ._values import Value, on_row

# --- reductions ------------------------------------------------------------------------------------

_SEGMENT: dict[str, Callable[..., Any]] = {
    "reduce_sum": jax.ops.segment_sum,
    "reduce_prod": jax.ops.segment_prod,
    "reduce_max": jax.ops.segment_max,
    "reduce_min": jax.ops.segment_min,
}


def identity_of(name: str, dtype: Any) -> Any:
    """Return what a reduction may read without effect, which its rule for padding says."""
    identity = mask_rules()[name].identity
    assert identity is not None
    return identity(dtype)


@define("reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or argmax argmin")
def _reduce(row: Row, eqn: Any, x: Value) -> Any:
    if x.kind != "row":
        return None
    axes = [a % len(x.shape) for a in eqn.params["axes"]]
    across = [a for a in x.ragged if a in axes]
    if not across:
        return Value(row.bind(eqn, x.data, axes=tuple(axes)), "row")
    name = eqn.primitive.name
    identity = identity_of(name, x.data.dtype)
    if name == "reduce_sum" and row.wants_total(eqn) and on_row(x.shape) and len(across) == len(x.ragged):
        return Value(row.bind(eqn, row.fill(x, 0), axes=tuple(axes)), "total")
    if name.startswith("arg"):
        return None  # of equals the first counts, which a fill in front could become
    if len(across) < len(x.ragged):  # pairs of cells, along one of their axes
        return Value(row.bind(eqn, row.fill(x, identity), axes=tuple(axes)), "row")
    if name not in _SEGMENT or x.data.dtype == np.bool_ or jnp.issubdtype(x.data.dtype, jnp.complexfloating):
        return None
    first, *others = across
    data = x.data if len(across) == 1 else row.fill(x, identity)
    rest = tuple(a for a in axes if a != first)
    data = row.bind(eqn, data, axes=rest) if rest else data
    place = first - sum(a < first for a in rest)
    space = row.space(x.shape[first])
    owner = jnp.where(space.valid, space.segment, row.layout.num_segments)
    moved = jnp.moveaxis(data, place, 0)
    out = _SEGMENT[name](moved, owner, num_segments=row.layout.num_segments)
    return Value(row.copied(out.astype(x.data.dtype)), "each")


# --- contractions ----------------------------------------------------------------------------------


@define("dot_general")
def _dot_general(row: Row, eqn: Any, lhs: Value, rhs: Value) -> Any:
    (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    crossed = [(a, b) for a, b in zip(lhs_axes, rhs_axes, strict=True) if _compat.is_symbolic(lhs.shape[a])]
    if not on_row(eqn.outvars[0].aval.shape):
        both = lhs.kind == rhs.kind == "row"
        whole = both and len(crossed) == len(lhs.ragged) == len(rhs.ragged)
        if not whole or not row.wants_total(eqn):
            return None
        return Value(row.bind(eqn, row.fill(lhs, 0), row.fill(rhs, 0)), "total")
    if "each" in (lhs.kind, rhs.kind):
        return _with_vectors(row, eqn, lhs, rhs)
    if not crossed:
        return Value(row.bind(eqn, lhs.data, rhs.data), "row")
    if len(crossed) > 1:
        return None
    data = [row.fill(x, 0) if len(x.ragged) == 2 else row.finite(x) for x in (lhs, rhs)]
    return Value(row.bind(eqn, *data), "row")


def _with_vectors(row: Row, eqn: Any, lhs: Value, rhs: Value) -> Any:
    """Contract a value on the row with one of its segments that has no axis of its own in the result."""
    (lhs_axes, rhs_axes), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    swapped = lhs.kind == "each"
    x, v = (rhs, lhs) if swapped else (lhs, rhs)
    x_axes, v_axes = (rhs_axes, lhs_axes) if swapped else (lhs_axes, rhs_axes)
    x_batch, v_batch = (rhs_batch, lhs_batch) if swapped else (lhs_batch, rhs_batch)
    if v.kind != "each" or x.kind != "row" or len(v.shape) > len(v_axes) + len(v_batch) or len(x.ragged) != 1:
        return None
    (axis,) = x.ragged
    cells = v.data[row.space(x.shape[axis]).segment]  # its axes move behind that of the cells
    dims = (
        (tuple(x_axes), tuple(a + 1 for a in v_axes)),
        ((*x_batch, axis), (*(a + 1 for a in v_batch), 0)),
    )
    eqn_type = eqn.outvars[0].aval.dtype
    out = lax.dot_general(
        x.data, cells, dims, precision=eqn.params["precision"], preferred_element_type=eqn_type
    )
    free = [a for a in range(len(x.shape)) if a not in x_axes and a not in x_batch]
    return Value(jnp.moveaxis(out, len(x_batch), len(x_batch) + free.index(axis)), "row")


# --- cumulative operations -------------------------------------------------------------------------

_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
    "cumlogsumexp": jnp.logaddexp,
}


@define(" ".join(_COMBINE))
def _cumulate(row: Row, eqn: Any, x: Value) -> Any:
    """Scan with a reset: a pair of a cell that begins a segment and anything before it is the cell."""
    axis, reverse, combine = eqn.params["axis"], eqn.params["reverse"], _COMBINE[eqn.primitive.name]
    if x.kind != "row":
        return None
    if axis not in x.ragged:
        return Value(row.bind(eqn, x.data), "row")
    space = row.space(x.shape[axis])
    begins = ~space.valid | ends(space) if reverse else ~space.valid | (space.position == 0)
    begins = jnp.broadcast_to(space.along(begins, len(x.shape), axis), x.data.shape)

    def step(a: Any, b: Any) -> Any:
        return a[0] | b[0], select(b[0], b[1], combine(a[1], b[1]))

    return Value(lax.associative_scan(step, (begins, x.data), reverse=reverse, axis=axis)[1], "row")


def ends(space: Any) -> Any:
    """Return which cells are the last of their segment."""
    return space.position == space.lengths[space.segment] - 1
