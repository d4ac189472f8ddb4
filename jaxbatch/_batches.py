"""`jaxbatch.batches`: padded batches for training, of few shapes.

A training step that is compiled once for each shape should see few of them, every example once, and know
which rows and which elements are real. Examples are planned as in a call of `batched`, a window at a time;
then those in buckets of equal sizes are dealt anew to these buckets' batches, in the user's order or
shuffled, which costs nothing and keeps an epoch from repeating the batches of the one before.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from ._batch import pad_and_stack
from ._errors import JaxbatchError, OversizeError, SpecError
from ._grid import Bucket, Grid
from ._padded_batch import PaddedBatch
from ._plan import Job, plan
from ._spec import Checked, Spec

_WINDOW = 16  # times the largest number of rows: so much of an iterator is looked at together


class Batches(Iterator[PaddedBatch]):
    """What `jaxbatch.batches` returns: an iterator over one epoch.

    Attributes:
      skipped: with `errors="skip"`, the error of each bad example that was met so far, by its position.
    """

    def __init__(
        self,
        examples: Iterable[Any],
        spec: Spec,
        grid: Grid,
        seed: int | None,
        window: int | None,
        skip: bool,
    ):
        self.skipped: dict[int, JaxbatchError] = {}
        self._examples = enumerate(examples)
        self._copies = not isinstance(examples, list | tuple)  # an iterator may reuse its buffers
        self._spec, self._grid, self._window, self._skip = spec, grid, window, skip
        self._limits = tuple(grid.limits.values())
        self._columns = [spec.dims.index(dim) for dim in grid.dims]
        self._fixed_columns = [i for i, dim in enumerate(spec.dims) if dim not in grid.dims]
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._fixed: tuple[int, ...] | None = None  # by the first example
        self._dtypes: tuple[np.dtype, ...] = ()
        self._stream = self._run()

    def __next__(self) -> PaddedBatch:
        return next(self._stream)

    def _run(self) -> Iterator[PaddedBatch]:
        waiting: list[_Held] = []
        more = True
        while more:
            held, num_waited = waiting, len(waiting)
            more = self._read(held)
            held, waiting = self._partition(held, num_waited) if more else (held, [])
            for job in deal(plan(self._lengths(held), self._grid), self._rng):
                yield self._batch(job.bucket, [held[i] for i in job.indices])

    def _partition(self, held: "list[_Held]", num_waited: int) -> "tuple[list[_Held], list[_Held]]":
        """Return the examples to run now, and those to run with the next window.

        What does not fill a batch of its size waits, unless the first of it has waited already.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, steps in enumerate(self._grid.ceil_indices(self._lengths(held)).tolist()):
            groups.setdefault(tuple(steps), []).append(place)
        later: set[int] = set()
        for steps, places in groups.items():
            sizes = [ladder[step] for ladder, step in zip(self._grid.ladders, steps, strict=True)]
            full = len(places) - len(places) % self._grid.rows_for(sizes)[-1]
            if places[full:] and places[full] >= num_waited:
                later.update(places[full:])
        if self._window and 2 * len(later) > self._window:
            return held, []  # at least half of every window is new, so that small windows get on as well
        now = [each for place, each in enumerate(held) if place not in later]
        return now, [held[place] for place in sorted(later)]

    def _read(self, held: "list[_Held]") -> bool:
        """Append the checked examples of the next window; return False at the end of the iterable."""
        room, num = None if self._window is None else self._window - len(held), 0
        for index, example in itertools.islice(self._examples, room):
            num += 1
            try:
                held.append(self._check(index, example))
            except (SpecError, OversizeError) as error:
                if not self._skip:
                    raise
                self.skipped[index] = error.with_traceback(None)  # which would keep the example alive
        return num == room

    def _check(self, index: int, example: Any) -> "_Held":
        where = f"jaxbatch.batches: `example[{index}]`"
        try:
            checked = self._spec.check((example,))
            self._bind(checked)
        except SpecError as error:
            text = str(error.args[0]).replace("`example", f"`example[{index}]")
            raise SpecError(f"jaxbatch.batches: {text}") from error.__cause__
        lengths = tuple([checked.lengths[i] for i in self._columns])
        if 0 in lengths:
            dim = self._grid.dims[lengths.index(0)]
            raise SpecError(f"{where} has length 0 in dim `{dim}`; a masked function needs at least 1.")
        if any(length > limit for length, limit in zip(lengths, self._limits, strict=True)):
            try:
                self._grid.ceil(dict(zip(self._grid.dims, lengths, strict=True)))
            except OversizeError as error:
                raise error.with_context(where)  # noqa: B904  (it is the same error)
        leaves = tuple(map(np.array, checked.leaves)) if self._copies else checked.leaves
        return _Held(index, leaves, lengths)

    def _bind(self, checked: Checked) -> None:
        """Compare what must be one for all, fixed sizes and dtypes, with the first example, which sets it."""
        fixed = tuple([checked.lengths[i] for i in self._fixed_columns])
        dtypes = tuple([leaf.dtype for leaf in checked.leaves])
        if self._fixed is None:
            self._fixed, self._dtypes = fixed, dtypes
        for column, size, bound in zip(self._fixed_columns, fixed, self._fixed, strict=True):
            if size != bound:
                raise SpecError(
                    f"`example` has size {size} in dim `{self._spec.dims[column]}`, but an earlier one has "
                    f"{bound}. A dim that is not in the grid has one size for all; name it in the grid."
                )
        for path, dtype, bound in zip(self._spec.paths, dtypes, self._dtypes, strict=True):
            if dtype != bound:
                raise SpecError(
                    f"`{path}` has dtype {dtype}, but an earlier one has {bound}, and a batch has one. Cast "
                    f"it, or name one dtype in the spec."
                )

    def _lengths(self, held: "list[_Held]") -> np.ndarray:
        lengths = np.array([each.lengths for each in held], np.int64)
        return lengths.reshape(len(held), len(self._columns))

    def _batch(self, bucket: Bucket, rows: "list[_Held]") -> PaddedBatch:
        fixed = zip(self._fixed_columns, self._fixed or (), strict=True)
        sizes = {self._spec.dims[column]: size for column, size in fixed}
        shapes = self._spec.shapes({**sizes, **bucket.sizes})
        examples = [row.leaves for row in rows]
        leaves, residuals = pad_and_stack(examples, self._lengths(rows), shapes, bucket["rows"])
        by_dim = dict(zip(self._grid.dims, np.ascontiguousarray(residuals.lengths.T), strict=True))
        indices = np.full(bucket["rows"], -1, np.int64)
        indices[: len(rows)] = [row.index for row in rows]
        (arrays,) = self._spec.treedef.unflatten(leaves)
        return PaddedBatch(arrays, by_dim, indices >= 0, indices, bucket)


