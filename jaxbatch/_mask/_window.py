"""Rules for windows that slide along a ragged axis: convolutions and pooling.

Inside the valid output every window reads valid cells, or cells right of them that the unpadded program
would have padded: those are filled. The padding on the left can depend on the length (SAME with a
stride splits it by the input size), which moves the alignment of every window; then the cells are
shifted to the true left padding first, since no mask could repair that.
"""

from collections.abc import Sequence
from typing import Any

from .. import _compat
from .._program import Dim
from ._context import Context, Padded
from ._layout import fit, pad_axis, positions, take
from ._reduce import Identity, all_ones, highest, lowest, one, zero
from ._registry import define

Config = list[tuple[int, int]]


def _dilated(size: Dim, dilation: int) -> Dim:
    return 0 if size == 0 else (size - 1) * dilation + 1


def align(
    ctx: Context,
    data: Any,
    axes: Sequence[int],
    padding: Sequence[tuple[Dim, Dim]],
    dilation: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    out: Sequence[int],
    value: Any,
) -> tuple[Any, Config, tuple[int, ...]]:
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
            data = pad_axis(ctx, data, value, axis, low, step - 1, max(reach, 1))
            low, step = 0, 1
        if out[k] == 0:
            reach = window[k] - 1  # no room for a single window
        high = reach - low - _dilated(data.shape[axis], step)
        if -strides[k] < high < 0:
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
    if not lhs.ragged(lhs_axes) and not rhs.ragged(rhs_axes):
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


def defwindow(name: str, identity: Identity) -> None:
    """Register a windowed reduction whose padding may hold `identity`."""

    def reduce_window(ctx: Context, eqn: Any, x: Padded) -> Any:
        value = identity(x.dtype)
        data, overrides = _aligned_window(ctx, eqn, x, ctx.fill(x, range(len(x.shape)), value), value)
        return ctx.bind(eqn, data, **overrides)

    define(name, "window", identity=identity)(reduce_window)


defwindow("reduce_window_sum", zero)
defwindow("reduce_window_max", lowest)
defwindow("reduce_window_min", highest)


def _aligned_window(ctx: Context, eqn: Any, x: Padded, data: Any, value: Any) -> tuple[Any, dict[str, Any]]:
    params, axes = eqn.params, range(len(x.shape))
    window = [
        _dilated(w, d) for w, d in zip(params["window_dimensions"], params["window_dilation"], strict=True)
    ]
    data, padding, dilation = align(
        ctx,
        data,
        axes,
        params["padding"],
        params["base_dilation"],
        ctx.shape(window),
        params["window_strides"],
        ctx.shape(eqn.outvars[0].aval.shape),
        value,
    )
    return data, {"padding": tuple(padding), "base_dilation": dilation}


@define("reduce_window", "window", status="conditional", note="the operation is add, mul, max, min, and, or")
def _reduce_window(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    operands, inits = xs[: len(xs) // 2], xs[len(xs) // 2 :]
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    identity = None
    if len(operands) == 1 and len(body.eqns) == 1:
        (only,) = body.eqns
        plain = set(only.invars) == set(body.invars) and only.outvars == body.outvars
        identity = _identities.get(only.primitive.name) if plain else None
    if identity is None:
        ctx.refuse(eqn, "slides an operation whose identity is not known.")
    (x,) = operands
    value = identity(x.dtype)
    data, overrides = _aligned_window(ctx, eqn, x, ctx.fill(x, range(len(x.shape)), value), value)
    return ctx.bind(eqn, data, *(i.data for i in inits), **overrides)


_identities: dict[str, Identity] = {
    "add": zero,
    "mul": one,
    "max": lowest,
    "min": highest,
    "and": all_ones,
    "or": zero,
}


@define("select_and_gather_add", "window", identity=zero)
def _select_and_gather_add(ctx: Context, eqn: Any, tangents: Padded, x: Padded) -> Any:
    every, chosen = range(len(x.shape)), _never_selected(ctx, eqn, x)
    operand, overrides = _aligned_window(ctx, eqn, x, ctx.fill(x, every, chosen), chosen)
    zeros = zero(tangents.dtype)
    data, _ = _aligned_window(ctx, eqn, tangents, ctx.fill(tangents, every, 0), zeros)
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
    name = eqn.params["select_prim"].name
    if name not in ("ge", "le"):
        ctx.refuse(eqn, f"selects by `{name}`.")
    return lowest(x.dtype) if name == "ge" else highest(x.dtype)
