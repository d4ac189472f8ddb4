"""Rules that read across an axis and have an identity: reductions, contractions, cumulative operations.

The padding is replaced by the identity, by selection. A contraction fills both operands, since 0 * NaN
is NaN.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import numpy as jnp

from ._context import Context, Padded
from ._registry import define

Identity = Callable[[Any], Any]


# --- identities ------------------------------------------------------------------------------------


def zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


def one(dtype: Any) -> Any:
    return np.ones((), dtype)


def lowest(dtype: Any) -> Any:
    """The identity of max: -inf, the smallest integer, or False."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(-np.inf, dtype)
    return np.array(False) if dtype == np.bool_ else np.array(jnp.iinfo(dtype).min, dtype)


def highest(dtype: Any) -> Any:
    """The identity of min: inf, the largest integer, or True."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array(np.inf, dtype)
    return np.array(True) if dtype == np.bool_ else np.array(jnp.iinfo(dtype).max, dtype)


def all_ones(dtype: Any) -> Any:
    """The identity of and: True, or every bit set."""
    return np.invert(np.zeros((), dtype))


# --- reductions ------------------------------------------------------------------------------------


def defreducer(names: str, identity: Identity, *, quiet: bool = False) -> None:
    """Register reductions over `axes` whose padding may hold `identity`."""

    def reduce(ctx: Context, eqn: Any, x: Padded) -> Any:
        return ctx.bind(eqn, ctx.fill(x, eqn.params["axes"], identity(x.dtype), quiet=quiet))

    define(names, "reduction", identity=identity)(reduce)


defreducer("reduce_sum", zero, quiet=True)
defreducer("reduce_prod", one)
defreducer("reduce_max argmax", lowest)
defreducer("reduce_min argmin", highest)
defreducer("reduce_or reduce_xor", zero)
defreducer("reduce_and", all_ones)


@define("reduce", "reduction", status="conditional", note="the initial value is an identity of the operation")
def _reduce(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    operands, inits = xs[: len(xs) // 2], xs[len(xs) // 2 :]
    filled = [ctx.fill(x, eqn.params["dimensions"], i.data) for x, i in zip(operands, inits, strict=True)]
    return ctx.bind(eqn, *filled, *(i.data for i in inits))


# --- contractions ----------------------------------------------------------------------------------


@define("dot_general", "contraction", identity=zero)
def _dot_general(ctx: Context, eqn: Any, lhs: Padded, rhs: Padded) -> Any:
    (lhs_axes, rhs_axes), _ = eqn.params["dimension_numbers"]
    return ctx.bind(eqn, ctx.fill(lhs, lhs_axes, 0, quiet=True), ctx.fill(rhs, rhs_axes, 0, quiet=True))


# --- cumulative operations -------------------------------------------------------------------------


def defcumulative(name: str, identity: Identity) -> None:
    """Register a running reduction along `axis`: in reverse the padding comes first, and is filled."""

    def cumulate(ctx: Context, eqn: Any, x: Padded) -> Any:
        if eqn.params["reverse"]:
            return ctx.bind(eqn, ctx.fill(x, [eqn.params["axis"]], identity(x.dtype)))
        return ctx.bind(eqn, x.data)

    define(name, "cumulative", identity=identity)(cumulate)


defcumulative("cumsum", zero)
defcumulative("cumprod", one)
defcumulative("cummax", lowest)
defcumulative("cummin", highest)
defcumulative("cumlogsumexp", lowest)
