"""One call: what it binds, how its examples are checked, and which batches they become.

An example goes one of three ways: an error of its own, a row of a bucket, or, where a ragged dim is
empty (or oversize or unmaskable, if that was allowed), a program of its exact size.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ._engine import Engine
from ._errors import MaskError, OversizeError, SpecError
from ._executables import KeyTakenError
from ._grid import Bucket, Grid
from ._layouts import plan_lists
from ._pipeline import Pipeline, Window, Work
from ._plan import chunk, plan
from ._shared import Shared
from ._spec import Checked, shared_dims
from ._traced import Traced


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a call does in doubt.

    Attributes:
      raises: an example's error ends the call, instead of standing in its place.
      lazy: earlier results are delivered before an error is raised, and examples are copied, since an
        iterator may reuse its buffers.
      oversize: "error" or "exact".
      frozen: a missing program is an error.
    """

    raises: bool
    lazy: bool
    oversize: str
    frozen: bool


class Call:
    """One call of a batched function.

    Args:
      engine: what the function keeps between calls.
      shared_args: the shared arguments, in order.
      names: of the shared arguments.
      on_delivered: called with each batch that has its results or errors.
    """

    def __init__(
        self,
        engine: Engine,
        shared_args: Sequence[Any],
        names: Sequence[str],
        policy: Policy,
        on_delivered: Callable[[Work], None] | None = None,
    ):
        self._engine = engine
        self._policy = policy
        self._spec = engine.function.spec
        self._shared = Shared.of(shared_args, names)
        self._columns = [self._spec.dims.index(dim) for dim in engine.dims]
        self._fixed = FixedSizes(engine, shared_args)
        self._pipeline = Pipeline(
            engine.executables,
            engine.recorder,
            self._shared.arrays,
            engine.streams,
            frozen=policy.frozen,
            on_failure=self._on_failure,
            on_delivered=on_delivered,
            again=self._again,
        )

    # --- in ---

    def check_all(self, columns: Sequence[Any]) -> "Examples":
        """Return the checked examples of a call, given as one sequence of values for each argument."""
        values = columns[0]
        if not self._engine.fixed_dims and len(columns) == 1 and self._spec.are_plain_vectors(values):
            # The common case, at a tenth of the time of one after another.
            num = len(values)
            lengths = np.fromiter(map(len, values), np.int64, num)[:, None]
            leaves = list(zip(values, strict=True))
            return Examples([None] * num, np.arange(num), leaves, lengths, (leaves[0][0].dtype,))
        return self.gather([self.check(each, i) for i, each in enumerate(zip(*columns, strict=True))])

    def gather(self, checked: Sequence[Checked | SpecError]) -> "Examples":
        """Return examples that were checked one by one."""
        errors = [each if isinstance(each, Exception) else None for each in checked]
        good = np.array([i for i, each in enumerate(errors) if each is None], np.intp)
        leaves = [checked[i].leaves for i in good.tolist()]
        lengths = np.array([checked[i].lengths for i in good.tolist()], np.int64)
        return Examples(errors, good, leaves, lengths.reshape(len(good), len(self._spec.dims)))

    def check(self, example: tuple[Any, ...], index: int) -> Checked | SpecError:
        """Return the checked example, or its error, which names it by `index`."""
        try:
            checked = self._spec.check(example)
            self._fixed.bind(checked)
        except SpecError as error:
            return name_example(error, self._engine, index)
        if self._policy.lazy:
            return Checked(tuple([np.array(leaf) for leaf in checked.leaves]), checked.lengths)
        return checked

    def submit(self, examples: "Examples", start: int) -> Window:
        """Plan examples and start their batches; `start` is the index of the first.

        Raises:
          Exception: what ends the whole call: `MaskError`, `CompileMissError`, and where the policy says so
            the first error of an example, before anything runs.
        """
        results: list[Any] = list(examples.errors)
        leaves, good, lengths = examples.leaves, examples.good, examples.lengths[:, self._columns]
        grid = self._engine.grid_for(lengths)
        over = np.any(lengths > np.array(list(grid.limits.values()), np.int64), axis=1)
        if self._policy.oversize == "error" and over.any():
            for i, own in zip(good[over], lengths[over], strict=True):
                results[i] = name_example(
                    oversize(self._engine, grid, own.tolist()), self._engine, start + int(i)
                )
            leaves = [leaves[i] for i in np.flatnonzero(~over).tolist()]
            good, lengths, over = good[~over], lengths[~over], over[~over]
        if self._policy.raises and not self._policy.lazy:
            for error in filter(None, results):
                raise error
        window = Window(results, pending=len(good))
        exact = np.any(lengths == 0, axis=1) | over
        rows = _Rows(window, good, leaves, lengths, exact, examples.dtypes)
        for work in self._works(rows, grid):
            self._pipeline.start(work)
        return window

    # --- out ---

    def finish(self, window: Window) -> list[Any]:
        """Wait for the window's results and return them in order, errors in their places."""
        self._pipeline.finish(window)
        return window.results

    # --- between ---

    def _works(self, rows: "_Rows", grid: Grid) -> Iterator[Work]:
        """Sort the examples by how they run and yield their batches; what cannot be traced fails here."""
        for dtypes, here in rows.by_dtypes():
            alone, inside = here[rows.exact[here]], here[~rows.exact[here]]
            traces: dict[str, Traced] = {}
            if len(inside):
                try:
                    traces = self._engine.for_lists(self._shared, dtypes, self._fixed.sizes)
                except Exception as error:
                    if isinstance(error, MaskError | KeyTakenError) or not self._own_fault(dtypes):
                        raise
                    self._fail(rows, inside, error)
                    inside = inside[:0]
            # At its exact size an example gets the error that the function has for it.
            leaving = self._raising(rows, inside, traces)
            alone, inside = np.concatenate([alone, inside[leaving]]), inside[~leaving]
            yield from self._exact_works(rows, alone, dtypes, grid)
            if len(inside):
                lengths, frozen = rows.lengths[inside], self._policy.frozen
                planned = plan_lists(self._engine, traces, lengths, grid, frozen=frozen)
                if self._engine.layout != "padded":
                    self._engine.recorder.add_layout(planned.layout, len(inside), planned.reason)
                assert planned.traced is not None
                self._pipeline.expect(planned.traced, [job.bucket for job in planned.jobs])
                for job in planned.jobs:
                    yield rows.work(planned.traced, job.bucket, inside[list(job.indices)], job.used)

    def _again(self, work: Work, places: Sequence[int]) -> Iterator[Work]:
        """Yield the batches of examples of a batch whose results do not count.

        It is rare, so that they run by programs that exist, or by one new one that holds them all.
        """
        traced, own, engine = work.traced.again, list(places), self._engine
        assert engine.grid is not None
        ready = frozenset([*engine.programs(traced), *work.traced.spare(None)])
        means = engine.means(traced, frozen=self._policy.frozen)
        means = dataclasses.replace(means, ready=ready, frozen=True)
        for job in plan(work.lengths[own], engine.grid, means):
            part = [own[i] for i in job.indices]
            indices, examples = tuple([work.indices[k] for k in part]), [work.examples[k] for k in part]
            yield Work(work.window, traced, job.bucket, indices, examples, work.lengths[part])

    def _raising(self, rows: "_Rows", inside: np.ndarray, traces: Mapping[str, Traced]) -> np.ndarray:
        """Return whether each example has no trace, or a length at which the function itself raises."""
        own, raising = rows.lengths[inside], np.full(len(inside), not traces)
        for bounds in next(iter(traces.values())).failures if traces else ():
            low, high = np.array([bounds[dim] for dim in self._engine.dims]).T
            raising |= np.all((own >= low) & (own <= high), axis=1)
        return raising

    def _exact_works(
        self, rows: "_Rows", alone: np.ndarray, dtypes: tuple[np.dtype, ...], grid: Grid
    ) -> Iterator[Work]:
        """Yield the batches of examples that run at their own size, equal sizes together."""
        sizes: dict[tuple[int, ...], list[int]] = {}
        for row in alone.tolist():
            sizes.setdefault(tuple(rows.lengths[row].tolist()), []).append(row)
        for own, members in sizes.items():
            lengths = dict(zip(self._engine.dims, own, strict=True))
            try:
                traced = self._engine.exact(self._shared, dtypes, {**self._fixed.sizes, **lengths})
            except (MaskError, KeyTakenError):
                raise
            except Exception as error:
                error.add_note(
                    f"raised by {self._engine.function.name} for an example of the exact size {lengths}"
                )
                self._fail(rows, np.array(members), error)
                continue
            for job in chunk(Bucket(**lengths), members, grid.rows_for([max(size, 1) for size in own])):
                yield rows.work(traced, job.bucket, np.array(job.indices))

    def _own_fault(self, dtypes: tuple[np.dtype, ...]) -> bool:
        """Tell whether an error of the trace is due to the dtypes of some examples, not to the whole call."""
        try:
            self._engine.padded(self._shared, self._spec.dtypes(), self._fixed.sizes)
        except Exception:
            return False
        return dtypes != self._spec.dtypes()

    def _fail(self, rows: "_Rows", members: np.ndarray, error: Exception) -> None:
        self._on_failure(error)
        rows.window.settle(rows.indices[members].tolist(), [error] * len(members))

    def _on_failure(self, error: Exception) -> None:
        if self._policy.raises and not self._policy.lazy:
            raise error


