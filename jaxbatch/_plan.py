"""Which examples run together, and in which bucket: a pure decision over lengths, grid and costs.

Every example starts at the smallest sizes that hold it. Then examples move to larger sizes wherever that
makes the whole run cheaper: into rows that would be empty, or to save a batch or a program of their own.
Without measured costs a batch costs its cells, so that padding alone decides; `_search` finds the moves.
Batches of the largest sizes come first, so that a memory error comes early, and longer examples before
shorter ones, so that neighbours are alike.
"""

import dataclasses

import numpy as np

from ._costs import Costs
from ._grid import Bucket, Grid
from ._search import by_cells, by_seconds, improve

_NO_BUCKETS: frozenset[Bucket] = frozenset()


@dataclasses.dataclass(frozen=True)
class Job:
    """Examples that run together.

    Attributes:
      bucket: padded sizes and rows; rows may exceed the number of examples.
      indices: the examples' places in the lengths that were planned.
      used: how many rows hold examples, if that is not one for each.
    """

    bucket: Bucket
    indices: tuple[int, ...]
    used: int | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True)
class Means:
    """What a planner may use and what it knows.

    Attributes:
      costs: seconds by bucket; without any measured one, padding decides.
      ready: the buckets whose programs exist.
      frozen: only these may be used, as far as they hold the examples.
      moves: whether an example may run at more than the smallest sizes that hold it.
    """

    costs: Costs = Costs()
    ready: frozenset[Bucket] = _NO_BUCKETS
    frozen: bool = False
    moves: bool = True


def plan(lengths: np.ndarray, grid: Grid, means: Means = Means()) -> list[Job]:
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
    if means.costs:
        tables = by_seconds(grid, means.costs, means.ready, frozen=means.frozen)
    else:
        tables = by_cells(grid, means.ready if means.frozen else None)
    members = _smallest(lengths, grid)
    if means.moves:
        counts = np.zeros(len(tables.steps), np.int64)
        for sizes, own in members.items():
            counts[sizes] = len(own)
        for source, target, many in improve(tables, counts):
            members[target] = members.get(target, []) + members[source][:many]
            members[source] = members[source][many:]
    jobs = []
    for sizes in sorted(members, key=lambda sizes: (tables.cells[sizes], -sizes), reverse=True):
        start = 0
        for bucket in tables.batches(sizes, len(members[sizes])):
            jobs.append(Job(bucket, tuple(members[sizes][start : start + bucket["rows"]])))
            start += bucket["rows"]
    return jobs


def _smallest(lengths: np.ndarray, grid: Grid) -> dict[int, list[int]]:
    """Return the examples at each combination of sizes, the longest first, equal ones in their order."""
    steps = grid.ceil_indices(lengths)
    shape = tuple(map(len, grid.ladders))
    if np.any(steps >= np.array(shape, np.int64)):
        raise AssertionError("plan: an example does not fit the grid; the caller sorts those out.")
    sizes = np.zeros(len(lengths), np.int64)
    if shape:
        sizes[:] = np.ravel_multi_index(tuple(steps.T), shape)
    order = np.lexsort((-lengths.prod(axis=1), sizes))  # stable, and the last key counts most
    ends = np.flatnonzero(np.diff(sizes[order])) + 1
    return {int(sizes[own[0]]): own.tolist() for own in np.split(order, ends)}


def chunk(bucket: Bucket, indices: list[int], rows: tuple[int, ...]) -> list[Job]:
    """Cut the examples of one size into full batches and a remainder; `rows` are those allowed, ascending."""
    jobs = []
    for start in range(0, len(indices), rows[-1]):
        part = tuple(indices[start : start + rows[-1]])
        jobs.append(Job(bucket.with_rows(next(r for r in rows if r >= len(part))), part))
    return jobs
