"""The cheapest plan there is, by trying all: the measure of the planner on small instances."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from jaxbatch._grid import Bucket, Grid


def least_cost(
    lengths: Sequence[Sequence[int]],
    grid: Grid,
    seconds: Mapping[Bucket, float],
    charges: Mapping[Bucket, float],
) -> float:
    """Return the least sum of `seconds` over batches, and of `charges` over the programs they use."""
    smallest = [grid.ceil(dict(zip(grid.dims, own, strict=True))).sizes for own in lengths]
    counts = Counter(tuple(sizes.values()) for sizes in smallest)
    # The hardest to place first: each batch is one that holds the first example left.
    classes = sorted(counts, key=lambda sizes: (_product(sizes), sizes), reverse=True)
    buckets = list(grid)

    @functools.cache
    def least(left: tuple[int, ...], used: frozenset[Bucket]) -> float:
        first = next((i for i, num in enumerate(left) if num), None)
        if first is None:
            return 0.0
        best = float("inf")
        for bucket in buckets:
            sizes = tuple(bucket.sizes.values())
            held = [i for i, own in enumerate(classes) if left[i] and _holds(sizes, own)]
            cost = seconds[bucket] + (0.0 if bucket in used else charges.get(bucket, 0.0))
            if first not in held or cost >= best:
                continue
            for taken in _fills([left[i] for i in held], bucket["rows"]):
                if taken[held.index(first)]:
                    rest = list(left)
                    for i, num in zip(held, taken, strict=True):
                        rest[i] -= num
                    best = min(best, cost + least(tuple(rest), used | {bucket}))
        return best

    return least(tuple(counts[own] for own in classes), frozenset())


def _fills(counts: Sequence[int], rows: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to fill rows as far as there are examples."""
    most = min(rows, sum(counts))
    for taken in itertools.product(*(range(min(num, rows) + 1) for num in counts)):
        if sum(taken) == most:
            yield taken


def _holds(sizes: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(sizes, own, strict=True))


def _product(sizes: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)
