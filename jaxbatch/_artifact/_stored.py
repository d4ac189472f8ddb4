"""A loaded artifact in the place of a function: the same face as a traced one, with programs from a file.

Weights take the place of closed-over arrays, so nothing is shared and callers pass examples only. Nothing is
traced: a program is read when its first bucket is compiled, and not at all where the compiled one is on disk.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .. import _compat
from .._batch import Residuals
from .._costs import Costs
from .._disk_cache import DiskCache, devices_of, program_digest
from .._errors import ArtifactError, SpecError
from .._executables import Signature, SingleFlight, compile_program
from .._grid import Bucket, Grid
from .._program import Bounds, Shape, evaluate_shape
from .._shared import Shared
from .._spec import Spec
from .._traced import Function, Ladders, Traced, named_lengths
from ._checkpoint import Reference
from ._parts import Outputs, Program, Special, Variant


@dataclasses.dataclass(frozen=True, eq=False)
class Artifact:
    """What was loaded.

    Attributes:
      path: of the file, for messages.
      manifest: its JSON object.
      weights: on the host, each typed PRNG key as its raw data; or where their sharding puts them.
      parts: the exported programs, not yet read, and the references, by the names of their parts.
      checkpoints: those that have some of the weights.
      shardings: of each weight; None for the default device.
    """

    path: str
    manifest: Mapping[str, Any]
    spec: Spec
    grid: Grid
    costs: Costs
    variants: tuple[Variant, ...]
    weights: list[Any]
    parts: Mapping[str, bytes]
    checkpoints: tuple[Reference, ...] = ()
    shardings: Sequence[jax.sharding.Sharding | None] = ()
    _exported: SingleFlight = dataclasses.field(default_factory=SingleFlight)
    _on_device: SingleFlight = dataclasses.field(default_factory=SingleFlight)

    @property
    def name(self) -> str:
        """The name of the function that was saved."""
        return str(self.manifest["name"])

    @property
    def vjp_order(self) -> int:
        """How often its programs can be differentiated."""
        return self.manifest["vjp_order"]

    def arrays(self, program: Program) -> list[jax.Array]:
        """Return the arrays that a program takes, by default on the default device, each once."""
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        with jax.ensure_compile_time_eval():  # also where a `jit` around is being traced
            arrays, _ = self._on_device.get(device, self._put)
        return [arrays[i] for i in program.weights]

    def _put(self) -> list[jax.Array]:
        if not any(self.shardings):
            return jax.device_put(self.weights)  # in one go: a hundred small ones take as long as large ones
        pairs = zip(self.weights, self.shardings, strict=True)
        return [jax.device_put(array, sharding) for array, sharding in pairs]

    def digest(self, program: Program) -> str:
        """Return the SHA-256 of a program's part, which is what the manifest says since it was read."""
        return self.manifest["parts"][program.part]["sha256"]

    def exported(self, program: Program) -> Any:
        """Return a program, read on first use.

        Raises:
          ArtifactError: it is none, or holds more than computation.
        """

        def read() -> Any:
            try:
                exported = jax.export.deserialize(bytearray(self.parts[program.part]))
                foreign = _compat.unstable_calls(exported)
            except Exception as error:
                raise self.error(f"its part {program.part!r} cannot be read: {error}") from error
            if foreign:
                raise self.error(
                    f"its part {program.part!r} calls {', '.join(sorted(foreign))}, which is no computation "
                    f"that JAX promises to keep, and might run code of others."
                )
            return exported

        return self._exported.get(program.part, read)[0]

    def error(self, fact: str) -> ArtifactError:
        """Return an error about this file."""
        writer = self.manifest["written_by"]
        return ArtifactError(
            f"{self.path}: {fact} It was written by jaxbatch {writer['jaxbatch']} with JAX {writer['jax']}; "
            f"save it again with `run.save` if this JAX, {jax.__version__}, cannot use it."
        )


