"""One array of one example: a size for every axis, some of them named, and a dtype."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import SpecError
from .._grid import RESERVED_NAMES
from ._dtypes import DtypeFamily, parse_dtype

SUPPORTED = "Supported are names (`n`), numbers (`64`) and linear expressions in one name (`4*h`, `2*n-1`)"

# Operators of `jax.export.symbolic_shape`; a dim of that name could not be traced.
_OPERATORS = ("mod", "floordiv", "max", "min")
_TERM = re.compile(r"(?P<sign>[+-]?)(?:(?P<number>\d+)(?:\*(?P<dim>[^\W\d]\w*))?|(?P<name>[^\W\d]\w*))")


@dataclass(frozen=True)
class Axis:
    """The size of one axis: `coefficient * dim + offset`, or `offset` alone where `dim` is None."""

    coefficient: int
    dim: str | None
    offset: int

    @classmethod
    def parse(cls, entry: str) -> "Axis":
        """Read one entry of a shape, such as `n`, `64` or `2*n-1`."""
        coefficient, dim, offset, end = 0, None, 0, 0
        while match := _TERM.match(entry, end):
            if end and not match["sign"]:
                break
            number, name = int(match["sign"] + (match["number"] or "1")), match["dim"] or match["name"]
            if name is None:
                offset += number
            elif dim in (None, name):
                coefficient, dim = coefficient + number, name
            else:
                raise SpecError(f"`{entry}` combines two dims. {SUPPORTED}.")
            end = match.end()
        if not entry or end < len(entry):
            raise SpecError(f"`{entry}` is not a size. {SUPPORTED}, without spaces inside.")
        if (dim and coefficient < 1) or (not dim and offset < 0):
            raise SpecError(f"`{entry}` does not grow with its dim, or is negative. {SUPPORTED}.")
        if dim in RESERVED_NAMES or dim in _OPERATORS or (dim and dim.startswith("_")):
            raise SpecError(f"`{dim}` cannot name a dim, since it has another meaning. Choose another name.")
        return cls(coefficient, dim, offset)

    @property
    def plain(self) -> bool:
        """Whether the size is the length of a dim, as it is."""
        return self.dim is not None and self.coefficient == 1 and not self.offset

    def size(self, lengths: Mapping[str, Any]) -> Any:
        """Return the size at these lengths, which may be symbolic (only `+` and `*` are used)."""
        if self.dim is None:
            return self.offset
        size = lengths[self.dim]
        if self.coefficient != 1:
            size = self.coefficient * size
        return size + self.offset if self.offset else size

    def solve(self, size: int) -> int:
        """Return the length of `dim` at which this axis has the given size."""
        length, remainder = divmod(size - self.offset, self.coefficient)
        if remainder or length < 0:
            raise SpecError(f"has size {size}, which is not `{self}` for any {self.dim} >= 0.")
        return length

    def __str__(self) -> str:
        if self.dim is None:
            return str(self.offset)
        text = self.dim if self.coefficient == 1 else f"{self.coefficient}*{self.dim}"
        return f"{text}{self.offset:+}" if self.offset else text


@dataclass(frozen=True, repr=False)
class ArraySpec:
    """What `jaxbatch.spec` returns: the axes of one array of one example, and its dtype."""

    axes: tuple[Axis, ...]
    dtype: np.dtype | DtypeFamily

    def shape(self, lengths: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the shape at these lengths, which may be symbolic."""
        return tuple(axis.size(lengths) for axis in self.axes)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.axes))}]"

    def __repr__(self) -> str:
        dtype = self.dtype.name if isinstance(self.dtype, DtypeFamily) else f'"{self.dtype}"'
        return f'spec("{", ".join(map(str, self.axes))}", {dtype})'


def spec(shape: str | tuple[str | int, ...], dtype: Any) -> ArraySpec:
    """Describe one array of one example.

    Args:
      shape: names and numbers separated by commas or spaces, `""` for a scalar; or a tuple of them. An entry
        may be a linear expression in one name, without spaces: `4*h`, `n+1`. The same name means the same
        size throughout an example.
      dtype: anything NumPy or JAX takes for one, "bfloat16" included.

    Raises:
      SpecError: the shape says something else, or JAX has no such dtype.

    Example:
      >>> spec("n, 64", "float32")
      spec("n, 64", "float32")
      >>> spec("4*h 4*w 3", "uint8").shape({"h": 2, "w": 5})
      (8, 20, 3)
    """
    try:
        if not isinstance(shape, str | tuple | list):
            raise SpecError(f"the shape is neither a string nor a tuple. {SUPPORTED}.")
        return ArraySpec(tuple(map(Axis.parse, _entries(shape))), parse_dtype(dtype))
    except SpecError as error:
        raise error.with_context(f"spec({shape!r}, {dtype!r})") from None


def _entries(shape: str | tuple[str | int, ...]) -> list[str]:
    if isinstance(shape, str):
        parts = [part.split() for part in shape.split(",")]
        # One comma may close the list, as in Python; any other gap is a slip that would change the rank.
        if not parts[-1]:
            parts.pop()
        if not all(parts):
            raise SpecError(f"an entry between two commas is missing. {SUPPORTED}.")
        return [entry for part in parts for entry in part]
    if any(isinstance(entry, bool) or not isinstance(entry, str | int) for entry in shape):
        raise SpecError(f"an entry is neither a string nor an integer. {SUPPORTED}.")
    return [str(entry).strip() for entry in shape]
