"""Shared arguments as leaves: arrays are traced, everything else is static.

Arrays, and a number that is a whole argument, are arguments of every program, so new values never mean a
new program and no program holds a copy of them. All other leaves (functions, strings, and numbers inside
a model, which it may branch on) are part of what the program is.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

_NUMBERS = (int, float, complex)


@dataclasses.dataclass(frozen=True, eq=False)
class Described:
    """An array without its values: enough to trace with, and to say what a program takes.

    Attributes:
      source: where the values are, for whoever made this.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    source: Any

    sharding = None
    committed = False

    @property
    def aval(self) -> Any:
        """As JAX describes the array."""
        return jax.typeof(jax.ShapeDtypeStruct(self.shape, self.dtype))


_ARRAYS = (jax.Array, np.ndarray, np.generic, Described)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Arguments split into traced leaves and the rest.

    Attributes:
      arrays: the traced leaves, in order, as they were given.
      static: trees and static leaves, hashable.
      traced: for each leaf, whether it is one of `arrays`.
    """

    arrays: tuple[Any, ...]
    static: Hashable
    traced: tuple[bool, ...]
    _trees: tuple[Any, ...]
    _leaves: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any]) -> "Split":
        """Flatten the arguments and sort their leaves."""
        flat = [jax.tree.flatten(arg) for arg in args]
        leaves, trees = [leaf for part, _ in flat for leaf in part], tuple(tree for _, tree in flat)
        traced = tuple(
            _is_traced(leaf, arg) for arg, (part, _) in zip(args, flat, strict=True) for leaf in part
        )
        return cls(
            arrays=tuple(leaf for leaf, t in zip(leaves, traced, strict=True) if t),
            static=(trees, traced, tuple(_hashable(x) for x, t in zip(leaves, traced, strict=True) if not t)),
            traced=traced,
            _trees=trees,
            _leaves=tuple(None if t else leaf for leaf, t in zip(leaves, traced, strict=True)),
        )

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Shape, dtype and weak type of each of `arrays`."""
        types = map(jax.typeof, self.arrays)
        return [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types]

    @property
    def kind(self) -> Hashable:
        """What a trace depends on: static parts, shapes, dtypes and weak types."""
        return self.static, tuple((a.shape, a.dtype, a.weak_type) for a in self.avals)

    def rebuild(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments with `arrays`, which may be traced, in the place of their own."""
        given = iter(arrays)
        leaves = iter([next(given) if t else leaf for leaf, t in zip(self._leaves, self.traced, strict=True)])
        return [tree.unflatten([next(leaves) for _ in range(tree.num_leaves)]) for tree in self._trees]


@dataclasses.dataclass(frozen=True, eq=False)
class _ById:
    """A leaf without a hash, compared by identity and kept alive, so that its id stays its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_traced(leaf: Any, arg: Any) -> bool:
    number = leaf is arg and isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool)
    return number or isinstance(leaf, _ARRAYS)


def _hashable(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return _ById(leaf)
    # 1 == True == 1.0, but a program that branches on one is not a program for the other.
    return type(leaf), leaf
