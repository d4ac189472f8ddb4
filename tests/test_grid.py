import copy
import itertools
import math
import pickle
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxbatch._errors import OversizeError
from jaxbatch._grid import Bucket, Grid, _ladder

# How long an example takes says nothing on a busy machine.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

sizes = st.integers(1, 70)
spans = st.tuples(sizes, sizes).map(lambda pair: (min(pair), max(pair)))
lists = st.lists(sizes, min_size=1, max_size=3, unique=True).map(sorted)
descriptions = st.one_of(sizes, spans, lists)


# Arguments, not grids: the types checked in tests draw random numbers, which a strategy must not do.
arguments = st.builds(
    lambda dims, rest: {**dims, **rest},
    st.dictionaries(st.sampled_from(["n", "h", "w", "t"]), descriptions, max_size=2),
    st.fixed_dictionaries({"rows": descriptions, "max_cells": st.none() | st.integers(1, 3_000)}),
)


LADDERS = (
    ((16, 512), (16, 32, 64, 128, 256, 512)),
    ((16, 317), (16, 32, 64, 128, 256, 317)),
    ((10, 40), (10, 16, 32, 40)),
    ((1, 1), (1,)),
    ((1, 2), (1, 2)),
    ((5, 6), (5, 6)),
    ((64, 64), (64,)),
    ([3, 5, 100], (3, 5, 100)),
    (7, (7,)),
    (np.int32(7), (7,)),
    ((np.int64(2), np.uint8(9)), (2, 4, 8, 9)),
)


@pytest.mark.parametrize(("description", "ladder"), LADDERS)
def test_a_description_means_this_ladder_for_dims_and_rows(description, ladder):
    assert Grid(n=description).sizes["n"] == ladder
    assert Grid(n=1, rows=description).rows == ladder


@patient
@given(spans)
def test_a_pair_means_its_ends_and_the_powers_of_two_between_them(span):
    lo, hi = span
    powers = {2**k for k in range(20)}
    assert set(Grid(n=span).sizes["n"]) == {lo, hi} | {size for size in powers if lo < size < hi}
    assert list(Grid(n=span).sizes["n"]) == sorted(set(Grid(n=span).sizes["n"]))


BAD_LADDERS = (
    (16.0, TypeError, "n must be an integer, got 16.0 (float)"),
    ((16, 64.0), TypeError, "n must be an integer, got 64.0 (float)"),
    ([np.float32(2)], TypeError, "n must be an integer"),
    (True, TypeError, "n must be an integer, got True (bool)"),
    ((np.bool_(True), 4), TypeError, "n must be an integer"),
    ("16", TypeError, "n must be an integer, got '16' (str)"),
    (None, TypeError, "n must be an integer, got None"),
    (0, ValueError, "n must be from 1 to 2**62, got 0"),
    ((0, 4), ValueError, "n must be from 1 to 2**62, got 0"),
    ([-1, 4], ValueError, "n must be from 1 to 2**62, got -1"),
    (2**63, ValueError, "n must be from 1 to 2**62"),
    ((64, 16), ValueError, "n=(64, 16) is empty"),
    ((16, 32, 64), ValueError, "Use a list for explicit sizes: n=[16, 32, 64]"),
    ([], ValueError, "must be ascending, without repeats, and not empty"),
    ([4, 2], ValueError, "n=[4, 2] must be ascending"),
    ([2, 2], ValueError, "n=[2, 2] must be ascending"),
)


# Through the helper, since the types checked in tests would refuse floats before it does.
@pytest.mark.parametrize(("description", "error", "message"), BAD_LADDERS)
def test_a_bad_description_says_what_is_wrong(description, error, message):
    with pytest.raises(error, match=re.escape(message)):
        _ladder("n", description)


@pytest.mark.parametrize("arguments", [{"max_cells": 0, "n": 1}, {"rows": 0}, {"n": [1], "rows": (8, 4)}])
def test_rows_and_max_cells_are_checked_like_sizes(arguments):
    with pytest.raises(ValueError, match="Grid: (rows|max_cells)"):
        Grid(**arguments)


def test_a_dim_must_have_a_name_that_a_spec_could_use():
    with pytest.raises(ValueError, match=re.escape("'4*h' cannot name a dim")):
        Grid(**{"4*h": 8})


