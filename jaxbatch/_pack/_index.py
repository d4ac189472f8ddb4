"""Packed rules that read or write at computed positions."""

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import mentions_dims, select
from .._mask._index import _far, _widened
from ._context import Row
from ._positions import window
from ._registry import define
from ._values import Value, on_row

_Mode = lax.GatherScatterMode


@define("gather")
def _gather(row: Row, eqn: Any, x: Value, indices: Value) -> Any:
    sizes = eqn.params["slice_sizes"]
    if x.kind == "plain" and indices.kind == "row" and not mentions_dims(sizes):
        return Value(
            row.bind(eqn, x.data, indices.data, indices_are_sorted=False, unique_indices=False), "row"
        )
    if len(indices.shape) == 1:
        return _one_window(row, eqn, x, indices)
    if x.kind == indices.kind == "row" and not mentions_dims(sizes):
        return _cells(row, eqn, x, indices)
    return None


def _one_window(row: Row, eqn: Any, x: Value, indices: Value) -> Any:
    """Read a single window, as `x[1:]` and `table[:n]` do."""
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    mode = _Mode.from_any(eqn.params["mode"])
    if dims.operand_batching_dims or indices.kind == "row" or mode == _Mode.FILL_OR_DROP:
        return None
    if not (on_row(x.shape) or on_row(sizes)) or x.kind == "total":
        return None
    starts: list[Any] = [0] * len(sizes)
    for column, axis in enumerate(dims.start_index_map):
        gap = x.shape[axis] - sizes[axis]
        begin = jnp.asarray(indices.data)[..., column]
        limit = jnp.asarray(row.value(gap)).astype(begin.dtype)
        if _compat.is_symbolic(gap) or gap != 0:
            starts[axis] = jnp.clip(begin, 0, limit).astype(np.int32) + jnp.zeros(
                row.layout.num_segments, np.int32
            )
    taken = window(row, x, starts, sizes, (1,) * len(sizes))
    if taken is None:
        return None
    gone = tuple(a + (taken.kind == "each") for a in dims.collapsed_slice_dims)
    data = jnp.squeeze(taken.data, gone)
    shift = int(taken.kind == "each")
    order = sorted(range(len(dims.offset_dims)), key=lambda k: dims.offset_dims[k])
    assert order == list(range(len(order)))
    return Value(data, taken.kind) if data.ndim == len(eqn.outvars[0].aval.shape) + shift else None


def _cells(row: Row, eqn: Any, x: Value, indices: Value) -> Any:
    """Read cells of the own segment at positions that other cells of it hold."""
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if len(x.ragged) != 1 or len(indices.ragged) != 1 or dims.operand_batching_dims:
        return None
    (axis,), (place,) = x.ragged, indices.ragged
    if axis not in dims.start_index_map or sizes[axis] != 1 or not on_row(eqn.outvars[0].aval.shape):
        return None
    mode = _Mode.from_any(eqn.params["mode"])
    source, space = row.space(x.shape[axis]), row.space(indices.shape[place])
    column = dims.start_index_map.index(axis)
    index = _widened(indices.data)
    part = index[..., column]
    start = space.along(source.starts[space.segment], part.ndim, place).astype(part.dtype)
    length = space.along(source.lengths[space.segment], part.ndim, place).astype(part.dtype)
    valid = space.along(space.valid, part.ndim, place)
    if mode == _Mode.FILL_OR_DROP:
        inside = (part >= 0) & (part < length)
        moved = select(inside & valid, part + start, _far(part.dtype))
    else:
        moved = start + jnp.clip(part, 0, length - 1)
    columns = [moved if k == column else index[..., k] for k in range(index.shape[-1])]
    return Value(
        row.bind(eqn, x.data, jnp.stack(columns, axis=-1), indices_are_sorted=False, unique_indices=False),
        "row",
    )


@define("scatter-add")
def _scatter_add(row: Row, eqn: Any, x: Value, indices: Value, updates: Value) -> Any:
    """Add the updates of all segments into one array, where the sum over the segments is wanted."""
    shapes = [x.shape, eqn.outvars[0].aval.shape]
    if not row.wants_total(eqn) or any(map(mentions_dims, shapes)) or not row.is_zero(eqn.invars[0]):
        return None
    if x.kind != "plain" or updates.kind != "row" or indices.kind != "row":
        return None
    if (
        len(indices.ragged) != 1
        or len(updates.ragged) != 1
        or eqn.params["dimension_numbers"].operand_batching_dims
    ):
        return None
    if _Mode.from_any(eqn.params["mode"]) == _Mode.CLIP:
        return None
    index = _widened(indices.data)
    index = select(row.valid(indices.shape), index, _far(index.dtype))
    out = row.bind(
        eqn,
        x.data,
        index,
        row.fill(updates, 0),
        mode=_Mode.FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )
    return Value(out, "total")
