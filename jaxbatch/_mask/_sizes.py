"""What to allocate for a size that is a formula in the lengths.

Most formulas grow with every dim, so the bucket's own sizes give the largest value; those that only shrink
have it at lengths of 1. The others (`n % 4`, `n - m`) are tried at every length up to the bucket's sizes.
The sizes themselves may be symbolic, for one program that serves all buckets.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import _compat
from .._errors import MaskError
from .._program import Dim

_MAX_ENUMERATED = 1 << 20


class Allocation:
    """The sizes of one bucket.

    Args:
      sizes: the allocated size of each ragged dim.
      name: the user's function, for messages.
    """

    def __init__(self, sizes: Mapping[str, Dim], name: str):
        self._sizes = sizes
        self._name = name
        self.size = functools.cache(self._size)

    def _size(self, dim: Dim) -> Dim:
        """Return the largest value that a formula takes up to the bucket's sizes."""
        direction = _direction(dim)
        if direction >= 0:
            return _compat.evaluate(dim, self._sizes)
        if direction < 0:
            return _compat.evaluate(dim, dict.fromkeys(_compat.dim_names(dim), 1))
        values = self._values(dim)
        if values is None:
            raise MaskError(
                f"{self._name}: no bound is known for the size {dim} in a bucket of {self._sizes}. Write it "
                f"so that it grows with its dims, or run such inputs at their exact sizes."
            )
        return int(np.max(values))

    def always(self, dim: Dim, least: int, most: int | float) -> bool:
        """Tell whether a formula is known to lie within bounds at all lengths up to the bucket's sizes."""
        values = self._values(dim)
        return values is not None and bool(np.all((values >= least) & (values <= most)))

    def _values(self, dim: Dim) -> Any:
        """Return a formula at all lengths of the bucket, of the largest one if its sizes are symbolic.

        Returns:
          None if they are too many, or unbounded.
        """
        names = sorted(_compat.dim_names(dim))
        sizes = [_compat.upper_bound(self._sizes[name]) for name in names]
        if math.prod(sizes) > _MAX_ENUMERATED:
            return None
        grid = np.meshgrid(*(np.arange(1, size + 1) for size in sizes), indexing="ij")
        return np.asarray(_compat.evaluate(dim, dict(zip(names, grid, strict=True))))


def grows(dim: Dim) -> bool:
    """Tell whether a size is known never to shrink when a length grows (so its bucket's value bounds it)."""
    return _direction(dim) >= 0


def _direction(dim: Any) -> int | float:
    """Return 1 for growing, -1 for shrinking, 0 for constant, NaN for unknown."""
    if not _compat.is_symbolic(dim):
        return 0
    signs = {_term_direction(k, factors) for k, factors in _compat.terms(dim)} - {0}
    return signs.pop() if len(signs) == 1 else (0 if not signs else float("nan"))


def _term_direction(coefficient: int, factors: Sequence[tuple[Any, int]]) -> int | float:
    """Direction of a product; every factor is a size or an operation on sizes, none of them negative."""
    signs = set()
    for factor, _ in factors:
        operation, operands = _compat.factor_operands(factor)
        match operation:
            case "var":
                signs.add(1)
            case "floordiv" if _direction(operands[1]) == 0 and _compat.evaluate(operands[1], {}) > 0:
                signs.add(_direction(operands[0]))
            case "max" | "min":
                signs |= {_direction(o) for o in operands} - {0}
            case _:
                return float("nan")
    if not signs:
        return 0
    # A product may shrink where a factor can be negative; sizes themselves never are.
    sizes_only = all(_compat.factor_operands(factor)[0] == "var" for factor, _ in factors)
    single = len(factors) == 1 and factors[0][1] == 1
    if len(signs) > 1 or not (sizes_only or single):
        return float("nan")
    return signs.pop() * (1 if coefficient > 0 else -1)
