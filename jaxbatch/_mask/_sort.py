"""Rules for order along a ragged axis: padding is ordered last by a key of its own.

Real data may hold infinities and NaN, so no value can stand for "last".
"""

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from ._context import Context, Padded
from ._reduce import lowest
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


@define("top_k", "order", status="conditional", note="k is at most every length")
def _top_k(ctx: Context, eqn: Any, x: Padded) -> Any:
    axis = eqn.params.get("axis", len(x.shape) - 1)
    return ctx.bind(eqn, ctx.fill(x, [axis], _last_in_order(x.dtype)))


def _last_in_order(dtype: Any) -> Any:
    """Return what top_k ranks last; equals are ranked by position, so padding comes after all real data.

    Floats are ranked by their total order, in which a negative NaN of the largest payload (all bits set)
    is below -inf and every other NaN.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return lowest(dtype)
    bits = np.array(-1, f"int{8 * np.dtype(dtype).itemsize}")
    return bits.view(dtype)
