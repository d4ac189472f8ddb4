"""Packed rules that keep every ragged axis as it is: broadcasts, transposes, reshapes of the other axes."""

import math
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._layout import _groups as groups
from ._context import Row
from ._registry import define
from ._values import Value, on_row, ragged_axes


@define("broadcast_in_dim")
def _broadcast(row: Row, eqn: Any, x: Value, *_: Any) -> Any:
    shape, dims = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    if not on_row(shape):
        return None
    data = x.data
    if x.kind == "each":
        first = ragged_axes(shape)[0]
        data = data[row.space(shape[first]).segment]  # [cells, *x.shape]
        if first in dims:  # a size of 1
            data = jnp.squeeze(data, 1 + dims.index(first))
            dims = tuple(d for d in dims if d != first)
        data = jnp.moveaxis(data, 0, sum(d < first for d in dims))
        dims = tuple(sorted((*dims, first)))
    return Value(lax.broadcast_in_dim(data, row.sizes(shape), dims), "row")


@define("squeeze transpose")
def _move(row: Row, eqn: Any, x: Value) -> Any:
    return Value(row.bind(eqn, x.data), "row") if x.kind == "row" else None


@define("reshape")
def _reshape(row: Row, eqn: Any, x: Value, *_: Any) -> Any:
    shape = eqn.outvars[0].aval.shape
    if x.kind != "row" or not on_row(shape) or eqn.params.get("dimensions") is not None:
        return None
    if not all(_keeps(*pair) for pair in groups(x.shape, shape)):
        return None
    return Value(jnp.reshape(x.data, row.sizes(shape)), "row")


def _keeps(source: Any, target: Any) -> bool:
    """Tell whether a part of a reshape leaves its ragged axis alone."""
    long = [[d for d in part if _compat.is_symbolic(d) or d != 1] for part in (source, target)]
    if not any(map(_compat.is_symbolic, (*source, *target))):
        return math.prod(source) == math.prod(target)
    return len(long[0]) == len(long[1]) == 1 and bool(long[0][0] == long[1][0])


@define("iota")
def _iota(row: Row, eqn: Any) -> Any:
    shape, axis = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    if not on_row(shape):
        return None
    if not _compat.is_symbolic(shape[axis]):
        return Value(lax.broadcasted_iota(eqn.params["dtype"], row.sizes(shape), axis), "row")
    space = row.space(shape[axis])
    own = space.along(space.position.astype(eqn.params["dtype"]), len(shape), axis)
    return Value(jnp.broadcast_to(own, row.sizes(shape)), "row")


@define("dim_as_value")
def _dim_as_value(row: Row, eqn: Any) -> Any:
    data = jnp.broadcast_to(row.value(eqn.params["dim"]), (row.layout.num_segments,))
    return Value(lax.convert_element_type(data, eqn.outvars[0].aval.dtype), "each")


@define("shape_assertion")
def _shape_assertion(row: Row, eqn: Any, *_: Any) -> Any:
    return []


def counting(size: int) -> Any:
    """Return 0 .. size - 1 as int32."""
    return lax.iota(np.int32, size)
