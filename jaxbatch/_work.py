"""What a program will do, roughly, before it is compiled: operations and bytes, counted in its jaxpr.

The number only compares programs of one function. Loops count as often as they run where that is known, else
once.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ._grid import Bucket
from ._traced import Traced

PER_BYTE = 8.0
"""How many operations a device does in the time of moving one byte, roughly."""

_EQUATION = 1e4  # what an operation costs, however small it is


def row_work(traced: Traced, size: int) -> float:
    """Return what one row of this size takes; the function is interpreted once more, and nothing compiles."""
    bucket = traced.bucket(Bucket(**{traced.dims[0]: size}), 1)
    return _work(jax.make_jaxpr(traced.run(bucket))(*traced.avals(bucket)).jaxpr)


def _work(jaxpr: Any) -> float:
    return sum(map(_of_equation, jaxpr.eqns))


def _of_equation(eqn: Any) -> float:
    if inner := list(map(_work, _inside(eqn))):
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        one = eqn.primitive.name == "cond"  # a single branch runs; `vmap` makes a selection of all
        return times * (max(inner) if one else sum(inner)) + _EQUATION
    moved = sum(_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return _flops(eqn) + PER_BYTE * moved + _EQUATION


def _inside(eqn: Any) -> list[Any]:
    """Return the jaxprs that an equation runs."""
    if eqn.primitive.name == "call_hi_primitive":  # JAX itself expands it while lowering
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        try:
            return [jax.make_jaxpr(lambda *args: eqn.primitive.to_lojax(*args, **eqn.params))(*avals).jaxpr]
        except NotImplementedError:
            pass
    return list(jex_core.jaxprs_in_params(eqn.params))


def _bytes(aval: Any) -> float:
    if not hasattr(aval, "shape") or jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return 0.0
    return float(math.prod(aval.shape)) * np.dtype(aval.dtype).itemsize


def _flops(eqn: Any) -> float:
    size = float(math.prod(getattr(eqn.outvars[0].aval, "shape", ()))) if eqn.outvars else 0.0
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        outs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * size * math.prod(kernel) / max(outs, 1)
    return size
