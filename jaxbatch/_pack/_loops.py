"""Packed rules for calls and loops.

A scan over the ragged axis is one over the row that starts anew at every segment. A scan over anything else
(layers, heads) runs its body packed, and so do loops and branches that all segments of a row take alike.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import select
from .._mask._control import arrays
from ._context import Row, flagged
from ._reduce import ends
from ._registry import define
from ._values import Value, ragged_axes


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


def _exact(x: Value, var: Any) -> Value:
    """Return a value as an array of exactly the dtype that a jaxpr declares."""
    return dataclasses.replace(x, data=arrays([x.data], [var])[0])


def _as_kind(row: Row, x: Value, kind: Any) -> Value:
    return x if x.kind == kind else Value(row.each(x), "each", x.shape)


def _stable(
    init: Sequence[Value], step: Callable[[Sequence[Value]], Sequence[Value]], row: Row
) -> list[Value]:
    """Return the carry at its start, of kinds that a step leaves as they are: plain only if all steps are."""
    init = list(init)
    while True:
        outs = jax.eval_shape(step, init)
        kinds = [a.kind if a.kind == b.kind else "each" for a, b in zip(init, outs, strict=True)]
        if kinds == [x.kind for x in init]:
            return init
        init = [_as_kind(row, x, kind) for x, kind in zip(init, kinds, strict=True)]


# --- scan ------------------------------------------------------------------------------------------


@define("scan")
def _scan(row: Row, eqn: Any, *xs: Value) -> Any:
    if any(x.kind == "total" for x in xs):
        return None
    return (
        _along_row(row, eqn, *xs) if _compat.is_symbolic(eqn.params["length"]) else _over_steps(row, eqn, *xs)
    )


def _over_steps(row: Row, eqn: Any, *xs: Value) -> Any:
    """Scan over something of fixed size, with a packed body."""
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    xs = tuple(_exact(x, v) for x, v in zip(xs, eqn.invars, strict=True))
    consts, init, items = (
        xs[:num_consts],
        xs[num_consts : num_consts + num_carry],
        xs[num_consts + num_carry :],
    )
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    made = body.outvars
    first = [_leading(x, +1) for x in items]
    totals = [False] * num_carry + [row.wants(v) for v in eqn.outvars[num_carry:]]

    def step(carry: Sequence[Value], item: Sequence[Value]) -> Any:
        inner = row.inner()
        outs = run_inner(inner, eqn.params["jaxpr"], [*consts, *carry, *item], totals)
        return [_exact(o, v) for o, v in zip(outs, made, strict=True)], flagged(inner.flags)

    def sample(carry: Sequence[Value]) -> Sequence[Value]:
        return step(carry, [Value(x.data[0], x.kind) for x in first])[0][:num_carry]

    length = eqn.params["length"]
    if not length:
        return None
    init = _stable([Value(x.data, x.kind) for x in init], sample, row)
    kinds: list[Any] = [x.kind for x in init]

    def body_fun(carry: Sequence[Value], item: Sequence[Value]) -> Any:
        outs, flag = step(carry, item)
        new = [
            Value(_as_kind(row, o, kind).data, kind) for o, kind in zip(outs[:num_carry], kinds, strict=True)
        ]
        return new, ([Value(o.data, o.kind) for o in outs[num_carry:]], flag)

    carry, (ys, flags) = lax.scan(
        body_fun,
        init,
        [Value(x.data, x.kind) for x in first],
        length=length,
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    row.flags.append(jnp.any(flags))
    return [*carry, *(_leading(y, -1) for y in ys)]


def _leading(x: Value, sign: int) -> Value:
    """Move the axis of steps to the front of data with an axis of segments (1), or back behind it (-1)."""
    if x.kind != "each":
        return x
    return Value(jnp.moveaxis(x.data, *((1, 0) if sign > 0 else (0, 1))), "each")


def _along_row(row: Row, eqn: Any, *xs: Value) -> Any:
    """Scan over the cells of the row: each step is one of its segment."""
    params = eqn.params
    num_consts, num_carry = _compat.scan_counts(params)
    every = [*eqn.invars[: num_consts + num_carry], *eqn.outvars[:num_carry]]
    if any(map(ragged_axes, [getattr(v.aval, "shape", ()) for v in every])):
        return None
    items, ys = eqn.invars[num_consts + num_carry :], eqn.outvars[num_carry:]
    if any(len(ragged_axes(v.aval.shape)) != 1 for v in [*items, *ys]):
        return None
    xs = tuple(_exact(x, v) for x, v in zip(xs, eqn.invars, strict=True))
    space, reverse = row.space(params["length"]), params["reverse"]
    opened, jaxpr_consts = _compat.open_jaxpr(params["jaxpr"])
    begins = ends(space) if reverse else space.position == 0
    whole, init = xs[:num_consts], xs[num_consts : num_consts + num_carry]

    def own(x: Value, segment: Any) -> Any:
        return x.data[segment] if x.kind == "each" else x.data

    def step(carry: list[Any], cell: Any) -> Any:
        segment, begin, valid, item = cell
        carry = [select(begin, own(x, segment), c) for x, c in zip(init, carry, strict=True)]
        length = row.layout.row.lengths[segment]
        context = row.layout.padded({row.layout.dim: length}, row.name).within(valid)
        outs = context.run(opened, jaxpr_consts, [*(own(x, segment) for x in whole), *carry, *item])
        outs = arrays(outs, opened.outvars)
        return outs[:num_carry], (outs[:num_carry], outs[num_carry:])

    start = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[:num_carry]]
    cells = (space.segment, begins & space.valid, space.valid, [x.data for x in xs[num_consts + num_carry :]])
    _, (carries, made) = lax.scan(step, start, cells, reverse=reverse, unroll=params["unroll"])
    last = space.starts if reverse else space.starts + space.lengths - 1
    final = [Value(c[jnp.clip(last, 0, space.size - 1)], "each") for c in carries]
    # A size of 0 (`n - 1` of one cell) makes no step.
    empty = space.lengths == 0
    final = [
        Value(select(jnp.reshape(empty, (-1, *[1] * (f.data.ndim - 1))), row.each(x), f.data), "each")
        for x, f in zip(init, final, strict=True)
    ]
    return [*final, *(Value(y, "row") for y in made)]


# --- loops and branches that all segments take alike -----------------------------------------------


@define("while")
def _while(row: Row, eqn: Any, *xs: Value) -> Any:
    params = eqn.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    if any(x.kind == "total" for x in xs):
        return None
    xs = tuple(Value(_exact(x, v).data, x.kind) for x, v in zip(xs, eqn.invars, strict=True))
    cond_consts, body_consts, init = xs[: split[0]], xs[split[0] : split[1]], xs[split[1] :]
    body, _ = _compat.open_jaxpr(params["body_jaxpr"])

    def step(carry: Sequence[Value]) -> tuple[list[Value], Any]:
        inner = row.inner()
        outs = run_inner(inner, params["body_jaxpr"], [*body_consts, *carry])
        return [Value(_exact(o, v).data, o.kind) for o, v in zip(outs, body.outvars, strict=True)], flagged(
            inner.flags
        )

    def going(carry: Sequence[Value]) -> Value:
        (go,) = run_inner(row.inner(), params["cond_jaxpr"], [*cond_consts, *carry])
        return Value(go.data, go.kind)

    noted = len(row.spread)
    init = _stable(list(init), lambda carry: step(carry)[0], row)
    if jax.eval_shape(going, init).kind != "plain":
        del row.spread[noted:]
        return None
    kinds: list[Any] = [x.kind for x in init]

    def loop(state: Any) -> Any:
        carry, flag = state
        outs, new = step(carry)
        return [Value(_as_kind(row, o, k).data, k) for o, k in zip(outs, kinds, strict=True)], flag | new

    outs, flag = lax.while_loop(lambda state: going(state[0]).data, loop, (init, jnp.asarray(False)))
    row.flags.append(flag)
    return outs


@define("cond")
def _cond(row: Row, eqn: Any, which: Value, *xs: Value) -> Any:
    branches = eqn.params["branches"]
    if which.kind != "plain" or any(x.kind == "total" for x in xs):
        return None
    xs = tuple(Value(_exact(x, v).data, x.kind) for x, v in zip(xs, eqn.invars[1:], strict=True))

    def branch(k: int) -> Any:
        opened, _ = _compat.open_jaxpr(branches[k])

        def run(*args: Value) -> tuple[list[Value], Any]:
            inner = row.inner()
            outs = [
                _exact(o, v) for o, v in zip(run_inner(inner, branches[k], args), opened.outvars, strict=True)
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
