"""Packed rules that move cells along a ragged axis: slices, shifts, concatenations, padding.

Every output cell knows its segment and its position there, and so does the cell that it is read from. Where
the output has a fixed size there, one is read from every segment.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import mentions_dims, select
from .._program import Dim
from ._context import Row
from ._registry import define
from ._shapes import counting
from ._spaces import Space
from ._values import Value, on_row

# --- windows ---------------------------------------------------------------------------------------


def window(
    row: Row, x: Value, starts: Sequence[Any], out: Sequence[Dim], strides: Sequence[int]
) -> Value | None:
    """Return a strided window of a value, from starts (ints, or int32 [segments]) inside true bounds.

    Returns:
      None if the segments must be spread out for it.
    """
    for axis, (dim, start, size, stride) in enumerate(zip(x.shape, starts, out, strides, strict=True)):
        ragged = _compat.is_symbolic(dim), _compat.is_symbolic(size)
        if isinstance(start, int) and start == 0 and stride == 1 and bool(size == dim):
            continue
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        if ragged[1]:
            if not on_row(shape):
                return None
            space = row.space(size)
            begin = start if isinstance(start, int) else start[space.segment]
            x = Value(row.fetch(x, axis, space, begin + stride * space.position), "row", shape)
        elif ragged[0]:
            if len(x.ragged) > 1:
                return None
            x = Value(_picked(row, x, axis, start, stride, int(size)), "each", shape)
        elif not isinstance(start, int) and x.kind != "plain":
            return None
        elif isinstance(start, int):
            x = _fixed(x, axis, start, int(size), stride, shape)
        else:
            return None
    return x


def _picked(row: Row, x: Value, axis: int, start: Any, stride: int, size: int) -> Any:
    """Read a fixed number of cells along the ragged axis of every segment."""
    space = row.space(x.shape[axis])
    begin = jnp.broadcast_to(jnp.asarray(start, np.int32), space.starts.shape)
    place = (space.starts + begin)[:, None] + stride * counting(size)[None]
    taken = jnp.take(x.data, place, axis=axis, mode="clip")  # the axis becomes [segments, size]
    return jnp.moveaxis(taken, axis, 0)


def _fixed(x: Value, axis: int, start: int, size: int, stride: int, shape: Any) -> Value:
    place = axis + 1 if x.kind == "each" else axis
    stop = start + (size - 1) * stride + 1 if size else start
    return Value(lax.slice_in_dim(x.data, start, stop, stride, place), x.kind, shape)


@define("slice")
def _slice(row: Row, eqn: Any, x: Value) -> Any:
    out = eqn.outvars[0].aval.shape
    strides = eqn.params["strides"] or (1,) * len(out)
    if mentions_dims(strides) or not (on_row(x.shape) or on_row(out)):
        return None
    return window(row, x, [_number(row, s) for s in eqn.params["start_indices"]], out, strides)


@define("split")
def _split(row: Row, eqn: Any, x: Value) -> Any:
    axis, start, pieces = eqn.params["axis"], 0, []
    if x.kind != "row":
        return None
    for size, var in zip(eqn.params["sizes"], eqn.outvars, strict=True):
        starts: list[Any] = [0] * len(x.shape)
        starts[axis] = _number(row, start)
        pieces.append(window(row, x, starts, var.aval.shape, (1,) * len(starts)))
        start = start + size
    return None if any(piece is None for piece in pieces) else pieces


def _number(row: Row, dim: Dim) -> Any:
    return row.value(dim) if _compat.is_symbolic(dim) else int(dim)


@define("dynamic_slice")
def _dynamic_slice(row: Row, eqn: Any, x: Value, *starts: Value) -> Any:
    sizes = eqn.params["slice_sizes"]
    if not (on_row(x.shape) or on_row(sizes)) or x.kind == "total":
        return None
    begins = [_clamped(row, *each) for each in zip(starts, x.shape, sizes, strict=True)]
    return window(row, x, begins, sizes, (1,) * len(sizes))


def _clamped(row: Row, start: Value, dim: Dim, size: Dim) -> Any:
    """Return where a window starts after JAX has moved it inside: 0 if there is no choice."""
    gap = dim - size
    if not _compat.is_symbolic(gap) and gap == 0:
        return 0
    begin = jnp.asarray(start.data)
    limit = jnp.asarray(row.value(gap)).astype(begin.dtype)
    return jnp.clip(begin, 0, limit).astype(np.int32) + jnp.zeros(row.layout.num_segments, np.int32)


# --- the whole axis --------------------------------------------------------------------------------


@define("rev")
def _rev(row: Row, eqn: Any, x: Value) -> Any:
    if x.kind != "row":
        return None
    axes = eqn.params["dimensions"]
    data = lax.rev(x.data, [a for a in axes if a not in x.ragged])
    for axis in (a for a in x.ragged if a in axes):
        space = row.space(x.shape[axis])
        last = space.lengths[space.segment] - 1
        data = row.fetch(Value(data, "row", x.shape), axis, space, last - space.position)
    return Value(data, "row")


@define("concatenate")
def _concatenate(row: Row, eqn: Any, *xs: Value) -> Any:
    axis, shape = eqn.params["dimension"], eqn.outvars[0].aval.shape
    if not on_row(shape):
        return None
    if not _compat.is_symbolic(shape[axis]):
        return Value(lax.concatenate([x.data for x in xs], axis), "row")
    space = row.space(shape[axis])
    begin: Any = 0
    out = None
    for x in xs:
        own = row.value(x.shape[axis])
        at = begin if isinstance(begin, int) else begin[space.segment]
        piece = row.fetch(x, axis, space, space.position - at)
        reached = space.along(space.position >= at, len(shape), axis)
        out = piece if out is None else select(reached, piece, out)
        begin = begin + own
    return Value(out, "row")


@define("pad")
def _pad(row: Row, eqn: Any, x: Value, value: Value) -> Any:
    shape, config = eqn.outvars[0].aval.shape, eqn.params["padding_config"]
    if not on_row(shape) or any(_compat.is_symbolic(interior) for _, _, interior in config):
        return None
    filler = jnp.broadcast_to(row.lift(value, shape), row.sizes(shape))
    for axis, (low, high, interior) in enumerate(config):
        if not _compat.is_symbolic(shape[axis]):
            if (low, high, interior) == (0, 0, 0):
                continue
            if (
                _compat.is_symbolic(x.shape[axis])
                or x.kind == "each"
                or value.kind == "each"
                or mentions_dims((low, high))
            ):
                return None
            edges = [(low, high, interior) if a == axis else (0, 0, 0) for a in range(len(shape))]
            x = Value(
                lax.pad(x.data, value.data, edges),
                x.kind,
                (*x.shape[:axis], shape[axis], *x.shape[axis + 1 :]),
            )
    for axis, (low, high, interior) in enumerate(config):
        if not _compat.is_symbolic(shape[axis]):
            continue
        if not mentions_dims((low, high)) and (low, high, interior) == (0, 0, 0):
            continue
        space = row.space(shape[axis])
        at = space.position - _in(space, row.value(low))
        source, step = at // (interior + 1), at % (interior + 1)
        inside = (at >= 0) & (step == 0) & (source < _in(space, row.value(x.shape[axis])))
        after = (*x.shape[:axis], shape[axis], *x.shape[axis + 1 :])
        if not on_row(after):
            return None
        data = row.fetch(x, axis, space, source)
        sizes = row.sizes(after)
        fill = filler if after == shape else jnp.broadcast_to(row.lift(value, after), sizes)
        x = Value(select(space.along(inside, len(shape), axis), data, fill), "row", after)
    return x


def _in(space: Space, value: Any) -> Any:
    """Return a number of each segment for every cell."""
    return value if isinstance(value, int) else value[space.segment]


@define("tile")
def _tile(row: Row, eqn: Any, x: Value) -> Any:
    shape = eqn.outvars[0].aval.shape
    if not on_row(shape):
        return None
    for axis, dim in enumerate(shape):
        if dim is x.shape[axis] or bool(dim == x.shape[axis]):
            continue
        after = (*x.shape[:axis], dim, *x.shape[axis + 1 :])
        if not _compat.is_symbolic(dim) or not on_row(after):
            return None
        space = row.space(dim)
        length = _in(space, row.value(x.shape[axis]))
        x = Value(row.fetch(x, axis, space, space.position % jnp.maximum(length, 1)), "row", after)
    return x if x.kind == "row" else None