@patient
@given(arguments, st.data())
def test_ceil_is_the_smallest_bucket_that_holds_the_lengths_by_brute_force(arguments, data):
    grid = Grid(**arguments)
    lengths = {dim: data.draw(st.integers(0, grid.limits[dim])) for dim in grid.dims}
    everything = (dict(zip(grid.dims, each, strict=True)) for each in itertools.product(*grid.ladders))
    holding = [each for each in everything if all(each[dim] >= lengths[dim] for dim in grid.dims)]
    bucket = grid.ceil(lengths)
    assert bucket.rows is None
    assert bucket.sizes in holding
    assert all(bucket[dim] <= each[dim] for each in holding for dim in grid.dims)


@patient
@given(arguments, st.data())
def test_ceil_indices_agrees_with_ceil_for_many_examples_at_once(arguments, data):
    grid = Grid(**arguments)
    row = st.tuples(*(st.integers(0, grid.limits[dim] + 2) for dim in grid.dims))
    rows = data.draw(st.lists(row, max_size=6))
    dtype = data.draw(st.sampled_from([np.int32, np.int64, np.uint64]))
    indices = grid.ceil_indices(np.array(rows, dtype).reshape(len(rows), len(grid.dims)))
    assert indices.dtype == np.int64
    for lengths, found in zip(rows, indices, strict=True):
        named = dict(zip(grid.dims, lengths, strict=True))
        if any(index == len(ladder) for index, ladder in zip(found, grid.ladders, strict=True)):
            with pytest.raises(OversizeError):
                grid.ceil(named)
        else:
            assert tuple(ladder[i] for i, ladder in zip(found, grid.ladders, strict=True)) == tuple(
                grid.ceil(named).values()
            )


@patient
@given(arguments)
def test_len_counts_what_iteration_yields_and_every_bucket_obeys_the_limit(arguments):
    grid = Grid(**arguments)
    buckets = list(grid)
    assert len(grid) == len(buckets) == len(set(buckets))
    limit = math.inf if grid.max_cells is None else grid.max_cells
    wanted = set()
    for chosen in itertools.product(*grid.ladders):
        rows = [each for each in grid.rows if each * math.prod(chosen) <= limit] or [1]
        wanted |= {Bucket(rows=each, **dict(zip(grid.dims, chosen, strict=True))) for each in rows}
    assert set(buckets) == wanted
    assert all(bucket.cells <= limit or bucket.rows == 1 for bucket in buckets)


@patient
@given(arguments)
def test_the_repr_of_a_grid_builds_an_equal_grid(arguments):
    grid = Grid(**arguments)
    again = eval(repr(grid))
    assert again == grid and hash(again) == hash(grid)
    assert pickle.loads(pickle.dumps(grid)) == grid


EDGES = ((0, 1), (1, 1), (2, 2), (3, 4), (63, 64), (64, 64), (65, 128), (2**50, 2**50), (2**50 + 1, 2**51))


@pytest.mark.parametrize(("length", "size"), EDGES)
def test_a_power_of_two_stays_and_one_more_takes_the_next(length, size):
    grid = Grid(n=(1, 2**51))
    assert grid.ceil({"n": length})["n"] == size
    assert grid.ladders[0][grid.ceil_indices(np.array([[length]]))[0, 0]] == size
    assert grid.ceil_indices(np.array([[length]], np.uint64))[0, 0] == grid.sizes["n"].index(size)


def test_lengths_that_float64_cannot_tell_apart_take_different_buckets():
    grid = Grid(n=[2**53, 2**54])
    assert grid.ceil_indices(np.array([[2**53], [2**53 + 1]], np.uint64))[:, 0].tolist() == [0, 1]


def test_an_oversize_error_carries_all_lengths_and_limits_and_says_what_to_do():
    grid = Grid(n=(1, 64), m=8)
    with pytest.raises(OversizeError) as caught:
        grid.ceil({"m": 3, "n": 70})
    assert str(caught.value) == (
        "dim `n` has length 70; the largest bucket holds 64. Extend the grid or split the example."
    )
    assert caught.value.lengths == {"n": 70, "m": 3}
    assert caught.value.limits == {"n": 64, "m": 8}
    with pytest.raises(OversizeError, match="dim `n` has length 65.*and dim `m` has length 9"):
        grid.ceil({"n": 65, "m": 9})


