"""What the outputs of a function of padded batches are cut to: one formula for each axis.

They are read from a trace at symbolic sizes. A function that needs to know its padded sizes is traced at a
few of them instead, and its output sizes must lie on straight lines. Nothing is guessed: what fits no
formula, or has no axis of rows, or cannot be cut at a prefix, is refused before anything compiles.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax

from . import _compat
from ._errors import MaskError
from ._program import Bounds, Program, Shape, evaluate_shape, symbolic_dims

Trace = Callable[[Mapping[str, Any], Bounds], Program]
"""Traces at these sizes, "rows" among them, that hold within these bounds if they are symbolic."""


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of a function of padded batches.

    Attributes:
      shapes: of each output leaf, formulas in the ragged dims and "rows"; the first axis is "rows".
      programs: the traces that they were read from.
    """

    shapes: tuple[Shape, ...]
    programs: tuple[Program, ...]

    @property
    def tree(self) -> Any:
        """The structure of the function's result."""
        return self.programs[0].out_tree

    def check(self, program: Program, sizes: Mapping[str, int]) -> None:
        """Raise MaskError unless a trace at these padded sizes has outputs as the formulas say."""
        shapes = [aval.shape for aval in program.out_avals]
        expected = [evaluate_shape(shape, sizes) for shape in self.shapes]
        if program.out_tree != self.tree or shapes != expected:
            raise MaskError(
                f"{program.name}: in a batch of {_describe(sizes)} its outputs have the shapes {shapes}, "
                f"expected {expected} from its traces at other sizes, so nobody can tell their valid parts. "
                f"Return outputs whose sizes follow the same formula at all padded sizes."
            )


def derive(
    trace: Trace, ladders: Mapping[str, Sequence[int]], fixed: Mapping[str, int], name: str
) -> Outputs:
    """Find out what the outputs of a function are cut to.

    Args:
      trace: traces the function.
      ladders: the padded sizes of all that varies, "rows" among them.
      fixed: the sizes that do not.
      name: of the function, for messages.

    Raises:
      MaskError: an output has no axis of rows, or a size that cannot be cut.
      Exception: what the function itself raises.
    """
    bounds = {dim: (1, sizes[-1]) for dim, sizes in ladders.items()}
    symbols = symbolic_dims(bounds)
    try:
        program = trace({**fixed, **symbols}, bounds)
    except MaskError as error:
        outputs = _fitted(trace, ladders, fixed, symbols, error)
    else:
        outputs = Outputs(tuple(aval.shape for aval in program.out_avals), (program,))
    paths = jax.tree_util.tree_leaves_with_path(outputs.tree.unflatten(range(len(outputs.shapes))))
    for (path, _), shape in zip(paths, outputs.shapes, strict=True):
        _check_cut(shape, f"{name}: output `result{jax.tree_util.keystr(path)}`")
    return outputs


def _check_cut(shape: Shape, output: str) -> None:
    if not shape or str(shape[0]) != "rows":
        raise MaskError(
            f"{output} has shape ({', '.join(map(str, shape))}), without a leading axis of rows, so it "
            f"belongs to no example. Return one entry for each row; jnp.broadcast_to gives all rows the same."
        )
    for axis, size in enumerate(shape[1:], 1):
        products = _compat.terms(size) if _compat.is_symbolic(size) else []
        simple = all(sum(power for _, power in factors) <= 1 for _, factors in products)
        names = _compat.dim_names(size)
        if not simple or len(names) > 1 or ("rows" in names and str(size) != "rows"):
            raise MaskError(
                f"{output} axis {axis} has size {size}, whose valid part cannot come first and be cut off. "
                f"Give each dim an axis of its own."
            )


def _fitted(
    trace: Trace,
    ladders: Mapping[str, Sequence[int]],
    fixed: Mapping[str, int],
    symbols: Mapping[str, Any],
    why: MaskError,
) -> Outputs:
    """Lay a straight line through the output sizes at three sizes of each dim."""
    samples = {dim: (*sizes, 2 * sizes[-1], 3 * sizes[-1])[:3] for dim, sizes in ladders.items()}
    base = {**fixed, **{dim: sizes[0] for dim, sizes in samples.items()}}
    first = trace(base, {})
    unknown = (
        f"{why} Its output sizes could not be read from traces at padded sizes either: with the other sizes "
        f"of {_describe(base)}"
    )
    shapes: list[Shape] = [aval.shape for aval in first.out_avals]
    programs = [first]
    for dim, sizes in samples.items():
        try:
            others = [trace({**base, dim: size}, {}) for size in sizes[1:]]
        except Exception as error:
            raise MaskError(
                f"{unknown}, it cannot be traced at each of {dim} = {_listed(sizes)}: {error}"
            ) from error
        column = [first, *others]
        if any(_kind(program) != _kind(first) for program in column):
            raise MaskError(
                f"{unknown}, its outputs are of another kind for each of {dim} = {_listed(sizes)}."
            )
        for i, shape in enumerate(shapes):
            grown = []
            for axis, size in enumerate(shape):
                values = [program.out_avals[i].shape[axis] for program in column]
                slope = _slope(sizes, values)
                if slope is None:
                    raise MaskError(
                        f"{unknown}, output {i} axis {axis} has the sizes {_listed(values)} for {dim} = "
                        f"{_listed(sizes)}, which is no whole multiple and says not what its valid part is."
                    )
                grown.append(size + slope * (symbols[dim] - sizes[0]))
            shapes[i] = tuple(grown)
        programs += others
    return Outputs(tuple(shapes), tuple(programs))


def _slope(xs: Sequence[int], ys: Sequence[int]) -> int | None:
    """Return the slope of the straight line through three points, None if it is no integer or no line."""
    slope = Fraction(ys[1] - ys[0], xs[1] - xs[0])
    straight = ys[2] - ys[1] == slope * (xs[2] - xs[1])
    return int(slope) if straight and slope.denominator == 1 else None


def _kind(program: Program) -> Any:
    return program.out_tree, [len(aval.shape) for aval in program.out_avals]


def _describe(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
