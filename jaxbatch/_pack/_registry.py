"""The packed column of the table of rules.

A packed rule is called as `rule(row, equation, *values)` and returns the packed result, or None where it does
not know these operands. What has no packed rule, or is declined, is spread out: the segments are
laid under each other like the rows of a bucket, the rule for padding does the work, and the result is packed
again. That is as exact, and costs what padding to the longest segment costs, for that equation.
"""

from collections.abc import Callable
from typing import Any

from jax.extend import core as jex_core

Apply = Callable[..., Any]

_rules: dict[str, Apply] = {}


def lookup(primitive: jex_core.Primitive) -> Apply | None:
    """Return the packed rule for a primitive, if there is one."""
    return _rules.get(primitive.name)


def define(names: str) -> Callable[[Apply], Apply]:
    """Register the decorated function as the packed rule of every primitive in `names`."""

    def decorate(apply: Apply) -> Apply:
        for name in names.split():
            _rules[name] = apply
        return apply

    return decorate


def names() -> frozenset[str]:
    """Return the primitives that have a packed rule."""
    return frozenset(_rules)
