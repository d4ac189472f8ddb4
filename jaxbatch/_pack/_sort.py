"""The packed rule for order along the ragged axis: the segment is the first key."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from ._context import Row
from ._registry import define
from ._values import Value


@define("sort")
def _sort(row: Row, eqn: Any, *xs: Value) -> Any:
    axis, shape = eqn.params["dimension"], xs[0].shape
    if any(x.kind != "row" for x in xs):
        return None
    if axis not in xs[0].ragged:
        outs = row.bind(eqn, *(x.data for x in xs))
        return [Value(out, "row") for out in outs]
    if len(xs[0].ragged) > 1:
        return None
    space = row.space(shape[axis])
    key = jnp.where(space.valid, space.segment, row.layout.num_segments)
    key = jnp.broadcast_to(space.along(key, len(shape), axis), xs[0].data.shape)
    _, *outs = lax.sort(
        (key, *(x.data for x in xs)),
        dimension=axis,
        is_stable=eqn.params["is_stable"],
        num_keys=eqn.params["num_keys"] + 1,
    )
    own = jnp.where(row.layout.real, space.lengths, 0)  # sorted, the segments lie one after the other
    before = jnp.cumsum(own) - own
    place = before[space.segment] + space.position
    return [Value(jnp.take(out, place, axis=axis, mode="clip"), "row") for out in outs]
