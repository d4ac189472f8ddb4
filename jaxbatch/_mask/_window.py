"""Rules for windows that slide along a ragged axis: convolutions and pooling.

Inside the valid output every window reads valid cells, or cells right of them that the unpadded program
would have padded: those are filled. The padding on the left can depend on the length (SAME with a
stride splits it by the input size), which moves the alignment of every window; then the cells are
shifted to the true left padding first, since no mask could repair that.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import core, lax
from jax import numpy as jnp

from .. import _compat
from .._program import Dim
from ._context import Context, Padded, mentions_dims
from ._layout import fit, pad_axis, positions, take
from ._reduce import Identity, all_ones, highest, lowest, one, zero
from ._registry import define

Config = list[tuple[Dim, Dim]]

_RAGGED_STEP = "has a stride or a dilation that depends on a size."


def _dilated(size: Dim, dilation: int) -> Dim:
    return 0 if size == 0 else (size - 1) * dilation + 1


def align(
    ctx: Context,
    data: Any,
    axes: Sequence[int],
    padding: Sequence[tuple[Dim, Dim]],
    dilation: Sequence[int],
    window: Sequence[Dim],
    strides: Sequence[int],
    out: Sequence[Dim],
    value: Any,
) -> tuple[Any, Config, tuple[Dim, ...]]:
    """Prepare spatial axes so that every valid window sits where the unpadded program puts it.

    Args:
      data: the filled operand.
      axes: its spatial axes; the other sequences have one entry for each of them.
      padding: the true (low, high) padding.
      dilation: the operand's dilation.
      window: the window's allocated extent, dilation included.
      strides: the window's strides.
      out: the allocated size of the output.
      value: what padding cells hold.

    Returns:
      The operand, its static padding and its remaining dilation, such that the output has size `out`.
    """
    config, remaining = [], []
    for k, axis in enumerate(axes):
        low, step = padding[k][0], dilation[k]
        reach = (out[k] - 1) * strides[k] + window[k] if out[k] > 0 else 0
        if _compat.is_symbolic(low):
            data = pad_axis(ctx, data, value, axis, low, step - 1, core.max_dim(reach, 1))
            low, step = 0, 1
        if out[k] == 0:
            reach = window[k] - 1  # no room for a single window
        high = reach - low - _dilated(data.shape[axis], step)
        if not _compat.is_symbolic(high) and -strides[k] < high < 0:
            high = 0  # cells that no window reaches
        config.append((low, high))
        remaining.append(step)
    return data, config, tuple(remaining)


# --- convolution -----------------------------------------------------------------------------------


@define("conv_general_dilated", "window", identity=zero)
def _conv(ctx: Context, eqn: Any, lhs: Padded, rhs: Padded) -> Any:
    params = eqn.params
    dims = params["dimension_numbers"]
    lhs_batch, lhs_feature, *lhs_axes = dims.lhs_spec
    _, rhs_feature, *rhs_axes = dims.rhs_spec
    if mentions_dims((params["window_strides"], params["lhs_dilation"], params["rhs_dilation"])):
        ctx.refuse(eqn, _RAGGED_STEP)
    if params["feature_group_count"] != 1 and lhs.ragged([lhs_feature]):
        ctx.refuse(eqn, "splits a ragged feature axis into groups.")
    if params["batch_group_count"] != 1 and lhs.ragged([lhs_batch]):
        ctx.refuse(eqn, "splits a ragged batch axis into groups.")
    if rhs.ragged([dims.rhs_spec[0]]) and (
        params["feature_group_count"] != 1 or params["batch_group_count"] != 1
    ):
        ctx.refuse(eqn, "has a ragged number of output features in groups.")
    left = ctx.fill(lhs, [lhs_feature, *lhs_axes], 0)
    right = ctx.fill(rhs, [rhs_feature, *rhs_axes], 0)
    if not (lhs.ragged(lhs_axes) or rhs.ragged(rhs_axes) or mentions_dims(params["padding"])):
        return ctx.bind(eqn, left, right)
    out = ctx.shape(eqn.outvars[0].aval.shape)
    left, padding, dilation = align(
        ctx,
        left,
        lhs_axes,
        params["padding"],
        params["lhs_dilation"],
        [_dilated(right.shape[a], d) for a, d in zip(rhs_axes, params["rhs_dilation"], strict=True)],
        params["window_strides"],
        [out[a] for a in dims.out_spec[2:]],
        zero(lhs.dtype),
    )
    return ctx.bind(eqn, left, right, padding=tuple(padding), lhs_dilation=dilation)


# --- pooling ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a window does with its cells: associative, commutative, and with an identity."""

    combine: Callable[[Any, Any], Any]
    identity: Identity


