"""Shared arguments: weights and settings that are the same for every example of a call.

They are flattened and put on the device once a call, not once a batch. Arrays and Python numbers are traced
arguments of every program, so new values never mean a new program and no program holds a copy of them. All
other leaves (functions, strings, and booleans, which models branch on) are static: part of the key.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ._executables import Leaf

_TRACED = (jax.Array, np.ndarray, np.generic, int, float, complex)
_MAX_DESCRIBED = 64
_described: dict[Hashable, tuple[Leaf, ...]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The shared arguments of one call.

    Attributes:
      arrays: the traced leaves, on the device.
      signature: what programs depend on, for each of `arrays`.
      static: the trees and the static leaves, for the key.
    """

    arrays: tuple[Any, ...]
    signature: tuple[Leaf, ...]
    static: Hashable
    _trees: tuple[Any, ...]
    _leaves: tuple[Any, ...]
    _traced: tuple[bool, ...]

    @classmethod
    def of(cls, args: Sequence[Any], names: Sequence[str]) -> "Shared":
        """Flatten the arguments, move their arrays to the device, and describe them.

        Raises:
          TypeError: an argument is traced, or holds an array that JAX cannot take.
        """
        flat = [jax.tree.flatten(arg) for arg in args]
        leaves, trees = [leaf for part, _ in flat for leaf in part], tuple(tree for _, tree in flat)
        traced = tuple(_is_traced(leaf) for leaf in leaves)
        given = [leaf for leaf, t in zip(leaves, traced, strict=True) if t]
        if any(isinstance(leaf, Tracer) for leaf in given):
            raise TypeError(
                "a shared argument is traced. Inside jit, vmap or grad use jaxbatch.mask instead."
            )
        arrays = tuple(leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf) for leaf in given)
        placed = tuple([array.sharding if array.committed else None for array in arrays])
        # Describing a hundred leaves takes longer than a small batch, so it is done once for each kind.
        kind = (tuple(names), trees, traced, tuple([array.aval for array in arrays]), placed)
        signature = _described.get(kind)
        if signature is None:
            if len(_described) >= _MAX_DESCRIBED:
                _described.clear()
            paths = [path for arg, name in zip(args, names, strict=True) for path in _paths(arg, name)]
            labels = [path for path, t in zip(paths, traced, strict=True) if t]
            signature = _described[kind] = tuple(map(_leaf, labels, arrays, placed))
        return cls(
            arrays=arrays,
            signature=signature,
            static=(trees, traced, tuple(_hashable(x) for x, t in zip(leaves, traced, strict=True) if not t)),
            _trees=trees,
            _leaves=tuple(None if t else leaf for leaf, t in zip(leaves, traced, strict=True)),
            _traced=traced,
        )

    def avals(self, *, placed: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Return shape and dtype of each of `arrays`; with `placed`, also where committed ones are."""
        return [
            jax.ShapeDtypeStruct(
                array.shape, array.dtype, weak_type=leaf.weak_type, sharding=leaf.sharding if placed else None
            )
            for array, leaf in zip(self.arrays, self.signature, strict=True)
        ]

    def rebuild(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments with `arrays`, which may be traced, in the place of this call's own."""
        given = iter(arrays)
        leaves = iter(
            [next(given) if t else leaf for leaf, t in zip(self._leaves, self._traced, strict=True)]
        )
        return [tree.unflatten([next(leaves) for _ in range(tree.num_leaves)]) for tree in self._trees]


@dataclasses.dataclass(frozen=True, eq=False)
class _ById:
    """A leaf without a hash, compared by identity and kept alive, so that its id stays its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, _TRACED) and not isinstance(leaf, bool)


def _hashable(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return _ById(leaf)
    # 1 == True == 1.0, but a program that branches on one is not a program for the other.
    return type(leaf), leaf


def _leaf(path: str, array: jax.Array, sharding: Any) -> Leaf:
    return Leaf(path, array.shape, array.dtype, array.aval.weak_type, sharding)


def _paths(arg: Any, name: str) -> list[str]:
    """Return where each leaf is, as a user would write it."""
    return [name + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(arg)]
