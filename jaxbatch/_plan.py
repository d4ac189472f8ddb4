"""Which examples run together, and in which bucket: a pure decision over lengths and the grid.

Every example gets the smallest sizes that hold it; examples of equal sizes share batches, longest first, so
that the largest program (and any memory error) comes first and neighbours are alike. As many of the largest
batches as can be filled are used, and the remainder goes into the smallest number of rows that holds
it: at each size at most two numbers of rows are used in one plan.
"""

import dataclasses

import numpy as np

from ._grid import Bucket, Grid


@dataclasses.dataclass(frozen=True)
class Job:
    """Examples that run together.

    Attributes:
      bucket: padded sizes and rows; rows may exceed the number of examples.
      indices: the examples' places in the lengths that were planned.
    """

    bucket: Bucket
    indices: tuple[int, ...]


def plan(lengths: np.ndarray, grid: Grid) -> list[Job]:
    """Return the batches that run examples of these lengths, each example in exactly one.

    Args:
      lengths: integers of shape [num, len(grid.dims)], none longer than the grid's largest size.

    Example:
      >>> for job in plan(np.array([[3], [20], [4]]), Grid(n=(4, 32), rows=(1, 2))):
      ...     print(job)
      Job(bucket=Bucket(n=32, rows=1), indices=(1,))
      Job(bucket=Bucket(n=4, rows=2), indices=(2, 0))
    """
    if not len(lengths):
        return []
    steps = grid.ceil_indices(lengths)
    shape = tuple(map(len, grid.ladders))
    if np.any(steps >= np.array(shape, np.int64)):
        raise AssertionError("plan: an example does not fit the grid; the caller sorts those out.")
    group = np.zeros(len(lengths), np.int64)
    if shape:
        group[:] = np.ravel_multi_index(tuple(steps.T), shape)
    columns = [np.array(ladder)[step] for ladder, step in zip(grid.ladders, steps.T, strict=True)]
    sizes = np.array(columns, np.int64).reshape(len(grid.dims), len(lengths))
    # The last key of lexsort counts most; the sort is stable, so equal examples keep their order.
    order = np.lexsort((-lengths.prod(axis=1), group, -sizes.prod(axis=0)))
    ends = np.flatnonzero(np.diff(group[order])) + 1
    jobs = []
    for indices in np.split(order, ends):
        bucket = Bucket(**dict(zip(grid.dims, sizes[:, indices[0]].tolist(), strict=True)))
        jobs += chunk(bucket, indices.tolist(), grid.rows_for(bucket.sizes))
    return jobs


def chunk(bucket: Bucket, indices: list[int], rows: tuple[int, ...]) -> list[Job]:
    """Cut the examples of one size into full batches and a remainder; `rows` are those allowed, ascending."""
    jobs = []
    for start in range(0, len(indices), rows[-1]):
        part = tuple(indices[start : start + rows[-1]])
        jobs.append(Job(bucket.with_rows(next(r for r in rows if r >= len(part))), part))
    return jobs
