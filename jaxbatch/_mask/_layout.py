"""Rules that move cells along ragged axes: reshape, concatenate, pad, slice, reverse, split, tile.

Each output cell of the valid prefix is found at a position that depends on true lengths. Where that
position does not (a prefix stays a prefix) the primitive runs as it is; elsewhere one gather along the
axis puts every cell where it belongs.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from .. import _compat
from .._program import Dim, Shape
from ._context import Context, Padded, mentions_dims, select
from ._registry import define

# --- one axis at a time ----------------------------------------------------------------------------


def positions(size: Dim) -> Any:
    """Return 0 .. size - 1 as int32."""
    return lax.iota(np.int32, size)


def take(data: Any, indices: Any, axis: int) -> Any:
    """Gather along one axis by a vector of positions; those outside are clamped.

    An empty axis gives padding.
    """
    if data.shape[axis] == 0:
        return fit(data, axis, indices.shape[0])
    return jnp.take(data, indices, axis=axis, mode="clip")


def fit(data: Any, axis: int, size: Dim) -> Any:
    """Crop or extend the end of an axis to `size`; what is added is padding."""
    have = data.shape[axis]
    if have == size:
        return data
    if not _compat.is_symbolic(size - have) and have > size:
        return lax.slice_in_dim(data, 0, size, axis=axis)
    # A negative amount crops, so this serves sizes of which it is not known which is the larger.
    config = [(0, size - have if a == axis else 0, 0) for a in range(data.ndim)]
    return lax.pad(data, np.zeros((), data.dtype), config)


def window(ctx: Context, data: Any, axis: int, start: Dim, out: Dim, stride: int = 1) -> Any:
    """Return `out` cells of an axis, `stride` apart, from a true and maybe ragged position on."""
    size = ctx.size(out)
    if _compat.is_symbolic(start):
        begin = ctx.length(start)
        if stride == 1 and not _compat.is_symbolic(out):  # a fixed window inside the valid part never clamps
            return lax.dynamic_slice_in_dim(data, begin, size, axis)
        return take(data, begin + stride * positions(size), axis)
    if size == 0:
        return lax.slice_in_dim(data, 0, 0, axis=axis)
    data = fit(data, axis, max(data.shape[axis], start + (size - 1) * stride + 1))
    return lax.slice_in_dim(data, start, start + (size - 1) * stride + 1, stride, axis)


@define("rev", "layout")
def _rev(ctx: Context, eqn: Any, x: Padded) -> Any:
    axes = eqn.params["dimensions"]
    ragged = x.ragged(axes)
    data = lax.rev(x.data, [a for a in axes if a not in ragged])
    for axis in ragged:
        data = take(data, ctx.length(x.shape[axis]) - 1 - positions(data.shape[axis]), axis)
    return data


@define("slice", "layout")
def _slice(ctx: Context, eqn: Any, x: Padded) -> Any:
    out = eqn.outvars[0].aval.shape
    strides = eqn.params["strides"] or (1,) * len(out)
    if mentions_dims(strides):
        ctx.refuse(eqn, "has a stride that depends on a size.")
    data = x.data
    for axis, (start, stride) in enumerate(zip(eqn.params["start_indices"], strides, strict=True)):
        data = window(ctx, data, axis, start, out[axis], stride)
    return data


@define("split", "layout")
def _split(ctx: Context, eqn: Any, x: Padded) -> Any:
    axis, start, pieces = eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        pieces.append(window(ctx, x.data, axis, start, size))
        start = start + size
    return pieces


@define("concatenate", "layout")
def _concatenate(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    axis = eqn.params["dimension"]
    data = lax.concatenate([x.data for x in xs], axis)
    if any(x.ragged([axis]) for x in xs[:-1]):
        # Position i belongs to the last piece that truly starts at or before i; skip the padding before it.
        begin, base, index = 0, 0, positions(data.shape[axis])
        source = index
        for before in xs[:-1]:
            begin = begin + ctx.length(before.shape[axis])
            base = base + before.data.shape[axis]
            source = jnp.where(index >= begin, index - begin + base, source)
        data = take(data, source, axis)
    return fit(data, axis, ctx.size(eqn.outvars[0].aval.shape[axis]))


@define("pad", "layout")
def _pad(ctx: Context, eqn: Any, x: Padded, value: Padded) -> Any:
    data, out = x.data, eqn.outvars[0].aval.shape
    for axis, (low, high, interior) in enumerate(eqn.params["padding_config"]):
        if _compat.is_symbolic(interior):
            ctx.refuse(eqn, "has a dilation that depends on a size.")
        reaches_past = _compat.is_symbolic(high) or high > 0
        if reaches_past:  # cells right of the valid part become part of the result
            data = ctx.fill(Padded(data, _with(x.shape, axis, data)), [axis], value.data)
        data = pad_axis(ctx, data, value.data, axis, low, interior, ctx.size(out[axis]))
    return data


def _with(shape: Shape, axis: int, data: Any) -> Shape:
    """Return the true shape of data whose axes before `axis` are already final; only `axis` is looked at."""
    return tuple(
        dim if a == axis else size for a, (dim, size) in enumerate(zip(shape, data.shape, strict=True))
    )


def pad_axis(ctx: Context, data: Any, value: Any, axis: int, low: Dim, interior: int, size: Dim) -> Any:
    """Dilate an axis, shift it by the true `low`, and return `size` cells of it."""

    def config(lo: Dim, hi: Dim) -> list[tuple[Dim, Dim, int]]:
        return [(lo, hi, interior) if a == axis else (0, 0, 0) for a in range(data.ndim)]

    value = lax.convert_element_type(value, data.dtype)
    dilated = data.shape[axis] + max(data.shape[axis] - 1, 0) * interior
    if not _compat.is_symbolic(low):
        return lax.pad(data, value, config(low, size - dilated - low))
    data = lax.pad(data, value, config(0, 0))
    source = positions(size) - ctx.length(low)
    inside = (source >= 0) & (source < dilated)
    shape = [size if a == axis else 1 for a in range(data.ndim)]
    return select(inside.reshape(shape), take(data, source, axis), value)


@define("tile", "layout")
def _tile(ctx: Context, eqn: Any, x: Padded) -> Any:
    data, out = x.data, eqn.outvars[0].aval.shape
    for axis, dim in enumerate(x.shape):
        if out[axis] is not dim:
            data = take(data, positions(ctx.size(out[axis])) % ctx.length(dim), axis)
    return data


# --- reshape ---------------------------------------------------------------------------------------


@define("reshape", "layout")
def _reshape(ctx: Context, eqn: Any, x: Padded) -> Any:
    if eqn.params.get("dimensions") is not None:
        ctx.refuse(eqn, "reorders dimensions while reshaping.")
    out = eqn.outvars[0].aval.shape
    if not ctx.always(math.prod(x.shape) - math.prod(out), 0, 0):
        ctx.refuse(eqn, f"is only possible at some lengths: {x.shape} to {out}.")
    return reshape(ctx, x, out)


def reshape(ctx: Context, x: Padded, out: Shape) -> Any:
    """Reshape by true sizes: the valid cells keep their row-major order, wherever the padding lies."""
    data, done = x.data, []
    if not all(_compat.is_symbolic(dim) or dim for dim in x.shape):
        return jnp.zeros(ctx.shape(out), x.dtype)  # no cell at any length
    for source, target in _groups(x.shape, out):
        width = len(source)
        data = _reshape_group(ctx, data, len(done), width, source, target)
        done.extend(target)
    return data.reshape(ctx.shape(out))


def _groups(source: Shape, target: Shape) -> list[tuple[Shape, Shape]]:
    """Split a reshape into the shortest runs of axes with equal products."""
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        begin_i, begin_j = i, j
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while not _same(math.prod(source[begin_i:i]), math.prod(target[begin_j:j])):
            left, right = math.prod(source[begin_i:i]), math.prod(target[begin_j:j])
            if i == len(source) and j == len(target):
                break  # equal, but only numbers show it
            if j == len(target) or (i < len(source) and _less(left, right)):
                i += 1
            else:
                j += 1
        groups.append((source[begin_i:i], target[begin_j:j]))
    return groups


def _same(a: Dim, b: Dim) -> bool:
    return bool(a == b)


def _less(a: Dim, b: Dim) -> bool:
    try:
        return bool(a < b)
    except (
        jex_core.InconclusiveDimensionOperation
    ):  # undecided: any order of growing the two sides ends at the whole shapes
        return len(_compat.dim_names(a)) < len(_compat.dim_names(b))


def _reshape_group(ctx: Context, data: Any, axis: int, width: int, source: Shape, target: Shape) -> Any:
    """Reshape `width` axes of data, from `axis` on, from true shape `source` to `target`."""
    shape = data.shape
    before, after = shape[:axis], shape[axis + width :]
    sizes, out_sizes = ctx.shape(source), ctx.shape(target)
    if _is_prefix(source) and _is_prefix(target):
        data = data.reshape(*before, math.prod(sizes), *after)
        return fit(data, axis, math.prod(out_sizes)).reshape(*before, *out_sizes, *after)
    index = _unravel(positions(math.prod(out_sizes)), out_sizes)
    flat = _ravel(index, [ctx.length(dim) for dim in target])  # the cell's place among the valid ones
    place = _ravel(_unravel(flat, [ctx.length(dim) for dim in source]), sizes)
    data = take(data.reshape(*before, math.prod(sizes), *after), place, axis)
    return data.reshape(*before, *out_sizes, *after)


def _is_prefix(shape: Shape) -> bool:
    """Tell whether the valid cells come first in memory: only the first axis longer than 1 is ragged."""
    long = [dim for dim in shape if _compat.is_symbolic(dim) or dim != 1]
    return not any(map(_compat.is_symbolic, long[1:]))


def _unravel(flat: Any, sizes: Sequence[Any]) -> list[Any]:
    index = []
    for size in reversed(sizes):
        size = jnp.maximum(size, 1)
        index.append(flat % size)
        flat = flat // size
    return index[::-1]


def _ravel(index: Sequence[Any], sizes: Sequence[Any]) -> Any:
    flat = index[0]
    for i, size in zip(index[1:], sizes[1:], strict=True):
        flat = flat * size + i
    return flat


# --- sizes as values -------------------------------------------------------------------------------


@define("dim_as_value", "sizes")
def _dim_as_value(ctx: Context, eqn: Any) -> Any:
    return lax.convert_element_type(ctx.length(eqn.params["dim"]), eqn.outvars[0].aval.dtype)


@define("iota", "sizes")
def _iota(ctx: Context, eqn: Any) -> Any:
    return ctx.bind(eqn)


@define("shape_assertion", "sizes", note="holds for the true sizes, which the trace has checked")
def _shape_assertion(ctx: Context, eqn: Any, *_: Padded) -> Any:
    return []