@dataclasses.dataclass(frozen=True)
class StoredFunction(Function):
    """The function of an artifact; it can be asked for its programs only."""

    artifact: Artifact

    @classmethod
    def of(cls, artifact: Artifact) -> "StoredFunction":
        """Return the function of an artifact."""
        names = artifact.spec.names
        return cls(_Absent(names), artifact.spec, (True,) * len(names), artifact.name, artifact)

    @property
    def where(self) -> str:  # noqa: D102
        return f"jaxbatch.load({self.name})"

    def alone(self, *args: Any) -> Any:  # noqa: D102
        return self.f(*args)

    def padded(  # noqa: D102
        self, shared: Shared, signature: Signature, ladders: Ladders, fixed: Mapping[str, int]
    ) -> Traced:
        variant = self._variant(signature)
        return StoredTraced(
            self.name,
            signature,
            tuple(self.artifact.grid.dims),
            False,
            shared.abstract(),
            self.artifact,
            variant,
            variant.programs,
            variant.outputs,
            {},
        )

    def exact(  # noqa: D102
        self, shared: Shared, signature: Signature, ladders: Ladders, sizes: Mapping[str, int]
    ) -> Traced:
        variant = self._variant(signature)
        for special in (*variant.exact, *variant.failures):
            if special.holds(sizes):
                if special.program is not None and special.outputs is not None:
                    return self._special(shared, signature, variant, special, sizes)
                if (error := special.raised()) is not None:
                    raise error
                break
        named = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
        reason = f" {special.error[1]}" if special.error else ""
        raise self.artifact.error(
            f"there is no program for examples of the exact size {named}.{reason} The function is needed."
        )

    def _special(
        self,
        shared: Shared,
        signature: Signature,
        variant: Variant,
        special: Special,
        sizes: Mapping[str, int],
    ) -> Traced:
        assert special.program is not None and special.outputs is not None
        return StoredTraced(
            self.name,
            signature,
            (),
            True,
            shared.abstract(),
            self.artifact,
            variant,
            (special.program,),
            special.outputs,
            dict(sizes),
        )

    def _variant(self, signature: Signature) -> Variant:
        dtypes = tuple(leaf.dtype.name for leaf in signature.examples)
        for variant in self.artifact.variants:
            if variant.dtypes == dtypes:
                return variant
        known = " or ".join(f"({', '.join(variant.dtypes)})" for variant in self.artifact.variants)
        raise SpecError(
            f"there is no program for the dtypes ({', '.join(dtypes)}), only for {known}. Cast the example, "
            f"or save again after a run with such an example."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class StoredTraced(Traced):
    """The programs of an artifact for one kind of example.

    Attributes:
      sizes: the example's own, where this is for exact sizes.
    """

    artifact: Artifact
    variant: Variant
    programs: Sequence[Program]
    outputs: Outputs
    sizes: Mapping[str, int]

    @property
    def failures(self) -> Sequence[Bounds]:  # noqa: D102
        return [special.bounds for special in self.variant.failures]

    @property
    def moves(self) -> bool:  # noqa: D102
        return self.variant.moves

    @property
    def may_not_end(self) -> bool:  # noqa: D102
        return self.variant.may_not_end

    @property
    def out_tree(self) -> Any:  # noqa: D102
        return self.outputs.tree

    @property
    def formulas(self) -> Sequence[Shape]:  # noqa: D102
        return self.outputs.shapes

    @property
    def text(self) -> str:  # noqa: D102
        return "\n".join(self.artifact.digest(program) for program in self.programs)

    def check(self, bucket: Bucket) -> None:  # noqa: D102
        self._program(bucket)

    def build(self, bucket: Bucket, disk: DiskCache | None = None) -> Any:  # noqa: D102
        run = self.run(bucket)
        run.__name__ = "stored"
        try:
            return compile_program(run, *self.avals(bucket), disk=disk, known=self.known(bucket))
        except ArtifactError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise self.artifact.error(
                f"its program for {dict(bucket)} cannot be compiled here. {type(error).__name__}: {first}"
            ) from error

    def known(self, bucket: Bucket) -> tuple[str, Sequence[Any]] | None:  # noqa: D102
        program = self._program(bucket)
        shardings = [self.artifact.shardings[i] for i in program.weights]
        outputs = self.outputs.dtypes, self.outputs.shapes
        parts = self.artifact.digest(program), program.dims, dict(bucket), self.sizes, outputs, shardings
        devices = devices_of(shardings)
        return None if devices is None else (program_digest(*parts), devices)

    def counts(self, residuals: Residuals) -> Any:  # noqa: D102
        if self.programs[0].takes_num:
            return residuals.lengths, np.int32(residuals.num)
        return residuals.lengths

    def run(self, bucket: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: D102
        program = self._program(bucket)
        expected = [
            (dtype, len(shape)) for dtype, shape in zip(self.outputs.dtypes, self.outputs.shapes, strict=True)
        ]

        def run(counts: Any, consts: Any, shared: Any, examples: Any) -> Any:
            lengths, *num = jax.tree.leaves(counts)
            if self.is_exact:  # the lengths are the sizes, the same for all rows
                own = np.array([self.sizes[dim] for dim in program.dims], np.int32)
                lengths = np.broadcast_to(own, (bucket["rows"], len(own)))
            outs = self.artifact.exported(program).call([lengths, *num, *consts, *examples])
            if [(out.dtype.name, out.ndim - 1) for out in outs] != expected:
                raise self.artifact.error(
                    f"its part {program.part!r} has other outputs than its manifest says."
                )
            return outs

        return run

    def consts(self, bucket: Mapping[str, Any]) -> list[jax.Array]:  # noqa: D102
        return self.artifact.arrays(self._program(bucket))

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:  # noqa: D102
        return list(self.artifact.spec.shapes({**self.sizes, **sizes}))

    def out_shapes(self, residuals: Residuals) -> Sequence[tuple[Any, ...]]:  # noqa: D102
        rows = np.full(len(residuals.lengths), residuals.num)
        env = {**self.sizes, **named_lengths(self.dims, residuals), "rows": rows}
        return [evaluate_shape(shape, env) for shape in self.formulas]

    def _program(self, bucket: Mapping[str, int]) -> Program:
        sizes = {**self.sizes, **bucket}
        for program in self.programs:
            if program.serves(sizes):
                return program
        raise self.artifact.error(f"there is no program for {dict(bucket)}.")


class _Absent:
    """Stands for the function that was saved, of which its arguments' names are left."""

    def __init__(self, names: Sequence[str]):
        if all(name.isidentifier() for name in names):
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __call__(self, *args: Any) -> Any:
        raise ArtifactError("an artifact has compiled programs only, and the function itself is needed here.")
