"""Packed rules for windows that slide along the ragged axis: convolutions and pooling.

The segments are laid out anew, each with its own padding around it and beginning at a multiple of the stride,
so that one convolution over the row has a window for every true window of every segment. A window never
crosses a border; those that would are not read.
"""

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import mentions_dims, select
from .._program import Dim
from ._context import Row
from ._reduce import identity_of
from ._registry import define
from ._values import Value


def _laid_out(
    row: Row, x: Value, axis: int, fill: Any, low: Dim, dilation: int, stride: int, extent: int, out: Dim
) -> tuple[Any, tuple[int, int], Any]:
    """Lay segments out so that windows of all of them are `stride` apart on the row.

    Returns:
      The data, the padding behind the row after which there is one window for each stride, and for each cell
      of an axis of size `out` the window that it is.
    """
    units = out + (-(-extent // stride) - 1)  # strides that a segment's windows reach over
    space = row.space(units)
    segment = jnp.repeat(space.segment, stride)
    place = jnp.repeat(space.position, stride) * stride + jnp.tile(lax.iota(np.int32, stride), space.size)
    low = row.value(low)
    begin = low if isinstance(low, int) else low[segment]
    source, step = (place - begin) // dilation, (place - begin) % dilation
    own = row.space(x.shape[axis])
    inside = (place >= begin) & (step == 0) & (source < own.lengths[segment])
    taken = jnp.take(x.data, own.starts[segment] + source, axis=axis, mode="clip")
    mask = jnp.reshape(inside, [segment.shape[0] if a == axis else 1 for a in range(taken.ndim)])
    target = row.space(out)
    window = space.starts[target.segment] + target.position
    return select(mask, taken, fill), (0, extent - stride), window


def _extent(size: int, dilation: int) -> int:
    return (size - 1) * dilation + 1


def _replaced(values: Any, place: int, value: Any) -> tuple[Any, ...]:
    return tuple(value if k == place else own for k, own in enumerate(values))


@define("conv_general_dilated")
def _conv(row: Row, eqn: Any, lhs: Value, rhs: Value) -> Any:
    params, dims = eqn.params, eqn.params["dimension_numbers"]
    if lhs.kind != "row" or rhs.kind != "plain" or len(lhs.ragged) != 1:
        return None
    (axis,) = lhs.ragged
    batch, feature, *spatial = dims.lhs_spec
    if axis == batch and params["batch_group_count"] == 1 and not mentions_dims(params["padding"]):
        return Value(row.bind(eqn, lhs.data, rhs.data), "row")
    if axis not in spatial:
        return None
    k = spatial.index(axis)
    out_axis = dims.out_spec[2 + k]
    out = eqn.outvars[0].aval.shape[out_axis]
    own = {name: params[name] for name in ("window_strides", "lhs_dilation", "rhs_dilation", "padding")}
    others = [own["padding"][j] for j in range(len(spatial)) if j != k]
    size = rhs.shape[dims.rhs_spec[2 + k]]
    steps = own["window_strides"], own["lhs_dilation"], own["rhs_dilation"]
    if mentions_dims((others, steps)) or not _compat.is_symbolic(out) or not size:
        return None
    stride, dilation = own["window_strides"][k], own["lhs_dilation"][k]
    extent = _extent(size, own["rhs_dilation"][k])
    clean = Value(row.finite(lhs), "row", lhs.shape)  # a library may mix what a window does not read
    zero = np.zeros((), lhs.data.dtype)
    data, edge, window = _laid_out(
        row, clean, axis, zero, own["padding"][k][0], dilation, stride, extent, out
    )
    made = row.bind(
        eqn,
        data,
        rhs.data,
        padding=_replaced(own["padding"], k, edge),
        lhs_dilation=_replaced(own["lhs_dilation"], k, 1),
    )
    return Value(jnp.take(made, window, axis=out_axis, mode="clip"), "row")


@define("reduce_window_sum reduce_window_max reduce_window_min")
def _pool(row: Row, eqn: Any, x: Value) -> Any:
    params = eqn.params
    if x.kind != "row" or len(x.ragged) != 1:
        return None
    (axis,) = x.ragged
    out = eqn.outvars[0].aval.shape[axis]
    sizes = (params["window_dimensions"], params["window_strides"])
    sizes += (params["base_dilation"], params["window_dilation"])
    others = [pair for a, pair in enumerate(params["padding"]) if a != axis]
    if mentions_dims((sizes, others)) or not _compat.is_symbolic(out):
        return None
    size, stride, dilation, between = (names[axis] for names in sizes)
    if not size:
        return None
    fill = identity_of(eqn.primitive.name, x.data.dtype)
    low = params["padding"][axis][0]
    data, edge, window = _laid_out(row, x, axis, fill, low, dilation, stride, _extent(size, between), out)
    made = row.bind(
        eqn,
        data,
        padding=_replaced(params["padding"], axis, edge),
        base_dilation=_replaced(params["base_dilation"], axis, 1),
    )
    return Value(jnp.take(made, window, axis=axis, mode="clip"), "row")
