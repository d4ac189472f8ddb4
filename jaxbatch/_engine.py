"""What a batched function keeps between calls: its grid, traces, programs and counts.

Every part has one owner here and may be asked from any thread.
"""

import dataclasses
import threading
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import _closures, _compat, _measure, _work
from ._costs import Costs
from ._disk_cache import DiskCache
from ._errors import MaskError
from ._executables import Executables, Leaf, Signature, SingleFlight, store_for
from ._flights import Streams
from ._grid import Bucket, Grid
from ._packed_rows import packed_rows
from ._plan import Means
from ._shared import Shared
from ._statistics import Recorder
from ._traced import Function, Ladders, Traced

# The sizes of a trace whose grid is inferred, since growing must not mean tracing again.
_ALL_SIZES = tuple(2**k for k in range(31))


class Engine:
    """The state of one batched function.

    Args:
      grid: None to infer it from the examples, and to let it grow with them.
      key: see `batched`.
      costs: what is known of costs already.
      disk: where compiled programs are kept for other processes.
      streams: how many batches run at the same time.
      layout: "padded", "packed" or "auto".

    Attributes:
      dims: the ragged dims; columns of all arrays of lengths are in this order.
      fixed_dims: the other names of the spec.
    """

    def __init__(
        self,
        function: Function,
        grid: Grid | None,
        *,
        on_unmaskable: str,
        key: Hashable,
        costs: Costs | None = None,
        disk: DiskCache | None = None,
        streams: int = 1,
        layout: str = "padded",
    ):
        self.layout = layout
        self.function = function
        self.dims = function.spec.dims if grid is None else grid.dims
        self.fixed_dims = tuple(dim for dim in function.spec.dims if dim not in self.dims)
        self.recorder = Recorder()
        store = store_for(key)
        self.executables = Executables(function.name, store, disk)
        self._inferred = grid is None
        self._grid = grid
        self._key = key
        self._store = store
        self._traces = SingleFlight()
        self._on_unmaskable = on_unmaskable
        self._unmaskable = False
        self.streams = Streams(streams)
        self._costs = costs or Costs()
        self._lock = threading.Lock()
        self._means: dict[bool, tuple[Any, frozenset[Bucket], Costs]] = {}
        self._row_work: dict[tuple[Signature, int], float] = {}
        self.note_slow_batches()

    @property
    def where(self) -> str:
        """What every message of this function begins with."""
        return self.function.where

    @property
    def is_unmaskable(self) -> bool:
        """Whether a trace has shown that padding would change the answer, so that all runs at exact sizes."""
        return self._unmaskable

    @property
    def programs_version(self) -> int:
        """A number that grows whenever there are other programs than before."""
        return self._store.version

    # --- the grid ---

    @property
    def grid(self) -> Grid | None:
        """The grid as it is now; None if it is to be inferred and no example was seen."""
        return self._grid

    @property
    def is_inferred(self) -> bool:
        """Whether no grid was given, so that it grows with the examples."""
        return self._inferred

    def grid_for(self, lengths: np.ndarray) -> Grid:
        """Return the grid for examples of these lengths; an inferred one grows to hold them."""
        grid = self._grid
        if self._inferred:
            tops = lengths.max(axis=0, initial=1).tolist()
            needed = {
                dim: [top, grid.limits[dim] if grid else 1] for dim, top in zip(self.dims, tops, strict=True)
            }
            grown = Grid.infer(needed)
            if grid is None:
                warnings.warn(
                    f"{self.where}: no grid was given, so powers of two that hold the "
                    f"examples are used, {grown} for now. Pass grid=... to bound the number of programs.",
                    UserWarning,
                    stacklevel=2,
                )
            grid = self._grid = grown
        assert grid is not None
        return grid

    # --- costs ---

    @property
    def costs(self) -> Costs:
        """What batches cost, as far as it was measured or given."""
        compiled = self.executables.statistics()
        num = compiled.compiles + compiled.exact_compiles
        mean = compiled.compile_seconds / num if num else self._costs.compile_seconds
        return dataclasses.replace(self._costs, compile_seconds=mean)

    def learn(self, measured: Mapping[Bucket, float]) -> None:
        """Add measured seconds, on which later plans rest."""
        with self._lock:
            self._costs = dataclasses.replace(self._costs, measured={**self._costs.measured, **measured})

    def note_slow_batches(self) -> None:
        """Say in the statistics at which sizes single rows are used, since batches are no faster."""
        costs = self.costs
        for single, best in costs.slower_together():
            sizes = ", ".join(f"{dim}={size}" for dim, size in single.sizes.items())
            alone, together = costs.measured[single], costs.measured[best] / best["rows"]
            self.recorder.note(
                f"at {sizes} single rows are used: an example takes {alone * 1e3:.3g} ms alone and "
                f"{together * 1e3:.3g} ms in batches of {best['rows']}, the fastest measured"
            )

    def programs(self, traced: Traced) -> dict[Bucket, jax.stages.Compiled]:
        """Return the programs for buckets that exist for a trace."""
        found = self.executables.ready(traced.signature)
        return {Bucket(**dict(sizes)): program for sizes, program in found.items()}

    def means(self, traced: Traced, *, frozen: bool) -> Means:
        """Return what the planner may use for the examples of a trace."""
        if not self._costs and not frozen:
            return Means(moves=traced.moves)
        state = traced.signature, self._store.version, self._costs
        known = self._means.get(traced.is_packed)
        if known is None or known[0] != state:
            programs = self.programs(traced)
            found = {bucket: _measure.work(program) for bucket, program in programs.items()}
            work = {**self._costs.work, **{bucket: each for bucket, each in found.items() if each}}
            costs = dataclasses.replace(self.costs, work=work).of(packed=traced.is_packed)
            known = self._means[traced.is_packed] = state, frozenset(programs), costs
        return Means(known[2], known[1], frozen, traced.moves)

    def row_work(self, traced: Traced, size: int) -> float:
        """Return what one row of a trace takes at this size, in units that only compare; counted once."""
        key = traced.signature, size
        if key not in self._row_work:
            self._row_work[key] = _work.row_work(traced, size)
        return self._row_work[key]

    # --- traces ---

    def signature(self, shared: Shared, dtypes: Sequence[np.dtype], sizes: Mapping[str, int]) -> Signature:
        """Return what a trace depends on; dims without an entry in `sizes` are symbolic."""
        spec = self.function.spec
        shapes = [
            tuple(
                str(axis) if axis.dim in self.dims and axis.dim not in sizes else axis.size(sizes)
                for axis in leaf.axes
            )
            for leaf in spec.leaves
        ]
        examples = tuple(map(Leaf, spec.paths, shapes, dtypes))
        per_example, ladders = self.function.per_example, tuple(self._ladders().items())
        static = (shared.split.static, spec.treedef, per_example, ladders, _compat.trace_context())
        return Signature(examples, shared.signature, static)

    def padded(self, shared: Shared, dtypes: Sequence[np.dtype], fixed: Mapping[str, int]) -> Traced | None:
        """Return the trace at symbolic sizes; None where the function is to run at exact sizes only.

        Raises:
          MaskError: the function cannot be padded, found here, before anything compiles.
        """
        if self._unmaskable:
            return None
        signature = self.signature(shared, dtypes, fixed)

        def make() -> Traced:
            traced = self.function.padded(shared, signature, self._ladders(), fixed)
            # Some refusals depend on the size; what the largest bucket allows, all allow.
            assert self._grid is not None
            limits = self._grid.limits
            traced.check(Bucket(rows=self._grid.rows_for(limits)[0], **limits))
            return self._registered(traced)

        try:
            return self._traces.get(signature, make)[0]
        except MaskError as error:
            if not str(error).startswith(self.where):  # threads that waited get the same object
                error = error.with_context(self.where)
            if self._on_unmaskable == "error":
                raise
            warnings.warn(
                f"{error} It runs at exact sizes instead, one program for each.", UserWarning, stacklevel=2
            )
            self._unmaskable = True
            return None

    def for_lists(
        self, shared: Shared, dtypes: Sequence[np.dtype], fixed: Mapping[str, int]
    ) -> dict[str, Traced]:
        """Return the trace for calls with lists in each layout that there is a choice of; none as `padded`.

        Why a function is padded only stands in the statistics' notes.
        """
        padded = self.padded(shared, dtypes, fixed)
        if padded is None:
            return {}
        if self.layout == "padded":
            return {"padded": padded}
        assert self._grid is not None
        grid = self._grid

        def make() -> Traced:
            try:
                return self._registered(packed_rows(padded, grid))
            except MaskError as error:
                self.recorder.note(f"padded only: {error}")
                return padded

        packed = self._traces.get((padded.signature, "packed"), make)[0]
        if not packed.is_packed:
            return {"padded": padded}
        return {"packed": packed} if self.layout == "packed" else {"padded": padded, "packed": packed}

    def traces(self) -> list[Traced]:
        """Return all traces that were made and are kept."""
        return [traced for _, traced in self._traces.items()]

    def exact(self, shared: Shared, dtypes: Sequence[np.dtype], lengths: Mapping[str, int]) -> Traced:
        """Return the trace at one example's own sizes, ragged and fixed; it raises what `f` raises."""
        signature = self.signature(shared, dtypes, lengths)
        make = lambda: self._registered(  # noqa: E731
            self.function.exact(shared, signature, self._ladders(), lengths)
        )
        traced, made = self._traces.get(signature, make)
        if made:
            self._traces.evict(lambda _, traced: traced.is_exact)
        return traced

    def _ladders(self) -> Ladders:
        if self._inferred or self._grid is None:
            return {**dict.fromkeys(self.dims, _ALL_SIZES), "rows": (1, 64)}
        return {**self._grid.sizes, "rows": self._grid.rows}

    def _registered(self, traced: Traced) -> Traced:
        """Compare with what other functions under the same user's key traced, and note what will compile."""
        if self._key is None:
            _closures.note_compile(self.function.f)
        else:
            self._store.check(traced.signature, traced.text)
        return traced