class _Held(NamedTuple):
    """A checked example that waits for its batch."""

    index: int
    leaves: tuple[np.ndarray, ...]
    lengths: tuple[int, ...]


def deal(jobs: list[Job], rng: np.random.Generator | None) -> list[Job]:
    """Return the same buckets with their examples dealt anew, among buckets of equal sizes.

    Shuffled, the jobs are too, so that large buckets do not all come first. In order, the fullest buckets get
    the first examples, and jobs come by their first example.
    """
    pools: dict[Bucket, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: -len(job.indices)):
        pools.setdefault(Bucket(**job.bucket.sizes), []).append(job)
    dealt = []
    for pool in pools.values():
        members = np.sort(np.concatenate([job.indices for job in pool]))
        if rng is not None:
            members = rng.permutation(members)
        hands = np.split(members, np.cumsum([len(job.indices) for job in pool])[:-1])
        dealt += [Job(job.bucket, tuple(hand.tolist())) for job, hand in zip(pool, hands, strict=True)]
    if rng is not None:
        return [dealt[i] for i in rng.permutation(len(dealt))]
    return sorted(dealt, key=lambda job: min(job.indices))


def batches(
    iterable: Iterable[Any],
    *,
    spec: Any,
    grid: Grid,
    seed: int | None = None,
    window: int | None = None,
    errors: Literal["raise", "skip"] = "raise",
) -> Batches:
    """Return an iterator over padded batches of all examples, each exactly once, for a training step.

    There are at most `len(grid)` shapes, so a jitted step compiles at most so often. With one size of rows,
    as in `Grid(n=(16, 512), rows=[32])`, that is once a size. How many batches there are depends on the
    lengths, the grid and the window, and not on the seed.

    Batches are of different sizes, so their means cannot be averaged. Sum over the valid elements, and divide
    by one count: of all batches that make one step, or of the epoch. The gradients of the sums divided by
    that count, added up, are then the gradient of the whole, whatever the batches are.

    Args:
      iterable: the examples; endless ones will do. Those of a list or tuple must not be written to meanwhile;
        those of an iterator are copied.
      spec: what one example is: `jaxbatch.spec("n, 64", "float32")`, or a pytree of such.
      grid: the padded sizes. A dim of the spec that is not in the grid has one size in all examples.
      seed: shuffles, the same way for the same seed: the examples of a window among the batches of
        their size, and the order of the batches. None keeps the order as far as batches of one size allow:
        each has the first examples of its size that are left, and they come by their first example.
      window: how many examples are looked at together, and held at most. None is all of a list or tuple, and
        16 times the largest number of rows otherwise. What does not fill a batch waits for one more window.
      errors: "raise" a bad example's error, or "skip" it and go on; `skipped` of the iterator says which.

    Raises:
      SpecError: here, the spec cannot be read; while iterating, an example does not match, or is empty.
      OversizeError: while iterating, an example is larger than the grid; nothing is truncated.

    Example:
      >>> import jax, numpy as np, jaxbatch as jb
      >>> spec = jb.spec("n", "float32")
      >>> loss = jax.vmap(jb.mask(lambda x: ((x - 1) ** 2).sum(), spec=spec))
      >>> data = [np.zeros(n, np.float32) for n in (3, 2, 7, 8)]
      >>> total = elements = 0
      >>> for batch in jb.batches(data, spec=spec, grid=jb.Grid(n=[4, 8], rows=[2])):
      ...     print(batch.bucket, batch.indices, batch.lengths["n"])
      ...     total += batch.sum(loss(batch.lengths, batch.arrays))
      ...     elements += batch.count("n")
      Bucket(n=4, rows=2) [0 1] [3 2]
      Bucket(n=8, rows=2) [2 3] [7 8]
      >>> print(total / elements)
      1.0
    """
    where = "jaxbatch.batches"
    if isinstance(iterable, str | bytes | Mapping) or not isinstance(iterable, Iterable):
        raise TypeError(f"{where}: expected an iterable of examples, got {type(iterable).__name__}.")
    if not isinstance(grid, Grid):
        raise TypeError(f"{where}: grid={grid!r}; use jaxbatch.Grid(n=(16, 512)).")
    if errors not in ("raise", "skip"):
        raise ValueError(f"{where}: errors={errors!r}; use 'raise' or 'skip'.")
    if window is not None and window < 1:
        raise ValueError(f"{where}: window={window}; it is a number of examples, at least 1.")
    try:
        whole = Spec.from_trees((spec,), ("example",))
        if unknown := [dim for dim in grid.dims if dim not in whole.dims]:
            raise SpecError(
                f"the grid has dim `{unknown[0]}`, but the spec has {', '.join(whole.dims) or 'none'}. Use "
                f"the names of the spec in the grid."
            )
    except SpecError as error:
        raise error.with_context(where)  # noqa: B904  (it is the same error)
    if window is None and not isinstance(iterable, list | tuple):
        window = _WINDOW * grid.rows[-1]
    return Batches(iterable, whole, grid, seed, window, skip=errors == "skip")