BAD_LENGTHS = (
    ({}, ValueError, "expected lengths of ['n'], got []"),
    ({"n": 1, "m": 1}, ValueError, "expected lengths of ['n'], got ['n', 'm']"),
    ({"n": -1}, ValueError, "the length of `n` is -1, below 0"),
    ({"n": True}, TypeError, "the length of `n` must be an integer, got True"),
)


@pytest.mark.parametrize(("lengths", "error", "message"), BAD_LENGTHS)
def test_ceil_refuses_wrong_names_and_numbers(lengths, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Grid(n=8).ceil(lengths)


@pytest.mark.parametrize("lengths", [np.zeros((2, 1)), np.zeros(2, int), np.zeros((2, 2), int)])
def test_ceil_indices_refuses_floats_and_other_shapes(lengths):
    with pytest.raises(ValueError, match=re.escape("expected integers of shape [num, 1], got")):
        Grid(n=8).ceil_indices(lengths)


def test_rows_fit_under_max_cells_and_one_row_always_is_there():
    grid = Grid(n=(16, 512), rows=(1, 64), max_cells=1024)
    assert grid.rows_for({"n": 16}) == (1, 2, 4, 8, 16, 32, 64)
    assert grid.rows_for([512]) == (1, 2)
    assert Grid(n=512, rows=8, max_cells=100).rows_for((512,)) == (1,)
    assert list(Grid(n=[8, 512], rows=8, max_cells=100)) == [Bucket(n=8, rows=8), Bucket(n=512, rows=1)]


def test_a_grid_without_dims_still_has_rows():
    assert [bucket.rows for bucket in Grid(rows=(1, 4))] == [1, 2, 4]
    assert Grid().ceil({}) == {}
    assert Grid().ceil_indices(np.zeros((3, 0), int)).shape == (3, 0)


def test_a_grid_is_frozen_and_compares_by_value():
    assert Grid(n=(16, 64)) == Grid(n=[16, 32, 64]) != Grid(n=(16, 65))
    assert len({Grid(n=(16, 64)), Grid(n=[16, 32, 64]), Grid(n=8)}) == 2
    with pytest.raises(AttributeError):
        Grid(n=8).rows = (1,)  # pyright: ignore[reportAttributeAccessIssue]  # frozen: that is the test
    assert repr(Grid(n=(16, 317), m=[3, 5], k=4, max_cells=99)) == (
        "Grid(n=(16, 317), m=[3, 5], k=4, rows=(1, 64), max_cells=99)"
    )
    assert Grid(n=(16, 317)).bounds == {"n": (1, 317)}


def test_infer_takes_powers_of_two_up_to_the_longest_and_at_least_one():
    assert Grid.infer({"n": np.array([3, 64]), "m": [65]}) == Grid(n=(1, 64), m=(1, 128))
    assert Grid.infer({"n": np.array([], int), "m": np.array([0, 0])}) == Grid(n=1, m=1)
    assert Grid.infer({}) == Grid()


def test_a_bucket_is_a_frozen_mapping():
    bucket = Bucket(n=np.int64(32), m=2, rows=8)
    assert repr(bucket) == "Bucket(n=32, m=2, rows=8)"
    assert dict(bucket) == {"n": 32, "m": 2, "rows": 8} == bucket
    assert (bucket.sizes, bucket.rows, bucket.cells) == ({"n": 32, "m": 2}, 8, 512)
    assert bucket == Bucket(m=2, n=32).with_rows(8)
    assert hash(bucket) == hash(Bucket(m=2, n=32, rows=8))
    assert bucket != Bucket(n=32, m=2)
    assert copy.deepcopy(bucket) == pickle.loads(pickle.dumps(bucket)) == bucket
    with pytest.raises(AttributeError):
        bucket.rows = 4  # pyright: ignore[reportAttributeAccessIssue]  # frozen: that is the test


def test_a_bucket_without_rows_has_no_such_key():
    bucket = Bucket(n=32)
    assert repr(bucket) == "Bucket(n=32)" and "rows" not in bucket and bucket.cells == 32
    with pytest.raises(KeyError, match="rows"):
        bucket["rows"]