@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
    """Examples that are planned together, after their check.

    Attributes:
      errors: for each example its own error, or None.
      good: the places of those without one.
      leaves: the arrays of each good one.
      lengths: int64 [num_good, num_dims], in the order of the spec's dims.
      dtypes: those of the leaves, if they are known to be the same in all examples.
    """

    errors: list[SpecError | None]
    good: np.ndarray
    leaves: Sequence[tuple[np.ndarray, ...]]
    lengths: np.ndarray
    dtypes: tuple[np.dtype, ...] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """The examples of one window that run, in order.

    Attributes:
      indices: the place of each in the window.
      lengths: int64 [num, num_dims].
      exact: bool [num], whether an example runs at its exact size in any case.
      dtypes: as in `Examples`.
    """

    window: Window
    indices: np.ndarray
    examples: Sequence[tuple[np.ndarray, ...]]
    lengths: np.ndarray
    exact: np.ndarray
    dtypes: tuple[np.dtype, ...] | None

    def by_dtypes(self) -> Iterator[tuple[tuple[np.dtype, ...], np.ndarray]]:
        """Yield the dtypes that examples have, and which of them have these."""
        if self.dtypes is not None and self.examples:
            yield self.dtypes, np.arange(len(self.examples))
            return
        groups: dict[tuple[np.dtype, ...], list[int]] = {}
        for row, leaves in enumerate(self.examples):
            groups.setdefault(tuple([leaf.dtype for leaf in leaves]), []).append(row)
        for dtypes, members in groups.items():
            yield dtypes, np.array(members)

    def work(self, traced: Traced, bucket: Bucket, members: np.ndarray, used: int | None = None) -> Work:
        """Return the batch of these rows."""
        examples = [self.examples[row] for row in members.tolist()]
        indices = tuple(self.indices[members].tolist())
        return Work(self.window, traced, bucket, indices, examples, self.lengths[members], used)


