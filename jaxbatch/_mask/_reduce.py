"""Rules that read across an axis and have an identity: reductions, contractions, cumulative operations.

The padding is replaced by the identity, by selection. A contraction fills both operands, since 0 * NaN
is NaN.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from .. import _compat
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
        axes = tuple(axis % len(x.shape) for axis in eqn.params["axes"])
        return ctx.bind(eqn, ctx.fill(x, axes, identity(x.dtype), quiet=quiet), axes=axes)

    define(names, "reduction", identity=identity)(reduce)


defreducer("reduce_sum", zero, quiet=True)
defreducer("reduce_prod", one)
defreducer("reduce_max argmax", lowest)
defreducer("reduce_min argmin", highest)
defreducer("reduce_or reduce_xor", zero)
defreducer("reduce_and", all_ones)


@define("reduce", "reduction")
def _reduce(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    """Fold the valid cells one after the other: an arbitrary operation has no identity to fill with."""
    operands, inits = xs[: len(xs) // 2], [x.data for x in xs[len(xs) // 2 :]]
    shape = operands[0].shape
    axes = [axis % len(shape) for axis in eqn.params["dimensions"]]
    if not operands[0].ragged(axes):
        return ctx.bind(eqn, *(x.data for x in operands), *inits)
    jaxpr, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
    sizes = operands[0].data.shape
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    out = tuple(sizes[axis] for axis in kept)
    num_cells = math.prod(sizes[axis] for axis in axes)

    def cells(data: Any) -> Any:
        """Return the reduced axes as one leading axis."""
        return jnp.transpose(data, (*axes, *kept)).reshape(num_cells, *out)

    mask = jnp.broadcast_to(ctx.valid(shape, axes), sizes)
    combine = jax.vmap(jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, list(consts))))

    def step(carry: list[Any], cell: tuple[Any, list[Any]]) -> tuple[list[Any], None]:
        live, values = cell
        flat = combine(*(c.reshape(-1) for c in carry), *(v.reshape(-1) for v in values))
        return [jnp.where(live, new.reshape(out), old) for new, old in zip(flat, carry, strict=True)], None

    start = [jnp.broadcast_to(jnp.asarray(i, x.dtype), out) for i, x in zip(inits, operands, strict=True)]
    folded, _ = lax.scan(step, start, (cells(mask), [cells(x.data) for x in operands]))
    return folded


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
