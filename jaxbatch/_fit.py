"""Ladders fitted to data: the sizes that leave the least padding under a budget of sizes.

In one dim the ladder is optimal, by dynamic programming. With `D[k][j]` the cells of the examples up to the
j-th distinct length in at most k sizes, the last of which is that length, and `W[j]` how many they are,

    D[k][j] = min over i of D[k-1][i] + length[j] * (W[j] - W[i])

which at each j asks for the lowest of the lines `D[k-1][i] - x * W[i]` at x = length[j]. Those lines are the
corners of a lower convex hull, so a layer takes one hull and one binary search for all j together: time
linear in the number of distinct lengths, up to a logarithm. (An i after j is never chosen: its group would
hold longer examples than length[j], and leaving them out is cheaper.)

With several dims the padded cells of an example are a product, and for given sizes of the other dims each
dim is the problem above with weighted examples. Fitting the dims in turn never makes the total worse; it
ends where no single dim can be improved, which is good, and optimal only by chance.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Ladder = np.ndarray
"""Ascending places in the distinct values of a dim; the last is the largest."""


def fit_ladders(lengths: Mapping[str, Any], max_sizes: int, multiple_of: int) -> dict[str, list[int]]:
    """Return for each dim the sizes that together leave the fewest padded cells over all examples.

    Args:
      lengths: for each dim an array with one entry per example.
      max_sizes: the largest number of combinations of sizes, which is the product over the dims.
      multiple_of: every size is a multiple of it.

    Raises:
      ValueError: there are no lengths, they are negative, or their shapes are wrong.
      TypeError: they are not integers.

    Example:
      >>> fit_ladders({"n": [3, 4, 5, 30, 31, 100]}, 3, 8)
      {'n': [8, 32, 104]}
    """
    columns = [_units(dim, values, multiple_of) for dim, values in lengths.items()]
    if len({len(column) for column in columns}) > 1:
        shapes = ", ".join(f"`{dim}` {len(column)}" for dim, column in zip(lengths, columns, strict=True))
        raise ValueError(f"every dim has one length per example, got {shapes}.")
    data = _Data.of(columns)
    if len(columns) == 1:
        found = [best_ladder(data.values[0], data.counts, max_sizes)]
    else:
        starts = itertools.product(_splits(len(columns), max_sizes), (data.widest(), data.exact()))
        found = min((data.improve(split, sizes) for split, sizes in starts), key=data.cells)
    return {
        dim: (values[ladder] * multiple_of).tolist()
        for dim, values, ladder in zip(lengths, data.values, found, strict=True)
    }


def best_ladder(values: np.ndarray, weights: np.ndarray, max_sizes: int) -> Ladder:
    """Return the ladder of at most `max_sizes` that minimises the sum of weight x padded value.

    Args:
      values: ascending, without repeats.
      weights: positive, one for each value.

    Example:
      >>> best_ladder(np.array([1, 2, 9, 10]), np.array([1, 5, 1, 1]), 2)
      array([1, 3])
    """
    num = len(values)
    if max_sizes >= num:
        return np.arange(num)
    x = np.concatenate([[0.0], values])
    w = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
    costs = x * w  # one size for all up to here
    parents = []
    for _ in range(max_sizes - 1):
        hull = _lower_hull(w, costs)
        slopes = np.diff(costs[hull]) / np.diff(w[hull])
        parent = np.minimum(hull[np.searchsorted(slopes, x, side="left")], np.arange(num + 1))
        better = costs[parent] + x * (w - w[parent])
        if better[-1] >= costs[-1]:
            break  # nothing is left to gain, for further sizes gain ever less
        parents.append(parent)
        costs = better
    ladder, place = [], num
    for parent in reversed(parents):
        if parent[place] < place:
            ladder.append(place - 1)
            place = int(parent[place])
    if place:
        ladder.append(place - 1)
    return np.array(ladder[::-1])


@dataclass(frozen=True, eq=False)
class _Data:
    """All examples, those of equal lengths counted together.

    Attributes:
      values: for each dim its distinct lengths, ascending.
      places: int [num, num_dims], where the lengths of each distinct example stand in `values`.
      counts: how many examples are like it.
    """

    values: tuple[np.ndarray, ...]
    places: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, columns: list[np.ndarray]) -> "_Data":
        values, inverse = zip(*(np.unique(column, return_inverse=True) for column in columns), strict=True)
        codes = np.zeros(len(columns[0]), np.int64)
        # Renumbered after each dim, so that nothing overflows.
        for own, place in zip(values, inverse, strict=True):
            codes = np.unique(codes * len(own) + place, return_inverse=True)[1]
        _, first, counts = np.unique(codes, return_index=True, return_counts=True)
        return cls(values, np.stack(inverse, axis=1)[first], counts)

    def widest(self) -> list[np.ndarray]:
        """Return, for each dim, its largest value for every example."""
        return [np.full(len(self.counts), own[-1], np.float64) for own in self.values]

    def exact(self) -> list[np.ndarray]:
        """Return, for each dim, the values that the examples have."""
        return [own[place].astype(np.float64) for own, place in zip(self.values, self.places.T, strict=True)]

    def improve(self, split: tuple[int, ...], sizes: list[np.ndarray]) -> list[Ladder]:
        """Fit one dim after another, in numbers of sizes given by `split`, until nothing gets better.

        Args:
          split: for each dim the largest number of sizes.
          sizes: for each dim the padded size of every example to start from, as the other dims see it.
        """
        sizes = list(sizes)
        ladders: list[Ladder] = [np.empty(0, np.intp)] * len(split)
        best = math.inf
        while True:
            for dim, most in enumerate(split):
                others = math.prod((s for i, s in enumerate(sizes) if i != dim), start=self.counts)
                weights = np.bincount(self.places[:, dim], weights=others)
                ladders[dim] = best_ladder(self.values[dim], weights, most)
                sizes[dim] = self._padded(dim, ladders[dim])
            cells = self.cells(ladders)
            if cells >= best:
                return ladders
            best = cells

    def cells(self, ladders: list[Ladder]) -> float:
        """Return the padded cells of all examples."""
        padded = (self._padded(dim, ladder) for dim, ladder in enumerate(ladders))
        return float(math.prod(padded, start=self.counts).sum())

    def _padded(self, dim: int, ladder: Ladder) -> np.ndarray:
        step = np.searchsorted(ladder, self.places[:, dim], side="left")
        return self.values[dim][ladder[step]].astype(np.float64)


def _units(dim: str, values: Any, multiple_of: int) -> np.ndarray:
    """Return lengths in multiples of `multiple_of`, rounded up; an empty example needs a size as well."""
    array = np.asarray(values)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"the lengths of `{dim}` have shape {array.shape}; pass a flat array, one length per example."
        )
    if array.dtype.kind not in "iu":
        raise TypeError(f"the lengths of `{dim}` have dtype {array.dtype}; they count elements, in integers.")
    if array.min() < 0:
        raise ValueError(f"the lengths of `{dim}` hold {array.min()}; the smallest possible length is 0.")
    if array.max() > 2**62:
        raise ValueError(f"the lengths of `{dim}` hold {array.max()}; sizes go up to 2**62.")
    return np.maximum(-(-array.astype(np.int64) // multiple_of), 1)


def _splits(num_dims: int, product: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of sizes for each dim whose product is at most `product`, as large as they can be."""
    if num_dims == 1:
        yield (product,)
        return
    # Of all first numbers that leave the same for the rest, the largest.
    for rest in sorted({product // first for first in range(1, product + 1)}, reverse=True):
        yield from ((product // rest, *others) for others in _splits(num_dims - 1, rest))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the places of the corners of the lower convex hull of points with ascending x."""
    hull = np.arange(len(x))
    # A point on or above the line between its neighbours is no corner; all such go at once, in rounds.
    while len(hull) > 2:
        slopes = np.diff(y[hull]) / np.diff(x[hull])
        corner = np.concatenate([[True], slopes[:-1] < slopes[1:], [True]])
        if corner.all():
            return hull
        few = np.count_nonzero(~corner) * 32 < len(hull)
        hull = hull[corner]
        if few:  # many rounds may remain, and one pass over the rest, point by point, ends it
            return _scanned_hull(hull, x[hull].tolist(), y[hull].tolist())
    return hull


def _scanned_hull(places: np.ndarray, xs: list[float], ys: list[float]) -> np.ndarray:
    """Andrew's monotone chain."""
    kept: list[int] = []
    slopes: list[float] = [-math.inf]  # of the edge that ends at each kept point
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        slope = -math.inf
        while kept:
            last = kept[-1]
            slope = (y - ys[last]) / (x - xs[last])
            if len(kept) == 1 or slopes[-1] < slope:
                break
            kept.pop()
            slopes.pop()
        kept.append(i)
        if i:
            slopes.append(slope)
    return places[kept]
