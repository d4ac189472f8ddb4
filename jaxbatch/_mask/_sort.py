"""Rules for order along a ragged axis: padding is ordered last by a key of its own.

Real data may hold infinities and NaN, so no value can stand for "last".
"""

from typing import Any

from jax import lax

from ._context import Context, Padded
from ._registry import define


@define("sort", "order")
def _sort(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    axis = eqn.params["dimension"]
    mask = ctx.valid(xs[0].shape, [axis])
    if mask is None:
        return ctx.bind(eqn, *(x.data for x in xs))
    is_padding = lax.broadcast_in_dim(~mask, xs[0].data.shape, range(mask.ndim))
    outs = lax.sort(
        (is_padding, *(x.data for x in xs)),
        dimension=axis,
        is_stable=eqn.params["is_stable"],
        num_keys=eqn.params["num_keys"] + 1,
    )
    return outs[1:]
