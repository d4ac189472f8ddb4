import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbatch._grid import Bucket, Grid
from jaxbatch._plan import chunk, plan


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


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=60),
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True).map(sorted),
    max_cells=st.none() | st.integers(1, 5000),
)
def test_every_example_runs_once_where_it_fits_with_as_few_programs_as_the_policy_allows(
    lengths, rows, max_cells
):
    grid = Grid(h=(1, 40), w=[5, 17, 40], rows=rows, max_cells=max_cells)
    array = np.array(lengths, np.int64).reshape(-1, 2)
    jobs = plan(array, grid)
    assert plan(array, grid) == jobs
    assert sorted(i for job in jobs for i in job.indices) == list(range(len(lengths)))
    allowed = set(grid)
    for job in jobs:
        assert job.bucket in allowed
        assert 1 <= len(job.indices) <= job.bucket["rows"]
        for i in job.indices:
            assert job.bucket.sizes == grid.ceil(dict(zip("hw", lengths[i], strict=True))).sizes
        # No smaller allowed number of rows would have done.
        fitting = [r for r in grid.rows_for(job.bucket.sizes) if r >= len(job.indices)]
        assert job.bucket["rows"] == min(fitting)
    by_sizes: dict[tuple, list] = {}
    for job in jobs:
        by_sizes.setdefault(tuple(job.bucket.sizes.items()), []).append(job)
    for same in by_sizes.values():
        most = grid.rows_for(same[0].bucket.sizes)[-1]
        assert [len(job.indices) for job in same[:-1]] == [most] * (len(same) - 1)
        assert len({job.bucket for job in same}) <= 2
    cells = [job.bucket.cells // job.bucket["rows"] for job in jobs]
    assert cells == sorted(cells, reverse=True)


def test_chunks_of_one_size_keep_their_order():
    jobs = chunk(Bucket(n=7), list(range(5)), (1, 4))
    assert [(job.bucket["rows"], job.indices) for job in jobs] == [(4, (0, 1, 2, 3)), (1, (4,))]
