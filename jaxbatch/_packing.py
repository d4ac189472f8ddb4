"""`jaxbatch.pack`: several examples in one row, for use inside jit, vmap and grad.

`pack(f)` is a function transformation like `mask(f)`: `f(*args)` at exact size becomes
`g(segments, starts, lengths, *packed_args)`, which runs all examples of a row at once and lets nothing of one
reach another. Here the arguments are sorted and their layout is checked; the transform is in `_pack`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from ._errors import MaskError, SpecError
from ._functions import function_of
from ._grid import Grid
from ._mask._context import Context
from ._pack import Packed, Spread, Value, form
from ._program import evaluate_shape, symbolic_dims, trace
from ._spec import DtypeFamily, function_name
from ._split import Split


class PackedFunction:
    """What `jaxbatch.pack` returns: `g(segments, starts, lengths, *packed_args) -> (outputs, flag)`.

    An array of one example with a single ragged axis of size `n` lies on the row: that axis has the cells
    of all segments. Any other array, argument or result, gets a leading axis of segments, and ragged axes
    (`n + 1`, or two of `n`) are padded behind it as in a bucket. Shared arguments are passed as they are.

    jit, vmap over rows and grad compose with it: gradients are those of `f` on each segment, of shared
    arguments their sum, and exactly zero where no segment is.

    Attributes:
      dim: the ragged dim.
    """

    def __init__(
        self, f: Callable[..., Any], in_axes: Any, spec: Any, grid: Grid | None, longest: int | None
    ):
        self._name = function_name(f)
        try:
            function = function_of(f, in_axes, spec, grid, None, masks_itself=False)
        except SpecError as error:
            raise error.with_context(f"pack({self._name})") from error.__cause__
        except ValueError as error:
            raise ValueError(f"pack({self._name}): {error}") from None
        self._f, self._per_example, self._spec = f, function.per_example, function.spec
        self._longest = longest
        dims = tuple(grid.dims) if grid is not None else self._spec.dims
        if len(dims) != 1:
            raise MaskError(
                f"pack({self._name}): packed rows need one ragged dim, the spec has "
                f"{', '.join(f'`{d}`' for d in dims) or 'none'}. Use jaxbatch.mask, which pads, or name "
                f"the ragged dim in grid=."
            )
        (self.dim,) = dims
        self._traced: dict[Any, Packed] = {}
        self._latest: tuple[Packed, Any] | None = None

    def __call__(self, segments: Any, starts: Any, lengths: Any, *packed_args: Any) -> tuple[Any, Any]:
        """Run `f` on every segment of a row.

        Args:
          segments: the segment of each cell, -1 for cells between segments; int32 [cells]. The cells of a
            segment are adjacent.
          starts: the first cell of each segment; int32 [segments].
          lengths: how many cells each segment has, 0 for slots without one; int32 [segments]. There is at
            least one segment.
          *packed_args: the arguments of `f`, per-example ones packed.

        Returns:
          What `f` returns, packed, with zeros where no segment is; and a bool. If it is True, something not
          finite met a dense contraction, which could not keep it out of the row's other segments: it was
          replaced, and the outputs of this row do not count. Run its examples padded.

        Raises:
          SpecError: an argument is not laid out as its spec asks.
          MaskError: an operation's answer would depend on the padding.
        """
        if len(packed_args) != len(self._per_example):
            raise TypeError(
                f"pack({self._name}) takes segments, starts, lengths and {len(self._per_example)} arguments, "
                f"got {len(packed_args)}."
            )
        pick = list(zip(packed_args, self._per_example, strict=True))
        split = Split.of([arg for arg, one in pick if not one])
        leaves = self._leaves(tuple(arg for arg, one in pick if one))
        place = self._place(segments, starts, lengths)
        longest = min(self._longest or place[0].shape[0], place[0].shape[0])
        packed = self._packed(split, leaves, longest)
        values = [Value(a, "plain") for a in split.arrays]
        avals = packed.program.in_avals[len(values) :]
        for leaf, aval, path in zip(leaves, avals, self._spec.paths, strict=True):
            kind = form(aval.shape, self.dim)
            self._check(leaf, aval, kind, path, longest, place)
            values.append(Value(leaf, kind))
        structs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), (place, values)
        )
        self._latest = packed, (structs[0], longest, structs[1])
        outs, flag = packed(place, longest, values)
        return packed.program.out_tree.unflatten([out.data for out in outs]), flag

    def explain(self) -> "Spreads":
        """Return what the latest call had no packed rule for and ran on segments padded to the longest.

        Raises:
          ValueError: the function has not been called yet.
        """
        if self._latest is None:
            raise ValueError(f"pack({self._name}).explain: call the function first (or jax.eval_shape it).")
        packed, arguments = self._latest
        return Spreads(packed.spread(*arguments))

    def _place(self, segments: Any, starts: Any, lengths: Any) -> tuple[Any, Any, Any]:
        where = f"pack({self._name})"
        place = tuple(jnp.asarray(x) for x in (segments, starts, lengths))
        for name, array in zip(("segments", "starts", "lengths"), place, strict=True):
            if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer) or not array.size:
                raise TypeError(
                    f"{where}: {name} must be a vector of integers, got {array.dtype}{list(array.shape)}; "
                    f"use jax.vmap for several rows."
                )
        if place[1].shape != place[2].shape:
            raise ValueError(
                f"{where}: starts has {place[1].shape[0]} entries and lengths {place[2].shape[0]}; expected "
                f"as many."
            )
        return place  # pyright: ignore[reportReturnType]  (three of them)

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        try:
            flat = self._spec.treedef.flatten_up_to(args)
            leaves = [jnp.asarray(value) for value in flat]
        except (TypeError, ValueError) as error:
            raise SpecError(
                f"pack({self._name}): the arguments are no arrays in the form of the spec. {error}"
            ) from None
        for leaf, path, spec in zip(leaves, self._spec.paths, self._spec.leaves, strict=True):
            family = isinstance(spec.dtype, DtypeFamily)
            fits = (
                leaf.dtype in spec.dtype
                if family
                else leaf.dtype == jax.dtypes.canonicalize_dtype(spec.dtype)
            )
            if not fits:
                raise SpecError(
                    f"pack({self._name}): `{path}` has dtype {leaf.dtype}, expected {spec.dtype}."
                )
        return leaves

    def _check(self, leaf: Any, aval: Any, kind: str, path: str, longest: int, place: Any) -> None:
        cells, segments = place[0].shape[0], place[1].shape[0]
        if kind == "row":
            expected = evaluate_shape(aval.shape, {self.dim: cells})
        else:
            expected = (segments, *Context({}, {self.dim: longest}).shape(aval.shape))
        if leaf.shape != tuple(expected):
            raise SpecError(
                f"pack({self._name}): `{path}` has shape {leaf.shape}, expected {tuple(expected)}: "
                f"{'on the row' if kind == 'row' else 'one for each segment'}, for {cells} cells and "
                f"{segments} segments."
            )

    def _packed(self, split: Split, leaves: Sequence[Any], longest: int) -> Packed:
        """Return the program for these kinds of arguments, traced on first use."""
        fixed: dict[str, int] = {}
        for leaf, spec in zip(leaves, self._spec.leaves, strict=True):
            shift = 0 if sum(axis.dim == self.dim for axis in spec.axes) == 1 else 1
            for axis, size in zip(
                spec.axes, leaf.shape[-len(spec.axes) :] if shift else leaf.shape, strict=False
            ):
                if axis.dim not in (None, self.dim):
                    fixed[axis.dim] = axis.solve(size)
        bounds = {self.dim: (1, longest)}
        dtypes = tuple(leaf.dtype for leaf in leaves)
        key = (longest, tuple(sorted(fixed.items())), dtypes, split.kind)
        if key not in self._traced:
            shapes = self._spec.shapes({**symbolic_dims(bounds), **fixed})
            structs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
            program = trace(self._flat(split), [*split.avals, *structs], bounds, name=self._name)
            self._traced[key] = Packed(program)
        return self._traced[key]

    def _flat(self, split: Split) -> Callable[..., Any]:
        def call(*leaves: Any) -> Any:
            shared = iter(split.rebuild(leaves[: len(split.arrays)]))
            own = iter(self._spec.treedef.unflatten(leaves[len(split.arrays) :]))
            return self._f(*(next(own) if one else next(shared) for one in self._per_example))

        return call


class Spreads(tuple[Spread, ...]):
    """What has no packed rule, in order; prints as one line each."""

    def __str__(self) -> str:
        return "\n".join([f"{len(self)} operations run on segments padded to the longest:", *map(str, self)])


def pack(
    f: Callable[..., Any],
    in_axes: Any = 0,
    *,
    spec: Any = None,
    grid: Grid | None = None,
    longest: int | None = None,
) -> PackedFunction:
    """Return `g(segments, starts, lengths, *packed_args)`, which runs `f` on every segment of a row.

    Args:
      f: a function of one example at its exact size.
      in_axes: as in `jax.vmap`, for whole arguments: 0 for the example's own, None for a shared one.
      spec: the shapes and dtypes of the per-example arguments (a tuple if there are several); default: `f`'s
        jaxtyping annotations.
      grid: names the ragged dim; all other named dims are fixed sizes. Default: there is one named dim.
      longest: no segment is longer, in cells; default: as long as the row. Operations without a packed rule
        cost what padding every segment to it costs.

    Raises:
      SpecError: the annotations do not describe the per-example arguments.
      MaskError: there is more than one ragged dim, or none.

    Example:
      >>> import jax, numpy as np, jaxbatch as jb
      >>> g = jb.pack(lambda x: x - x.mean(), spec=jb.spec("n", "float32"))
      >>> row = np.array([1, 3, np.nan, 5, 6, 7], np.float32)
      >>> out, flag = g(np.array([0, 0, -1, 1, 1, 1]), np.array([0, 3]), np.array([2, 3]), row)
      >>> print(out, flag)
      [-1.  1.  0. -1.  0.  1.] False
    """
    return PackedFunction(f, in_axes, spec, grid, longest)
