"""A program as a function that JAX can differentiate at symbolic sizes.

Some of JAX's own derivative rules need a constant size: running products, maxima and log-sums (through
`associative_scan`) and products along an axis. Where a program is about to be differentiated these are
computed by a `lax.scan` instead, which is the same function and has a derivative at any size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from .. import _compat
from ._context import mentions_dims
from ._reduce import Identity, highest, lowest, one


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr, with what has no derivative at symbolic sizes replaced."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with _compat.user_context(eqn), eqn.ctx.manager:
            outs = _apply(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn: Any, args: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in ("jit", "closed_call"):
        return evaluate(*_compat.open_jaxpr(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]), args)
    if name == "remat2":
        jaxpr, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
        options = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
        return jax.checkpoint(lambda *xs: evaluate(jaxpr, consts, xs), **options)(*args)
    replacement = _replacements.get(name)
    if replacement is not None and mentions_dims(eqn.invars[0].aval.shape):
        return [replacement(eqn, *args)]
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return outs if eqn.primitive.multiple_results else [outs]


def _running(combine: Callable[[Any, Any], Any], identity: Identity) -> Callable[..., Any]:
    """Return a cumulative operation along an axis as a scan."""

    def cumulate(eqn: Any, x: Any) -> Any:
        moved = jnp.moveaxis(x, eqn.params["axis"], 0)

        def step(carry: Any, value: Any) -> tuple[Any, Any]:
            carry = combine(carry, value)
            return carry, carry

        start = jnp.full_like(moved[0], identity(x.dtype))
        _, out = lax.scan(step, start, moved, reverse=eqn.params["reverse"])
        return jnp.moveaxis(out, 0, eqn.params["axis"])

    return cumulate


def _product(eqn: Any, x: Any) -> Any:
    """Return a product over axes as one scan for each."""
    for axis in sorted(eqn.params["axes"], reverse=True):
        moved = jnp.moveaxis(x, axis, 0)
        x, _ = lax.scan(lambda carry, v: (carry * v, None), jnp.ones_like(moved[0]), moved)
    return x


_replacements: dict[str, Callable[..., Any]] = {
    "cumprod": _running(lax.mul, one),
    "cummax": _running(lax.max, lowest),
    "cummin": _running(lax.min, highest),
    "cumlogsumexp": _running(jnp.logaddexp, lowest),
    "reduce_prod": _product,
}
