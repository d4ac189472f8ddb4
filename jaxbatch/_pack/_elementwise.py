"""Packed rules for operations that never read across an axis."""

from typing import Any

import jax
from jax import numpy as jnp

from .._mask import _registry as mask_rules
from ._context import Row
from ._registry import define
from ._values import Value, on_row

_NAMES = " ".join(name for name, rule in mask_rules.rules().items() if rule.family == "elementwise")


@define(_NAMES)
def _elementwise(row: Row, eqn: Any, *xs: Value) -> Any:
    shape = eqn.outvars[0].aval.shape
    if not on_row(shape):
        return None
    sizes = row.sizes(shape)
    data = [jnp.broadcast_to(row.lift(x, shape), sizes) for x in xs]
    data = [
        jnp.asarray(d, v.aval.dtype) if not _is_extended(v) else d
        for d, v in zip(data, eqn.invars, strict=True)
    ]
    outs = row.bind(eqn, *data)
    return [Value(out, "row") for out in (outs if eqn.primitive.multiple_results else [outs])]


def _is_extended(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jax.dtypes.extended))
