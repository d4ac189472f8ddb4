"""The user's function, traced for one kind of example and made ready to compile for any bucket.

`Traced` is the face that the rest of the library sees. `PerExample` stands behind it for functions of one
example, in two forms: traced once at symbolic sizes, masked, for every bucket; and traced at one example's
own sizes, for those that no bucket can serve. (`_self_masking` has the third.) Weights and closed-over
arrays are arguments of all, so a compiled program holds no copy of them.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ._batch import Residuals, pad_and_stack, unstack
from ._disk_cache import DiskCache, devices_of, program_digest, source_digest
from ._executables import Key, Signature, compile_program
from ._grid import Bucket, Grid
from ._identity import symbolic_text
from ._mask import Masked
from ._program import Bounds, Program, evaluate_shape, symbolic_dims, trace
from ._shared import Shared
from ._spec import Spec

Ladders = Mapping[str, Sequence[int]]
"""The padded sizes of each ragged dim, and the numbers of rows under "rows", ascending."""


# --- functions -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of shared and per-example arguments, written for one example at its exact size.

    Attributes:
      f: the user's function.
      per_example: for each positional argument, whether it has one value per example.
      name: what messages call it.
    """

    f: Callable[..., Any]
    spec: Spec
    per_example: tuple[bool, ...]
    name: str

    @property
    def where(self) -> str:
        """What every message about the batched function begins with."""
        return f"jaxbatch.batched({self.name})"

    def arguments(self, shared: Shared, leaves: Sequence[Any]) -> list[Any]:
        """Return what `f` is called with, from array leaves: those of `shared`, then those of the example."""
        num = len(shared.arrays)
        rest = iter(shared.split.rebuild(leaves[:num]))
        own = iter(self.spec.treedef.unflatten(leaves[num:]))
        return [next(own) if one else next(rest) for one in self.per_example]

    def alone(self, *args: Any) -> Any:
        """Return what `f` gives for one example, unpadded and without any other: what batching must give."""
        return self.f(*args)

    def padded(
        self, shared: Shared, signature: Signature, ladders: Ladders, fixed: Mapping[str, int]
    ) -> "Traced":
        """Trace the function for all buckets.

        Raises:
          MaskError: it cannot be padded.
        """
        bounds = {dim: (1, sizes[-1]) for dim, sizes in ladders.items() if dim != "rows"}
        program = self._trace(shared, signature, {**symbolic_dims(bounds), **fixed}, bounds)
        own = shared.abstract()
        return PerExample(self.name, signature, tuple(bounds), False, own, program, Masked(program), ladders)

    def exact(
        self, shared: Shared, signature: Signature, ladders: Ladders, sizes: Mapping[str, int]
    ) -> "Traced":
        """Trace the function at one example's sizes; what it raises there is the example's own error."""
        program = self._trace(shared, signature, sizes, {})
        return PerExample(self.name, signature, (), True, shared.abstract(), program, None, ladders)

    def _trace(
        self, shared: Shared, signature: Signature, dims: Mapping[str, Any], bounds: Bounds
    ) -> Program:
        leaves = [*shared.avals(), *example_avals(self.spec, signature, dims)]
        flat = lambda *leaves: self.f(*self.arguments(shared, leaves))  # noqa: E731
        return trace(flat, leaves, bounds, name=self.name, partial=True)


def example_avals(
    spec: Spec, signature: Signature, sizes: Mapping[str, Any], *rows: Any
) -> list[jax.ShapeDtypeStruct]:
    """Return shape and dtype of the leaves of an example, or with `rows` of a batch, at these sizes."""
    pairs = zip(spec.shapes(sizes), signature.examples, strict=True)
    return [jax.ShapeDtypeStruct((*rows, *shape), leaf.dtype) for shape, leaf in pairs]


