"""Packed rules for scans.

A scan over the ragged axis is one over the row that starts anew at every segment. A scan over anything else
(layers, heads) runs its body packed. In either, a carry that only adds up the gradient of something shared
is one sum for the whole row.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import select
from .._mask._control import arrays
from ._context import Row, flagged
from ._loops import as_kind, exact, run_inner, stable
from ._reduce import ends
from ._registry import define
from ._totals import only_added
from ._values import Value, ragged_axes


@define("scan")
def _scan(row: Row, eqn: Any, *xs: Value) -> Any:
    xs = tuple(exact(x, v) for x, v in zip(xs, eqn.invars, strict=True))
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    split = num_consts + num_carry
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    init = list(xs[num_consts:split])
    for k, var in enumerate(eqn.outvars[:num_carry]):
        if row.wants(var) and init[k].kind in ("plain", "each") and only_added(body, num_consts + k, k):
            init[k] = row.total(init[k])
    run = _along_row if _compat.is_symbolic(eqn.params["length"]) else _over_steps
    return run(row, eqn, xs[:num_consts], init, xs[split:])


def _over_steps(
    row: Row, eqn: Any, consts: Sequence[Value], init: Sequence[Value], items: Sequence[Value]
) -> Any:
    """Scan over something of fixed size, with a packed body."""
    num_carry = len(init)
    body, _ = _compat.open_jaxpr(eqn.params["jaxpr"])
    made = body.outvars
    first = [_leading(x, +1) for x in items]
    totals = [x.kind == "total" for x in init] + [row.wants(v) for v in eqn.outvars[num_carry:]]

    def step(carry: Sequence[Value], item: Sequence[Value]) -> Any:
        inner = row.inner()
        outs = run_inner(inner, eqn.params["jaxpr"], [*consts, *carry, *item], totals)
        return [exact(o, v) for o, v in zip(outs, made, strict=True)], flagged(inner.flags)

    def sample(carry: Sequence[Value]) -> Sequence[Value]:
        return step(carry, [Value(x.data[0], x.kind) for x in first])[0][:num_carry]

    length = eqn.params["length"]
    if not length:
        return None
    init = stable([Value(x.data, x.kind) for x in init], sample, row)
    kinds: list[Any] = [x.kind for x in init]

    def body_fun(carry: Sequence[Value], item: Sequence[Value]) -> Any:
        outs, flag = step(carry, item)
        new = [
            Value(as_kind(row, o, kind).data, kind) for o, kind in zip(outs[:num_carry], kinds, strict=True)
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


def _along_row(
    row: Row, eqn: Any, consts: Sequence[Value], init: Sequence[Value], items: Sequence[Value]
) -> Any:
    """Scan over the cells of the row: each step is one of its segment."""
    params, num_carry = eqn.params, len(init)
    carried = [*eqn.invars[: len(consts) + num_carry], *eqn.outvars[:num_carry]]
    stepped = [*eqn.invars[len(consts) + num_carry :], *eqn.outvars[num_carry:]]
    if any(ragged_axes(getattr(v.aval, "shape", ())) for v in carried):
        return None
    if any(len(ragged_axes(v.aval.shape)) != 1 for v in stepped):
        return None
    space, reverse = row.space(params["length"]), params["reverse"]
    opened, jaxpr_consts = _compat.open_jaxpr(params["jaxpr"])
    begins = ends(space) if reverse else space.position == 0

    def own(x: Value, segment: Any) -> Any:
        return x.data[segment] if x.kind == "each" else x.data

    sums = [x.kind == "total" for x in init]

    def step(carry: list[Any], cell: Any) -> Any:
        segment, begin, valid, item = cell
        carry = [
            c if total else select(begin, own(x, segment), c)
            for x, c, total in zip(init, carry, sums, strict=True)
        ]
        length = row.layout.row.lengths[segment]
        context = row.layout.padded({row.layout.dim: length}, row.name).within(valid)
        outs = context.run(opened, jaxpr_consts, [*(own(x, segment) for x in consts), *carry, *item])
        outs = arrays(outs, opened.outvars)
        new = [
            select(valid, o, c) if total else o
            for o, c, total in zip(outs[:num_carry], carry, sums, strict=True)
        ]
        kept = [o for o, total in zip(new, sums, strict=True) if not total]
        return new, (kept, outs[num_carry:])

    start = [
        x.data if total else jnp.zeros(v.aval.shape, v.aval.dtype)
        for x, v, total in zip(init, eqn.outvars, sums, strict=False)
    ]
    cells = (space.segment, begins & space.valid, space.valid, [x.data for x in items])
    carry, (kept, made) = lax.scan(step, start, cells, reverse=reverse, unroll=params["unroll"])
    last = space.starts if reverse else space.starts + space.lengths - 1
    last = jnp.clip(last, 0, space.size - 1)
    empty = space.lengths == 0  # a size such as `n - 1` makes no step where it is 0
    final, rest = [], iter(kept)
    for x, value, total in zip(init, carry, sums, strict=True):
        if total:
            final.append(Value(value, "total"))
            continue
        own_last = next(rest)[last]
        none = jnp.reshape(empty, (-1, *[1] * (own_last.ndim - 1)))
        final.append(Value(select(none, row.each(x), own_last), "each"))
    return [*final, *(Value(y, "row") for y in made)]
