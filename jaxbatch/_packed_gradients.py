"""Gradients of a packed function against those of each example alone, for `jaxbatch.testing`.

All examples lie in one row, a gap before each of them, and the poison stands in the gaps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ._batch import fill_value
from ._compat import is_symbolic
from ._mask._context import Context
from ._pack import form
from ._packing import PackedFunction


@dataclasses.dataclass(frozen=True, eq=False)
class OneRow:
    """Examples of these lengths in one row.

    Attributes:
      longest: what axes are padded to that do not lie on the row.
    """

    packed: PackedFunction
    lengths: tuple[int, ...]
    longest: int

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first cell of each example."""
        return [1 + k + sum(self.lengths[:k]) for k in range(len(self.lengths))]

    @property
    def size(self) -> int:
        """The cells of the row."""
        return sum(self.lengths) + len(self.lengths) + 1

    @functools.cached_property
    def place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the packed function is told."""
        ids = np.full(self.size, -1, np.int32)
        for k, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            ids[start : start + length] = k
        return ids, np.array(self.starts, np.int32), np.array(self.lengths, np.int32)

    def shape(self, shape: Sequence[Any]) -> tuple[int, ...]:
        """Return what an array of this symbolic shape has in the row."""
        if form(tuple(shape), self.packed.dim) == "row":
            return tuple(self.size if is_symbolic(d) else int(d) for d in shape)
        return len(self.lengths), *Context({}, {self.packed.dim: self.longest}).shape(tuple(shape))

    def cells(self, k: int, shape: Sequence[Any], own: Sequence[int]) -> tuple[Any, ...]:
        """Return where the array of example `k`, whose shape is `own`, lies."""
        if form(tuple(shape), self.packed.dim) == "row":
            cut = slice(self.starts[k], self.starts[k] + self.lengths[k])
            return tuple(cut if is_symbolic(d) else slice(None) for d in shape)
        return k, *map(slice, own)

    def put(self, arrays: Sequence[Any], shape: Sequence[Any], filler: Any = None) -> np.ndarray:
        """Return one array of each example in the row, around the padding value or another."""
        dtype = np.asarray(arrays[0]).dtype
        out = np.full(self.shape(shape), fill_value(dtype) if filler is None else filler, dtype)
        for k, array in enumerate(arrays):
            out[self.cells(k, shape, np.shape(array))] = array
        return out

    def out_shapes(self, *args: Any) -> list[Any]:
        """Return the symbolic shapes of the outputs."""
        jax.eval_shape(self.packed, *self.place, *args)
        assert self.packed._latest is not None
        return [aval.shape for aval in self.packed._latest[0].program.out_avals]


def weighted(outs: Sequence[Any], weights: Sequence[Any]) -> Any:
    """Return the weighted sum of outputs."""
    pairs = zip(outs, weights, strict=True)
    return sum(((jnp.real(out) * weight).sum().astype(np.float32) for out, weight in pairs), jnp.float32(0))
