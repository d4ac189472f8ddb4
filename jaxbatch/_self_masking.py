"""Functions of whole padded batches that mask themselves: the third kind of trace behind `Traced`.

Such a function may branch on the padded sizes, so it is traced anew for every bucket, as `jit` would, and
nothing in it is rewritten. What its outputs are cut to is known beforehand (`_outputs`), and every bucket's
trace must keep to it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ._batch import Residuals
from ._executables import Signature, SingleFlight
from ._outputs import Outputs, derive
from ._program import Bounds, Program, evaluate_shape, trace
from ._shared import Shared
from ._traced import (
    Function,
    Ladders,
    Traced,
    example_avals,
    named_lengths,
    program_text,
    run_program,
)


@dataclasses.dataclass(frozen=True)
class SelfMasking(Function):
    """A function of padded arrays with a leading axis of rows; its specs still say what one example is.

    Attributes:
      dims: the ragged dims.
      plain_mask: `mask_arg` gets the mask of the only ragged dim itself, not a dict of masks.
      lengths_arg: the parameter that gets the lengths by dim, int32 [rows]; None if `f` has none.
      mask_arg: the parameter that gets the masks; None if `f` has none.
    """

    dims: tuple[str, ...]
    plain_mask: bool
    lengths_arg: str | None
    mask_arg: str | None

    def alone(self, *args: Any) -> Any:  # noqa: D102
        checked = self.spec.check(tuple(arg for arg, one in zip(args, self.per_example, strict=True) if one))
        leaves = [jnp.asarray(leaf)[None] for leaf in checked.leaves]
        own = iter(self.spec.treedef.unflatten(leaves))
        args = tuple(next(own) if one else arg for arg, one in zip(args, self.per_example, strict=True))
        sizes = dict(zip(self.spec.dims, checked.lengths, strict=True))
        lengths = np.array([[sizes[dim] for dim in self.dims]], np.int32)
        outputs = self.f(*args, **self.keywords(lengths, np.int32(1), leaves))
        return jax.tree.map(lambda output: output[0], outputs)

    def padded(  # noqa: D102
        self, shared: Shared, signature: Signature, ladders: Ladders, fixed: Mapping[str, int]
    ) -> Traced:
        return _self_masked(self, shared, signature, ladders, fixed, is_exact=False)

    def exact(  # noqa: D102
        self, shared: Shared, signature: Signature, ladders: Ladders, sizes: Mapping[str, int]
    ) -> Traced:
        rows = {"rows": ladders["rows"]}
        return _self_masked(self, shared, signature, rows, sizes, is_exact=True)

    def keywords(self, lengths: Any, num: Any, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return the lengths and masks that `f` asks for.

        Args:
          lengths: int32 [rows, len(dims)].
          num: how many rows are examples.
          leaves: those of the batch, padded.
        """
        by_dim = {dim: jnp.asarray(lengths[:, i], np.int32) for i, dim in enumerate(self.dims)}
        found: dict[str, Any] = {self.lengths_arg: by_dim} if self.lengths_arg else {}
        if self.mask_arg:
            sizes = self._sizes(leaves)
            masks = {dim: jnp.arange(sizes[dim]) < by_dim[dim][:, None] for dim in self.dims}
            masks["rows"] = jnp.arange(lengths.shape[0]) < num
            found[self.mask_arg] = masks[self.dims[0]] if self.plain_mask else masks
        return found

    def _sizes(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Read the size of each dim, which may be symbolic, off padded leaves."""
        sizes = {}
        for leaf, spec in zip(leaves, self.spec.leaves, strict=True):
            for axis, size in zip(spec.axes, leaf.shape[1:], strict=True):
                if axis.dim is not None:
                    sizes.setdefault(axis.dim, (size - axis.offset) // axis.coefficient)
        return sizes


@dataclasses.dataclass(frozen=True, eq=False)
class SelfMasked(Traced):
    """A function that masks itself, traced for each bucket when that is asked for.

    Attributes:
      fixed: the sizes that are the same in all buckets; all sizes, if this is for exact ones.
      outputs: what each output is cut to.
    """

    function: SelfMasking
    fixed: Mapping[str, int]
    outputs: Outputs
    _programs: SingleFlight = dataclasses.field(default_factory=SingleFlight)
    _copies: SingleFlight = dataclasses.field(default_factory=SingleFlight)

    @property
    def out_tree(self) -> Any:  # noqa: D102
        return self.outputs.tree

    @property
    def may_not_end(self) -> bool:  # noqa: D102
        return any(program.may_not_end for program in self.outputs.programs)

    @property
    def formulas(self) -> Sequence[tuple[Any, ...]]:  # noqa: D102
        return [shape[1:] for shape in self.outputs.shapes]

    @property
    def text(self) -> str:  # noqa: D102
        return "\n".join(map(program_text, self.outputs.programs))

    def counts(self, residuals: Residuals) -> Any:  # noqa: D102
        return residuals.lengths, np.int32(residuals.num)

    def run(self, bucket: Mapping[str, Any]) -> Callable[..., Any]:  # noqa: D102
        program, _ = self._program(bucket)

        def run(counts: Any, consts: Any, shared: Any, examples: Any) -> Any:
            return run_program(program, consts, [*counts, *shared, *examples])

        return run

    def consts(self, bucket: Mapping[str, Any]) -> list[jax.Array]:  # noqa: D102
        return self._program(bucket)[1]

    def shapes(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:  # noqa: D102
        return list(self.function.spec.shapes({**self.fixed, **sizes}))

    def out_shapes(self, residuals: Residuals) -> Sequence[tuple[Any, ...]]:  # noqa: D102
        rows = np.full(len(residuals.lengths), residuals.num)
        env = {**named_lengths(self.dims, residuals), "rows": rows}
        return [evaluate_shape(shape, env) for shape in self.formulas]

    def _program(self, bucket: Mapping[str, Any]) -> tuple[Program, list[jax.Array]]:
        """Return the trace at a bucket's sizes, and what it closed over, on the device."""

        def make() -> tuple[Program, list[jax.Array]]:
            sizes = {**self.fixed, **bucket}
            program = _trace(self.function, self.shared, self.signature, sizes, {})
            self.outputs.check(program, sizes)
            return program, [self._copy(const) for const in program.consts]

        return self._programs.get(tuple(bucket.items()), make)[0]

    def _copy(self, const: Any) -> jax.Array:
        """Return the only copy of a closed-over array on the device, whichever buckets use it."""
        # The array is kept beside its copy, so that its id stays its own.
        return self._copies.get(id(const), lambda: (const, jax.device_put(const)))[0][1]


def _self_masked(
    function: SelfMasking,
    shared: Shared,
    signature: Signature,
    ladders: Ladders,
    fixed: Mapping[str, int],
    *,
    is_exact: bool,
) -> SelfMasked:
    shared = shared.abstract()
    outputs = derive(functools.partial(_trace, function, shared, signature), ladders, fixed, function.name)
    return SelfMasked(function.name, signature, function.dims, is_exact, shared, function, fixed, outputs)


def _trace(
    function: SelfMasking, shared: Shared, signature: Signature, sizes: Mapping[str, Any], bounds: Bounds
) -> Program:
    """Trace the function of counts, shared leaves and example leaves at sizes that include "rows"."""
    rows, num_dims = sizes["rows"], len(function.dims)

    def flat(lengths: Any, num: Any, *leaves: Any) -> Any:
        keywords = function.keywords(lengths, num, leaves[len(shared.arrays) :])
        return function.f(*function.arguments(shared, leaves), **keywords)

    counts = [jax.ShapeDtypeStruct((rows, num_dims), np.int32), jax.ShapeDtypeStruct((), np.int32)]
    examples = example_avals(function.spec, signature, sizes, rows)
    return trace(flat, [*counts, *shared.avals(), *examples], bounds, name=function.name)


def asked_for(f: Callable[..., Any], names: Sequence[str], mask_arg: str | None) -> dict[str, str | None]:
    """Return under which parameters `f` takes lengths and masks, as fields of `SelfMasking`.

    Args:
      names: the arguments that callers give; a parameter among these is theirs.
      mask_arg: as in `batched`.

    Raises:
      ValueError: `mask_arg` was named, and `f` has no such parameter.
    """
    parameters = inspect.signature(f).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    free = {each.name for each in parameters if each.kind in kinds} - set(names)
    if mask_arg is not None and mask_arg not in free:
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
            raise ValueError(
                f"mask_arg={mask_arg!r}, but the function has no such parameter beside its arguments "
                f"{', '.join(names)}. Name the parameter that takes the mask."
            )
        free.add(mask_arg)
    mask = mask_arg or "mask"
    return {
        "lengths_arg": "lengths" if "lengths" in free else None,
        "mask_arg": mask if mask in free else None,
    }
