"""What a value of the program is while several segments share a row.

The kind follows from the number of ragged axes, so that every rule knows what it gets:

- none: `plain` (the same for all segments, made from shared arguments alone) or `each` (a leading axis of
  segments);
- one or two: `row`, each ragged axis in the space of its size; with two, a cell is valid where both of its
  places belong to the same segment;
- more: `each`, padded behind the lengths as in a bucket.

A gradient with respect to something shared is a `total`: already the sum over the segments.
"""

import dataclasses
from typing import Any, Literal, cast

import jax

from .. import _compat
from .._program import Shape

Kind = Literal["plain", "each", "row", "total"]


@dataclasses.dataclass(frozen=True)
class Value:
    """An array, how it is laid out, and the formula of its true shape.

    Attributes:
      shape: empty where a value is passed between programs; the program that reads it knows.
    """

    data: Any
    kind: Kind
    shape: Shape = ()

    @property
    def ragged(self) -> list[int]:
        return ragged_axes(self.shape)


jax.tree_util.register_pytree_node(
    Value, lambda value: ((value.data,), value.kind), lambda kind, data: Value(data[0], cast(Kind, kind))
)


def ragged_axes(shape: Shape) -> list[int]:
    """Return the axes whose size differs between segments."""
    return [a for a, dim in enumerate(shape) if _compat.is_symbolic(dim)]


def on_row(shape: Shape) -> bool:
    """Tell whether a value of this true shape lies on the row."""
    return len(ragged_axes(shape)) in (1, 2)
