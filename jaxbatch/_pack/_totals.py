"""Which values of a program are wanted as sums over the segments alone.

The gradient of a shared weight is the sum of the gradients of the segments. If nothing else reads a value on
its way there, the sum can be taken as early as possible: one product over the whole row, where a product for
each segment would hold as many copies of the weight.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core

from ._values import ragged_axes

# The sum over segments passes through these: they are linear in every operand and never mix cells.
THROUGH = frozenset(
    ["add_any", "neg", "transpose", "reshape", "squeeze", "convert_element_type", "copy", "reduce_sum"]
)


def demanded(jaxpr: Any, totals: Sequence[bool]) -> set[Any]:
    """Return the variables that are read as totals only, given which outputs are."""
    if not any(totals):
        return set()
    wanted, otherwise = set(), set()
    for var, total in zip(jaxpr.outvars, totals, strict=True):
        if not isinstance(var, jex_core.Literal):
            (wanted if total else otherwise).add(var)
    for eqn in reversed(jaxpr.eqns):
        passes = (
            eqn.primitive.name in THROUGH and eqn.outvars[0] in wanted and eqn.outvars[0] not in otherwise
        )
        for var in eqn.invars:
            if isinstance(var, jex_core.Literal):
                continue
            linear = passes and not ragged_axes(var.aval.shape) and _is_real(var) and _is_real(eqn.outvars[0])
            (wanted if linear else otherwise).add(var)
    return wanted - otherwise - {*jaxpr.invars}


def only_added(jaxpr: Any, source: int, target: int) -> bool:
    """Tell whether a body only adds to one of its inputs, and gives the sum as one of its outputs."""
    added = {jaxpr.invars[source]}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, jex_core.Literal) and v in added for v in eqn.invars):
            if eqn.primitive.name not in ("add_any", "convert_element_type", "copy"):
                return False
            added.add(eqn.outvars[0])
    given = [not isinstance(v, jex_core.Literal) and v in added for v in jaxpr.outvars]
    return [k for k, one in enumerate(given) if one] == [target]


def _is_real(var: Any) -> bool:
    return var.aval.dtype.kind in "fcV" and var.aval.dtype.itemsize >= 2
