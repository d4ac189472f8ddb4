"""The user's function, traced for one kind of example and made ready to compile for any bucket.

Two forms with one face: `padded` is traced once at symbolic sizes and serves every bucket; `exact` is traced
at one example's own sizes, for those that no bucket can serve. Weights and closed-over arrays are arguments
of both, so a compiled program holds no copy of them.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ._executables import Key, Signature, compile_program
from ._grid import Bucket
from ._mask import Masked
from ._program import Bounds, Program, evaluate_shape, symbolic_dims, trace
from ._shared import Shared
from ._spec import Spec


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of shared and per-example arguments.

    Attributes:
      f: the user's function.
      per_example: for each positional argument, whether it has one value per example.
      name: what messages call it.
    """

    f: Callable[..., Any]
    spec: Spec
    per_example: tuple[bool, ...]
    name: str

    def flat(self, shared: Shared) -> Callable[..., Any]:
        """Return the same function of array leaves: those of `shared`, then those of one example."""

        def call(*leaves: Any) -> Any:
            num = len(shared.arrays)
            rest = iter(shared.split.rebuild(leaves[:num]))
            example = iter(self.spec.treedef.unflatten(leaves[num:]))
            return self.f(*(next(example) if one else next(rest) for one in self.per_example))

        return call


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function traced for one signature.

    Attributes:
      program: at symbolic sizes, or at exact ones if `masked` is None.
      shared_avals: shape, dtype and place of the shared leaves.
    """

    signature: Signature
    program: Program
    masked: Masked | None
    shared_avals: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """The ragged dims, in the order of the columns of lengths."""
        return self.program.dims

    def key(self, bucket: Bucket) -> Key:
        """Return the key of the program for a bucket that has rows."""
        return Key(self.signature, tuple(bucket.items()), exact=self.masked is None)

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the shape of each leaf of an example in a bucket of these sizes."""
        avals = self.program.in_avals[len(self.shared_avals) :]
        return [_shape(aval.shape, sizes) for aval in avals]

    def out_shapes(self, lengths: np.ndarray) -> tuple[tuple[Any, ...], ...]:
        """Return the valid shape of each output leaf; entries are ints, or arrays of one int per row."""
        return self.program.out_shapes(dict(zip(self.dims, lengths.astype(np.int64).T, strict=True)))

    def build(self, bucket: Bucket) -> jax.stages.Compiled:
        """Compile the program `(lengths [rows, dims], consts, shared, examples) -> outputs` for a bucket."""
        run = self.rows(bucket.sizes)
        run.__name__ = re.sub(r"\W", "_", self.program.name)  # what JAX's own logs call it
        return compile_program(run, *self.avals(bucket))

    def avals(self, bucket: Bucket) -> tuple[Any, ...]:
        """Return shapes and dtypes of a program's arguments."""
        rows = bucket["rows"]
        inputs = zip(self.shapes(bucket.sizes), self.signature.examples, strict=True)
        examples = [jax.ShapeDtypeStruct((rows, *shape), leaf.dtype) for shape, leaf in inputs]
        consts = [
            jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=c.sharding if c.committed else None)
            for c in self.consts
        ]
        lengths = jax.ShapeDtypeStruct((rows, len(self.dims)), np.int32)
        return lengths, consts, list(self.shared_avals), examples

    def rows(self, sizes: Mapping[str, int]) -> Callable[..., Any]:
        """Return the function of a whole batch at these sizes: a plain `vmap` over its rows."""

        def run(lengths: Any, consts: Any, shared: Any, examples: Any) -> Any:
            def one(length: Any, leaves: Any) -> Any:
                if self.masked is None:
                    return _evaluate(self.program, consts, [*shared, *leaves])
                named = {dim: length[i] for i, dim in enumerate(self.dims)}
                return self.masked(named, sizes, [*shared, *leaves], consts=consts)

            try:
                return jax.vmap(one)(lengths, examples)
            except NotImplementedError:
                if self.masked is not None:
                    raise
                # An operation that cannot be batched can still run row by row at the exact size.
                return jax.lax.map(lambda row: one(*row), (lengths, examples))

        return run

    @functools.cached_property
    def consts(self) -> list[jax.Array]:
        """The arrays that the function closed over, on the device."""
        return [jax.device_put(const) for const in self.program.consts]

    @functools.cached_property
    def text(self) -> str:
        """The traced function in words, closed-over arrays apart: equal text and signature, equal program."""
        jaxpr = re.sub(r" at 0x[0-9a-f]+", "", str(self.program.jaxpr))
        return "\n".join([jaxpr, *_digests(self.program.jaxpr)])


def padded(
    function: Function, shared: Shared, signature: Signature, bounds: Bounds, fixed: Mapping[str, int]
) -> Traced:
    """Trace the function at symbolic sizes.

    Raises:
      MaskError: one program cannot stand for all sizes.
    """
    program = _trace(function, shared, signature, {**symbolic_dims(bounds), **fixed}, bounds)
    return Traced(signature, program, Masked(program), tuple(shared.avals(placed=True)))


def exact(function: Function, shared: Shared, signature: Signature, lengths: Mapping[str, int]) -> Traced:
    """Trace the function at one example's sizes; what it raises there is the example's own error."""
    program = _trace(function, shared, signature, lengths, {})
    return Traced(signature, program, None, tuple(shared.avals(placed=True)))


def _trace(
    function: Function, shared: Shared, signature: Signature, dims: Mapping[str, Any], bounds: Bounds
) -> Program:
    shapes = function.spec.shapes(dims)
    leaves = [
        jax.ShapeDtypeStruct(shape, leaf.dtype)
        for shape, leaf in zip(shapes, signature.examples, strict=True)
    ]
    return trace(function.flat(shared), [*shared.avals(), *leaves], bounds, name=function.name)


def _shape(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(size) for size in evaluate_shape(tuple(shape), sizes))


def _evaluate(program: Program, consts: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    return jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(program.jaxpr, list(consts)))(*leaves)


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
