"""A function traced for packed rows: several examples in each row of a bucket.

It stands where a padded trace stands. A bucket's size is that of a row, and its `segments` are how many
examples a row may hold. A batch's examples come in the order in which they lie in the rows; where one does
not fit into the row of those before it, the next row begins.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from ._batch import Residuals, fill_value
from ._compat import is_symbolic
from ._errors import MaskError
from ._grid import Bucket, Grid
from ._mask._context import Context
from ._pack import Packed, Value, form
from ._traced import PerExample, Traced

AGAIN_ROWS = 8
"""How many examples, at least, run again together, if the grid has such rows: about those of one row."""


@dataclasses.dataclass(frozen=True, eq=False)
class PackedResiduals(Residuals):
    """What undoes a packed batch. `num` counts examples, and `lengths` has one entry for each example here.

    Attributes:
      rows, slots, starts: for each example its row, its place among the segments of the row, and its first
        cell there.
      place: what the program is told: ids of the cells [rows, size], starts and lengths [rows, segments].
    """

    rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray
    place: tuple[np.ndarray, np.ndarray, np.ndarray]


def lay_out(lengths: np.ndarray, rows: int, size: int, segments: int) -> PackedResiduals:
    """Return where examples of these lengths lie, one after the other; rows without any repeat the first.

    Args:
      lengths: integers [num, 1].
    """
    own = lengths[:, 0].tolist()
    places, starts, slots = [], [], []
    row, end, slot = 0, 0, 0
    for length in own:
        if end + length > size or slot == segments:
            row, end, slot = row + 1, 0, 0
        places.append(row)
        starts.append(end)
        slots.append(slot)
        end, slot = end + length, slot + 1
    if row >= rows:
        raise AssertionError(f"{len(own)} examples do not fit into {rows} rows of {size}.")
    ids = np.full((rows, size), -1, np.int32)
    begins, sizes = np.zeros((rows, segments), np.int32), np.zeros((rows, segments), np.int32)
    for r, s, k, length in zip(places, starts, slots, own, strict=True):
        ids[r, s : s + length] = k
    begins[places, slots], sizes[places, slots] = starts, own
    for array in (ids, begins, sizes):
        array[row + 1 :] = array[0]
    found = (np.array(each, np.int64) for each in (places, slots, starts))
    return PackedResiduals(len(own), lengths, next(found), next(found), next(found), (ids, begins, sizes))


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows(PerExample):
    """A function of one example, for rows that hold several.

    Attributes:
      packed: the program for rows; `program` is the same as in `padded`.
      grid: the sizes of rows and their numbers.
      padded: the trace for examples of rows whose answers do not count.
      flags: whether a row's answers may ever not count.
    """

    packed: Packed
    grid: Grid
    padded: PerExample
    flags: bool = True

    @property
    def is_packed(self) -> bool:  # noqa: D102
        return True

    @property
    def again(self) -> PerExample:  # noqa: D102
        return self.padded

    @property
    def text(self) -> str:  # noqa: D102
        return f"packed {self.padded.text}"

    @property
    def _dim(self) -> str:
        return self.dims[0]

    def buckets(self, grid: Grid) -> Iterable[Bucket]:  # noqa: D102
        return grid.packed

    def bucket(self, sizes: Bucket, rows: int) -> Bucket:  # noqa: D102
        return Bucket(rows=rows, segments=self.grid.segments_for(sizes[self._dim])[-1], **sizes.sizes)

    def spare(self, longest: int | None) -> list[Bucket]:  # noqa: D102
        if not self.flags:
            return []
        ladder = self.grid.ladders[0]
        top = next(i for i, size in enumerate(ladder) if size >= (longest or ladder[-1]))
        sizes = ladder[top : top + 1] if self.padded.moves else ladder[: top + 1]
        rows = [self.grid.rows_for([size]) for size in sizes]
        few = [next((r for r in own if r >= AGAIN_ROWS), own[-1]) for own in rows]
        return [Bucket(rows=r, **{self._dim: size}) for r, size in zip(few, sizes, strict=True)]

    # --- the host side ---

    def assemble(
        self, bucket: Bucket, examples: Sequence[Sequence[Any]], lengths: np.ndarray
    ) -> tuple[list[np.ndarray], PackedResiduals]:
        """Return the packed arrays of a batch, and what undoes it."""
        rows = bucket["rows"]
        where = lay_out(lengths, rows, bucket[self._dim], bucket["segments"])
        used = int(where.rows[-1]) + 1
        arrays = []
        for column, aval, shape in zip(
            zip(*examples, strict=True), self._avals, self.shapes(bucket), strict=True
        ):
            array = np.full((rows, *shape), fill_value(column[0].dtype), column[0].dtype)
            if form(aval.shape, self._dim) == "row":
                axis = next(a for a, d in enumerate(aval.shape) if is_symbolic(d))
                before = (slice(None),) * axis
                for x, r, s in zip(column, where.rows.tolist(), where.starts.tolist(), strict=True):
                    array[(r, *before, slice(s, s + x.shape[axis]))] = x
            else:
                for x, r, k in zip(column, where.rows.tolist(), where.slots.tolist(), strict=True):
                    array[(r, k, *map(slice, np.shape(x)))] = x
            array[used:] = array[0]
            arrays.append(array)
        return arrays, where

    def take_apart(self, arrays: Sequence[np.ndarray], residuals: Any) -> list[list[Any] | None]:
        """Return for each example its output leaves: copies; None where its row was flagged."""
        *outs, flags = arrays
        shapes = self.out_shapes(residuals)
        results: list[list[Any] | None] = []
        ragged = [
            (form(aval.shape, self._dim) == "row", [is_symbolic(d) for d in aval.shape])
            for aval in self.program.out_avals
        ]
        places = zip(
            residuals.rows.tolist(),
            residuals.slots.tolist(),
            residuals.starts.tolist(),
            residuals.lengths[:, 0].tolist(),
            strict=True,
        )
        for i, (r, k, s, length) in enumerate(places):
            if flags[r]:
                results.append(None)
                continue
            leaves = []
            for out, shape, (on_row, axes) in zip(outs, shapes, ragged, strict=True):
                if on_row:
                    cut = (r, *(slice(s, s + length) if axis else slice(None) for axis in axes))
                else:
                    sizes = [int(d[i]) if isinstance(d, np.ndarray) else int(d) for d in shape]
                    cut = (r, k, *map(slice, sizes), ...)
                leaves.append(out[cut].copy())
            results.append(leaves)
        return results

    # --- the program ---

    @property
    def _avals(self) -> Sequence[Any]:
        return self.program.in_avals[len(self.shared.arrays) :]

    def counts(self, residuals: Any) -> Any:  # noqa: D102
        return residuals.place

    def trial(self, bucket: Bucket) -> PackedResiduals:
        """Return where examples would lie that fill all rows of a bucket."""
        rows, size, segments = bucket["rows"], bucket[self._dim], bucket["segments"]
        return lay_out(np.full((rows * segments, 1), size // segments), rows, size, segments)

    def avals(self, bucket: Bucket) -> tuple[Any, ...]:  # noqa: D102
        rows, size, segments = bucket["rows"], bucket[self._dim], bucket["segments"]
        _, consts, shared, _ = self.padded.avals(bucket)
        place = [jax.ShapeDtypeStruct((rows, n), np.int32) for n in (size, segments, segments)]
        pairs = zip(self.shapes(bucket), self.signature.examples, strict=True)
        examples = [jax.ShapeDtypeStruct((rows, *shape), leaf.dtype) for shape, leaf in pairs]
        return tuple(place), consts, shared, examples

    def shapes(self, sizes: Any) -> list[tuple[int, ...]]:  # noqa: D102
        context, segments = Context({}, {self._dim: sizes[self._dim]}), sizes["segments"]
        shapes = []
        for aval in self._avals:
            own = tuple(context.shape(aval.shape))
            shapes.append(own if form(aval.shape, self._dim) == "row" else (segments, *own))
        return shapes

    def run(self, bucket: Bucket) -> Callable[..., Any]:  # noqa: D102
        longest = bucket[self._dim]

        def one(place: Any, leaves: Any, consts: Any, shared: Any) -> Any:
            outs, flag = self.packed(place, longest, self._values(leaves, shared), consts=consts)
            return [*(out.data for out in outs), flag]

        def run(place: Any, consts: Any, shared: Any, examples: Any) -> Any:
            return jax.vmap(lambda p, x: one(p, x, consts, shared))(tuple(place), examples)

        return run

    def _values(self, leaves: Sequence[Any], shared: Sequence[Any]) -> list[Value]:
        pairs = zip(leaves, self._avals, strict=True)
        return [
            *(Value(x, "plain") for x in shared),
            *(Value(x, form(aval.shape, self._dim)) for x, aval in pairs),
        ]

    def checked(self) -> "PackedRows":
        """Return the trace with `flags` as it is.

        Raises:
          MaskError: an operation has no packed form.
        """
        bucket = self.grid.packed[-1].with_rows(1)
        self.check(bucket)
        (ids, starts, lengths), _, shared, examples = self.avals(bucket)
        one = lambda each: jax.ShapeDtypeStruct(each.shape[1:], each.dtype)  # noqa: E731
        values = self._values(list(map(one, examples)), shared)
        flags = self.packed.may_flag((one(ids), one(starts), one(lengths)), bucket[self._dim], values)
        return dataclasses.replace(self, flags=flags)


def packed_rows(padded: Traced, grid: Grid) -> PackedRows:
    """Return the packed form of a padded trace.

    Raises:
      MaskError: the function has no packed form.
    """
    if not isinstance(padded, PerExample):
        raise MaskError(f"{padded.name} masks itself, and knows nothing of segments.")
    if padded.failures:
        raise MaskError(f"{padded.name} raises at some lengths.")
    signature = padded.signature
    signature = dataclasses.replace(signature, static=("packed", grid.segments, signature.static))
    fields = {f.name: getattr(padded, f.name) for f in dataclasses.fields(padded)}
    fields["signature"] = signature
    return PackedRows(**fields, packed=Packed(padded.program), grid=grid, padded=padded).checked()
