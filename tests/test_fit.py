import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxbatch import Grid
from jaxbatch._fit import _lower_hull, _scanned_hull, _splits, best_ladder

# How long an example takes says nothing on a busy machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

few_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=12)
many_lengths = st.lists(st.integers(0, 5000), min_size=1, max_size=300)
weighted = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=60)
pairs = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=7)


def padded_cells(grid, lengths):
    """Sum the cells that the grid's sizes take up, over all examples."""
    columns = [np.asarray(lengths[dim]) for dim in grid.dims]
    sizes = [
        np.array(ladder)[np.searchsorted(ladder, own)]
        for ladder, own in zip(grid.ladders, columns, strict=True)
    ]
    return int(np.prod(sizes, axis=0).sum())


def ladders_of(lengths, max_sizes, multiple_of):
    """Yield every ladder worth a try: rounded lengths, the largest always among them."""
    values = sorted({max(-(-length // multiple_of), 1) * multiple_of for length in lengths})
    for num in range(min(max_sizes, len(values))):
        for lower in itertools.combinations(values[:-1], num):
            yield [*lower, values[-1]]


@patient
@given(few_lengths, st.integers(1, 6), st.sampled_from([1, 2, 3, 8]))
def test_in_one_dim_no_ladder_of_so_few_sizes_takes_fewer_cells(lengths, max_sizes, multiple_of):
    fitted = Grid.fit(lengths, max_sizes, multiple_of)
    possible = (Grid(n=ladder) for ladder in ladders_of(lengths, max_sizes, multiple_of))
    best = min(padded_cells(grid, {"n": lengths}) for grid in possible)
    assert padded_cells(fitted, {"n": lengths}) == best


@patient
@given(many_lengths, st.integers(1, 12), st.sampled_from([1, 8, 100]))
def test_sizes_are_few_multiples_and_the_largest_just_holds_the_largest_length(
    lengths, max_sizes, multiple_of
):
    (ladder,) = Grid.fit(np.array(lengths), max_sizes, multiple_of).ladders
    assert len(ladder) <= max_sizes
    assert all(size % multiple_of == 0 for size in ladder)
    assert 0 <= ladder[-1] - max(*lengths, 1) < multiple_of


@patient
@given(many_lengths, st.integers(0, 5))
def test_powers_of_two_of_as_many_sizes_never_take_fewer_cells(lengths, num):
    top = 1 << (max(*lengths, 1) - 1).bit_length()
    powers = Grid(n=(max(top >> num, 1), top))
    fitted = Grid.fit(lengths, max_sizes=len(powers.ladders[0]), multiple_of=1)
    assert padded_cells(fitted, {"n": lengths}) <= padded_cells(powers, {"n": lengths})


@patient
@given(many_lengths, st.integers(1, 9))
def test_one_more_size_never_takes_more_cells(lengths, max_sizes):
    cells = [padded_cells(Grid.fit(lengths, k, 1), {"n": lengths}) for k in (max_sizes, max_sizes + 1)]
    assert cells[1] <= cells[0]


@patient
@given(weighted, st.integers(1, 8))
def test_a_weight_is_as_good_as_that_many_examples(pairs, max_sizes):
    weights = dict(pairs)
    values = np.array(sorted(weights))
    counts = np.array([weights[value] for value in values])
    ladder = values[best_ladder(values, counts, max_sizes)]
    (repeated,) = Grid.fit(np.repeat(values, counts), max_sizes, multiple_of=1).ladders
    assert ladder.tolist() == list(repeated)


@patient
@given(pairs, st.integers(1, 4))
def test_in_two_dims_the_fit_is_close_to_the_best_of_all_grids(lengths, max_sizes):
    columns = dict(zip("hw", map(list, zip(*lengths, strict=True)), strict=True))
    fitted = Grid.fit(columns, max_sizes, multiple_of=1)
    best = min(
        padded_cells(Grid(h=h, w=w), columns)
        for h in ladders_of(columns["h"], max_sizes, 1)
        for w in ladders_of(columns["w"], max_sizes // len(h), 1)
    )
    assert math.prod(map(len, fitted.ladders)) <= max_sizes
    assert best <= padded_cells(fitted, columns) <= 1.1 * best


@patient
@given(pairs, st.integers(1, 12), st.sampled_from([1, 4]))
def test_dims_fitted_together_never_take_more_cells_than_dims_fitted_alone(lengths, max_sizes, multiple_of):
    columns = dict(zip("hw", map(list, zip(*lengths, strict=True)), strict=True))
    together = padded_cells(Grid.fit(columns, max_sizes, multiple_of), columns)
    for num in range(1, max_sizes + 1):
        (h,) = Grid.fit({"h": columns["h"]}, num, multiple_of).ladders
        (w,) = Grid.fit({"w": columns["w"]}, max_sizes // num, multiple_of).ladders
        assert together <= padded_cells(Grid(h=[*h], w=[*w]), columns)


def test_a_dim_that_varies_little_leaves_its_sizes_to_the_other():
    rng = np.random.default_rng(0)
    lengths = {"h": rng.integers(1, 1000, 500), "w": rng.integers(63, 65, 500)}
    assert list(map(len, Grid.fit(lengths, 8).ladders)) == [8, 1]


def test_three_dims_share_the_number_of_sizes():
    rng = np.random.default_rng(0)
    lengths = {dim: rng.integers(1, 100, 200) for dim in "abc"}
    fitted = Grid.fit(lengths, 12, multiple_of=4, rows=1)
    assert len(fitted) <= 12
    assert padded_cells(fitted, lengths) < 0.5 * padded_cells(Grid.fit(lengths, 1, 4), lengths)


def test_a_million_lengths_with_many_distinct_ones_are_fitted():
    lengths = np.random.default_rng(0).integers(1, 100_000, 1_000_000)
    (ladder,) = Grid.fit(lengths, 4, multiple_of=1).ladders
    np.testing.assert_allclose(ladder, [25_000, 50_000, 75_000, 100_000], rtol=0.05)


@patient
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-50, 50)), min_size=1, max_size=150))
def test_a_hull_in_rounds_has_the_corners_of_a_hull_point_by_point(steps):
    x, y = np.cumsum(np.array(steps, np.float64), axis=0).T
    everything = np.arange(len(x))
    hull = _lower_hull(x, y)
    np.testing.assert_array_equal(hull, _scanned_hull(everything, x.tolist(), y.tolist()))
    np.testing.assert_array_less(np.interp(x, x[hull], y[hull]) - 1e-6, y)


def test_splits_use_the_budget_up():
    assert set(_splits(2, 8)) == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert set(_splits(2, 7)) == {(1, 7), (2, 3), (3, 2), (7, 1)}
    assert (2, 2, 2) in set(_splits(3, 8)) and len(set(_splits(3, 8))) == 10


def test_the_rest_is_as_in_a_grid_and_an_array_alone_is_the_dim_n():
    fitted = Grid.fit([5, 20], max_sizes=2, rows=[1, 8], max_cells=64)
    assert fitted == Grid(n=[8, 24], rows=[1, 8], max_cells=64)
    assert Grid.fit({"n": np.array([5, 20], np.uint8)}, 2, rows=[1, 8], max_cells=64) == fitted
    assert Grid.fit([5], 1).rows == Grid(n=8).rows


def test_empty_examples_and_equal_ones_need_one_size():
    assert Grid.fit([0, 0], 4).ladders == ((8,),)
    assert Grid.fit([17] * 9, 4, multiple_of=1).ladders == ((17,),)


BAD = (
    (([],), {}, ValueError, "Grid.fit: the lengths of `n` have shape (0,); pass a flat array"),
    (({"h": [1], "w": []},), {}, ValueError, "the lengths of `w` have shape (0,)"),
    (([[1, 2]],), {}, ValueError, "the lengths of `n` have shape (1, 2)"),
    ((7,), {}, ValueError, "the lengths of `n` have shape ()"),
    (([1.0, 2.0],), {}, TypeError, "the lengths of `n` have dtype float64"),
    (([True],), {}, TypeError, "the lengths of `n` have dtype bool"),
    ((["3"],), {}, TypeError, "the lengths of `n` have dtype <U1"),
    (([4, -1],), {}, ValueError, "the lengths of `n` hold -1"),
    ((np.array([2**63], np.uint64),), {}, ValueError, "sizes go up to 2**62"),
    (({"h": [1, 2], "w": [1]},), {}, ValueError, "one length per example, got `h` 2, `w` 1"),
    (({},), {}, ValueError, "lengths of []; pass an array, or a dict"),
    (({"rows": [1]},), {}, ValueError, "lengths of ['rows']; pass an array, or a dict"),
    (([1],), {"max_sizes": 0}, ValueError, "max_sizes must be from 1"),
    (([1],), {"max_sizes": 2.0}, TypeError, "max_sizes"),
    (([1],), {"multiple_of": 0}, ValueError, "multiple_of must be from 1"),
    (([1],), {"rows": 0}, ValueError, "rows must be from 1"),
)


@pytest.mark.parametrize(("args", "options", "error", "message"), BAD)
def test_lengths_that_cannot_be_fitted_are_refused_with_the_reason(args, options, error, message):
    with pytest.raises(error) as caught:
        Grid.fit(*args, **options)
    assert message in str(caught.value)
