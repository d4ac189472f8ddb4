"""The finite set of padded sizes, and with it the largest number of programs a run can compile.

A `Grid` has one ladder of sizes for each ragged dim and one for the rows of a batch. Everything here is
exact integer arithmetic: the smallest bucket that holds an example, or an error; nothing is ever
truncated. `len(grid)` is the compile bound that the rest of the library keeps.
"""

import copy
import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from ._errors import OversizeError
from ._fit import fit_ladders

Sizes: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex]
"""How a user describes a ladder: one size, `(lo, hi)` for powers of two, or a list taken as it is."""

RESERVED_NAMES = ("rows", "max_cells", "segments")
CELLS_A_SEGMENT = 8
"""How many cells of a packed row there are for each example that it may hold, by default."""

_LARGEST_SIZE = 2**62  # Lengths are compared as int64, and sums of two sizes must not wrap.


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Bucket(Mapping[str, int]):
    """One padded size for every ragged dim and, once it is known, the number of rows.

    Attributes:
      rows: the size of the batch axis; None (and no key of the mapping) where only sizes were asked for.
      segments: how many examples each row may hold, where rows are packed; None (and no key) elsewhere.

    Example:
      >>> bucket = Bucket(n=32, rows=8)
      >>> bucket["n"], bucket["rows"], bucket.sizes, bucket.cells
      (32, 8, {'n': 32}, 256)
    """

    rows: int | None
    segments: int | None
    _values: dict[str, int]

    def __init__(
        self,
        *,
        rows: SupportsIndex | None = None,
        segments: SupportsIndex | None = None,
        **sizes: SupportsIndex,
    ):
        values = {dim: operator.index(size) for dim, size in sizes.items()}
        if rows is not None:
            values["rows"] = operator.index(rows)
        if segments is not None:
            values["segments"] = operator.index(segments)
        object.__setattr__(self, "rows", values.get("rows"))
        object.__setattr__(self, "segments", values.get("segments"))
        object.__setattr__(self, "_values", values)

    @property
    def sizes(self) -> dict[str, int]:
        """The padded size of each ragged dim, in a dict of the caller's own."""
        return {dim: size for dim, size in self._values.items() if dim not in ("rows", "segments")}

    @property
    def cells(self) -> int:
        """The product of all sizes, and of the rows where they are known."""
        return math.prod(self._values.values()) // (self.segments or 1)

    def with_rows(self, rows: SupportsIndex) -> "Bucket":
        """Return the bucket of the same sizes with this many rows."""
        return Bucket(rows=rows, segments=self.segments, **self.sizes)

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Bucket):  # every batch is counted under its bucket, so this is worth the lines
            return self._values == other._values
        return super().__eq__(other)

    def __repr__(self) -> str:
        return f"Bucket({', '.join(f'{name}={size}' for name, size in self.items())})"


