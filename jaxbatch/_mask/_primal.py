"""A program as a function that JAX can differentiate at symbolic sizes.

Some of JAX's own derivative rules need a constant size: running products, maxima and log-sums (through
`associative_scan`) and products along an axis. Where a program is about to be differentiated these are
computed by a `lax.scan` instead, which is the same function and has a derivative at any size. A gather
gets a mode under which its gradient goes back to the place that it read, and a determinant a derivative that
holds at size 1.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._branches import Out, size_switch_p, switch
from ._context import mentions_dims, plain
from ._index import is_place
from ._reduce import Identity, highest, lowest, one


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr, with what has no derivative at symbolic sizes replaced."""
    return _compat.interpret(jaxpr, consts, args, _apply)


def _apply(eqn: Any, args: list[Any]) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in ("jit", "closed_call", "custom_padding"):
        return evaluate(*_compat.open_jaxpr(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]), args)
    if name == "remat2":
        jaxpr, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
        options = {"prevent_cse": eqn.params["prevent_cse"], "policy": eqn.params["policy"]}
        return jax.checkpoint(lambda *xs: evaluate(jaxpr, consts, xs), **options)(*args)
    if eqn.primitive is size_switch_p:
        return _switch(eqn, args)
    if name == "custom_jvp_call" and _is_determinant(eqn):
        return [_determinant(eqn, *args)]
    replacement = _replacements.get(name)
    if replacement is not None and mentions_dims(eqn.invars[0].aval.shape):
        return [replacement(eqn, *args)]
    if name == "gather" and mentions_dims(eqn.invars[0].aval.shape):
        return _compat.bind(eqn, args, mode=_mode_at_fixed_sizes(eqn))
    return _compat.bind(eqn, args)


def _mode_at_fixed_sizes(eqn: Any) -> lax.GatherScatterMode:
    """Return the mode under which the derivative treats a place past a short length like the gather does."""
    dims, mode = plain(eqn.params["dimension_numbers"]), lax.GatherScatterMode.from_any(eqn.params["mode"])
    batching, collapsed = dims.start_indices_batching_dims, dims.collapsed_slice_dims
    place = is_place(eqn.invars[1].aval.shape, batching, dims.start_index_map, collapsed)
    return lax.GatherScatterMode.CLIP if place and mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS else mode


def _switch(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return a switch between sizes with a derivative: the switch between the derivatives of its pieces."""
    jaxprs, bounds = eqn.params["jaxprs"], [dict(b) for b in eqn.params["bounds"]]
    wanted = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    given = [i for i, v in enumerate(eqn.outvars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]

    @jax.custom_vjp
    def call(operands: Sequence[Any]) -> list[Any]:
        return switch(operands, jaxprs, bounds, eqn.params["outs"])

    def pull_back(jaxpr: Any, operands: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        def run(*inexact: Any) -> list[Any]:
            values = list(operands)
            for i, x in zip(wanted, inexact, strict=True):
                values[i] = x
            outs = evaluate(*_compat.open_jaxpr(jaxpr), values)
            return [outs[i] for i in given]

        return jax.vjp(run, *(operands[i] for i in wanted))[1](list(cotangents))

    def backward(operands: Sequence[Any], cotangents: Sequence[Any]) -> tuple[list[Any]]:
        num, pieces = len(operands), []
        for jaxpr in jaxprs:
            opened, _ = _compat.open_jaxpr(jaxpr)
            avals = [v.aval for v in opened.invars] + [opened.outvars[i].aval for i in given]
            run = functools.partial(lambda j, *xs: pull_back(j, xs[:num], xs[num:]), jaxpr)
            pieces.append(jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)))
        outs = [Out(operands[i].shape, operands[i].dtype, False) for i in wanted]
        grads = switch([*operands, *(cotangents[i] for i in given)], pieces, bounds, outs)
        every: list[Any] = [None] * num
        for i, grad in zip(wanted, grads, strict=True):
            every[i] = grad
        return (every,)

    call.defvjp(lambda operands: (call(operands), operands), backward, **_compat.DEFVJP_OPTIONS)
    return call(list(operands))


def _is_determinant(eqn: Any) -> bool:
    """Tell whether a call is JAX's own `det` of a matrix of symbolic size."""
    jaxpr, _ = _compat.open_jaxpr(eqn.params["call_jaxpr"])
    made = jaxpr.debug_info.func_src_info.replace("\\", "/")
    return made.startswith("_det at ") and "/jax/_src/" in made and mentions_dims(eqn.invars[0].aval.shape)


def _determinant(eqn: Any, a: Any) -> Any:
    """Return a determinant whose derivative holds at size 1 too, for which JAX has another formula."""

    @jax.custom_jvp
    def det(a: Any) -> Any:
        return _compat.bind(eqn, [a])[0]

    @det.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (a,), (tangent,) = primals, tangents
        size = a.shape[-1]
        single = jnp.asarray(size) == 1
        # At size 1 the formula for minors divides by what is not there: it gets a matrix of its own.
        larger = jnp.where(single, jnp.eye(size, dtype=a.dtype), a)
        out, slope = jax.jvp(lambda x: _compat.bind(eqn, [x])[0], (larger,), (tangent,))
        trace = jnp.trace(tangent, axis1=-2, axis2=-1)
        return jnp.where(single, a[..., 0, 0], out), jnp.where(single, trace, slope)

    return det(a)


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
