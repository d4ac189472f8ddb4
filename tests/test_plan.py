import numpy as np
import pytest
from brute_plan import least_cost
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbatch._costs import Costs
from jaxbatch._grid import Bucket, Grid
from jaxbatch._plan import Means, chunk, plan
from jaxbatch._search import REUSE


def column(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)[:, None]


# (grid, lengths, the batches as (sizes and rows, indices))
CASES = (
    (Grid(n=(4, 16)), [], []),
    (Grid(n=(4, 16)), [3], [(dict(n=4, rows=1), (0,))]),
    # Longest first, both among batches and within one.
    (Grid(n=(4, 16)), [3, 16, 4, 9], [(dict(n=16, rows=2), (1, 3)), (dict(n=4, rows=2), (2, 0))]),
    # Full batches first, then the remainder in the smallest number of rows that holds it.
    (
        Grid(n=4, rows=(1, 2)),
        [4] * 5,
        [(dict(n=4, rows=r), i) for r, i in ((2, (0, 1)), (2, (2, 3)), (1, (4,)))],
    ),
    (Grid(n=4, rows=[1, 8]), [4] * 3, [(dict(n=4, rows=8), (0, 1, 2))]),
    # `max_cells` allows fewer rows for larger sizes.
    (
        Grid(n=(4, 16), rows=(1, 4), max_cells=16),
        [16, 15, 2, 2, 2],
        [(dict(n=16, rows=1), (0,)), (dict(n=16, rows=1), (1,)), (dict(n=4, rows=4), (2, 3, 4))],
    ),
)


@pytest.mark.parametrize(("grid", "lengths", "expected"), CASES)
def test_examples_are_grouped_by_size_longest_first(grid, lengths, expected):
    jobs = plan(column(*lengths), grid)
    assert [(dict(job.bucket), job.indices) for job in jobs] == expected


def test_two_dims_make_one_group_for_each_pair_of_sizes():
    jobs = plan(np.array([[2, 9], [9, 2], [1, 10], [16, 16]]), Grid(h=(4, 16), w=(4, 16), rows=(1, 8)))
    assert jobs[0].indices == (3,)
    assert {job.bucket: job.indices for job in jobs} == {
        Bucket(h=16, w=16, rows=1): (3,),
        Bucket(h=4, w=16, rows=2): (0, 2),
        Bucket(h=16, w=4, rows=1): (1,),
    }


def test_without_ragged_dims_rows_alone_are_planned():
    jobs = plan(np.zeros((3, 0), np.int64), Grid(rows=(1, 2)))
    assert [(dict(job.bucket), job.indices) for job in jobs] == [({"rows": 2}, (0, 1)), ({"rows": 1}, (2,))]


def test_an_example_that_does_not_fit_is_our_own_mistake():
    with pytest.raises(AssertionError, match="does not fit"):
        plan(column(17), Grid(n=(4, 16)))


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=60)
ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(sorted)