@dataclass(frozen=True, init=False, repr=False)
class Grid:
    """All (sizes, rows) pairs that may be compiled.

    Each of `rows` and the dims is described by `(lo, hi)`: powers of two from lo to hi, where lo and hi
    themselves always belong; a list: as it is; or a number: a list of one. A pair belongs to the grid if
    rows x product of sizes <= `max_cells`. Sizes so large that no number of rows fits get one row.

    Attributes:
      dims: names of the ragged dims, in the order given.
      ladders: the sizes of each of `dims`, ascending.
      rows: the sizes of the batch axis, ascending.
      max_cells: the largest rows x product of sizes, or None for no limit.
      caps: (sizes, largest number of rows) where `capped` set one.
      segments: for packed rows, how many examples a row may hold, ascending; None for one in 8 cells.

    Example:
      >>> grid = Grid(n=(16, 100), rows=[1, 8])
      >>> grid.sizes, len(grid)
      ({'n': (16, 32, 64, 100)}, 8)
    """

    dims: tuple[str, ...]
    ladders: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]
    max_cells: int | None
    caps: tuple[tuple[tuple[int, ...], int], ...]
    segments: tuple[int, ...] | None

    def __init__(
        self,
        rows: Sizes = (1, 64),
        max_cells: SupportsIndex | None = None,
        segments: Sizes | None = None,
        **dims: Sizes,
    ):
        for dim in dims:
            if not dim.isidentifier():
                raise ValueError(f"Grid: {dim!r} cannot name a dim. Name the dims of the spec, such as `n`.")
        object.__setattr__(self, "dims", tuple(dims))
        object.__setattr__(self, "ladders", tuple(_ladder(dim, sizes) for dim, sizes in dims.items()))
        object.__setattr__(self, "rows", _ladder("rows", rows))
        limit = None if max_cells is None else _positive("max_cells", max_cells)
        object.__setattr__(self, "max_cells", limit)
        object.__setattr__(self, "caps", ())
        numbers = None if segments is None else _ladder("segments", segments)
        object.__setattr__(self, "segments", numbers)

    @classmethod
    def infer(cls, lengths: Mapping[str, np.ndarray | Sequence[int]]) -> "Grid":
        """Return the powers of two that hold all these lengths, with the default rows.

        Example:
          >>> Grid.infer({"n": [3, 65]})
          Grid(n=(1, 128), rows=(1, 64))
        """
        tops = {dim: int(np.max(values, initial=1)) for dim, values in lengths.items()}
        dims: dict[str, Sizes] = {dim: (1, 1 << (top - 1).bit_length()) for dim, top in tops.items()}
        return cls((1, 64), None, None, **dims)

    @classmethod
    def fit(
        cls,
        lengths: Mapping[str, Any] | Any,
        max_sizes: SupportsIndex = 8,
        multiple_of: SupportsIndex = 8,
        rows: Sizes = (1, 64),
        max_cells: SupportsIndex | None = None,
    ) -> "Grid":
        """Return the grid whose sizes leave the least padding on examples of these lengths.

        With one dim no other grid of so few sizes leaves less, counted in cells over all examples. With
        several, the best found by fitting the dims in turn. A million lengths take a fraction of a second, so
        there is no need to sample; but a later example longer than all of these does not fit.

        Args:
          lengths: by dim, an array with the length of each example, in elements; an array alone means the
            dim `n`.
          max_sizes: the largest number of combinations of sizes, which is the product over the dims. Each is
            a program for every number of rows in use.
          multiple_of: every size is a multiple of it, so the largest is the largest length, rounded up.
          rows: as in `Grid`.
          max_cells: as in `Grid`.

        Raises:
          ValueError: there are no lengths, some are negative, or dims have different numbers of them.
          TypeError: lengths are not integers.

        Example:
          >>> Grid.fit([3, 5, 7, 8, 30, 31, 100], max_sizes=3)
          Grid(n=[8, 32, 104], rows=(1, 64))
        """
        if not isinstance(lengths, Mapping):
            lengths = {"n": lengths}
        if not lengths or any(dim in RESERVED_NAMES for dim in lengths):
            raise ValueError(
                f"Grid.fit: lengths of {list(lengths)}; pass an array, or a dict of arrays by ragged dim."
            )
        most, multiple = _positive("max_sizes", max_sizes), _positive("multiple_of", multiple_of)
        try:
            ladders = fit_ladders(lengths, most, multiple)
        except (TypeError, ValueError) as error:
            raise type(error)(f"Grid.fit: {error}") from None
        dims: dict[str, Sizes] = {dim: list(ladder) for dim, ladder in ladders.items()}
        return cls(rows, max_cells, None, **dims)

    @classmethod
    def tune(cls, run: Any, *shared: Any, max_bytes: int | None = None) -> "Grid":
        """Return the grid of a batched function with no more rows at any sizes than pay there.

        At each sizes the rows with the best measured throughput are the most. More are not tried once they
        are clearly slower for each example, or once the compiler says that a program needs more memory than
        there is; such a program is never run. Programs that are tried stay compiled, and their measured
        costs are those that `run` plans by.

        Args:
          run: what `jaxbatch.batched` returned, with a grid.
          shared: its shared arguments.
          max_bytes: memory that one batch may take; None for all that the device says it has, if it does.

        Raises:
          ValueError: the function has no grid, or must not be run on made-up data.

        Example:
          >>> import jaxbatch as jb
          >>> run = jb.batched(lambda x: x.sum(), spec=jb.spec("n", "float32"), grid=Grid(n=[8], rows=(1, 4)))
          >>> tuned = Grid.tune(run)
          >>> tuned.sizes == run.grid.sizes and len(tuned) <= len(run.grid)
          True
        """
        return run.grid.capped(run.best_rows(*shared, max_bytes=max_bytes))

    def capped(self, most_rows: Mapping[tuple[int, ...], SupportsIndex]) -> "Grid":
        """Return the grid with at most this many rows where sizes are given, in the order of `dims`.

        Example:
          >>> [dict(bucket) for bucket in Grid(n=(16, 32), rows=(1, 2)).capped({(32,): 1})]
          [{'n': 16, 'rows': 1}, {'n': 16, 'rows': 2}, {'n': 32, 'rows': 1}]
        """
        known = set(itertools.product(*self.ladders))
        for sizes in most_rows:
            if tuple(sizes) not in known:
                raise ValueError(
                    f"Grid.capped: there are no sizes {sizes} of dims {', '.join(self.dims)} in {self}."
                )
        caps = {tuple(sizes): _positive("rows", most) for sizes, most in most_rows.items()}
        grid = copy.copy(self)
        object.__setattr__(grid, "caps", tuple(sorted({**dict(self.caps), **caps}.items())))
        return grid

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The ladder of each dim, ascending."""
        return dict(zip(self.dims, self.ladders, strict=True))

    @property
    def limits(self) -> dict[str, int]:
        """The largest size of each dim."""
        return {dim: ladder[-1] for dim, ladder in self.sizes.items()}

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """The smallest and largest length that a program of this grid must be right for, by dim."""
        return {dim: (1, top) for dim, top in self.limits.items()}

    def ceil(self, lengths: Mapping[str, SupportsIndex]) -> Bucket:
        """Return the smallest bucket that holds `lengths`; it has no rows yet.

        Args:
          lengths: valid size of each of the grid's dims, in elements; 0 is held by the smallest size.

        Raises:
          OversizeError: a length exceeds its ladder; it carries all lengths and limits.
          ValueError: the names are not those of the grid, or a length is negative.

        Example:
          >>> Grid(n=(16, 64)).ceil({"n": 17})
          Bucket(n=32)
        """
        if lengths.keys() != set(self.dims):
            raise ValueError(f"Grid.ceil: expected lengths of {list(self.dims)}, got {list(lengths)}.")
        exact = {dim: _integer(f"the length of `{dim}`", lengths[dim]) for dim in self.dims}
        if negative := [dim for dim, length in exact.items() if length < 0]:
            raise ValueError(f"Grid.ceil: the length of `{negative[0]}` is {exact[negative[0]]}, below 0.")
        sizes = {}
        for (dim, length), ladder in zip(exact.items(), self.ladders, strict=True):
            index = bisect_left(ladder, length)
            if index == len(ladder):
                raise _oversize(exact, self.limits)
            sizes[dim] = ladder[index]
        return Bucket(**sizes)

    def ceil_indices(self, lengths: np.ndarray) -> np.ndarray:
        """Return, for many examples at once, the ladder index of the smallest size that holds each length.

        Args:
          lengths: integers of shape [num, len(dims)], columns in the order of `dims`.

        Returns:
          int64 of the same shape; an index equal to the length of its ladder means too long.
        """
        lengths = np.asarray(lengths)
        if lengths.shape[1:] != (len(self.dims),) or (lengths.size and lengths.dtype.kind not in "iu"):
            raise ValueError(
                f"Grid.ceil_indices: expected integers of shape [num, {len(self.dims)}], "
                f"got {lengths.dtype} of shape {lengths.shape}."
            )
        # uint64 against int64 would be compared in float64, which cannot tell 2**53 from 2**53 + 1.
        lengths = lengths.astype(np.int64)
        indices = np.empty(lengths.shape, np.int64)
        for column, ladder in enumerate(self.ladders):
            indices[:, column] = np.searchsorted(np.array(ladder, np.int64), lengths[:, column], side="left")
        return indices

    def rows_for(self, sizes: Mapping[str, SupportsIndex] | Sequence[SupportsIndex]) -> tuple[int, ...]:
        """Return the numbers of rows that the grid has at these sizes, ascending; never empty.

        Args:
          sizes: a size for each dim, by name or in the order of `dims`.
        """
        if self.max_cells is None and not self.caps:
            return self.rows
        if isinstance(sizes, Mapping):
            sizes = [sizes[dim] for dim in self.dims]
        own = tuple(map(operator.index, sizes))
        most = self.rows[-1] if self.max_cells is None else self.max_cells // math.prod(own)
        most = min(most, dict(self.caps).get(own, most))
        return tuple(rows for rows in self.rows if rows <= most) or (1,)

    def segments_for(self, size: SupportsIndex) -> tuple[int, ...]:
        """Return how many examples a packed row of this size may hold, ascending: one program for each.

        Example:
          >>> Grid(n=[64], segments=(4, 16)).segments_for(8), Grid(n=[64]).segments_for(64)
          ((4, 8), (8,))
        """
        cells = operator.index(size)
        ladder = self.segments or (max(cells // CELLS_A_SEGMENT, 1),)
        return tuple(sorted({min(most, cells) for most in ladder}))

    @property
    def packed(self) -> tuple[Bucket, ...]:
        """All buckets of packed rows: what `layout="packed"` may compile, apart from padded programs.

        Example:
          >>> len(Grid(n=[64, 128], rows=[1, 4], segments=(4, 16)).packed)
          12
        """
        return tuple(
            Bucket(rows=bucket["rows"], segments=most, **bucket.sizes)
            for bucket in self
            for most in self.segments_for(math.prod(bucket.sizes.values()))
        )

    def __len__(self) -> int:
        if self.max_cells is None and not self.caps:
            return math.prod(map(len, self.ladders)) * len(self.rows)
        return sum(len(self.rows_for(sizes)) for sizes in itertools.product(*self.ladders))

    def __iter__(self) -> Iterator[Bucket]:
        for sizes in itertools.product(*self.ladders):
            for rows in self.rows_for(sizes):
                yield Bucket(rows=rows, **dict(zip(self.dims, sizes, strict=True)))

    def __repr__(self) -> str:
        parts = [f"{dim}={_describe(ladder)}" for dim, ladder in self.sizes.items()]
        parts.append(f"rows={_describe(self.rows)}")
        if self.max_cells is not None:
            parts.append(f"max_cells={self.max_cells}")
        if self.segments is not None:
            parts.append(f"segments={_describe(self.segments)}")
        caps = f".capped({dict(self.caps)})" if self.caps else ""
        return f"Grid({', '.join(parts)}){caps}"


def _integer(name: str, value: object) -> int:
    """Return an exact Python int; floats and bools are refused, since both hide mistakes."""
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)  # pyright: ignore[reportArgumentType]  # it decides by raising
        except TypeError:
            pass
    raise TypeError(f"Grid: {name} must be an integer, got {value!r} ({type(value).__name__}).")


def _positive(name: str, value: object) -> int:
    number = _integer(name, value)
    if not 1 <= number <= _LARGEST_SIZE:
        raise ValueError(f"Grid: {name} must be from 1 to 2**62, got {number}.")
    return number


def _ladder(name: str, sizes: object) -> tuple[int, ...]:
    """Return the ascending sizes that a user's description stands for."""
    if isinstance(sizes, tuple):
        if len(sizes) != 2:
            raise ValueError(
                f"Grid: {name}={sizes} is not (lo, hi). Use a list for explicit sizes: {name}={list(sizes)}."
            )
        lo, hi = (_positive(name, size) for size in sizes)
        if lo > hi:
            raise ValueError(f"Grid: {name}=({lo}, {hi}) is empty; the first number must not be the larger.")
        return _powers_of_two(lo, hi)
    if isinstance(sizes, list):
        ladder = tuple(_positive(name, size) for size in sizes)
        if not ladder or any(a >= b for a, b in itertools.pairwise(ladder)):
            raise ValueError(f"Grid: {name}={sizes} must be ascending, without repeats, and not empty.")
        return ladder
    return (_positive(name, sizes),)


def _powers_of_two(lo: int, hi: int) -> tuple[int, ...]:
    """Return lo, the powers of two strictly between, and hi."""
    between = (1 << k for k in range(lo.bit_length(), hi.bit_length() + 1))
    return (lo, *(size for size in between if size < hi), *((hi,) if hi > lo else ()))


def _describe(ladder: tuple[int, ...]) -> str:
    """Write a ladder the shortest way that a user could have."""
    if len(ladder) == 1:
        return str(ladder[0])
    lo, hi = ladder[0], ladder[-1]
    return f"({lo}, {hi})" if ladder == _powers_of_two(lo, hi) else str(list(ladder))


def _oversize(lengths: dict[str, int], limits: dict[str, int]) -> OversizeError:
    facts = [
        f"dim `{dim}` has length {length}; the largest bucket holds {limits[dim]}"
        for dim, length in lengths.items()
        if length > limits[dim]
    ]
    return OversizeError(f"{', and '.join(facts)}. Extend the grid or split the example.", lengths, limits)
