"""The search behind the planner: how many examples run at which sizes, in batches of how many rows.

`Tables` answer what `n` examples cost at each of the grid's sizes, in their best batches. `improve` starts
with every example at its smallest sizes and moves counts of examples to larger ones, the best move first,
until no move helps. Examples of the same sizes are alike, so counts are all it needs.
"""

import dataclasses
import functools
import itertools
import math

import numpy as np

from ._costs import Costs
from ._grid import Bucket, Grid

REUSE = 10
"""How many runs like this one a new program is expected to serve: its compile time counts by this part."""

_MANY_PLACES = 24
_NONE = 1e15  # What an example costs where no program may run it: so much that any other place is better.


@dataclasses.dataclass(frozen=True, eq=False)
class Tables:
    """What examples cost at each combination of sizes.

    Attributes:
      steps: int [num_sizes, num_dims], the ladder index of each dim.
      rows: the numbers of rows, ascending.
      buckets: for each combination of sizes a bucket for each of `rows`.
      costs: [num_sizes, num + 1] of 0 to num examples; `num` is twice the largest number of rows.
      warm: bool [num_sizes], whether a program exists; `cold` whether one does not.
      bulk: for each sizes the rows of batches beyond that, and `bulk_cost` what one of them costs.
      layers: for each number of rows what all up to it give, to find the batches again; empty where these
        are just full ones and the smallest for the rest, out of `allowed` [num_sizes, num_rows].
    """

    steps: np.ndarray
    rows: tuple[int, ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    costs: np.ndarray
    warm: np.ndarray
    cold: np.ndarray
    bulk: np.ndarray
    bulk_cost: np.ndarray
    allowed: np.ndarray
    layers: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def cost(self, sizes: np.ndarray, num: np.ndarray) -> np.ndarray:
        """Return the cost of `num` examples at `sizes`; both are indices, broadcast together."""
        last = self.costs.shape[1] - 1
        more = np.maximum(-(-(num - last) // self.bulk[sizes]), 0)
        return self.costs[sizes, num - more * self.bulk[sizes]] + more * self.bulk_cost[sizes]

    def batches(self, sizes: int, num: int) -> list[Bucket]:
        """Return the buckets that run `num` examples at this cost, those of more rows first."""
        last, bulk = self.costs.shape[1] - 1, int(self.bulk[sizes])
        more = max(-(-(num - last) // bulk), 0)
        rows = sorted([bulk] * more + self._few(sizes, num - more * bulk), reverse=True)
        return [self.buckets[sizes][self.rows.index(each)] for each in rows]

    @functools.cached_property
    def cells(self) -> list[int]:
        """The product of the sizes, for each combination."""
        return [own[0].cells // own[0]["rows"] for own in self.buckets]

    def _few(self, sizes: int, num: int) -> list[int]:
        if not self.layers:
            full, rest = divmod(num, int(self.bulk[sizes]))
            rows = [r for r, ok in zip(self.rows, self.allowed[sizes], strict=True) if ok]
            return [rows[-1]] * full + ([next(r for r in rows if r >= rest)] if rest else [])
        found, layer, inside = [], len(self.layers) - 1, False
        while num > 0:
            best, using = self.layers[layer]
            before = self.layers[layer - 1][0][sizes] if layer else None
            rows = self.rows[layer]
            if not inside and before is not None and before[num] <= best[sizes, num]:
                layer -= 1
                continue
            found.append(rows)
            num = max(num - rows, 0)
            # What is left after one of these rows: more of them at no new charge, or fewer rows only.
            inside = before is None or bool(using[sizes, num] < before[num])
            layer -= 0 if inside else 1
        return found


@functools.lru_cache(maxsize=32)
def by_cells(grid: Grid, only: frozenset[Bucket] | None = None, *, packed: bool = False) -> Tables:
    """Return tables where a batch costs its cells: full batches, and one of the fewest rows for the rest.

    Args:
      only: the buckets that may be used; None for all.
      packed: as in `by_seconds`.
    """
    pairs = _Pairs.of(grid, packed)
    allowed = pairs.allowed if only is None else pairs.among(only)
    served = np.logical_or.reduce(allowed, axis=1)
    allowed = np.where(served[:, None], allowed, pairs.allowed)  # costs too much, but can be planned
    rows, num = np.array(pairs.rows), np.arange(2 * pairs.rows[-1] + 1)
    bulk = np.where(allowed, rows, 0).max(axis=1)
    full, rest = np.divmod(num, bulk[:, None])
    fitting = np.where(allowed[:, None] & (rows >= rest[..., None]), rows, np.iinfo(np.int64).max).min(axis=2)
    price = pairs.cells * np.where(served, 1.0, _NONE)
    costs = price[:, None] * (full * bulk[:, None] + np.where(rest > 0, fitting, 0))
    return Tables(pairs.steps, pairs.rows, pairs.buckets, costs, served, ~served, bulk, price * bulk, allowed)


@functools.lru_cache(maxsize=32)
def by_seconds(
    grid: Grid, costs: Costs, ready: frozenset[Bucket], *, frozen: bool = False, packed: bool = False
) -> Tables:
    """Return tables where a batch costs its seconds, and a program that is not ready a part of a compile.

    Args:
      ready: the buckets whose programs exist.
      frozen: no other bucket may be used.
      packed: the tables are for rows instead of examples, and each number of segments is a size of its own.
    """
    pairs = _Pairs.of(grid, packed)
    warm = pairs.among(ready)
    # Of equal costs, those of more rows: their overhead may not have been measured.
    seconds = pairs.seconds(costs) * (1 - 1e-9 * np.arange(len(pairs.rows)))
    if frozen:
        served = warm.any(axis=1, keepdims=True)
        seconds = np.where(served, np.where(warm, seconds, np.inf), seconds * _NONE)
    charge = np.where(warm, 0.0, (costs.compile_seconds or 0.0) / REUSE)
    rows = np.array(pairs.rows)
    best = np.argmin(seconds / rows, axis=1)
    layers = _knapsack(seconds, charge, rows, 2 * int(rows[-1]))
    bulk_cost = seconds[np.arange(len(best)), best]
    allowed = np.isfinite(seconds)
    cold = np.logical_or.reduce(allowed & ~warm, axis=1)
    layout = pairs.steps, pairs.rows, pairs.buckets
    return Tables(
        *layout,
        layers[-1][0],
        np.logical_or.reduce(warm, axis=1),
        cold,
        rows[best],
        bulk_cost,
        allowed,
        layers,
    )


def _knapsack(
    seconds: np.ndarray, charge: np.ndarray, rows: np.ndarray, num: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return for each number of rows the least cost of 0 to `num` examples using it and smaller ones.

    The second array of a pair is that of examples that follow a batch of these rows, which is paid for
    already: least(n) = min(least of smaller rows(n), charge + cost + following(n - rows)).
    """
    layers, below = [], np.full((len(seconds), num + 1), np.inf)
    below[:, 0] = 0.0
    for j, each in enumerate(rows.tolist()):
        # `using[n]`: at least one batch of these rows, charge apart. Blocks of `each` follow one another.
        using = np.full_like(below, np.inf)
        following = below.copy()  # min(below, using), as far as it is known
        cost = seconds[:, j, None]
        for start in range(1, num + 1, each):
            here = slice(start, min(start + each, num + 1))
            places = np.maximum(np.arange(here.start, here.stop) - each, 0)
            using[:, here] = cost + following[:, places]
            following[:, here] = np.minimum(below[:, here], using[:, here])
        below = np.minimum(below, using + charge[:, j, None])
        below[:, 0] = 0.0
        layers.append((below, using))
    return tuple(layers)


def improve(tables: Tables, counts: np.ndarray) -> list[tuple[int, int, int]]:
    """Return moves (from, to, how many) of examples between sizes that make the run cheaper, in order.

    Args:
      counts: how many examples there are at each combination of sizes.
    """
    here = np.flatnonzero(counts)
    if len(tables.steps) == 1:
        return []
    places = _places(tables, here)
    steps, num = tables.steps[places], counts[places].copy()
    holds = np.all(steps[None] >= steps[:, None], axis=2) & ~np.eye(len(places), dtype=bool)
    if not holds.any():
        return []
    joined = _triples(holds)
    moves = []
    while (found := _best_move(tables, places, num, holds, joined)) is not None:
        for source, target, many in found:
            num[source] -= many
            num[target] += many
            moves.append((int(places[source]), int(places[target]), many))
    return moves


def _best_move(
    tables: Tables, places: np.ndarray, num: np.ndarray, holds: np.ndarray, joined: np.ndarray
) -> list[tuple[int, int, int]] | None:
    """Return the move that saves most: some examples, all of them, or two sizes into one that holds both."""
    now = tables.cost(places, num)
    least = 1e-9 * float(now.sum())
    # some of one
    most = int(min(num.max(), tables.rows[-1]))
    if most * holds.size > 4_000_000:
        most = 1
    some = np.arange(1, most + 1)
    fewer = tables.cost(places[:, None], np.maximum(num[:, None] - some, 0))
    more = tables.cost(places[:, None], num[:, None] + some)
    gain = (now[:, None] - fewer)[:, None, :] + (now[:, None] - more)[None, :, :]
    gain[~holds] = -np.inf
    movable = some <= num[:, None]
    if not tables.layers:  # without seconds, more padding is worth it only where a batch is saved
        movable &= some == (num % tables.bulk[places])[:, None]
    gain = np.where(movable[:, None, :], gain, -np.inf)
    source, target, index = np.unravel_index(np.argmax(gain), gain.shape)
    best, found = gain[source, target, index], [(int(source), int(target), int(some[index]))]
    # all of one
    whole = now[:, None] + now[None] - tables.cost(places[None], num[:, None] + num[None])
    whole = np.where(holds & (num > 0)[:, None], whole, -np.inf)
    source, target = np.unravel_index(np.argmax(whole), whole.shape)
    if whole[source, target] >= best:
        best, found = whole[source, target], [(int(source), int(target), int(num[source]))]
    # all of two
    if joined.size:
        one, other, target = joined.T
        both = num[one] + num[other]
        gain = now[one] + now[other] + now[target] - tables.cost(places[target], num[target] + both)
        gain = np.where((num[one] > 0) & (num[other] > 0), gain, -np.inf)
        pair = int(np.argmax(gain))
        if gain[pair] > best:
            a, b, t = joined[pair].tolist()
            best, found = gain[pair], [(a, t, int(num[a])), (b, t, int(num[b]))]
    return found if best > least else None


def _places(tables: Tables, here: np.ndarray) -> np.ndarray:
    """Return the sizes where examples can be: their own, those that hold two, and those with programs."""
    own = tables.steps[here]
    joins = np.unique(np.maximum(own[:, None], own[None]).reshape(-1, own.shape[1]), axis=0)
    shape = tables.steps.max(axis=0) + 1
    found = np.ravel_multi_index(tuple(joins.T), shape) if own.shape[1] else np.zeros(1, np.intp)
    if tables.cold[here].any():  # programs that exist already may be worth the larger sizes
        found = np.concatenate([found, np.flatnonzero(tables.warm)])
    return np.union1d(here, found)


def _triples(holds: np.ndarray) -> np.ndarray:
    """Return [num, 3]: two places and a third that holds both; of very many, the smallest third alone."""
    both = np.triu(np.ones(holds.shape, bool), 1)[:, :, None] & holds[:, None] & holds[None]
    if holds.shape[0] > _MANY_PLACES:  # places are in ascending order of sizes
        both &= np.cumsum(both, axis=2) == 1
    return np.argwhere(both)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pairs:
    """The grid as arrays: combinations of sizes, in the order of `itertools.product`, by numbers of rows.

    Packed, each combination stands once for each number of segments, ascending.

    Attributes:
      buckets: for each combination a bucket for each of `rows`.
      allowed: bool [num_sizes, num_rows], whether the grid has the pair.
    """

    steps: np.ndarray
    cells: np.ndarray
    rows: tuple[int, ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    allowed: np.ndarray

    @classmethod
    @functools.lru_cache(maxsize=32)
    def of(cls, grid: Grid, packed: bool = False) -> "_Pairs":
        combinations = list(itertools.product(*grid.ladders))
        steps = np.array(list(np.ndindex(*map(len, grid.ladders))), np.int64)
        steps = steps.reshape(len(combinations), len(grid.dims))
        segments: list[int | None] = [None] * len(combinations)
        if packed:
            numbers = [grid.segments_for(math.prod(sizes)) for sizes in combinations]
            steps = np.repeat(steps, list(map(len, numbers)), axis=0)
            combinations = [sizes for sizes, own in zip(combinations, numbers, strict=True) for _ in own]
            segments = [most for own in numbers for most in own]
        fitting = list(map(grid.rows_for, combinations))
        rows = tuple(sorted(set().union(*fitting)))
        buckets = tuple(
            tuple(Bucket(rows=r, segments=most, **dict(zip(grid.dims, sizes, strict=True))) for r in rows)
            for sizes, most in zip(combinations, segments, strict=True)
        )
        allowed = np.array([[r in own for r in rows] for own in fitting])
        cells = np.array([float(math.prod(sizes)) for sizes in combinations])
        return cls(steps, cells, rows, buckets, allowed)

    def among(self, buckets: frozenset[Bucket]) -> np.ndarray:
        return self.allowed & np.array([[bucket in buckets for bucket in own] for own in self.buckets])

    def seconds(self, costs: Costs) -> np.ndarray:
        found = [[costs.seconds(bucket) or np.inf for bucket in own] for own in self.buckets]
        return np.where(self.allowed, np.array(found), np.inf)
