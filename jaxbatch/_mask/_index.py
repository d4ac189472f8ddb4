"""Rules that read or write at computed positions: gather, scatter, dynamic slices.

Positions are valid data; the bounds they are held against are the true ones. So clamping, dropping and
filling are decided by the length before the primitive sees the padded array. Positions in the padding
of the index array are made harmless.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import core, lax
from jax import numpy as jnp

from .. import _compat
from .._program import Dim, Shape
from ._context import Context, Padded, select
from ._layout import fit
from ._reduce import Identity, highest, lowest, one, zero
from ._registry import define

_Mode = lax.GatherScatterMode


def _limit(ctx: Context, dim: Dim, size: Dim) -> Any:
    """Return the last position at which a window of true `size` starts inside true `dim`."""
    return ctx.length(dim - size)


def _room(ctx: Context, dim: Dim, size: Dim) -> Dim:
    """Return how much longer an axis must be allocated so that no valid window is clamped.

    A window of allocated size K may start anywhere up to the true limit, so S >= limit + K must hold.
    """
    gap = dim - size
    if not _compat.is_symbolic(gap) or not _compat.is_symbolic(size):
        return 0
    return core.max_dim(ctx.size(gap) + ctx.size(size) - ctx.size(dim), 0)


# --- dynamic slices --------------------------------------------------------------------------------


@define("dynamic_slice", "indexing")
def _dynamic_slice(ctx: Context, eqn: Any, x: Padded, *starts: Padded) -> Any:
    sizes, data = eqn.params["slice_sizes"], x.data
    begins = []
    for axis, (dim, size, start) in enumerate(zip(x.shape, sizes, starts, strict=True)):
        data = fit(data, axis, data.shape[axis] + _room(ctx, dim, size))
        begins.append(_clamp(ctx, start.data, dim, size))
    return lax.dynamic_slice(data, begins, ctx.shape(sizes), allow_negative_indices=False)


def _clamp(ctx: Context, start: Any, dim: Dim, size: Dim) -> Any:
    """Return `start` held against true bounds; left alone where the allocated bounds are the true ones.

    What is still negative is not counted from the end: the program has done that already.
    """
    start = _widened(jnp.asarray(start))
    if not _compat.is_symbolic(dim) and not _compat.is_symbolic(size):
        return start
    return jnp.clip(start, 0, lax.convert_element_type(_limit(ctx, dim, size), start.dtype))


@define("dynamic_update_slice", "indexing")
def _dynamic_update_slice(ctx: Context, eqn: Any, x: Padded, update: Padded, *starts: Padded) -> Any:
    begins = [_clamp(ctx, s.data, d, k) for s, d, k in zip(starts, x.shape, update.shape, strict=True)]
    return _write(ctx, x, update, begins)


def _write(ctx: Context, x: Padded, update: Padded, begins: Sequence[Any]) -> Any:
    """Overwrite one window with the valid part of `update`, at starts inside true bounds."""
    data = x.data
    for axis, (dim, size) in enumerate(zip(x.shape, update.shape, strict=True)):
        data = fit(data, axis, data.shape[axis] + _room(ctx, dim, size))
    keep = ctx.valid(update.shape, range(len(update.shape)))
    new = update.data
    if keep is not None:
        new = select(keep, new, lax.dynamic_slice(data, begins, new.shape, allow_negative_indices=False))
    data = lax.dynamic_update_slice(data, new, begins, allow_negative_indices=False)
    for axis, size in enumerate(x.data.shape):
        data = fit(data, axis, size)
    return data


# --- gather ----------------------------------------------------------------------------------------


@define("gather", "indexing")
def _gather(ctx: Context, eqn: Any, x: Padded, indices: Padded) -> Any:
    params = eqn.params
    sizes, mode = params["slice_sizes"], _Mode.from_any(params["mode"])
    known = ctx.literal(eqn.invars[1])  # e.g. table[:n] starts at a 0 that the program states
    data, columns = x.data, {}
    for column, axis in enumerate(params["dimension_numbers"].start_index_map):
        dim, size = x.shape[axis], sizes[axis]
        if known is not None and _surely_inside(ctx, known, dim, size):
            continue
        data = fit(data, axis, data.shape[axis] + _room(ctx, dim, size))
        if _compat.is_symbolic(dim) or _compat.is_symbolic(size):
            columns[column] = (_limit(ctx, dim, size), mode)
    index = _bounded(indices.data, columns)
    ragged_index = bool(indices.ragged())
    return ctx.bind(
        eqn,
        data,
        index,
        indices_are_sorted=params["indices_are_sorted"] and not ragged_index,
        unique_indices=params["unique_indices"] and not ragged_index,
    )


def is_place(
    indices: Shape, batching: Sequence[int], indexed: Sequence[int], collapsed: Sequence[int]
) -> bool:
    """Tell whether a gather is one place of an array, `x[i]` or `x[:, i]`, or a scatter its derivative.

    Where sizes are symbolic JAX promises that the place is inside, and the derivative drops one that is not;
    where they are not it slices, and the derivative of a slice clamps its place like the slice itself. Such a
    place is also called unique; others of JAX's derivatives make no such promise and drop.
    """
    return len(indices) - 1 == len(batching) and not set(indexed).isdisjoint(collapsed)


def _surely_inside(ctx: Context, start: Any, dim: Dim, size: Dim) -> bool:
    """Tell whether a window at a known start is inside at every length, and inside the allocated axis."""
    return start >= 0 and ctx.always(dim - size - start, 0) and start + ctx.size(size) <= ctx.size(dim)


def _bounded(indices: Any, columns: dict[int, tuple[Any, _Mode]]) -> Any:
    """Hold index columns against true limits: outside, they are clamped, or sent far away to be dropped."""
    if not columns:
        return indices
    indices = _widened(indices)
    parts = []
    for column in range(indices.shape[-1]):
        part = indices[..., column]
        if column in columns:
            limit, mode = columns[column]
            limit = lax.convert_element_type(limit, part.dtype)
            if mode == _Mode.FILL_OR_DROP:
                part = select((part >= 0) & (part <= limit), part, _far(part.dtype))
            else:
                part = jnp.clip(part, 0, limit)
        parts.append(part)
    return jnp.stack(parts, axis=-1)


def _widened(indices: Any) -> Any:
    """Return indices in a dtype that can hold a position far outside any array."""
    return indices if indices.dtype.itemsize >= 4 else lax.convert_element_type(indices, np.int32)


def _far(dtype: Any) -> Any:
    """A position outside every array, with room for a window behind it."""
    return np.array(np.iinfo(np.int32).max // 2, dtype)


# --- scatter ---------------------------------------------------------------------------------------


def defscatter(names: str, identity: Identity | None) -> None:
    """Register scatters; `identity` is what one may write without effect, None if it overwrites."""

    def scatter(ctx: Context, eqn: Any, x: Padded, indices: Padded, updates: Padded) -> Any:
        return _scatter(ctx, eqn, x, indices, updates, identity)

    define(names, "indexing", identity=identity)(scatter)


defscatter("scatter", None)
defscatter("scatter-add scatter-sub", zero)
defscatter("scatter-mul", one)
defscatter("scatter-min", highest)
defscatter("scatter-max", lowest)


def _write_one(ctx: Context, x: Padded, indices: Padded, updates: Padded, dims: Any, drop: bool) -> Any:
    """Overwrite a single window of ragged size, as `table.at[:n].set(x)` does."""
    inserted = sorted(dims.inserted_window_dims)
    shape = list(updates.shape)
    for axis in inserted:
        shape.insert(axis, 1)
    update = Padded(lax.expand_dims(updates.data, inserted), tuple(shape))
    begins: list[Any] = [np.int32(0)] * len(shape)
    inside: Any = True
    for column, axis in enumerate(dims.scatter_dims_to_operand_dims):
        begin, limit = indices.data[column], _limit(ctx, x.shape[axis], shape[axis])
        inside = inside & (begin >= 0) & (begin <= limit)
        begins[axis] = jnp.clip(lax.convert_element_type(begin, np.int32), 0, limit)
    out = _write(ctx, x, update, begins)
    return select(inside, out, x.data) if drop else out


def _scatter(
    ctx: Context, eqn: Any, x: Padded, indices: Padded, updates: Padded, identity: Identity | None
) -> Any:
    params = eqn.params
    dims = params["dimension_numbers"]
    collapsed = {*dims.inserted_window_dims, *dims.operand_batching_dims}
    window_axes = [a for a in range(len(x.shape)) if a not in collapsed]
    window: list[Dim] = [1] * len(x.shape)
    for axis, update_axis in zip(window_axes, dims.update_window_dims, strict=True):
        window[axis] = updates.shape[update_axis]
    mode = _Mode.from_any(params["mode"])
    place = is_place(
        indices.shape,
        dims.scatter_indices_batching_dims,
        dims.scatter_dims_to_operand_dims,
        dims.inserted_window_dims,
    )
    if mode == _Mode.PROMISE_IN_BOUNDS and identity is zero and place and params["unique_indices"]:
        mode = _Mode.CLIP
    elif mode != _Mode.CLIP:
        mode = _Mode.FILL_OR_DROP  # what XLA itself does; JAX clamps only where it says so

    data, columns, partial = x.data, {}, []
    live = ctx.valid(indices.shape, range(len(indices.shape) - 1))
    bounds = [(x.shape[axis], window[axis]) for axis in dims.scatter_dims_to_operand_dims]
    ragged = [any(map(_compat.is_symbolic, pair)) for pair in bounds]
    clamps = mode == _Mode.CLIP and (live is not None or any(ragged))  # the mode is about to change
    for column, (dim, size) in enumerate(bounds):
        if clamps or ragged[column]:
            columns[column] = (_limit(ctx, dim, size), mode)
    for axis, update_axis in zip(window_axes, dims.update_window_dims, strict=True):
        if _compat.is_symbolic(window[axis]) and window[axis] != x.shape[axis]:
            partial.append(update_axis)  # its padding would land on valid cells of the operand
            data = fit(data, axis, data.shape[axis] + _room(ctx, x.shape[axis], window[axis]))
    if partial and identity is None:
        if len(indices.shape) > 1:
            ctx.refuse(eqn, "overwrites parts of an array with many windows of ragged size.")
        return _write_one(ctx, x, indices, updates, dims, drop=mode == _Mode.FILL_OR_DROP)
    new = updates.data if not partial else ctx.fill(updates, partial, identity(updates.dtype))  # pyright: ignore[reportOptionalCall]

    index = _bounded(indices.data, columns)
    if live is not None:  # updates in the padding of the index array are dropped
        index = _widened(index)
        index = select(live, index, _far(index.dtype))
    changed = bool(columns) or live is not None
    out = ctx.bind(
        eqn,
        data,
        index,
        new,
        mode=_Mode.FILL_OR_DROP if changed else mode,
        indices_are_sorted=params["indices_are_sorted"] and not changed,
        unique_indices=params["unique_indices"] and not changed,
    )
    for axis, size in enumerate(x.data.shape):
        out = fit(out, axis, size)
    return out
