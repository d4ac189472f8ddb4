"""The table of rules: what each primitive needs so that padding cannot change its answer.

A rule is data first (its family, whether it is exact, under what condition, and the identity that it
fills with), then a function. Whole families are one line each; an exception is one function. What has
no entry is refused when it meets a ragged value.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jax.extend import core as jex_core

Status = Literal["exact", "conditional", "refused"]
Apply = Callable[..., Any]  # (context, equation, *padded operands) -> one array or a list of them


@dataclasses.dataclass(frozen=True)
class Rule:
    """What one primitive needs under padding.

    Attributes:
      apply: computes the padded outputs; `rule.apply(context, equation, *operands)`.
      family: the kind of primitive, a heading in the support table.
      status: exact always, exact under a condition, or refused.
      note: the condition or the reason, for people.
      identity: what a reduction fills its padding with, as a function of the dtype.
      always: also consulted where nothing is ragged (effects would be seen for filler rows).
    """

    apply: Apply
    family: str
    status: Status = "exact"
    note: str = ""
    identity: Callable[[Any], Any] | None = None
    always: bool = False


_rules: dict[str | jex_core.Primitive, Rule] = {}


def lookup(primitive: jex_core.Primitive) -> Rule | None:
    """Return the rule for a primitive: a user's own first, then the one shipped under its name."""
    return _rules.get(primitive) or _rules.get(primitive.name)


def rules() -> dict[str, Rule]:
    """Return every rule by its primitive's name."""
    return {key if isinstance(key, str) else key.name: rule for key, rule in _rules.items()}


def define(names: str, family: str, **fields: Any) -> Callable[[Apply], Apply]:
    """Register the decorated function as the rule of every primitive in `names` (separated by spaces)."""

    def decorate(apply: Apply) -> Apply:
        for name in names.split():
            _rules[name] = Rule(apply, family, **fields)
        return apply

    return decorate


def register(primitive: jex_core.Primitive, *, note: str = "") -> Callable[[Apply], Apply]:
    """Give a primitive of your own a rule.

    The decorated function is called as `rule(context, equation, *operands)` while a masked function is
    traced. Each operand has `.data` (the padded array) and `.shape` (its true shape; ragged entries are
    symbolic). It returns the padded result, or a list where the primitive has several. Its promise: the
    result equals the unpadded one on the valid prefix of every axis, whatever the padding of the operands
    holds. `context.fill(operand, axes, value)` replaces the padding along some axes,
    `context.bind(equation, *arrays)` runs the primitive itself with sizes put in for symbolic dims, and
    `context.refuse(equation, reason)` raises `MaskError`.

    Args:
      primitive: the `jax.extend.core.Primitive` to cover.
      note: a condition worth telling people.
    """

    def decorate(apply: Apply) -> Apply:
        _rules[primitive] = Rule(apply, "user", note=note)
        return apply

    return decorate
