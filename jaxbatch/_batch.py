"""Rows in, padded arrays out, and back: the host side of a batch, in NumPy.

Promises kept here: every batch gets buffers of its own (on a CPU, JAX may read NumPy memory after the call
returns, so a buffer is never written twice); rows that only fill up a batch repeat its first row and are
dropped; results are copies that own their memory, so keeping one does not keep its batch alive.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

padding: float = 0.0
"""What padding cells hold. Nothing may depend on it; `jaxbatch.testing.padding_value` changes it."""


def fill_value(dtype: Any) -> Any:
    """Return `padding` in this dtype: clipped to the range of integers, with NaN as their smallest.

    Example:
      >>> int(fill_value(np.dtype("int8")))
      0
    """
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.bool_(padding != 0)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        finite = math.copysign(2.0**80, padding) if math.isinf(padding) else padding
        return dtype.type(low if math.isnan(padding) else min(max(int(finite), low), high))
    with np.errstate(over="ignore"):
        return np.asarray(padding).astype(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """What `unstack` needs to undo `pad_and_stack`.

    Attributes:
      num: the number of examples; rows after these only fill the batch up.
      lengths: int32 [rows, num_dims], the valid length of every row in each ragged dim.
    """

    num: int
    lengths: np.ndarray


def pad_and_stack(
    examples: Sequence[Sequence[Any]], lengths: np.ndarray, shapes: Sequence[tuple[int, ...]], rows: int
) -> tuple[list[np.ndarray], Residuals]:
    """Return one new array [rows, *shape] for each leaf, and what undoes it.

    Args:
      examples: for each example the arrays of its leaves, at their own sizes; at most `rows`, at least one.
      lengths: [num, num_dims], the lengths of each example.
      shapes: for each leaf its padded shape.
    """
    num = len(examples)
    arrays = []
    for column, shape in zip(zip(*examples, strict=True), shapes, strict=True):
        array = np.full((rows, *shape), fill_value(column[0].dtype), column[0].dtype)
        _write(array, column)
        array[num:] = array[0]
        arrays.append(array)
    own = np.empty((rows, lengths.shape[1]), np.int32)
    own[:num] = lengths
    own[num:] = own[0]
    return arrays, Residuals(num, own)


def unstack(
    arrays: Sequence[np.ndarray], residuals: Residuals, shapes: Sequence[tuple[Any, ...]]
) -> list[list[np.ndarray]]:
    """Return for each example its leaves, cut to their valid shapes: copies, without the filler rows.

    Args:
      arrays: for each leaf its padded values [rows, ...].
      shapes: for each leaf its valid shape; an entry is one int for all rows, or an array of one per row.
    """
    num = residuals.num
    columns = []
    for array, shape in zip(arrays, shapes, strict=True):
        if any(isinstance(dim, np.ndarray) for dim in shape):
            per_row = np.stack(
                [np.broadcast_to(dim, len(residuals.lengths)) for dim in shape], axis=1
            ).tolist()
            columns.append([array[(i, *map(slice, per_row[i]))].copy() for i in range(num)])
        elif shape:
            columns.append([row.copy() for row in array[:num]])
        else:
            columns.append([array[i, ...].copy() for i in range(num)])  # with `...`, scalars stay arrays
    return [list(leaves) for leaves in zip(*columns, strict=True)] if columns else [[] for _ in range(num)]


def _write(array: np.ndarray, column: Sequence[np.ndarray]) -> None:
    """Write each row at the origin of its place. The loop is as fast as one masked write, and copies once."""
    if not array.size:
        return
    if array.ndim == 1:
        array[: len(column)] = column
    elif array.ndim == 2:
        flat, size = array.reshape(-1), array.shape[1]  # a view, which takes a plain slice a little faster
        for start, row in zip(range(0, flat.size, size), column, strict=False):
            flat[start : start + len(row)] = row
    else:
        for i, row in enumerate(column):
            array[(i, *map(slice, row.shape))] = row
