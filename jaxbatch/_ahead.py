"""What can be done before a run: plan it, explain it, compile its programs and measure what they cost."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _measure
from ._calls import bound_dims
from ._engine import Engine
from ._errors import MaskError, OversizeError, SpecError
from ._executables import KeyTakenError
from ._explanation import Explanation, explain
from ._grid import Bucket, Grid
from ._layouts import plan_lists
from ._plan import Means, chunk, plan
from ._shared import Shared
from ._traced import Traced

Lengths = Mapping[str, Any] | Sequence[int] | np.ndarray

_LONGEST = 2.0
"""A batch that is expected to take more seconds than this is not measured; its cost is estimated."""

_CLEARLY = 1.1  # how much slower for each example more rows must be to end a search for the best


class Ahead:
    """Plans, explanations and warm programs of one batched function.

    Args:
      names: of the shared arguments.
      oversize: "error" or "exact".
    """

    def __init__(self, engine: Engine, names: Sequence[str], oversize: str):
        self._engine = engine
        self._names = names
        self._oversize = oversize

    def shared(self, args: Sequence[Any]) -> Shared:
        """Return the shared arguments, flat and on the device."""
        if len(args) != len(self._names):
            expected = ", ".join(self._names) or "none"
            raise TypeError(f"{self._engine.where}: the shared arguments are {expected}; got {len(args)}.")
        return Shared.of(args, self._names)

    # --- plan and explain ---

    def explain(self, args: Sequence[Any], lengths: Lengths, *, frozen: bool) -> Explanation:
        """Return what a run of examples of these lengths would do; see `Batched.explain`."""
        engine = self._engine
        array = self._array(lengths)
        inside = array[(array > 0).all(axis=1) & (not engine.is_unmaskable)]
        kept = self._kept(inside)
        traces = self._traces(args)
        grid = engine.grid_for(inside)
        planned = plan_lists(engine, traces, kept, grid, frozen=frozen)
        programs = {} if planned.traced is None else engine.programs(planned.traced)
        found = explain(
            planned.jobs,
            kept,
            missing=planned.missing,
            num_exact=len(array) - len(kept),
            cost=planned.means.costs.seconds,
            memory=lambda bucket: _measure.peak_bytes(programs[bucket]) if bucket in programs else None,
        )
        advice = self._advice(kept, found, planned.means) if planned.layout == "padded" else None
        return dataclasses.replace(found, advice=advice, layout=planned.layout, layout_reason=planned.reason)

    def _advice(self, lengths: np.ndarray, found: Explanation, means: Means) -> str | None:
        """Say whether a ladder fitted to these lengths would repay its compiles, where costs are known."""
        grid, each = self._engine.grid, means.costs.compile_seconds
        if found.seconds is None or each is None or grid is None or not grid.dims:
            return None
        columns = dict(zip(grid.dims, lengths.T, strict=True))
        num = len({tuple(bucket.sizes.items()) for bucket in found.buckets})
        best: tuple[float, float, float, int] | None = None
        for most in (2 * num, 3 * num):
            fitted = Grid.fit(columns, most, 8, list(grid.rows), grid.max_cells)
            jobs = plan(lengths, fitted, dataclasses.replace(means, moves=False))
            seconds = sum(means.costs.seconds(job.bucket) or 0.0 for job in jobs)
            compiling = each * (len({job.bucket for job in jobs} - means.ready) - found.missing)
            if best is None or seconds + compiling < best[0]:
                best = seconds + compiling, seconds, compiling, most
        assert best is not None
        total, seconds, compiling, most = best
        if seconds > 0.97 * found.seconds:
            return None
        repaid = max(compiling, 0.0) / (found.seconds - seconds) * len(lengths)
        verdict = "it pays here" if total < found.seconds else f"it pays from {repaid:,.0f} such examples on"
        return (
            f"Grid.fit(lengths, max_sizes={most}) is predicted to run them in {seconds:.3g} s instead of "
            f"{found.seconds:.3g} s, for {compiling:.3g} s more of compiling: {verdict}."
        )

    def _traces(self, args: Sequence[Any]) -> Mapping[str, Traced | None]:
        """Return the traces by layout; None for each if it cannot be traced with these arguments."""
        engine = self._engine
        layouts = ("padded", "packed") if engine.layout == "auto" else (engine.layout,)
        unknown = dict.fromkeys(layouts if len(engine.dims) == 1 else ("padded",))
        if len(args) != len(self._names):
            return unknown
        fixed = bound_dims(engine, args)
        if any(dim not in fixed for dim in engine.fixed_dims):
            return unknown
        try:
            shared = self.shared(args)
            return engine.for_lists(shared, engine.function.spec.dtypes(), fixed) or {"padded": None}
        except Exception:  # it belongs to a call; with a dtype family the default may be the wrong one
            return unknown

    def _kept(self, lengths: np.ndarray) -> np.ndarray:
        """Return the lengths without oversize examples.

        Raises:
          OversizeError: there are such, and that is an error.
        """
        grid = self._engine.grid_for(lengths)
        over = (lengths > np.array(list(grid.limits.values()), np.int64)).any(axis=1)
        if self._oversize == "error" and over.any():
            try:
                grid.ceil(dict(zip(grid.dims, lengths[over][0].tolist(), strict=True)))
            except OversizeError as error:
                raise error.with_context(self._engine.where)  # noqa: B904  (it is the same error)
        return lengths[~over]

    # --- compile and measure ---

    def warm_up(self, args: Sequence[Any], lengths: Lengths | None, *, measure: bool) -> None:
        """Compile what later calls will need, and measure it; see `Batched.warm_up`."""
        engine, dtypes = self._engine, self._engine.function.spec.dtypes()
        array = None if lengths is None else self._array(lengths)
        if array is not None:
            self._kept(array[(array > 0).all(axis=1)])  # it raises what a call would
        elif engine.grid is None:
            raise ValueError(
                f"{engine.where}: without a grid there is nothing to warm up; pass grid= or lengths=."
            )
        shared = self.shared(args)
        fixed = bound_dims(engine, args)
        if unknown := [dim for dim in engine.fixed_dims if dim not in fixed]:
            raise SpecError(
                f"{engine.where}: the size of `{unknown[0]}` is not known before the first example. Write "
                f"the number into the spec."
            )
        traces = engine.for_lists(shared, dtypes, fixed)
        inside = None if array is None else array[~self._is_exact(array)]
        for layout, traced in traces.items():
            if inside is None:
                assert engine.grid is not None
                self._prepare(traced, traced.buckets(engine.grid), shared, measure)
            elif len(inside):
                self._prepare_for(inside, layout, traced, shared, measure)
            if inside is None or len(inside):
                longest = None if inside is None else int(inside.max(initial=1))
                for bucket in traced.spare(longest):
                    self._prepare(traced.again, [bucket], shared, measure=False)
            engine.note_slow_batches()
        if array is not None:
            self._warm_up_exact(shared, fixed, array[self._is_exact(array)] if traces else array)

    def _prepare_for(
        self, lengths: np.ndarray, layout: str, traced: Traced, shared: Shared, measure: bool
    ) -> None:
        """Prepare the buckets of a plan, and of the plan that then is the best, until it is the same one."""
        while True:
            grid = self._engine.grid_for(lengths)
            planned = plan_lists(self._engine, {layout: traced}, lengths, grid, frozen=False)
            missing = planned.missing
            self._prepare(traced, dict.fromkeys(job.bucket for job in planned.jobs), shared, measure)
            if not missing:
                return

    def _prepare(self, traced: Traced, buckets: Iterable[Bucket], shared: Shared, measure: bool) -> None:
        """Compile the programs of these buckets and measure those that have no measured cost yet.

        Small ones come first, so that what is measured tells which are too large to be worth it.
        """
        engine = self._engine
        for bucket in sorted(buckets, key=lambda bucket: bucket.cells) if measure else buckets:
            build = functools.partial(traced.build, bucket, engine.executables.disk)
            program = engine.executables.get(traced.key(bucket), build)
            if measure and self._is_worth_measuring(traced, bucket):
                seconds = _measure.run_seconds(program, traced, bucket, shared.arrays)
                engine.learn({bucket: seconds})

    def best_rows(self, args: Sequence[Any], max_bytes: int | None) -> dict[tuple[int, ...], int]:
        """Return for each sizes the rows with the best throughput; see `Grid.tune`."""
        engine, where = self._engine, self._engine.where
        if (grid := engine.grid) is None:
            raise ValueError(f"{where}: without a grid there are no rows to choose from; pass grid=.")
        traces = engine.for_lists(self.shared(args), engine.function.spec.dtypes(), bound_dims(engine, args))
        traced = next(iter(traces.values()), None)
        if traced is None or traced.may_not_end:
            why = "it runs at exact sizes" if traced is None else "its loops may not end, or it calls back"
            raise ValueError(f"{where}: cannot be measured on made-up data: {why}.")
        shared, found = self.shared(args), {}
        most = _measure.device_bytes() if max_bytes is None else max_bytes
        for own in itertools.product(*grid.ladders):
            sizes = Bucket(**dict(zip(grid.dims, own, strict=True)))
            found[own] = self._best_rows(traced, sizes, grid.rows_for(own), shared, most)
        engine.note_slow_batches()
        return found

    def _best_rows(
        self, traced: Traced, sizes: Bucket, ladder: Sequence[int], shared: Shared, most: int | None
    ) -> int:
        """Try numbers of rows, few first, until more of them do not fit or are clearly slower."""
        engine, rates = self._engine, {}
        for rows in ladder:
            bucket = traced.bucket(sizes, rows)
            program = engine.executables.get(
                traced.key(bucket), functools.partial(traced.build, bucket, engine.executables.disk)
            )
            needed = _measure.peak_bytes(program)
            if rates and most is not None and needed is not None and needed > most:
                break
            if bucket not in engine.costs.measured:
                engine.learn({bucket: _measure.run_seconds(program, traced, bucket, shared.arrays)})
            rates[rows] = engine.costs.measured[bucket] / rows
            if rates[rows] > _CLEARLY * min(rates.values()) or engine.costs.measured[bucket] > _LONGEST:
                break
        return min(rates, key=lambda rows: rates[rows])

    def _is_worth_measuring(self, traced: Traced, bucket: Bucket) -> bool:
        costs = self._engine.costs
        if traced.may_not_end or bucket in costs.measured:
            return False
        expected = costs.seconds(bucket)
        return expected is None or expected <= _LONGEST

    def _warm_up_exact(self, shared: Shared, fixed: Mapping[str, int], lengths: np.ndarray) -> None:
        """Compile for examples that run at their exact size, equal ones together as in a call."""
        engine, grid = self._engine, self._engine.grid_for(lengths)
        for own, num in collections.Counter(map(tuple, lengths.tolist())).items():
            sizes = dict(zip(engine.dims, own, strict=True))
            try:
                traced = engine.exact(shared, engine.function.spec.dtypes(), {**fixed, **sizes})
            except (MaskError, KeyTakenError):
                raise
            except Exception:
                continue  # at this size the function itself raises, and no example needs a program
            rows = grid.rows_for([max(size, 1) for size in own])
            for bucket in {job.bucket for job in chunk(Bucket(**sizes), list(range(num)), rows)}:
                engine.executables.get(
                    traced.key(bucket), functools.partial(traced.build, bucket, engine.executables.disk)
                )

    def _is_exact(self, lengths: np.ndarray) -> np.ndarray:
        """Return which examples run at their exact size whatever the function is."""
        over = lengths > np.array(list(self._engine.grid_for(lengths).limits.values()), np.int64)
        return np.any((lengths == 0) | over, axis=1)

    def _array(self, lengths: Lengths) -> np.ndarray:
        """Return lengths as int64 [num, num_dims]."""
        dims, where = self._engine.dims, self._engine.where
        if not isinstance(lengths, Mapping):
            if len(dims) != 1:
                raise ValueError(f"{where}: lengths are a dict of arrays by dim: {', '.join(dims)}.")
            lengths = {dims[0]: lengths}
        if lengths.keys() != set(dims):
            raise ValueError(f"{where}: lengths of {list(lengths)}, expected {list(dims)}.")
        columns = [np.atleast_1d(np.asarray(lengths[dim])) for dim in dims]
        try:
            columns = np.broadcast_arrays(*columns)
        except ValueError:
            shapes = ", ".join(f"`{dim}` {c.shape}" for dim, c in zip(dims, columns, strict=True))
            raise ValueError(
                f"{where}: one length per example in each dim, but the shapes are {shapes}."
            ) from None
        array = np.stack(columns, axis=1) if columns else np.zeros((1, 0), np.int64)
        if array.ndim != 2 or (array.size and array.dtype.kind not in "iu") or (array < 0).any():
            raise ValueError(f"{where}: lengths are integers of at least 0, in one array for each dim.")
        return array.astype(np.int64)
