"""Rules for control flow and calls: loops end at the true length, calls are looked into.

A scan over a ragged axis runs to the allocated size and freezes its carry past the length; in reverse
the frozen steps come first. Loops whose end depends on data do not start in a frozen step or in a
branch not taken: what they would read there is padding, and they might never end.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .. import _compat
from .._errors import MaskError
from .._program import Shape
from ._context import Context, Padded, has_inner_loop, select
from ._layout import fit
from ._registry import define


def arrays(values: Any, variables: Any) -> list[Any]:
    """Return values as arrays of exactly the dtypes that a jaxpr declares."""
    return [lax.convert_element_type(x, v.aval.dtype) for x, v in zip(values, variables, strict=True)]


# --- calls -----------------------------------------------------------------------------------------


@define(
    "jit closed_call core_call call eval_jaxpr remat2 composite "
    "custom_jvp_call custom_vjp_call custom_vmap_call",
    "call",
)
def _call(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    jaxpr = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr", "call") if key in eqn.params)
    return ctx.call(eqn, *_compat.open_jaxpr(jaxpr), xs)


@define("call_hi_primitive", "call")
def _call_hi_primitive(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    """Look into an operation that JAX itself expands while lowering."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def decide(test: str, line: str, difference: Any) -> bool:
        if difference is None or not (ctx.always(difference, 1) or ctx.always(difference, 0, 0)):
            ctx.refuse(eqn, f"depends on {test}, which differs between examples.")
        return not ctx.always(difference, 1)

    try:
        with _compat.watch_size_tests(decide):
            closed = jax.make_jaxpr(lambda *args: eqn.primitive.to_lojax(*args, **eqn.params))(*avals)
    except MaskError:
        raise
    except NotImplementedError:
        ctx.refuse(eqn, "cannot be looked into.")
    return ctx.call(eqn, _compat.consts_as_inputs(closed), (), [*map(_unpadded, closed.consts), *xs])


def _unpadded(const: Any) -> Padded:
    return Padded(const, np.shape(const))


# --- loops -----------------------------------------------------------------------------------------


@define("scan", "control flow")
def _scan(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    params = eqn.params
    jaxpr, jaxpr_consts = _compat.open_jaxpr(params["jaxpr"])
    num_consts, num_carry = _compat.scan_counts(params)
    data = arrays([x.data for x in xs], eqn.invars)
    consts, init, items = (
        data[:num_consts],
        data[num_consts : num_consts + num_carry],
        data[num_consts + num_carry :],
    )
    ragged = _compat.is_symbolic(params["length"])
    size = ctx.size(params["length"])

    def body(carry: list[Any], step: Any) -> Any:
        i, items = step
        live = i < ctx.length(params["length"]) if ragged else None
        inner = ctx.within(live) if ragged else ctx
        outs = inner.run(jaxpr, jaxpr_consts, [*consts, *carry, *items])
        new, ys = arrays(outs[:num_carry], jaxpr.outvars[:num_carry]), outs[num_carry:]
        if ragged:
            new = [select(live, n, old) for n, old in zip(new, carry, strict=True)]
        return new, ys

    steps = (lax.iota(np.int32, size), items)
    carry, ys = lax.scan(body, init, steps, reverse=params["reverse"], unroll=params["unroll"])
    return [*carry, *ys]


@define("while", "control flow")
def _while(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    params = eqn.params
    cond, cond_consts = _compat.open_jaxpr(params["cond_jaxpr"])
    body, body_consts = _compat.open_jaxpr(params["body_jaxpr"])
    data = arrays([x.data for x in xs], eqn.invars)
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_args, body_args, init = data[: split[0]], data[split[0] : split[1]], data[split[1] :]

    (go_aval,) = [v.aval for v in cond.outvars]

    def going(carry: list[Any]) -> Any:
        """Return the predicate: one bool, or one for each lane of a loop that `vmap` has batched."""
        (go,) = ctx.run(cond, cond_consts, [*cond_args, *carry])
        go = ctx.fill(Padded(go, go_aval.shape), range(len(go_aval.shape)), False)
        return go if ctx.active is None else go & _for_lanes(ctx.active, go)

    def step(carry: list[Any]) -> list[Any]:
        inner = ctx.within(going(carry)) if has_inner_loop(eqn) else ctx
        new = arrays(inner.run(body, body_consts, [*body_args, *carry]), body.outvars)
        if not go_aval.shape:
            return new
        go = going(carry)  # a lane that has ended keeps its carry while others go on
        lanes = (lax.broadcast_in_dim(go, n.shape, range(go.ndim)) for n in new)
        return [lax.select(lane, n, old) for lane, n, old in zip(lanes, new, carry, strict=True)]

    return lax.while_loop(lambda carry: going(carry).any(), step, init)


def _for_lanes(active: Any, go: Any) -> Any:
    """Return which lanes of an inner loop may run; one that has no lanes runs if any outer lane does."""
    if np.ndim(active) > go.ndim:
        return active.any()
    return lax.broadcast_in_dim(active, go.shape, range(np.ndim(active)))


@define("size_switch", "control flow")
def _size_switch(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    """Run each piece on the sizes and lengths it is for; the one the lengths belong to gives the answer."""
    results: list[Any] | None = None
    targets = [ctx.shape(v.aval.shape) for v in eqn.outvars]
    for jaxpr, bounds in zip(eqn.params["jaxprs"], map(dict, eqn.params["bounds"]), strict=True):
        if any(low > ctx.sizes[dim] or high < ctx.floors.get(dim, 1) for dim, (low, high) in bounds.items()):
            continue
        lengths, sizes, inside = {}, {}, np.True_
        for dim, (low, high) in bounds.items():
            length, sizes[dim] = ctx.lengths[dim], min(high, ctx.sizes[dim])
            inside = inside & (length >= low) & (length <= high)
            lengths[dim] = lax.clamp(np.int32(low), length, np.int32(sizes[dim]))
        inner = ctx.at(lengths, sizes, inside)
        opened, consts = _compat.open_jaxpr(jaxpr)
        args = _fitted([x.data for x in xs], [inner.shape(v.aval.shape) for v in opened.invars])
        outs = _fitted(arrays(inner.run(opened, consts, args), eqn.outvars), targets)
        results = [select(inside, *pair) for pair in zip(outs, results or outs, strict=True)]
    if results is None:  # `f` itself raises at every length that is in this bucket, so that none runs here
        return [lax.full(shape, 0, v.aval.dtype) for shape, v in zip(targets, eqn.outvars, strict=True)]
    return results


def _fitted(values: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
    """Crop or extend arrays at the end of each axis."""
    fitted = []
    for value, shape in zip(values, shapes, strict=True):
        for axis, size in enumerate(shape):
            value = fit(value, axis, size)
        fitted.append(value)
    return fitted


@define("cond", "control flow")
def _cond(ctx: Context, eqn: Any, which: Padded, *xs: Padded) -> Any:
    branches = eqn.params["branches"]
    index = lax.convert_element_type(which.data, np.int32)  # within bounds: `lax.switch` has clamped it

    def branch(k: int) -> Any:
        jaxpr, consts = _compat.open_jaxpr(branches[k])

        def run(*args: Any) -> list[Any]:
            return arrays(ctx.within(index == k).run(jaxpr, consts, args), jaxpr.outvars)

        return run

    return lax.switch(
        index, [branch(k) for k in range(len(branches))], *arrays([x.data for x in xs], eqn.invars[1:])
    )
