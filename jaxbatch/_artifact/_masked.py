"""The masked function of an artifact, for use inside jit, vmap and grad.

An exported program has no rules for vmap and, under a transformation, none for gradients either. Here it gets
both: a new axis of examples becomes rows, and its derivative is the exported one, in which padding is as
harmless as in the program itself.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from .. import _compat
from .._errors import ArtifactError, SpecError
from ._parts import Program, Variant
from ._stored import Artifact

Rows = Callable[..., list[Any]]
"""Takes arrays with a leading axis of rows, and returns such."""


class StoredMask:
    """What `loaded.masked` is: `g(lengths, *padded)`, as `jaxbatch.mask` makes it, without shared arguments.

    Attributes:
      dims: the ragged dims.
    """

    def __init__(self, artifact: Artifact):
        self._artifact = artifact
        self.dims = tuple(artifact.grid.dims)

    def __call__(self, lengths: Mapping[str, Any], *padded: Any) -> Any:
        """Run the function at padded sizes, for one example or for a batch.

        Args:
          lengths: the valid length of each ragged dim, at least 1: an integer for one example, or integers
            [rows] for a batch.
          padded: the arguments of the function, padded at the end of every ragged axis; for a batch with a
            leading axis of rows.

        Returns:
          What the function returns, at padded sizes, with zeros in the padding.

        Raises:
          SpecError: an argument does not match its spec.
          ArtifactError: there is no program for these sizes; or, where a gradient is asked for, the artifact
            was saved without.
        """
        where = f"{self._artifact.path}: masked"
        if not isinstance(lengths, Mapping) or set(lengths) != set(self.dims):
            raise ValueError(f"{where}: lengths are a dict of integers by dim: {', '.join(self.dims)}.")
        spec = self._artifact.spec
        if len(padded) != len(spec.names):
            raise TypeError(
                f"{where}: takes lengths and {', '.join(spec.names)}; got {len(padded)} arguments."
            )
        try:
            leaves = [jnp.asarray(leaf) for leaf in spec.treedef.flatten_up_to(padded)]
        except ValueError as error:
            raise SpecError(f"{where}: the arguments have another structure than the spec. {error}") from None
        columns = [_length(where, dim, lengths[dim]) for dim in self.dims]
        single = all(column.ndim == 0 for column in columns)
        if single:
            columns, leaves = [c[None] for c in columns], [leaf[None] for leaf in leaves]
        rows = leaves[0].shape[0]
        stacked = jnp.stack(columns, axis=1) if columns else jnp.zeros((rows, 0), np.int32)
        sizes = self._sizes(where, leaves)
        variant = self._variant(where, leaves)
        if len(stacked) != rows:
            raise ValueError(f"{where}: lengths of {len(stacked)} rows, and arguments of {rows}.")
        outs = self._function(variant, tuple(sizes.items()))(stacked, *leaves)
        outs = [out[0] for out in outs] if single else outs
        return variant.outputs.tree.unflatten(outs)

    def out_lengths(self, lengths: Mapping[str, Any]) -> Any:
        """Return the valid shape of every output, as a tree with a tuple for each array."""
        outputs = self._artifact.variants[0].outputs
        shapes = [tuple(_compat.evaluate(size, lengths) for size in shape) for shape in outputs.shapes]
        return outputs.tree.unflatten(shapes)

    def _sizes(self, where: str, leaves: Sequence[Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        spec = self._artifact.spec
        for leaf, own, path in zip(leaves, spec.leaves, spec.paths, strict=True):
            if leaf.ndim != len(own.axes) + 1:
                raise SpecError(
                    f"{where}: `{path}` has shape {leaf.shape[1:]} for each example, expected {own}."
                )
            for axis, size in zip(own.axes, leaf.shape[1:], strict=True):
                if axis.dim is not None:
                    sizes.setdefault(axis.dim, axis.solve(size))
                if size != axis.size(sizes):
                    raise SpecError(
                        f"{where}: `{path}` has an axis of size {size}, expected {axis.size(sizes)}."
                    )
        for dim, size in sizes.items():
            top = self._artifact.grid.limits[dim]
            if not 1 <= size <= top:
                raise self._artifact.error(
                    f"dim `{dim}` is padded to {size}, and its programs go from 1 to {top}."
                )
        return sizes

    def _variant(self, where: str, leaves: Sequence[Any]) -> Variant:
        dtypes = tuple(leaf.dtype.name for leaf in leaves)
        for variant in self._artifact.variants:
            if variant.dtypes == dtypes:
                return variant
        known = " or ".join(f"({', '.join(variant.dtypes)})" for variant in self._artifact.variants)
        raise SpecError(
            f"{where}: the arguments have dtypes ({', '.join(dtypes)}), expected {known}. Cast them."
        )

    @functools.cache  # noqa: B019  (of an artifact there are few kinds, and they live as long as it does)
    def _function(self, variant: Variant, sizes: tuple[tuple[str, int], ...]) -> Rows:
        named = dict(sizes)
        programs = [each for each in variant.programs if all(named[d] == s for d, s in each.sizes.items())]
        if not programs:
            raise self._artifact.error(
                f"there is no program for the padded sizes {named}, only for those of {self._artifact.grid}. "
                f"Pad to one of them."
            )
        plain = _in_parts(programs, self._call)
        return _differentiable(plain, self._artifact.vjp_order, variant.rows_apart, self._no_gradient)

    def _call(self, program: Program, lengths: Any, *leaves: Any) -> list[Any]:
        num = [jnp.int32(lengths.shape[0])] if program.takes_num else []
        weights = self._artifact.arrays(program)
        return self._artifact.exported(program).call([lengths, *num, *weights, *leaves])

    def _no_gradient(self) -> ArtifactError:
        order = self._artifact.vjp_order
        return self._artifact.error(
            f"it can be differentiated {order} times (vjp_order={order}), and one more is asked for. Save it "
            f"with vjp_order={order + 1}."
        )


def _length(where: str, dim: str, length: Any) -> Any:
    length = jnp.asarray(length)
    if length.ndim > 1 or not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(
            f"{where}: the length of `{dim}` is an integer, or integers [rows]; got {length.dtype}"
            f"{list(length.shape)}."
        )
    return length.astype(np.int32)


def _in_parts(programs: Sequence[Program], call: Callable[..., list[Any]]) -> Rows:
    """Return a function of any number of rows, by programs of which each may have its own."""
    if programs[0].rows is None:
        return functools.partial(call, programs[0])
    by_rows = {program.rows or 0: program for program in programs}

    def run(*arrays: Any) -> list[Any]:
        total, parts, begin = arrays[0].shape[0], [], 0
        while begin < total:
            num = next((rows for rows in sorted(by_rows) if rows >= total - begin), max(by_rows))
            own = [array[np.minimum(np.arange(begin, begin + num), total - 1)] for array in arrays]
            parts.append(call(by_rows[num], *own))
            begin += num
        return [jnp.concatenate(column)[:total] for column in zip(*parts, strict=True)]

    return run


def _differentiable(run: Rows, order: int, rows_apart: bool, refusal: Callable[[], Exception]) -> Rows:
    """Return a function of rows that vmap and, `order` times, reverse-mode differentiation understand."""
    batched = _batchable(run, rows_apart)

    @jax.custom_vjp
    def call(*arrays: Any) -> list[Any]:
        return batched(*arrays)

    def forward(*arrays: Any) -> tuple[list[Any], Any]:
        if order < 1:
            raise refusal()
        return _differentiable(run, order - 1, rows_apart, refusal)(*arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> tuple[Any, ...]:
        flags = [bool(jnp.issubdtype(array.dtype, jnp.inexact)) for array in arrays]
        kept = [ct for ct in cotangents if ct.dtype != jax.dtypes.float0]
        pull = _differentiable(functools.partial(_pull_back, run, flags), order - 1, rows_apart, refusal)
        given = iter(pull(*arrays, *kept))
        return tuple(next(given) if flag else None for flag in flags)

    call.defvjp(forward, backward, **_compat.DEFVJP_OPTIONS)
    return call


def _pull_back(run: Rows, flags: Sequence[bool], *given: Any) -> list[Any]:
    """Return the cotangent of each inexact array."""
    arrays, cotangents = given[: len(flags)], iter(given[len(flags) :])

    def of_inexact(*inexact: Any) -> list[Any]:
        values = iter(inexact)
        return run(*(next(values) if flag else each for each, flag in zip(arrays, flags, strict=True)))

    primals = [array for array, flag in zip(arrays, flags, strict=True) if flag]
    outs, pull = jax.vjp(of_inexact, *primals)
    return list(
        pull(
            [
                next(cotangents)
                if jnp.issubdtype(out.dtype, jnp.inexact)
                else np.zeros(out.shape, jax.dtypes.float0)
                for out in outs
            ]
        )
    )


def _batchable(run: Rows, rows_apart: bool) -> Rows:
    """Return a function of rows for which `vmap` adds rows; where rows see each other it makes a loop."""
    if not rows_apart:
        return jax.custom_batching.sequential_vmap(run)

    @jax.custom_batching.custom_vmap
    def call(*arrays: Any) -> list[Any]:
        return run(*arrays)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[list[Any], list[bool]]:
        full = [
            array if flag else jnp.broadcast_to(array, (axis_size, *array.shape))
            for array, flag in zip(arrays, in_batched, strict=True)
        ]
        outs = call(*(array.reshape(-1, *array.shape[2:]) for array in full))
        return [out.reshape(axis_size, -1, *out.shape[1:]) for out in outs], [True] * len(outs)

    return call
