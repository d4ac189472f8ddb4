"""`batched`: a function of one example at its exact size becomes a function of many examples of many sizes.

This module is the face: it takes the user's arguments apart and puts errors, order and promises together.
The work is done below: `_calls` checks and sorts examples, `_pipeline` runs batches, `_engine` keeps what
lasts.
"""

import collections
import contextlib
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer

from . import _artifact, _closures, _report
from ._ahead import Ahead, Lengths
from ._calls import Call, Policy
from ._costs import Costs
from ._disk_cache import DiskCache
from ._dispatch import Dispatcher, Settings
from ._engine import Engine
from ._errors import ArtifactError, MaskError, SpecError
from ._executables import KeyTakenError
from ._explanation import Explanation
from ._functions import function_name, function_of
from ._grid import Grid
from ._pipeline import Window
from ._progress import ProgressBar, progress_bar
from ._spec import Checked, argument_names
from ._statistics import Statistics
from ._traced import Function

Errors = Literal["raise", "return"]

_FIRST_WINDOW = 16  # examples, so that the first results come early; later windows are twice as large
_WINDOW_BATCHES = 16  # of the largest rows: the more are planned together, the fuller are the last batches
_WINDOW_BYTES = 64 * 2**20  # of examples, after which a window ends early


class Batched:
    """What `batched` returns: the function over lists of examples. It may be called from several threads."""

    def __init__(
        self,
        function: Function,
        grid: Grid | None,
        *,
        oversize: Literal["error", "exact"],
        on_unmaskable: Literal["error", "exact"],
        frozen: bool,
        key: Hashable,
        costs: Costs | None,
        disk: DiskCache | None = None,
        streams: int = 1,
        layout: str = "padded",
    ):
        self._function = function
        self._oversize = oversize
        self._frozen = frozen
        self._engine = Engine(
            function,
            grid,
            on_unmaskable=on_unmaskable,
            key=key,
            costs=costs,
            disk=disk,
            streams=streams,
            layout=layout,
        )
        names = argument_names(function.f, len(function.per_example))
        self._shared_names = [n for n, one in zip(names, function.per_example, strict=True) if not one]
        self._ahead = Ahead(self._engine, self._shared_names, oversize)
        self.__name__ = function.name
        self.__wrapped__ = function.f

    def __call__(self, *args: Any, errors: Errors = "raise", progress: bool = False) -> list[Any]:
        """Return `f` of each example, in order: NumPy arrays that own their memory, in `f`'s own tree.

        Args:
          args: shared arguments as `f` takes them, and for each per-example argument a sequence (a list, or
            an array whose rows are the examples), all of one length.
          errors: "raise" checks all examples before anything runs and raises the first error; "return" puts
            an example's own error in the place of its result and runs the others.
          progress: draw a progress bar on stderr; it needs rich, which `jaxbatch[demo]` installs.

        Raises:
          SpecError: an example does not match its spec.
          OversizeError: an example is larger than the grid.
          MaskError: padding would change the answer; nothing was run.
          CompileMissError: frozen, and a program is missing.
          ValueError: the sequences differ in length.
        """
        shared, columns = self._split(args, errors)
        for name, column in columns.items():
            if not isinstance(column, Sized):
                hint = "; for iterators use map" if isinstance(column, Iterator) else ""
                raise self._not_examples(name, f"{type(column).__name__}{hint}")
        # Indexing rows of a device array costs 70 us each; one copy to the host costs less than two of them.
        values = [np.asarray(c) if isinstance(c, jax.Array) else c for c in columns.values()]
        if len({len(column) for column in values}) > 1:
            lengths = ", ".join(
                f"`{name}` {len(column)}" for name, column in zip(columns, values, strict=True)
            )
            raise ValueError(
                f"{self._engine.where}: one value per example each, but the lengths are {lengths}."
            )
        if not len(values[0]):
            return []
        bar = progress_bar(progress, self._engine.where, len(values[0]))
        call = self._call(shared, errors, bar, lazy=False)
        with bar or contextlib.nullcontext():
            return call.finish(call.submit(call.check_all(values), 0))

    def map(self, *args: Any, errors: Errors = "raise", progress: bool = False) -> Iterator[Any]:
        """Yield the result of each example in order, reading the iterables lazily.

        The first results come after at most 48 examples were read; later on at most 32 times the grid's
        largest rows, and about 128 MiB of examples, are read ahead of the result that is delivered. Examples
        are copied as they are read, so an iterator may reuse its buffer; shared arrays are not, so leave them
        as they are until the last result. An error (of an example, or raised by an iterable) comes after all
        results before it.

        Args:
          args: as in a call, with any iterables, infinite ones too, in the place of sequences.
          errors: "raise", or "return" to yield an example's own error in its place and go on.
          progress: as in a call; without a total where an iterable does not know its length.

        Raises:
          ValueError: one iterable ended before another.
        """
        shared, columns = self._split(args, errors)
        for name, column in columns.items():
            if not isinstance(column, Iterable):
                raise self._not_examples(name, type(column).__name__)
        values = {n: np.asarray(c) if isinstance(c, jax.Array) else c for n, c in columns.items()}
        total = min((len(each) for each in values.values() if isinstance(each, Sized)), default=None)
        bar = progress_bar(progress, self._engine.where, total)
        call = self._call(shared, errors, bar, lazy=True)
        return self._stream(call, self._in_step(values), errors, bar or contextlib.nullcontext())

    def warm_up(self, *shared: Any, lengths: Lengths | None = None, measure: bool = True) -> None:
        """Compile now what later calls will need, and measure what it costs; allowed when frozen.

        Packed rows need a program for each number of segments too, and, where the results of a row may not
        count, a padded one for what then runs again. With `layout="auto"` both layouts are compiled.

        From then on, batches are planned by seconds instead of cells (see `costs`), and a program that does
        not exist yet is used only where it saves more than a tenth of the time to compile it. With `lengths`,
        a run of such examples compiles nothing afterwards.

        Args:
          shared: the shared arguments, as in a call. Dtypes that neither they nor the spec fix are JAX's
            defaults (float32, int32).
          lengths: those of the examples to expect, an array if there is one dim, else a dict of arrays by
            dim, to compile only what they need, programs for exact sizes too; None compiles the whole grid.
          measure: time a few runs of each program, on zeros. Programs that loop until their data say stop, or
            call back, are never run on made-up data, and a batch that should take more than 2 s is estimated.

        Raises:
          SpecError: a fixed size is not known.
          OversizeError: a length is larger than the grid.
        """
        self._ahead.warm_up(shared, lengths, measure=measure)

    def explain(self, lengths: Lengths, *shared: Any) -> Explanation:
        """Say what a run of examples of these lengths would do, and in which layout; nothing is compiled.

        Args:
          lengths: an array if there is one dim, else a dict of arrays by dim, in elements.
          shared: the shared arguments; without them every program counts as missing.

        Raises:
          OversizeError: a length is larger than the grid.
        """
        return self._ahead.explain(shared, lengths, frozen=self._frozen)

    def best_rows(self, *shared: Any, max_bytes: int | None = None) -> dict[tuple[int, ...], int]:
        """Measure, and return for each sizes the rows with the best throughput; see `Grid.tune`."""
        return self._ahead.best_rows(shared, max_bytes)

    def dispatcher(
        self,
        *shared: Any,
        max_delay: float | int = 2e-3,
        max_pending: int = 4096,
        max_pending_cells: int | None = None,
        on_full: Literal["block", "raise"] = "block",
        target_latency: float | int | None = None,
        aging: float | int = 1.0,
        in_flight: int = 2,
    ) -> Dispatcher:
        """Return an object that takes single examples from any thread, and gives a future for each.

        Batches form by themselves: an idle device starts at once, unless waiting a moment for a mate is
        expected to pay, and meanwhile others gather. Warm up first where the first requests must not wait for
        a compile; what is missing is compiled in the background.

        Args:
          shared: the shared arguments, as in a call.
          max_delay: the longest that an example waits for mates while the device is free and its bucket has a
            program, in seconds.
          max_pending: how many examples may be pending at once.
          max_pending_cells: how many padded cells they may have together; by default as many as 16 of the
            largest batches, or 2**20 if that is more.
          on_full: what `submit` does beyond that: "block" until there is room, or "raise" `QueueFullError`.
          target_latency: seconds from `submit` to the result that batches should keep, by fewer rows if need
            be, as long as nobody has waited longer already.
          aging: how many seconds of waiting count as much as one step of priority.
          in_flight: how many batches the device has at once, at most; others that are urgent wait for these.

        Raises:
          MaskError: padding would change the answer; nothing was run.

        Example:
          >>> import numpy as np, jaxbatch as jb
          >>> run = jb.batched(lambda x: x / x.max(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=(4, 16)))
          >>> with run.dispatcher() as d:
          ...     futures = [d.submit(x) for x in (np.array([1, 2]), np.ones(3))]
          >>> [future.result().tolist() for future in futures]
          [[0.5, 1.0], [1.0, 1.0, 1.0]]
        """
        self._refuse_packed("dispatcher", "single examples do not wait for a row to fill")
        settings = Settings(
            max_delay, max_pending, max_pending_cells, on_full, target_latency, aging, in_flight
        )
        flat = self._ahead.shared(shared)
        return Dispatcher(self._engine, shared, flat, settings, oversize=self._oversize, frozen=self._frozen)

    def statistics(self) -> Statistics:
        """Return the counts so far, of all calls and threads; the snapshot does not change."""
        return self._engine.recorder.snapshot(self._engine.executables.statistics())

    @property
    def costs(self) -> Costs:
        """What a batch in each bucket costs, as measured so far; `to_json` saves it, `costs=` takes it."""
        return self._engine.costs

    def save(
        self,
        path: str | os.PathLike[str],
        *shared: Any,
        platforms: Sequence[str] | None = None,
        vjp_order: int = 0,
        metadata: Mapping[str, Any] | None = None,
        references: bool = True,
        copy: bool = True,
    ) -> None:
        """Write all that is needed to run this function elsewhere, without its code, to one file.

        `jaxbatch.load` reads it. It holds the programs in a portable form, the arrays of the shared and
        closed-over values once, the specs, the grid and the costs; no code and no pickle. Of several kinds of
        examples (`Float` may be float32 or float16) it holds those that were run before, or the default one.
        Shared values that are no arrays are part of the programs. With `oversize="exact"` it also holds one
        for examples of any size above the grid; a function for which there is none is refused.

        Args:
          path: an existing file is replaced as a whole.
          shared: the shared arguments, as in a call; or for one of them a `pathlib.Path` to read it from: an
            Orbax checkpoint (a folder), a .safetensors or an .npz file.
          platforms: where it shall run: "cpu", "cuda", "rocm", "tpu"; None means where JAX runs now. No such
            device is needed.
          vjp_order: how often `loaded.masked` can be differentiated; each order adds a program.
          metadata: JSON data of your own.
          references: run the function, unpadded, on one or two made-up examples, for `jaxbatch verify` to
            compare with. That compiles.
          copy: False leaves the arrays of Orbax checkpoints where they are: the file refers to them, by place
            and digests, and `load` restores them. With `references=False` they are not even read, but for
            their digests.

        Raises:
          ArtifactError: it cannot be exported: it calls back into Python, or gives objects of a class of its
            own; or the grid or a size is not known yet.
          MaskError: padding would change the answer, or the gradient.
        """
        self._refuse_packed("save", "a file holds padded programs")
        policies = {"oversize": self._oversize, "frozen": self._frozen}
        options = _artifact.Options(platforms, vjp_order, metadata, references)
        sources = _artifact.Sources(shared, copy=copy)
        try:
            _artifact.save(path, self._engine, sources, self._ahead.shared, policies, options)
        except (ArtifactError, SpecError) as error:
            raise error.with_context(f"{self._engine.where}.save")  # noqa: B904  (it is the same error)

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write what ran so far to one HTML file, with charts, that can be opened and passed on as it is.

        Args:
          path: its name ends in ".html"; an existing file is replaced as a whole.

        Raises:
          ValueError: the name has another ending.
        """
        try:
            _report.write(path, _report.render(self.__name__, self.grid, self.statistics()))
        except ValueError as error:
            raise ValueError(f"{self._engine.where}.report: {error}") from None

    def _refuse_packed(self, method: str, why: str) -> None:
        if self._engine.layout == "packed":
            raise ValueError(
                f"{self._engine.where}.{method}: layout='packed' is for lists; {why}. Make one with "
                f"layout='padded', or with 'auto', which pads here and gives the same results."
            )

    @property
    def grid(self) -> Grid | None:
        """The grid; where none was given, the inferred one, or None before the first example."""
        return self._engine.grid

    def __repr__(self) -> str:
        return f"<jaxbatch.batched({self.__name__}): {self._function.spec!r}, {self.grid}>"

    def _trace_early(self) -> None:
        """Trace already now where all is known, so that a refusal shows where the function is wrapped."""
        engine, spec = self._engine, self._function.spec
        if self._shared_names or engine.grid is None or engine.fixed_dims:
            return
        try:
            engine.padded(self._ahead.shared([]), spec.dtypes(), {})
        except (MaskError, KeyTakenError):
            raise
        except Exception:
            # With a dtype family the default may be the wrong one; and `f`'s own error belongs to a call.
            return

    # --- taking arguments apart ---

    def _split(self, args: Sequence[Any], errors: str) -> tuple[list[Any], dict[str, Any]]:
        """Return the shared arguments, and the per-example ones by name."""
        if errors not in ("raise", "return"):
            raise ValueError(f"{self._engine.where}: errors={errors!r}; use 'raise' or 'return'.")
        flags = self._function.per_example
        if len(args) != len(flags):
            expected = ", ".join(argument_names(self._function.f, len(flags)))
            raise TypeError(
                f"{self._engine.where}: takes {len(flags)} arguments ({expected}), got {len(args)}."
            )
        shared = [arg for arg, one in zip(args, flags, strict=True) if not one]
        per_example = [arg for arg, one in zip(args, flags, strict=True) if one]
        columns = dict(zip(self._function.spec.names, per_example, strict=True))
        for name, column in columns.items():
            if isinstance(column, Tracer):
                raise TypeError(
                    f"{self._engine.where}: `{name}` is traced by a JAX transformation. Inside jit, vmap or "
                    f"grad use jaxbatch.mask instead."
                )
            if isinstance(column, str | bytes | Mapping | set | frozenset):
                raise self._not_examples(name, type(column).__name__)
            if getattr(column, "ndim", 1) == 0:
                raise self._not_examples(name, f"a scalar {type(column).__name__}")
        return shared, columns

    def _not_examples(self, name: str, got: str) -> TypeError:
        return TypeError(
            f"{self._engine.where}: `{name}` has one value per example, so it must be a list or an array of "
            f"them; got {got}."
        )

    def _in_step(self, columns: Mapping[str, Iterable[Any]]) -> Iterator[tuple[Any, ...]]:
        """Yield one example after another, as `zip` does, but name the iterable that ends too early."""
        iterators, end = {name: iter(column) for name, column in columns.items()}, object()
        for num in itertools.count():
            example = tuple([next(iterator, end) for iterator in iterators.values()])
            ended = [name for name, value in zip(iterators, example, strict=True) if value is end]
            if len(ended) == len(example):
                return
            if ended:
                raise ValueError(
                    f"{self._engine.where}: `{ended[0]}` ended after {num} examples, and others go on. Every "
                    f"iterable has one value per example."
                )
            yield example

    def _call(self, shared: Sequence[Any], errors: str, bar: ProgressBar | None, *, lazy: bool) -> Call:
        policy = Policy(raises=errors == "raise", lazy=lazy, oversize=self._oversize, frozen=self._frozen)
        return Call(self._engine, shared, self._shared_names, policy, bar and bar.advance)

    # --- the lazy way ---

    def _stream(
        self,
        call: Call,
        examples: Iterator[tuple],
        errors: str,
        bar: contextlib.AbstractContextManager[Any],
    ) -> Iterator[Any]:
        """Submit windows of growing size, one ahead of the one whose results are delivered."""
        rows = self._engine.grid.rows[-1] if self._engine.grid else 64
        windows: collections.deque[Window] = collections.deque()
        largest = _WINDOW_BATCHES * rows
        size, start, failure, more = min(_FIRST_WINDOW, largest), 0, None, True
        with bar:
            while more:
                checked, held = [], 0
                try:
                    while len(checked) < size and held < _WINDOW_BYTES:
                        checked.append(call.check(next(examples), start + len(checked)))
                        if isinstance(checked[-1], Checked):
                            held += sum([leaf.nbytes for leaf in checked[-1].leaves])
                except StopIteration:
                    more = False
                except Exception as error:
                    failure = error
                try:
                    if checked:
                        windows.append(call.submit(call.gather(checked), start))
                except Exception as error:
                    failure = error
                more = more and failure is None
                start, size = start + len(checked), min(2 * size, largest)
                while len(windows) > (1 if more else 0):
                    for result in call.finish(windows.popleft()):
                        if isinstance(result, Exception) and errors == "raise":
                            raise result
                        yield result
            if failure is not None:
                raise failure


def batched(
    f: Callable[..., Any],
    in_axes: int | None | Sequence[int | None] = 0,
    *,
    spec: Any = None,
    grid: Grid | None = None,
    oversize: Literal["error", "exact"] = "error",
    on_unmaskable: Literal["error", "exact"] = "error",
    frozen: bool = False,
    key: Hashable = None,
    per_example: bool = True,
    mask_arg: str | None = None,
    costs: Costs | None = None,
    streams: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
    layout: Literal["padded", "packed", "auto"] = "padded",
) -> Batched:
    """Turn a function of one example at its exact size into one of many examples of many sizes.

    Args:
      f: a function of whole arguments, without padding, mask or batch axis. Bind static and keyword
        arguments with `functools.partial`. It is traced, as under `jit`: what it closes over, and the
        weights of a module that is `f` itself, stay as they were; pass what changes as shared arguments.
      in_axes: as in `jax.vmap`, for whole arguments: 0 for one value per example, None for shared ones.
        Shared arguments may be any pytree: their arrays and numbers are traced, other leaves are static.
      spec: what one example is: `jaxbatch.spec("n, 64", "float32")` or a pytree of such; with several
        per-example arguments a tuple of one each. None reads the jaxtyping annotations of `f`.
      grid: the padded sizes. A dim of the spec that is in the grid is ragged; any other has one size in all
        examples of a call. None makes all dims ragged and infers powers of two from the examples.
      oversize: what happens to an example larger than the grid: "error", or "exact" for a program of its own.
      on_unmaskable: where padding would change the answer of `f`: "error", or "exact" to run every example at
        its exact size, with one program for each, after one warning.
      frozen: raise `CompileMissError` instead of compiling in a call; `warm_up` may still compile.
      key: a name under which functions share their programs in the whole process, for closures that are made
        anew; their traces must be the same. Arrays that they close over may differ.
      per_example: False for a function that is written for padded batches and masks itself, such as a model
        with an attention mask. `spec`, and what a caller passes and gets, are the same; but `f` is called
        with per-example arguments [rows, ...], padded with zeros at the end of each ragged axis. Where its
        signature names them, it also gets, by keyword, `lengths`, a dict of int32 [rows] by ragged dim, and
        `mask`, a dict of bool [rows, size] by ragged dim, True where an element is valid. Rows that only fill
        a batch up repeat its first one; `mask["rows"]`, bool [rows], is False there, for functions that look
        across rows. Every output needs a leading axis of rows, and its valid part first on every other axis.
      mask_arg: the parameter of `f` that gets the masks, if it is not called `mask`. With one ragged dim it
        gets the array bool [rows, size] itself, as models with an `attention_mask` take it.
      streams: how many batches of a call run at the same time, each started by a thread of its own. On a CPU
        of several cores 2 is often faster; a GPU runs one program after another, so leave it at 1 there.
      costs: what batches cost, measured by another run of the same function on such a device: batches are
        then planned by seconds from the start. None plans by cells until `warm_up` has measured.
      cache_dir: a folder, of the user's own, that keeps compiled programs: a later process traces as usual,
        and reads what is there instead of compiling. Entries of other machines or versions are not used. What
        is read from it is run, so others must not be able to write to it.
      layout: how examples of lists lie in rows. "padded": each in a row of its own. "packed": as many in one
        as there is room for, with no padding between them; the sizes of the grid are then those of rows, and
        `len(grid.packed)` bounds the programs, of which one more, padded, runs what has to run again (one for
        each size where Python branches on it). "auto": the layout that is predicted to take less, for each
        call (or window of `map`), by measured costs after `warm_up`, else by the operations of the programs;
        `explain` and the statistics say which and why. A function that cannot be packed is padded, and the
        notes of the statistics say why; so are examples in a row with one whose numbers are not finite,
        where these could have reached them.

    Returns:
      A `Batched`: call it with the arguments of `f`, a list of examples in the place of each one.

    Raises:
      SpecError: the spec cannot be read, or the grid has a dim that no example has.
      MaskError: padding would change the answer. Found here where no argument is shared and all sizes are
        known, else at the first call, in both cases before anything compiles.

    Example:
      >>> import numpy as np, jaxbatch as jb
      >>> run = jb.batched(lambda x: x / x.sum(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=(4, 16)))
      >>> [y.tolist() for y in run([np.ones(2), np.ones(4), [8.0]])]
      [[0.5, 0.5], [0.25, 0.25, 0.25, 0.25], [1.0]]
    """
    where = f"jaxbatch.batched({function_name(f)})"
    for option, value in {"oversize": oversize, "on_unmaskable": on_unmaskable}.items():
        if value not in ("error", "exact"):
            raise ValueError(f"{where}: {option}={value!r}; use 'error' or 'exact'.")
    if grid is not None and not isinstance(grid, Grid):
        raise TypeError(f"{where}: grid={grid!r}; use jaxbatch.Grid(n=(16, 512)).")
    if not isinstance(key, Hashable):
        raise TypeError(f"{where}: key={key!r} has no hash; use a string or a tuple of strings.")
    if isinstance(streams, bool) or not isinstance(streams, int) or streams < 1:
        raise ValueError(f"{where}: streams={streams!r}; it is a number of threads, 1 or more.")
    if layout not in ("padded", "packed", "auto"):
        raise ValueError(f"{where}: layout={layout!r}; use 'padded', 'packed' or 'auto'.")
    if layout != "padded" and grid is None:
        raise ValueError(f"{where}: layout={layout!r} needs grid=, whose sizes are those of rows.")
    if per_example and mask_arg is not None:
        raise ValueError(f"{where}: mask_arg={mask_arg!r} is for functions that mask themselves.")
    try:
        function = function_of(f, in_axes, spec, grid, mask_arg, masks_itself=not per_example)
    except SpecError as error:
        raise error.with_context(where) from error.__cause__
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        disk = None if cache_dir is None else DiskCache(cache_dir)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if key is None:
        _closures.warn_if_made_anew(f, stacklevel=2)
    run = Batched(
        function,
        grid,
        oversize=oversize,
        on_unmaskable=on_unmaskable,
        frozen=frozen,
        key=key,
        costs=costs,
        disk=disk,
        streams=streams,
        layout=layout,
    )
    run._trace_early()
    return run
