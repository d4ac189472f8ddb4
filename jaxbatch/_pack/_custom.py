"""The packed rule of `custom_padding`: a user's own version for packed rows."""

from typing import Any

import numpy as np
from jax import numpy as jnp

from .._mask._context import select
from ._context import Row
from ._registry import define
from ._values import Value, on_row


@define("custom_padding")
def _custom_padding(row: Row, eqn: Any, *xs: Value) -> Any:
    version, fill = eqn.params["packed"], eqn.params["fill"]
    fits = all(on_row(var.aval.shape) for var in eqn.outvars) and all(x.kind != "each" for x in xs)
    if version is None or not fits:
        return None
    outs = version([_segments(row, x) for x in xs], [_clean(row, x, fill) for x in xs])
    for out, var in zip(outs, eqn.outvars, strict=True):
        expected = row.sizes(var.aval.shape)
        if jnp.shape(out) != expected or out.dtype != var.aval.dtype:
            row.refuse(
                eqn,
                f"has a version for packed rows that returns {out.dtype}{list(jnp.shape(out))}, "
                f"expected {var.aval.dtype}{list(expected)}.",
            )
    return [Value(out, "row") for out in outs]


def _segments(row: Row, x: Value) -> tuple[Any, ...]:
    """Return the segment of each cell along every ragged axis, None along the others."""
    spaces = [row.space(dim) if axis in x.ragged else None for axis, dim in enumerate(x.shape)]
    return tuple(s and jnp.where(s.valid, s.segment, np.int32(-1)) for s in spaces)


def _clean(row: Row, x: Value, fill: Any) -> Any:
    """Return the data without what a kernel could carry into other segments."""
    if x.kind != "row":
        return x.data
    data = row.finite(x)
    if fill is None:
        return select(row.valid(x.shape), data, x.data)
    return data if fill == 0 else select(row.valid(x.shape), data, np.asarray(fill, x.data.dtype))
