"""Closed-over arrays as inputs, also those that an inner `jax.jit` closed over.

A compiled program must not hold a copy of a weight. The constants of a trace become its leading inputs;
those of inner jitted functions are inside their equations, so these are looked into once.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import _compat


def hoist(closed: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a closed jaxpr as an open one over its constants and then its inputs, and the constants."""
    inner = list({id(const): const for const in _inner_consts(closed.jaxpr)}.values())
    if not inner:
        return _compat.consts_as_inputs(closed), tuple(closed.consts)
    consts = [*closed.consts, *inner]
    opened = _compat.consts_as_inputs(closed)

    def run(*values: Any) -> list[Any]:
        own, hoisted = values[: len(closed.consts)], values[len(closed.consts) : len(consts)]
        table = {id(const): value for const, value in zip(inner, hoisted, strict=True)}
        return _inline(opened, (*own, *values[len(consts) :]), table)

    structs = [jax.ShapeDtypeStruct(np.shape(const), const.dtype) for const in consts]
    inputs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in closed.in_avals
    ]
    again = jax.make_jaxpr(run)(*structs, *inputs)
    assert not again.consts
    return _compat.consts_as_inputs(again), tuple(consts)


def _inner_consts(jaxpr: Any) -> list[Any]:
    """Return what the jitted functions inside a jaxpr closed over, at any depth of calls."""
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "jit":
            inner, consts = _compat.open_jaxpr(eqn.params["jaxpr"])
            found += [*consts, *_inner_consts(inner)]
    return found


def _inline(jaxpr: Any, args: Sequence[Any], table: dict[int, Any]) -> list[Any]:
    """Run a jaxpr; a call that closed over an array is looked into, with `table`'s value in its place."""

    def apply(eqn: Any, values: list[Any]) -> Sequence[Any]:
        closed = eqn.params["jaxpr"] if eqn.primitive.name == "jit" else None
        if closed is None or not (closed.consts or _inner_consts(_compat.open_jaxpr(closed)[0])):
            return _compat.bind(eqn, values)
        own = [table[id(const)] for const in closed.consts]
        return _inline(_compat.consts_as_inputs(closed), (*own, *values), table)

    return _compat.interpret(jaxpr, (), args, apply)
