"""The door for examples: checked in the caller's thread, copied, and told which way they run.

An example runs in a bucket of the grid, or at its exact size: where a ragged dim is empty, where it is larger
than the grid or the function cannot be padded (if that was allowed), or where the function itself raises.
"""

import bisect
import collections
import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from .._calls import FixedSizes, oversize
from .._engine import Engine
from .._errors import SpecError
from .._executables import MAX_EXACT
from .._grid import Grid
from .._lanes import Kind
from .._traced import Traced


class TracedKind(Kind):
    """Examples of the same dtypes; those of an exact size are a kind of their own.

    Args:
      fixed: the sizes of the dims that are not in the grid.
      exact: the lengths, if it is for one exact size.

    Attributes:
      traced: None until the compile thread has traced it.
    """

    def __init__(
        self,
        dims: tuple[str, ...],
        dtypes: tuple[np.dtype, ...],
        fixed: dict[str, int],
        exact: tuple[int, ...] | None = None,
    ):
        name = ", ".join(map(str, dtypes)) + ("" if exact is None else f" of the exact size {exact}")
        super().__init__(dims, moves=exact is None, name=name)
        self.dtypes = dtypes
        self.fixed = fixed
        self.exact = exact
        self.is_open = False
        self.is_passing = exact is not None
        self.traced: Traced | None = None
        self.changed_at = 0.0  # when a program was last added

    @property
    def lengths(self) -> dict[str, int]:
        """The lengths of an exact size by dim."""
        assert self.exact is not None
        return dict(zip(self.dims, self.exact, strict=True))

    def raises_at(self, lengths: Sequence[int]) -> bool:
        """Tell whether the function itself raises for these lengths, so that no bucket serves them."""
        if self.traced is None or not self.traced.failures:
            return False
        return any(
            all(low <= length <= high for length, (low, high) in zip(lengths, bounds, strict=True))
            for bounds in ([each[dim] for dim in self.dims] for each in self.traced.failures)
        )


class Intake:
    """Checks examples and sorts them; any thread may ask.

    Args:
      oversize: "error" or "exact".
    """

    def __init__(self, engine: Engine, shared_args: Sequence[Any], oversize: str):
        self._engine = engine
        self._spec = engine.function.spec
        self._oversize = oversize
        self._fixed = FixedSizes(engine, shared_args)
        self._columns = [self._spec.dims.index(dim) for dim in engine.dims]
        self._plain = self._columns == list(range(len(self._spec.dims)))
        self._kinds: collections.OrderedDict[Hashable, TracedKind] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def fixed(self) -> dict[str, int]:
        """The sizes of the dims that are not in the grid, as far as they are known."""
        return dict(self._fixed.sizes)

    def check(self, example: tuple[Any, ...]) -> tuple[tuple[np.ndarray, ...], tuple[int, ...]]:
        """Return an example's arrays, copied, and the lengths of its ragged dims.

        Raises:
          SpecError: it does not match the spec.
          OversizeError: it is larger than the grid, and that was not allowed.
        """
        try:
            checked = self._spec.check(example)
            self._fixed.bind(checked)
        except SpecError as error:
            raise error.with_context(f"{self._engine.where}.submit")  # noqa: B904  (it is the same error)
        lengths = checked.lengths if self._plain else tuple([checked.lengths[i] for i in self._columns])
        if self._oversize == "error":
            grid = self._grid(lengths)
            if any([length > ladder[-1] for length, ladder in zip(lengths, grid.ladders, strict=True)]):
                raise oversize(self._engine, grid, lengths).with_context(f"{self._engine.where}.submit")
        return tuple([np.array(leaf) for leaf in checked.leaves]), lengths

    def sort(
        self, leaves: Sequence[np.ndarray], lengths: tuple[int, ...]
    ) -> tuple[TracedKind, tuple[int, ...], int]:
        """Return an example's kind, its padded sizes and its cells."""
        dtypes = tuple([leaf.dtype for leaf in leaves])
        grid = self._grid(lengths)
        sizes, inside = [], not self._engine.is_unmaskable
        for length, ladder in zip(lengths, grid.ladders, strict=True):
            if not 0 < length <= ladder[-1]:
                inside = False
                break
            sizes.append(ladder[bisect.bisect_left(ladder, length)])
        if inside:
            kind = self.kind(dtypes, None)
            if not kind.raises_at(lengths):
                return kind, tuple(sizes), math.prod(sizes)
        return self.kind(dtypes, lengths), lengths, math.prod([max(length, 1) for length in lengths])

    def kind(self, dtypes: tuple[np.dtype, ...], exact: tuple[int, ...] | None) -> TracedKind:
        """Return the kind for these dtypes, always the same one; of exact sizes the latest are kept."""
        key = dtypes, exact
        known = self._kinds.get(key)
        if known is not None and exact is None:
            return known
        with self._lock:
            if key not in self._kinds:
                self._kinds[key] = TracedKind(self._engine.dims, dtypes, self.fixed, exact)
                sized = [key for key, kind in self._kinds.items() if kind.exact is not None]
                for old in sized[: max(len(sized) - MAX_EXACT, 0)]:
                    del self._kinds[old]
            self._kinds.move_to_end(key)
            return self._kinds[key]

    def kinds(self) -> list[TracedKind]:
        """Return all kinds that are kept."""
        with self._lock:
            return list(self._kinds.values())

    def rows_for(self, kind: Kind, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of rows of batches of a kind at these sizes, ascending."""
        grid = self._engine.grid
        return (1,) if grid is None else grid.rows_for([max(size, 1) for size in sizes])

    def _grid(self, lengths: tuple[int, ...]) -> Grid:
        if self._engine.is_inferred:
            return self._engine.grid_for(np.array([lengths], np.int64))
        assert self._engine.grid is not None
        return self._engine.grid