# --- their traces ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Traced(abc.ABC):
    """A function traced for one signature.

    A program of it takes `(counts, consts, shared, examples)` and returns the output leaves, padded.

    Attributes:
      dims: the ragged dims whose lengths it is told, in the order of the columns of lengths.
      is_exact: whether it is for one example's own sizes, and no bucket of the grid.
      shared: the shared arguments without their values, which a trace must not keep alive.
    """

    name: str
    signature: Signature
    dims: tuple[str, ...]
    is_exact: bool
    shared: Shared

    @property
    def failures(self) -> Sequence[Bounds]:
        """Bounds of lengths at which the function itself raises, so that no bucket serves them."""
        return ()

    @property
    def moves(self) -> bool:
        """Whether an example may run in a larger bucket than the smallest that holds it."""
        return True

    @property
    def is_packed(self) -> bool:
        """Whether several examples share a row."""
        return False

    def buckets(self, grid: Grid) -> Iterable[Bucket]:
        """Return all buckets of a grid that it can have a program for."""
        return grid

    def bucket(self, sizes: Bucket, rows: int) -> Bucket:
        """Return the bucket of these sizes with this many rows; of packed ones that of the most segments."""
        return sizes.with_rows(rows)

    def spare(self, longest: int | None) -> Sequence[Bucket]:
        """Return buckets of `again` that hold whatever may run again.

        Args:
          longest: no example is longer; None for whatever the grid holds.
        """
        return ()

    @property
    @abc.abstractmethod
    def may_not_end(self) -> bool:
        """Whether its programs must not run on made-up data: it loops until data end it, or calls back."""

    def key(self, bucket: Bucket) -> Key:
        """Return the key of the program for a bucket that has rows."""
        return Key(self.signature, tuple(bucket.items()), exact=self.is_exact)

    def check(self, bucket: Bucket) -> None:
        """Raise `MaskError` if the program for a bucket cannot be exact; compiles nothing."""
        jax.eval_shape(self.run(bucket), *self.avals(bucket))

    def build(self, bucket: Bucket, disk: DiskCache | None = None) -> Any:
        """Compile the program for a bucket, or find it on disk; see `compile_program`."""
        run = self.run(bucket)
        run.__name__ = re.sub(r"\W", "_", self.name)  # what JAX's own logs call it
        known = None if disk is None else self.known(bucket)
        return compile_program(run, *self.avals(bucket), disk=disk, known=known)

    def known(self, bucket: Bucket) -> tuple[str, Sequence[Any]] | None:
        """Return a digest of the program for a bucket and its devices, if these are known before lowering."""
        return None

    def expect(self, bucket: Bucket, disk: DiskCache) -> None:
        """Begin to read the program for a bucket from disk, if it is known and there."""
        if (known := self.known(bucket)) is not None:
            disk.expect(*known)

    def avals(self, bucket: Bucket) -> tuple[Any, ...]:
        """Return shapes and dtypes of a program's arguments."""
        rows = bucket["rows"]
        counts = self.counts(Residuals(rows, np.zeros((rows, len(self.dims)), np.int32)))
        consts = [
            jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=c.sharding if c.committed else None)
            for c in self.consts(bucket)
        ]
        examples = [
            jax.ShapeDtypeStruct((rows, *shape), leaf.dtype)
            for shape, leaf in zip(self.shapes(bucket), self.signature.examples, strict=True)
        ]
        return jax.tree.map(jax.typeof, counts), consts, self.shared.avals(placed=True), examples

    def assemble(
        self, bucket: Bucket, examples: Sequence[Sequence[np.ndarray]], lengths: np.ndarray
    ) -> tuple[list[np.ndarray], Residuals]:
        """Return the arrays of a batch, and what `take_apart` needs; `lengths` is [num, num_dims]."""
        return pad_and_stack(examples, lengths, self.shapes(bucket), bucket["rows"])

    def take_apart(
        self, arrays: Sequence[np.ndarray], residuals: Residuals
    ) -> Sequence[Sequence[np.ndarray] | None]:
        """Return the output leaves of each example, or None for one that must run again by `again`."""
        return unstack(arrays, residuals, self.out_shapes(residuals))

    @property
    def again(self) -> "Traced":
        """The trace for examples whose results do not count."""
        raise AssertionError("a padded batch counts")

    def counts(self, residuals: Residuals) -> Any:
        """Return what a program is told about a batch: by default int32 lengths [rows, len(dims)]."""
        return residuals.lengths

    def trial(self, bucket: Bucket) -> Residuals:
        """Return what `counts` needs for a batch of made-up examples that fill a bucket."""
        own = np.array([bucket[dim] for dim in self.dims], np.int32)
        return Residuals(bucket["rows"], np.tile(own, (bucket["rows"], 1)))

    @property
    @abc.abstractmethod
    def out_tree(self) -> Any:
        """The structure of one example's result."""

    @property
    @abc.abstractmethod
    def formulas(self) -> Sequence[tuple[Any, ...]]:
        """The valid shape of each output leaf: formulas in `dims`, and in "rows" where that is padded too."""

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """The traced function in words, closed-over arrays apart: equal text and signature, equal program."""

    @abc.abstractmethod
    def run(self, bucket: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function that a program is compiled from."""

    @abc.abstractmethod
    def consts(self, bucket: Mapping[str, Any]) -> list[jax.Array]:
        """Return the arrays that the function closed over, on the device."""

    @abc.abstractmethod
    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the shape of each leaf of an example in a bucket of these sizes."""

    @abc.abstractmethod
    def out_shapes(self, residuals: Residuals) -> Sequence[tuple[Any, ...]]:
        """Return the valid shape of each output leaf; entries are ints, or arrays of one int per row."""


@dataclasses.dataclass(frozen=True, eq=False)
class PerExample(Traced):
    """A function of one example, batched by a plain `vmap`.

    Attributes:
      program: at symbolic sizes, or at exact ones if `masked` is None.
    """

    program: Program
    masked: Masked | None
    ladders: Ladders

    @property
    def failures(self) -> Sequence[Bounds]:  # noqa: D102
        return self.program.failures

    @property
    def moves(self) -> bool:  # noqa: D102
        return self.program.num_pieces == 1  # of several, a bucket has those alone that its lengths need

    @property
    def may_not_end(self) -> bool:  # noqa: D102
        return self.program.may_not_end

    @property
    def out_tree(self) -> Any:  # noqa: D102
        return self.program.out_tree

    @property
    def formulas(self) -> Sequence[tuple[Any, ...]]:  # noqa: D102
        return [aval.shape for aval in self.program.out_avals]

    @functools.cached_property
    def text(self) -> str:  # noqa: D102
        return program_text(self.program)

    def known(self, bucket: Bucket) -> tuple[str, Sequence[Any]] | None:  # noqa: D102
        if self.is_exact or self._symbolic_text is None:
            return None
        arrays = [leaf.sharding for leaf in self.shared.signature]
        devices = devices_of([*arrays, *(c.sharding for c in self._consts if c.committed)])
        if devices is None or len(devices) > 1:  # how a program is split may depend on its sizes
            return None
        given = source_digest(), dict(bucket), dict(self.ladders), self.avals(bucket)
        return program_digest(self._symbolic_text, *given), devices

    @functools.cached_property
    def _symbolic_text(self) -> str | None:
        if not self.moves:
            return None
        return symbolic_text(self.program, self.run, self.dims, self.shared.avals())

    def run(self, bucket: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: D102
        sizes, floors = {}, {}
        for dim in self.dims:
            sizes[dim] = size = bucket[dim]
            # Where pieces matter (`moves`), an example is in the smallest size that holds it.
            floors[dim] = 1 + next((s for s, t in itertools.pairwise(self.ladders[dim]) if t == size), 0)

        def one(length: Any, leaves: Any, consts: Any, shared: Any) -> Any:
            if self.masked is None:
                return run_program(self.program, consts, [*shared, *leaves])
            named = {dim: length[i] for i, dim in enumerate(self.dims)}
            return self.masked(named, sizes, [*shared, *leaves], consts=consts, floors=floors)

        def run(lengths: Any, consts: Any, shared: Any, examples: Any) -> Any:
            row = functools.partial(one, consts=consts, shared=shared)
            try:
                return jax.vmap(row)(lengths, examples)
            except NotImplementedError:
                if self.masked is not None:
                    raise
                # An operation that cannot be batched can still run row by row at the exact size.
                return jax.lax.map(lambda each: row(*each), (lengths, examples))

        return run

    def consts(self, bucket: Mapping[str, Any]) -> list[jax.Array]:  # noqa: D102
        return self._consts

    @functools.cached_property
    def _consts(self) -> list[jax.Array]:
        return [jax.device_put(const) for const in self.program.consts]

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:  # noqa: D102
        avals = self.program.in_avals[len(self.shared.arrays) :]
        return [tuple(int(size) for size in evaluate_shape(aval.shape, sizes)) for aval in avals]

    def out_shapes(self, residuals: Residuals) -> Sequence[tuple[Any, ...]]:  # noqa: D102
        return self.program.out_shapes(named_lengths(self.dims, residuals))


def named_lengths(dims: Sequence[str], residuals: Residuals) -> dict[str, np.ndarray]:
    """Return the lengths of all rows by dim."""
    return dict(zip(dims, residuals.lengths.astype(np.int64).T, strict=True))


def run_program(program: Program, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """Run a program that was traced at concrete sizes."""
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(program.jaxpr, []))(*consts, *leaves)


def program_text(program: Program) -> str:
    """Return a program in words, with a digest of each array that an inner function closed over."""
    jaxpr = re.sub(r" at 0x[0-9a-f]+", "", str(program.jaxpr))
    return "\n".join([jaxpr, *_digests(program.jaxpr)])


def _digests(jaxpr: Any) -> list[str]:
    """Return a digest of each array that an inner function closed over; the text shows its shape alone."""
    found = []
    for eqn in jaxpr.eqns:
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: isinstance(x, jex_core.ClosedJaxpr)
        ):
            if isinstance(value, jex_core.ClosedJaxpr):
                found += [hashlib.sha256(np.asarray(c).tobytes()).hexdigest() for c in value.consts]
                value = value.jaxpr
            if isinstance(value, jex_core.Jaxpr):
                found += _digests(value)
    return found
