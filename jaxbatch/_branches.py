"""Branches on a size: one program that holds what the function does for small and for large sizes.

A Python `if x.shape[0] > 5` cannot be decided at a symbolic size. But where it changes is known, so the
function is traced once below and once above, each within bounds that settle the test. The two traces
become one equation, `size_switch`, which is interpreted like any other: every piece runs on what it
would see at its own sizes, and the one that the length belongs to gives the answer.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax.extend import core as jex_core

from . import _compat
from ._errors import MaskError

Bounds = Mapping[str, tuple[int, int]]

MAX_PIECES = 8
_MAX_CHECKED = 1 << 16
_COMPARISON = re.compile(r"comparison '(.+)' (?:>=|<=|>|<) '(.+)' is inconclusive")


class SizeTestError(MaskError):
    """A test on a size whose answer differs within the bounds of a trace.

    Attributes:
      difference: what the test compares with zero, a symbolic size; None if it is no comparison.
    """

    def __init__(self, message: str, difference: Any = None):
        super().__init__(message)
        self.difference = difference


def compared(message: str) -> Any:
    """Read the difference of the two sizes out of JAX's message about an undecided comparison, or None."""
    found = _COMPARISON.search(message)
    if found is None:
        return None
    left, right = jax.export.symbolic_shape(f"{found[1]}, {found[2]}")
    return left - right


def split(difference: Any, bounds: Bounds) -> tuple[Bounds, Bounds] | None:
    """Split bounds into two at a length where the sign of a size changes; None if that is not known."""
    names = _compat.dim_names(difference)
    if len(names) != 1:
        return None
    (name,) = names
    if name not in bounds:
        return None
    low, high = bounds[name]

    def sign(length: int) -> int:
        return int(np.sign(_compat.evaluate(difference, {name: length})))

    if sign(low) == sign(high):
        if high - low > _MAX_CHECKED:
            return None
        lengths = np.arange(low, high + 1)
        signs = np.sign(np.broadcast_to(_compat.evaluate(difference, {name: lengths}), lengths.shape))
        (changes,) = np.nonzero(signs != signs[0])
        if not len(changes):
            return None
        high = int(lengths[changes[0]])
    last = low  # the last length known to have the sign of `low`; `high` has another
    while high - last > 1:
        middle = (last + high) // 2
        last, high = (middle, high) if sign(middle) == sign(low) else (last, middle)
    below, above = (low, last), (last + 1, bounds[name][1])
    return {**bounds, name: below}, {**bounds, name: above}


def is_zero(difference: Any, bounds: Bounds) -> bool | None:
    """Tell whether a size is zero at every length or at none; None if that depends on it, or is not known."""
    names = sorted(_compat.dim_names(difference))
    if not all(name in bounds for name in names):
        return None
    if math.prod(bounds[name][1] - bounds[name][0] + 1 for name in names) > _MAX_CHECKED:
        return None
    lengths = np.meshgrid(*(np.arange(bounds[name][0], bounds[name][1] + 1) for name in names))
    zero = _compat.evaluate(difference, dict(zip(names, lengths, strict=True))) == 0
    return True if np.all(zero) else None if np.any(zero) else False


# --- the equation ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Out:
    """Shape and dtype of one output of a switch."""

    shape: tuple[Any, ...]
    dtype: Any
    weak_type: bool


size_switch_p = jex_core.Primitive("size_switch")
size_switch_p.multiple_results = True


@size_switch_p.def_abstract_eval
def _abstract(*_: Any, jaxprs: Any, bounds: Any, outs: tuple[Out, ...]) -> list[Any]:
    return [core.ShapedArray(out.shape, out.dtype, weak_type=out.weak_type) for out in outs]


def switch(
    operands: Sequence[Any], jaxprs: Sequence[Any], bounds: Sequence[Bounds], outs: Sequence[Out]
) -> list[Any]:
    """Bind a switch: every piece takes all operands, and holds for lengths within its bounds."""
    frozen = tuple(tuple(sorted(b.items())) for b in bounds)
    return size_switch_p.bind(*operands, jaxprs=tuple(jaxprs), bounds=frozen, outs=tuple(outs))


def common_outs(pieces: Sequence[tuple[Bounds, Sequence[Any]]], dims: Mapping[str, Any]) -> list[Out]:
    """Return output formulas that hold in every piece.

    Args:
      pieces: the bounds of each, and its output avals.
      dims: the symbolic dims of the whole.

    Raises:
      MaskError: the number, dtype or size of the outputs changes with the branch.
    """
    if len({tuple((a.dtype, len(a.shape)) for a in avals) for _, avals in pieces}) > 1:
        raise MaskError(
            "a branch on a size changes the number, rank or dtype of the outputs. Return the same kind of "
            "outputs from both sides, or declare the dim as a fixed size."
        )
    outs = []
    for column in zip(*(avals for _, avals in pieces), strict=True):
        shape = []
        for entries in zip(*(aval.shape for aval in column), strict=True):
            shape.append(_common_size(entries, [bounds for bounds, _ in pieces], dims))
        weak = all(getattr(aval, "weak_type", False) for aval in column)
        outs.append(Out(tuple(shape), column[0].dtype, weak))
    return outs


def _common_size(sizes: Sequence[Any], bounds: Sequence[Bounds], dims: Mapping[str, Any]) -> Any:
    """Return one formula for a size that has another formula in each piece, such as `min(n, 5)`."""
    known = list(dict.fromkeys([*(_compat.evaluate(size, dims) for size in sizes), *dims.values()]))
    pairs = [extreme(a, b) for a in known for b in known for extreme in (core.min_dim, core.max_dim)]
    for formula in [*known, *pairs]:
        if all(_agree(formula, size, own) for size, own in zip(sizes, bounds, strict=True)):
            return formula
    raise MaskError(
        f"a branch on a size changes the size of an output: {' or '.join(map(str, sizes))}. Return one size "
        f"from both sides, or declare the dim as a fixed size."
    )


def _agree(formula: Any, own: Any, bounds: Bounds) -> bool:
    """Tell whether a formula gives the piece's own size, at every length where there are not too many."""
    names = sorted(_compat.dim_names(formula) | _compat.dim_names(own))
    most = round(_MAX_CHECKED ** (1 / max(len(names), 1)))
    ranges = []
    for name in names:
        low, high = bounds[name]
        spread = np.linspace(low, high, num=min(high - low + 1, most)).astype(np.int64)
        ranges.append(np.union1d(spread, np.arange(low, min(low + most, high + 1))))
    env = dict(zip(names, np.meshgrid(*ranges, indexing="ij"), strict=True))
    return bool(np.all(_compat.evaluate(formula, env) == _compat.evaluate(own, env)))