def check_jobs(jobs, lengths, grid):
    """Every example once, in a bucket of the grid that holds it, large sizes first."""
    assert sorted(i for job in jobs for i in job.indices) == list(range(len(lengths)))
    allowed = set(grid)
    for job in jobs:
        assert job.bucket in allowed
        assert 1 <= len(job.indices) <= job.bucket["rows"]
        assert all(lengths[i][k] <= job.bucket[dim] for i in job.indices for k, dim in enumerate(grid.dims))
    cells = [job.bucket.cells // job.bucket["rows"] for job in jobs]
    assert cells == sorted(cells, reverse=True)


@settings(max_examples=60)
@given(lengths=LENGTHS, rows=ROWS, max_cells=st.none() | st.integers(1, 5000))
def test_by_cells_no_plan_is_worse_than_full_batches_and_a_remainder_at_each_smallest_size(
    lengths, rows, max_cells
):
    grid = Grid(h=(1, 40), w=[5, 17, 40], rows=rows, max_cells=max_cells)
    array = np.array(lengths, np.int64).reshape(-1, 2)
    jobs, simple = plan(array, grid), plan(array, grid, Means(moves=False))
    assert plan(array, grid) == jobs
    check_jobs(jobs, lengths, grid)
    check_jobs(simple, lengths, grid)
    for job in simple:
        for i in job.indices:
            assert job.bucket.sizes == grid.ceil(dict(zip("hw", lengths[i], strict=True))).sizes
    by_sizes: dict[tuple, list] = {}
    for job in jobs:
        by_sizes.setdefault(tuple(job.bucket.sizes.items()), []).append(job)
        # No smaller allowed number of rows would have done.
        fitting = [r for r in grid.rows_for(job.bucket.sizes) if r >= len(job.indices)]
        assert job.bucket["rows"] == min(fitting)
    for same in by_sizes.values():
        most = grid.rows_for(same[0].bucket.sizes)[-1]
        assert [len(job.indices) for job in same[:-1]] == [most] * (len(same) - 1)
        assert len({job.bucket for job in same}) <= 2
    assert sum(job.bucket.cells for job in jobs) <= sum(job.bucket.cells for job in simple)
    assert len({job.bucket for job in jobs}) <= len({job.bucket for job in simple})


# (grid, lengths, the batches as (sizes and rows, indices))
RIDES = (
    # The short one takes a row that would be empty.
    (Grid(n=(4, 16), rows=[4]), [3, 16, 15, 14], [(dict(n=16, rows=4), (1, 2, 3, 0))]),
    # Not if the larger batch would have to grow by more than that.
    (Grid(n=(4, 16)), [3, 16, 15], [(dict(n=16, rows=2), (1, 2)), (dict(n=4, rows=1), (0,))]),
    # An outlier drags nobody up.
    (
        Grid(n=(16, 2048)),
        [2000, *[9] * 7],
        [(dict(n=2048, rows=1), (0,)), (dict(n=16, rows=8), (1, 2, 3, 4, 5, 6, 7))],
    ),
)


@pytest.mark.parametrize(("grid", "lengths", "expected"), RIDES)
def test_leftovers_ride_in_empty_rows_of_larger_batches(grid, lengths, expected):
    jobs = plan(column(*lengths), grid)
    assert [(dict(job.bucket), job.indices) for job in jobs] == expected


# --- by seconds ---------------------------------------------------------------------------------


def random_case(seed: int, num_dims: int) -> tuple[Grid, np.ndarray, Means]:
    """Return a small instance whose costs grow with cells, an overhead, a quadratic part and noise."""
    rng = np.random.default_rng(seed)
    sizes, num = [4, 8, 12, 16, 24, 32, 48, 64], rng.integers(1, 9)
    ladders = [np.sort(rng.choice(sizes, rng.integers(2, 4), False)).tolist() for _ in range(num_dims)]
    rows = np.sort(rng.choice([1, 2, 3, 4, 8], rng.integers(1, 4), replace=False)).tolist()
    grid = Grid(rows=rows, **dict(zip("hw", ladders, strict=False)))
    lengths = np.stack([rng.integers(1, own[-1] + 1, num) for own in ladders], 1)
    overhead, square = rng.uniform(0, 200), rng.uniform(0, 1)
    noise = {b: rng.uniform(0.9, 1.1) for b in grid}
    seconds = {b: noise[b] * (overhead + b.cells * (1 + square * max(b.sizes.values()) / 16)) for b in grid}
    ready = frozenset(b for b in grid if rng.random() < 0.5) if seed % 2 else frozenset(grid)
    return grid, lengths, Means(Costs(seconds, {}, rng.uniform(0, 3000)), ready)


@pytest.mark.parametrize("num_dims", [1, 2])
def test_plans_cost_within_two_percent_of_the_least(num_dims):
    ratios = []
    for seed in range(150):
        grid, lengths, means = random_case(seed, num_dims)
        assert means.costs.compile_seconds is not None
        charge = means.costs.compile_seconds / REUSE
        charges = {bucket: charge for bucket in grid if bucket not in means.ready}
        jobs = plan(lengths, grid, means)
        check_jobs(jobs, lengths, grid)
        cost = sum(means.costs.measured[job.bucket] for job in jobs)
        cost += sum(charges.get(bucket, 0.0) for bucket in {job.bucket for job in jobs})
        least = least_cost(lengths.tolist(), grid, means.costs.measured, charges)
        assert cost >= least * (1 - 1e-9)
        ratios.append(cost / least)
    assert np.mean(ratios) <= 1.01
    assert np.mean(np.array(ratios) > 1.02) <= 0.05


def test_a_large_plan_is_near_the_cost_that_no_plan_can_be_below():
    grid = Grid(n=(16, 512))
    costs = Costs({b: 1e-4 + b.cells * (1e-7 + b["n"] * 1e-10) for b in grid})
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, (100_000, 1)), 1, 512).astype(np.int64)
    jobs = plan(lengths, grid, Means(costs, frozenset(grid)))
    check_jobs(jobs, lengths, grid)
    own = np.array(grid.ladders[0])[grid.ceil_indices(lengths)[:, 0]]
    rate = {n: min(costs.measured[Bucket(n=n, rows=r)] / r for r in grid.rows) for n in grid.ladders[0]}
    bound = sum(rate[n] for n in own.tolist())
    assert sum(costs.measured[job.bucket] for job in jobs) <= 1.001 * bound


