"""Where segments lie on a row, for every size that occurs in a program.

Several examples share a row of tokens, each in a segment of its own. An axis of size `n` lies where the
planner put it. An axis of any other ragged size (`n + 1` behind a prefix, `floordiv(n, 2)` behind a stride)
gets a space of its own, in which the segments lie one after the other. So whatever a program does to a size,
its values stay packed, and moving between two spaces is one gather.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .. import _compat
from .._mask._context import Context
from .._program import Dim


@dataclasses.dataclass(frozen=True)
class Space:
    """One ragged axis of a row.

    Attributes:
      size: cells, those of no segment included.
      segment: the segment of each cell, 0 where there is none; int32 [size].
      position: the cell's place within its segment; int32 [size], anything where there is none.
      valid: whether a cell belongs to a segment; bool [size].
      starts: the first cell of each segment; int32 [segments].
      lengths: valid cells of each segment; int32 [segments].
    """

    size: int
    segment: Any
    position: Any
    valid: Any
    starts: Any
    lengths: Any

    def along(self, values: Any, ndim: int, axis: int) -> Any:
        """Return a vector over the cells in a shape that broadcasts along `axis`."""
        return jnp.reshape(values, [self.size if a == axis else 1 for a in range(ndim)])


@dataclasses.dataclass(frozen=True)
class Layout:
    """The segments of a row as the caller gives them.

    Slots of the segment axis that no segment uses have length 0. They are computed as copies of the first
    used one, since a loop that their data end might never do so.

    Attributes:
      dim: the ragged dim.
      row: the space of `dim`.
      real: which slots are used; bool [segments].
      owner: the slot whose data each slot has; int32 [segments].
      longest: the most cells that a segment may have; ints, as padding is allocated by it.
    """

    dim: str
    row: Space
    real: Any
    owner: Any
    longest: int

    @classmethod
    def of(cls, dim: str, segments: Any, starts: Any, lengths: Any, longest: int) -> "Layout":
        """Read the caller's arrays: ids [size] with -1 for gaps, starts and lengths [segments]."""
        starts, lengths = (_compat.on_device(jnp.asarray(x, np.int32)) for x in (starts, lengths))
        segments = _compat.on_device(jnp.asarray(segments, np.int32))
        real = lengths > 0
        owner = jnp.where(real, lax.iota(np.int32, real.shape[0]), jnp.argmax(real))
        starts, lengths = starts[owner], jnp.maximum(lengths[owner], 1)
        segment = jnp.maximum(segments, 0)
        position = lax.iota(np.int32, segments.shape[0]) - starts[segment]
        row = Space(segments.shape[0], segment, position, segments >= 0, starts, lengths)
        return cls(dim, row, real, owner, longest)

    @property
    def num_segments(self) -> int:
        return self.real.shape[0]

    def space(self, dim: Dim) -> Space:
        """Return the space of a ragged size."""
        if str(dim) == self.dim:
            return self.row
        own = jnp.broadcast_to(jnp.asarray(self.value(dim, self.row.lengths), np.int32), (self.num_segments,))
        ends = jnp.cumsum(jnp.where(self.real, own, 0))
        starts = (ends - jnp.where(self.real, own, 0))[self.owner]
        cell = lax.iota(np.int32, self.size(dim))
        reached = (cell[:, None] >= starts[None]) & self.real[None]
        # Of several that begin here the last one, as those before it have no cell.
        segment = jnp.max(jnp.where(reached, lax.iota(np.int32, self.num_segments)[None], 0), axis=1)
        position = cell - starts[segment]
        return Space(cell.shape[0], segment, position, position < own[segment], starts, own)

    def value(self, dim: Dim, lengths: Any) -> Any:
        """Return a size at these lengths."""
        return _compat.evaluate(dim, {self.dim: lengths})

    def size(self, dim: Dim) -> int:
        """Return how many cells the segments of a row can need together for an axis of size `dim`.

        Segments have at most `row.size` cells of the dim itself; a line through the first and the last value
        of the formula, raised until it holds everywhere, bounds the sum.
        """
        if not _compat.is_symbolic(dim):
            return int(dim)
        if str(dim) == self.dim:
            return self.row.size
        longest = min(self.longest, self.row.size)
        lengths = np.arange(1, longest + 1)
        values = np.broadcast_to(self.value(dim, lengths), lengths.shape).astype(np.int64)
        run = max(longest - 1, 1)
        rise = max(int(values[-1] - values[0]), 0)
        offset = int(np.max(run * values - rise * lengths))
        num = self.num_segments if offset > 0 else 1
        most = (rise * self.row.size + offset * num) // run
        return max(min(most, int(values.max()) * self.num_segments), 1)

    def padded(self, lengths: Mapping[str, Any], name: str) -> Context:
        """Return the padded reading of one segment."""
        return Context(lengths, {self.dim: self.longest}, name=name)

    def same(self, a: Space, b: Space) -> Any:
        """Return which pairs of cells belong to the same segment; bool [a.size, b.size]."""
        equal = a.segment[:, None] == b.segment[None, :]
        return equal & a.valid[:, None] & b.valid[None, :]
