"""What the padding of a value is known to hold, so that fills that cannot matter are skipped.

Two kinds of facts about a variable and one of its axes:

- a fill put this constant there (its bits are the fact);
- `QUIET`: there is 0, or NaN where every valid cell along the axis is NaN too. A sum or a contraction over
  the axis cannot tell such padding from 0. It is what a softmax leaves when its input was filled with -inf:
  `exp(-inf - max)` is 0 unless the maximum over the valid cells is -inf or NaN, and then each valid cell
  is NaN; and `0 / sum` is 0 unless the sum is 0 or NaN, where again each valid cell is. Without a valid
  cell there would be NaN alone, so this holds for axes that are never empty.

`QUIET` is deduced step by step, each from what the operands hold at that moment: a later fill of an operand
changes its facts, never those of a value computed before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import core
from jax import numpy as jnp
from jax.extend import core as jex_core

Fact = tuple[int, Any]  # an axis, and what is known there
Facts = set[Fact]

QUIET = "quiet"
SHIFTED = "shifted"  # -inf minus the maximum over the valid cells; exp makes it quiet


def token(value: Any) -> Any:
    """Return something to compare fill values by: equal bits; a traced value equals nothing."""
    return object() if isinstance(value, core.Tracer) else complex(np.asarray(value).item())


def deduced(
    eqn: Any,
    known: Mapping[Any, Facts],
    producers: Mapping[Any, Any],
    never_empty: Callable[[Any], bool],
) -> Facts:
    """Return what an equation's output is known to hold, from its operands' facts."""
    if not eqn.invars or isinstance(eqn.invars[0], jex_core.Literal):
        return set()
    match eqn.primitive.name:
        case "sub":
            x, shift = eqn.invars
            axes = _reduced(shift, x, "reduce_max", producers)
            filled = [axis for axis in axes if (axis, token(-np.inf)) in known.get(x, ())]
            return {(axis, SHIFTED) for axis in filled if never_empty(x.aval.shape[axis])}
        case "exp":
            return {(axis, QUIET) for axis, fact in known.get(eqn.invars[0], ()) if fact == SHIFTED}
        case "div":
            x, divisor = eqn.invars
            axes = _reduced(divisor, x, "reduce_sum", producers)
            return {(axis, QUIET) for axis in axes if (axis, QUIET) in known.get(x, ())}
        case "convert_element_type" if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            return {
                fact for fact in known.get(eqn.invars[0], ()) if fact[1] in (QUIET, token(-np.inf), token(0))
            }
    return set()


def _reduced(atom: Any, x: Any, reduction: str, producers: Mapping[Any, Any]) -> tuple[int, ...]:
    """Return the axes of `x` that `atom` was reduced over, if it is such a reduction spread out again."""
    while not isinstance(atom, jex_core.Literal) and (eqn := producers.get(atom)) is not None:
        match eqn.primitive.name:
            case name if name == reduction:
                return tuple(map(int, eqn.params["axes"])) if eqn.invars[0] is x else ()
            case "max" if isinstance(eqn.invars[0], jex_core.Literal):
                atom = eqn.invars[1]  # max(-inf, m), as jax.nn.softmax writes it
            case "stop_gradient" | "copy":
                atom = eqn.invars[0]
            case "broadcast_in_dim" if _keeps_places(eqn, x, reduction, producers):
                atom = eqn.invars[0]
            case _:
                return ()
    return ()


def _keeps_places(eqn: Any, x: Any, reduction: str, producers: Mapping[Any, Any]) -> bool:
    """Tell whether a broadcast puts the axes that a reduction of `x` left back where they were in `x`."""
    given, places = eqn.invars[0].aval.ndim, tuple(eqn.params["broadcast_dimensions"])
    if given == x.aval.ndim:
        return places == tuple(range(given))
    axes = _reduced(eqn.invars[0], x, reduction, producers)
    return places == tuple(a for a in range(x.aval.ndim) if a not in axes)