def priced(grid: Grid, seconds) -> Costs:
    return Costs({bucket: float(seconds(bucket)) for bucket in grid}, {}, 1.0)


def test_where_batches_are_slower_for_each_example_single_rows_are_used():
    grid = Grid(n=16, rows=(1, 8))
    costs = priced(grid, lambda bucket: bucket["rows"] ** 1.5)
    jobs = plan(column(*[10] * 5), grid, Means(costs, frozenset(grid)))
    assert [job.bucket["rows"] for job in jobs] == [1] * 5


def test_where_a_batch_costs_the_same_at_all_sizes_one_batch_is_made():
    grid = Grid(n=(4, 64), rows=(1, 8))
    costs = priced(grid, lambda bucket: 1.0 + 1e-6 * bucket.cells)
    (job,) = plan(column(3, 60, 10, 20, 2), grid, Means(costs, frozenset(grid)))
    assert job.bucket == Bucket(n=64, rows=8)


def test_an_example_waits_for_no_program_if_a_larger_one_is_ready():
    grid = Grid(n=(4, 64), rows=(1, 8))
    costs, ready = priced(grid, lambda bucket: 1e-6 * bucket.cells), frozenset([Bucket(n=32, rows=4)])
    (job,) = plan(column(3, 4), grid, Means(costs, ready))
    assert job.bucket == Bucket(n=32, rows=4)
    # It would save more than a tenth of a compile.
    jobs = plan(column(*[3] * 100_000), grid, Means(costs, ready))
    assert {job.bucket for job in jobs} == {Bucket(n=4, rows=8)}


@pytest.mark.parametrize("measured", [False, True])
def test_frozen_plans_use_what_is_ready_and_else_name_the_bucket_that_is_missing(measured):
    grid = Grid(n=(4, 64), rows=(1, 8))
    costs = priced(grid, lambda bucket: bucket.cells) if measured else Costs()
    means = Means(costs, frozenset([Bucket(n=16, rows=2), Bucket(n=32, rows=8)]), frozen=True)
    jobs = plan(column(3, 4, 20, 10, 1), grid, means)
    assert {job.bucket for job in jobs} <= means.ready
    check_jobs(jobs, [[3], [4], [20], [10], [1]], grid)
    missing = {job.bucket for job in plan(column(3, 40), grid, means)} - means.ready
    assert missing == {Bucket(n=64, rows=1)}


def test_chunks_of_one_size_keep_their_order():
    jobs = chunk(Bucket(n=7), list(range(5)), (1, 4))
    assert [(job.bucket["rows"], job.indices) for job in jobs] == [(4, (0, 1, 2, 3)), (1, (4,))]