class FixedSizes:
    """The sizes of the dims that are not in the grid, told by shared arguments or the first example."""

    def __init__(self, engine: Engine, shared_args: Sequence[Any]):
        self._engine = engine
        self._columns = [(dim, engine.function.spec.dims.index(dim)) for dim in engine.fixed_dims]
        self.sizes = bound_dims(engine, shared_args)

    def bind(self, checked: Checked) -> None:
        """Compare an example's sizes with those that are bound, and bind new ones.

        Raises:
          SpecError: a size differs.
        """
        for dim, i in self._columns:
            size = checked.lengths[i]
            if self.sizes.get(dim, size) != size:
                raise SpecError(
                    f"{_where(self._engine, dim)} has size {size}, but the shared arguments or an earlier "
                    f"example have {self.sizes[dim]}. A dim that is not in the grid has one size for all; "
                    f"name `{dim}` in the grid to let it vary."
                )
        self.sizes.update({dim: checked.lengths[i] for dim, i in self._columns})


def bound_dims(engine: Engine, shared_args: Sequence[Any]) -> dict[str, int]:
    """Return the fixed sizes that annotated shared arguments have."""
    if not engine.fixed_dims:
        return {}
    positions = [i for i, one in enumerate(engine.function.per_example) if not one]
    found = shared_dims(engine.function.f, positions, shared_args)
    return {dim: size for dim, size in found.items() if dim in engine.fixed_dims}


def _where(engine: Engine, dim: str) -> str:
    """Return the first place where a dim stands: "`x['tokens']` axis 0 (dim `n`)"."""
    spec = engine.function.spec
    for path, leaf in zip(spec.paths, spec.leaves, strict=True):
        for position, axis in enumerate(leaf.axes):
            if axis.dim == dim:
                return f"`{path}` axis {position} (dim `{dim}`)"
    raise AssertionError(f"{dim} is not in the spec")


def oversize(engine: Engine, grid: Grid, lengths: Sequence[int]) -> OversizeError:
    """Return the error of an example that is larger than the grid."""
    named = dict(zip(grid.dims, lengths, strict=True))
    try:
        grid.ceil(named)
    except OversizeError as error:
        dim = next(dim for dim, length in named.items() if length > grid.limits[dim])
        return error.with_context(_where(engine, dim).split(" (dim")[0])
    raise AssertionError("the example fits after all")


def name_example(error: Any, engine: Engine, index: int) -> Any:
    """Return the error with the index of its example in every path: `x['ids']` becomes `x[17]['ids']`."""
    path = rf"`({'|'.join(map(re.escape, engine.function.spec.names))})(?=[`\[])"
    error.args = (re.sub(path, rf"`\1[{index}]", str(error.args[0])), *error.args[1:])
    return error.with_context(engine.where)
