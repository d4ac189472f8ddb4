"""Packed rules for calls, and for loops and branches that all segments of a row take alike.

Where each segment decides by itself, they are spread out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._control import arrays
from ._context import Row, flagged
from ._registry import define
from ._values import Value


@define(
    "jit closed_call core_call call eval_jaxpr remat2 composite "
    "custom_jvp_call custom_vjp_call custom_vmap_call"
)
def _call(row: Row, eqn: Any, *xs: Value) -> Any:
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in eqn.params)
    return run_inner(row, inner, xs, [row.wants(var) for var in eqn.outvars])


def run_inner(row: Row, inner: Any, xs: Sequence[Value], totals: Any = None) -> list[Value]:
    """Interpret the jaxpr of an equation, whose constants are the same for all segments."""
    opened, consts = _compat.open_jaxpr(inner)
    if consts or opened.constvars:
        opened = _compat.consts_as_inputs(inner)
    return row.run(opened, [*(Value(c, "plain") for c in consts), *xs], totals)


# --- carried values --------------------------------------------------------------------------------


def exact(x: Value, var: Any) -> Value:
    """Return a value as an array of exactly the dtype that a jaxpr declares."""
    return dataclasses.replace(x, data=arrays([x.data], [var])[0])


def as_kind(row: Row, x: Value, kind: Any) -> Value:
    return x if x.kind == kind else Value(row.each(x), "each", x.shape)


def stable(
    init: Sequence[Value], step: Callable[[Sequence[Value]], Sequence[Value]], row: Row
) -> list[Value]:
    """Return the carry at its start, of kinds that a step leaves as they are: plain only if all steps are."""
    init = list(init)
    while True:
        outs = jax.eval_shape(step, init)
        kinds = [a.kind if a.kind == b.kind else "each" for a, b in zip(init, outs, strict=True)]
        if kinds == [x.kind for x in init]:
            return init
        init = [as_kind(row, x, kind) for x, kind in zip(init, kinds, strict=True)]


# --- loops and branches that all segments take alike -----------------------------------------------


@define("while")
def _while(row: Row, eqn: Any, *xs: Value) -> Any:
    params = eqn.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    xs = tuple(Value(exact(x, v).data, x.kind) for x, v in zip(xs, eqn.invars, strict=True))
    cond_consts, body_consts, init = xs[: split[0]], xs[split[0] : split[1]], xs[split[1] :]
    body, _ = _compat.open_jaxpr(params["body_jaxpr"])

    def step(carry: Sequence[Value]) -> tuple[list[Value], Any]:
        inner = row.inner()
        outs = run_inner(inner, params["body_jaxpr"], [*body_consts, *carry])
        return [Value(exact(o, v).data, o.kind) for o, v in zip(outs, body.outvars, strict=True)], flagged(
            inner.flags
        )

    def going(carry: Sequence[Value]) -> Value:
        (go,) = run_inner(row.inner(), params["cond_jaxpr"], [*cond_consts, *carry])
        return Value(go.data, go.kind)

    noted = len(row.spread)
    init = stable(list(init), lambda carry: step(carry)[0], row)
    if jax.eval_shape(going, init).kind != "plain":
        del row.spread[noted:]
        return None
    kinds: list[Any] = [x.kind for x in init]

    def loop(state: Any) -> Any:
        carry, flag = state
        outs, new = step(carry)
        return [Value(as_kind(row, o, k).data, k) for o, k in zip(outs, kinds, strict=True)], flag | new

    outs, flag = lax.while_loop(lambda state: going(state[0]).data, loop, (init, jnp.asarray(False)))
    row.flags.append(flag)
    return outs


@define("cond")
def _cond(row: Row, eqn: Any, which: Value, *xs: Value) -> Any:
    branches = eqn.params["branches"]
    if which.kind != "plain":
        return None
    xs = tuple(Value(exact(x, v).data, x.kind) for x, v in zip(xs, eqn.invars[1:], strict=True))

    def branch(k: int) -> Any:
        opened, _ = _compat.open_jaxpr(branches[k])

        def run(*args: Value) -> tuple[list[Value], Any]:
            inner = row.inner()
            outs = [
                exact(o, v) for o, v in zip(run_inner(inner, branches[k], args), opened.outvars, strict=True)
            ]
            outs = [o if o.kind == "row" else Value(row.each(o), "each") for o in outs]
            return [Value(o.data, o.kind) for o in outs], flagged(inner.flags)

        return run

    index = lax.clamp(
        np.int32(0), lax.convert_element_type(which.data, np.int32), np.int32(len(branches) - 1)
    )
    outs, flag = lax.switch(index, [branch(k) for k in range(len(branches))], *xs)
    row.flags.append(flag)
    return outs