_operations = {
    "add": Operation(lax.add, zero),
    "mul": Operation(lax.mul, one),
    "max": Operation(lax.max, lowest),
    "min": Operation(lax.min, highest),
    "and": Operation(lax.bitwise_and, all_ones),
    "or": Operation(lax.bitwise_or, zero),
}


def defwindow(name: str, operation: Operation) -> None:
    """Register a windowed reduction whose padding may hold the operation's identity."""

    def reduce_window(ctx: Context, eqn: Any, x: Padded) -> Any:
        return _pool(ctx, eqn, x, operation)

    define(name, "window", identity=operation.identity)(reduce_window)


defwindow("reduce_window_sum", _operations["add"])
defwindow("reduce_window_max", _operations["max"])
defwindow("reduce_window_min", _operations["min"])


@define("reduce_window", "window", status="conditional", note="the operation is add, mul, max, min, and, or")
def _reduce_window(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    operands, inits = xs[: len(xs) // 2], xs[len(xs) // 2 :]
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    operation = None
    if len(operands) == 1 and len(body.eqns) == 1:
        (only,) = body.eqns
        plain = set(only.invars) == set(body.invars) and only.outvars == body.outvars
        operation = _operations.get(only.primitive.name) if plain else None
    if operation is None:
        ctx.refuse(eqn, "slides an operation whose identity is not known.")
    return _pool(ctx, eqn, operands[0], operation, *(i.data for i in inits))


def _pool(ctx: Context, eqn: Any, x: Padded, operation: Operation, *inits: Any) -> Any:
    value = operation.identity(x.dtype)
    data, growing = ctx.fill(x, range(len(x.shape)), value), _growing(ctx, eqn, x)
    for axis in growing:
        data = _slide(ctx, eqn, data, axis, operation)
    rest = eqn.replace(params=_without(eqn.params, growing))
    data, overrides = _aligned_window(ctx, rest, data, value)
    return ctx.bind(rest, data, *inits, **overrides)


def _aligned_window(ctx: Context, eqn: Any, data: Any, value: Any) -> tuple[Any, dict[str, Any]]:
    params = eqn.params
    window = [
        _dilated(w, d) for w, d in zip(params["window_dimensions"], params["window_dilation"], strict=True)
    ]
    data, padding, dilation = align(
        ctx,
        data,
        range(data.ndim),
        params["padding"],
        params["base_dilation"],
        ctx.shape(window),
        params["window_strides"],
        ctx.shape(eqn.outvars[0].aval.shape),
        value,
    )
    return data, {"padding": tuple(padding), "base_dilation": dilation}


# --- windows of ragged size ------------------------------------------------------------------------


def _growing(ctx: Context, eqn: Any, x: Padded) -> list[int]:
    """Return the axes along which a window of allocated size would see more valid cells than a true one."""
    params, ones = eqn.params, (1,) * len(x.shape)
    steps, dilation = (params.get(name, ones) for name in ("window_dilation", "base_dilation"))
    if mentions_dims((params["window_strides"], steps, dilation)):
        ctx.refuse(eqn, _RAGGED_STEP)
    growing = []
    for axis, (size, (low, _)) in enumerate(zip(params["window_dimensions"], params["padding"], strict=True)):
        # A window grows at its end. Past all cells there from the first place on, it sees padding alone.
        past = size * steps[axis] - low - _dilated(x.shape[axis], dilation[axis])
        if _compat.is_symbolic(size) and not ctx.always(past, 0):
            growing.append(axis)
    return growing


def _slide(ctx: Context, eqn: Any, data: Any, axis: int, operation: Operation) -> Any:
    """Combine windows of ragged size along one axis: blocks of 1, 2, 4 ... cells add up to the true size."""
    names = ("window_dimensions", "window_dilation", "window_strides", "base_dilation", "padding")
    size, step, stride, dilation, (low, _) = (eqn.params[name][axis] for name in names)
    num, most = ctx.size(eqn.outvars[0].aval.shape[axis]), ctx.size(size)
    if _compat.is_symbolic(most):
        ctx.refuse(eqn, "slides a window of ragged size, which needs a program for each bucket.")
    if num == 0:
        return fit(data, axis, 0)
    value, span = operation.identity(data.dtype), (num - 1) * stride + 1
    block = pad_axis(ctx, data, value, axis, low, dilation - 1, span + (most - 1) * step)
    length, done = ctx.length(size), np.int32(0)
    out = lax.full_like(lax.slice_in_dim(block, 0, span, axis=axis), value)
    for bit in range(most.bit_length()):
        cells, taken = 1 << bit, (length >> bit) % 2 == 1
        part = lax.dynamic_slice_in_dim(block, done * step, span, axis)
        out = jnp.where(taken, operation.combine(out, part), out)
        done = done + jnp.where(taken, cells, 0)
        after = [(-cells * step, cells * step, 0) if a == axis else (0, 0, 0) for a in range(data.ndim)]
        block = operation.combine(block, lax.pad(block, value, after))
    return lax.slice_in_dim(out, 0, span, stride, axis)


def _without(params: dict[str, Any], axes: Sequence[int]) -> dict[str, Any]:
    """Return the parameters of a window that is one cell long along some axes."""
    ones: dict[str, Any] = dict.fromkeys(("window_dimensions", "window_strides"), 1)
    ones |= {"window_dilation": 1, "base_dilation": 1, "padding": (0, 0)}
    return params | {
        name: tuple(single if axis in axes else own for axis, own in enumerate(params[name]))
        for name, single in ones.items()
    }


# --- the derivatives of pooling --------------------------------------------------------------------


@define("select_and_gather_add", "window", identity=zero)
def _select_and_gather_add(ctx: Context, eqn: Any, tangents: Padded, x: Padded) -> Any:
    every, chosen = range(len(x.shape)), _never_selected(ctx, eqn, x)
    operand, overrides = _aligned_window(ctx, eqn, ctx.fill(x, every, chosen), chosen)
    data, _ = _aligned_window(ctx, eqn, tangents.data, zero(tangents.dtype))  # no padding is selected
    return ctx.bind(eqn, data, operand, **overrides)


@define("select_and_scatter_add", "window", identity=zero)
def _select_and_scatter_add(ctx: Context, eqn: Any, source: Padded, x: Padded) -> Any:
    params, axes = eqn.params, range(len(x.shape))
    value = _never_selected(ctx, eqn, x)
    data, padding, _ = align(
        ctx,
        ctx.fill(x, axes, value),
        axes,
        params["padding"],
        (1,) * len(x.shape),
        ctx.shape(params["window_dimensions"]),
        params["window_strides"],
        ctx.shape(source.shape),
        value,
    )
    out = ctx.bind(eqn, ctx.fill(source, axes, 0), data, padding=tuple(padding))
    for axis, (dim, (low, _)) in enumerate(zip(x.shape, params["padding"], strict=True)):
        if _compat.is_symbolic(low):  # undo the shift
            out = take(out, ctx.length(low) + positions(ctx.size(dim)), axis)
        else:
            out = fit(out, axis, ctx.size(dim))
    return out


def _never_selected(ctx: Context, eqn: Any, x: Padded) -> Any:
    """Return what a max or min pool passes over, by the comparison that selects."""
    if _growing(ctx, eqn, x):
        ctx.refuse(eqn, "selects from a window of ragged size that slides.")
    name = eqn.params["select_prim"].name
    if name not in ("ge", "le"):
        ctx.refuse(eqn, f"selects by `{name}`.")
    return lowest(x.dtype) if name == "ge" else highest(x.dtype)
