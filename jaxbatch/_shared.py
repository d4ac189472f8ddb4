"""Shared arguments: weights and settings that are the same for every example of a call.

They are flattened, described and put on the device once a call, not once a batch.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from ._executables import Leaf
from ._split import Described, Split

_MAX_DESCRIBED = 64
_described: dict[Hashable, tuple[Leaf, ...]] = {}


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """The shared arguments of one call.

    Attributes:
      arrays: the traced leaves, on the device; or `Described` ones, to trace with.
      signature: what programs depend on, for each of `arrays`.
      split: the rest.
    """

    arrays: tuple[Any, ...]
    signature: tuple[Leaf, ...]
    split: Split

    @classmethod
    def of(cls, args: Sequence[Any], names: Sequence[str]) -> "Shared":
        """Flatten the arguments, move their arrays to the device, and describe them.

        Raises:
          TypeError: an argument is traced, or holds an array that JAX cannot take.
        """
        split = Split.of(args)
        if any([isinstance(array, Tracer) for array in split.arrays]):
            paths = _paths(args, names, split)
            path = next(p for p, array in zip(paths, split.arrays, strict=True) if isinstance(array, Tracer))
            raise TypeError(
                f"the shared argument `{path}` is traced by a JAX transformation. Inside jit, vmap or grad "
                f"use jaxbatch.mask instead."
            )
        kept = jax.Array, Described
        with jax.ensure_compile_time_eval():  # numbers are numbers, also where a `jit` around is being traced
            arrays = tuple([x if isinstance(x, kept) else jax.device_put(x) for x in split.arrays])
        placed = tuple([array.sharding if array.committed else None for array in arrays])
        # Describing a hundred leaves takes longer than a small batch, so it is done once for each kind.
        kind = (tuple(names), split.static, tuple([array.aval for array in arrays]), placed)
        signature = _described.get(kind)
        if signature is None:
            if len(_described) >= _MAX_DESCRIBED:
                _described.clear()
            signature = _described[kind] = tuple(map(_leaf, _paths(args, names, split), arrays, placed))
        return cls(arrays, signature, split)

    def abstract(self) -> "Shared":
        """Return the same with shapes and dtypes in the place of the arrays, to be kept without them."""
        split = dataclasses.replace(self.split, arrays=())
        return dataclasses.replace(self, arrays=tuple(self.avals()), split=split)

    def avals(self, *, placed: bool = False) -> list[jax.ShapeDtypeStruct]:
        """Return shape and dtype of each of `arrays`; with `placed`, also where committed ones are."""
        return [
            jax.ShapeDtypeStruct(
                array.shape, array.dtype, weak_type=leaf.weak_type, sharding=leaf.sharding if placed else None
            )
            for array, leaf in zip(self.arrays, self.signature, strict=True)
        ]


def _leaf(path: str, array: jax.Array | Described, sharding: Any) -> Leaf:
    return Leaf(path, array.shape, array.dtype, array.aval.weak_type, sharding)


def _paths(args: Sequence[Any], names: Sequence[str], split: Split) -> list[str]:
    """Return where each traced leaf is, as a user would write it."""
    paths = [
        name + jax.tree_util.keystr(path)
        for arg, name in zip(args, names, strict=True)
        for path, _ in jax.tree_util.tree_leaves_with_path(arg)
    ]
    return [path for path, traced in zip(paths, split.traced, strict=True) if traced]
