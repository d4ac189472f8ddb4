"""`jaxbatch.mask`: the padded form of a function, for use inside jit, vmap and grad.

`mask(f)` is a function transformation like `vmap`: `f(*args)` at exact size becomes
`g(lengths, *padded_args)`, with the same answer on the valid prefix of every output and zeros behind it.
Here the arguments are sorted into shared and per-example leaves and sizes are read off the padded arrays;
the transform itself is in `_mask`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer

from ._errors import SpecError
from ._functions import function_of
from ._grid import Grid
from ._mask import Fill, Masked
from ._program import symbolic_dims, trace
from ._spec import ArraySpec, DtypeFamily, function_name
from ._split import Split


class MaskedFunction:
    """What `jaxbatch.mask` returns: `g(lengths, *padded_args)`.

    `lengths` maps each ragged dim to an int32 scalar, at least 1 and at most the padded size. Shared
    arguments are passed as they are. It is traced once for each kind of arguments. jit, vmap over examples
    (and lengths) and grad compose with it; gradients are those of `f` on the valid part and exactly zero in
    the padding. Forward-mode differentiation is refused by JAX; mask the forward-mode derivative instead.

    Attributes:
      dims: the ragged dims.
    """

    def __init__(self, f: Callable[..., Any], in_axes: Any, spec: Any, grid: Grid | None):
        self._name = function_name(f)
        if grid is not None and not isinstance(grid, Grid):
            raise TypeError(f"mask({self._name}): grid={grid!r}; use jaxbatch.Grid(n=(16, 512)).")
        try:
            function = function_of(f, in_axes, spec, grid, None, masks_itself=False)
        except SpecError as error:
            raise error.with_context(f"mask({self._name})") from error.__cause__
        except ValueError as error:
            raise ValueError(f"mask({self._name}): {error}") from None
        self._f, self._per_example, self._spec = f, function.per_example, function.spec
        self._grid = grid
        self.dims = tuple(grid.dims) if grid is not None else self._spec.dims
        self._traced: dict[Any, Masked] = {}
        self._latest: Masked | None = None

    def __call__(self, lengths: Mapping[str, Any], *padded_args: Any) -> Any:
        """Run `f` at padded sizes.

        Args:
          lengths: the valid length of each ragged dim, in elements.
          *padded_args: the arguments of `f`, per-example ones padded at the end of every ragged axis.

        Returns:
          What `f` returns, at padded sizes, with zeros in the padding.

        Raises:
          SpecError: padded sizes disagree, or an argument has another rank or dtype than its spec.
          MaskError: an operation's answer would depend on the padding.
        """
        where = f"mask({self._name})"
        if len(padded_args) != len(self._per_example):
            raise TypeError(
                f"{where} takes lengths and {len(self._per_example)} arguments, got {len(padded_args)}."
            )
        pick = zip(padded_args, self._per_example, strict=True)
        split = Split.of([arg for arg, one in pick if not one])
        leaves, sizes = self._padded_leaves(
            tuple(a for a, one in zip(padded_args, self._per_example, strict=True) if one)
        )
        ragged = {dim: sizes[dim] for dim in self.dims}
        masked = self._masked(split, leaves, sizes)
        outs = masked(_checked_lengths(where, lengths, ragged), ragged, [*split.arrays, *leaves])
        return masked.program.out_tree.unflatten(outs)

    def out_lengths(self, lengths: Mapping[str, Any]) -> Any:
        """Return the valid shape of every output, as a tree like `f`'s with a tuple for each array.

        The formulas come from the latest trace; a function with shared arguments must have been called.

        Raises:
          ValueError: nothing has been traced, and shapes of shared arguments are unknown.
        """
        _check_names(f"mask({self._name}).out_lengths", lengths, self.dims)
        masked = self._latest
        if masked is None:
            if not all(self._per_example) or set(self._spec.dims) - set(self.dims):
                raise ValueError(
                    f"mask({self._name}).out_lengths: call the function first; shared sizes are unknown."
                )
            top = {dim: max(int(np.max(lengths[dim])), 1) for dim in self.dims}
            avals = zip(self._spec.shapes(top), self._spec.dtypes(), strict=True)
            masked = self._masked(Split.of([]), [jax.ShapeDtypeStruct(s, d) for s, d in avals], top)
        shapes = masked.program.out_shapes({dim: lengths[dim] for dim in self.dims})
        return masked.program.out_tree.unflatten(shapes)

    def explain(self) -> "Fills":
        """Return every fill of the latest trace: what reads the padding, and on which line of the user's.

        Raises:
          ValueError: the function has not been called yet.
        """
        if self._latest is None:
            raise ValueError(f"mask({self._name}).explain: call the function first (or jax.eval_shape it).")
        top = {dim: high for dim, (_, high) in self._latest.program.bounds.items()}
        return Fills(self._latest.fills(top))

    def _padded_leaves(self, args: tuple[Any, ...]) -> tuple[list[Any], dict[str, int]]:
        """Return the per-example leaves as arrays, and the padded size of every dim."""
        sizes: dict[str, int] = {}
        try:
            flat = self._spec.treedef.flatten_up_to(args)
        except ValueError as error:
            raise SpecError(
                f"mask({self._name}): the arguments have another structure than the spec. {error}"
            ) from None
        leaves = []
        for value, path, spec in zip(flat, self._spec.paths, self._spec.leaves, strict=True):
            try:
                leaves.append(_as_array(value))
                _read_sizes(leaves[-1], spec, sizes)
            except SpecError as error:
                raise error.with_context(f"mask({self._name}): `{path}`") from None
        return leaves, sizes

    def _masked(self, split: Split, leaves: Sequence[Any], sizes: Mapping[str, int]) -> Masked:
        """Return the program for these kinds of arguments, traced on first use."""
        top = self._grid.limits if self._grid is not None else {}
        bounds = {dim: (1, max(sizes[dim], top.get(dim, 1))) for dim in self.dims}
        fixed = {dim: size for dim, size in sizes.items() if dim not in bounds}
        dtypes = tuple(leaf.dtype for leaf in leaves)
        key = (tuple(bounds.items()), tuple(sorted(fixed.items())), dtypes, split.kind)
        if key not in self._traced:
            shapes = self._spec.shapes({**symbolic_dims(bounds), **fixed})
            structs = [
                jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            program = trace(self._flat(split), [*split.avals, *structs], bounds, name=self._name)
            self._traced[key] = Masked(program)
        masked = self._latest = self._traced[key]
        return masked

    def _flat(self, split: Split) -> Callable[..., Any]:
        def call(*leaves: Any) -> Any:
            shared = iter(split.rebuild(leaves[: len(split.arrays)]))
            own = iter(self._spec.treedef.unflatten(leaves[len(split.arrays) :]))
            return self._f(*(next(own) if one else next(shared) for one in self._per_example))

        return call


class Fills(tuple[Fill, ...]):
    """The fills of a masked function, in order; prints as one line each."""

    def __str__(self) -> str:
        needed = sum(fill.needed for fill in self)
        return "\n".join([f"{needed} fills, {len(self) - needed} more left out:", *map(str, self)])


def mask(
    f: Callable[..., Any], in_axes: Any = 0, *, spec: Any = None, grid: Grid | None = None
) -> MaskedFunction:
    """Return `g(lengths, *padded_args)`, which answers on padded arrays as `f` does on unpadded ones.

    Args:
      f: a function of one example at its exact size.
      in_axes: as in `jax.vmap`, for whole arguments: 0 for the example's own, None for a shared one.
      spec: the shapes and dtypes of the per-example arguments (a tuple if there are several); default: `f`'s
        jaxtyping annotations.
      grid: names the ragged dims; all other named dims are fixed sizes. Default: every named dim is ragged.

    Raises:
      SpecError: the annotations do not describe the per-example arguments.

    Example:
      >>> import jax, numpy as np, jaxbatch as jb
      >>> g = jb.mask(lambda x: x - x.mean(), spec=jb.spec("n", "float32"))
      >>> padded = np.array([1, 3, np.nan, np.nan], np.float32)
      >>> print(g({"n": 2}, padded))
      [-1.  1.  0.  0.]
      >>> g.out_lengths({"n": 2})
      (2,)
    """
    return MaskedFunction(f, in_axes, spec, grid)


def _as_array(value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise SpecError(f"is a {type(value).__name__}, not a padded array. {error}") from None


def _read_sizes(leaf: Any, spec: ArraySpec, sizes: dict[str, int]) -> None:
    """Solve the padded sizes of a leaf's dims into `sizes`."""
    exact = not isinstance(spec.dtype, DtypeFamily)
    if leaf.dtype not in spec.dtype if not exact else leaf.dtype != jax.dtypes.canonicalize_dtype(spec.dtype):
        raise SpecError(f"has dtype {leaf.dtype}, expected {spec.dtype}. Cast it first.")
    if leaf.ndim != len(spec.axes):
        raise SpecError(
            f"has shape {leaf.shape}, expected {spec}. One example is passed here; use jax.vmap for a batch."
        )
    for position, (axis, size) in enumerate(zip(spec.axes, leaf.shape, strict=True)):
        if axis.dim is None:
            if size != axis.offset:
                raise SpecError(f"axis {position} has size {size}, expected {axis.offset}.")
            continue
        try:
            solved = axis.solve(size)
        except SpecError as error:
            raise error.with_context(f"axis {position}") from None
        if sizes.setdefault(axis.dim, solved) != solved:
            raise SpecError(
                f"axis {position} (dim `{axis.dim}`) is padded to {solved}, another to {sizes[axis.dim]}. "
                f"Pad every array of a dim to the same size."
            )


def _checked_lengths(where: str, lengths: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    _check_names(where, lengths, sizes)
    for dim, length in lengths.items():
        if np.ndim(length):
            raise ValueError(f"{where}: the length of `{dim}` must be a scalar; use jax.vmap for a batch.")
        if not jnp.issubdtype(jnp.result_type(length), jnp.integer):
            raise TypeError(f"{where}: the length of `{dim}` must be an integer, got {length!r}.")
        if not isinstance(length, Tracer) and not 1 <= int(length) <= sizes[dim]:
            raise ValueError(
                f"{where}: the length of `{dim}` is {length}, expected 1 to {sizes[dim]} (the padded size)."
            )
    return dict(lengths)


def _check_names(where: str, lengths: Any, dims: Iterable[str]) -> None:
    if not isinstance(lengths, Mapping):
        raise TypeError(f"{where}: lengths are a dict of scalars by dim, got {type(lengths).__name__}.")
    if set(lengths) != set(dims):
        raise ValueError(f"{where}: lengths must name the dims {sorted(dims)}, got {sorted(lengths)}.")
