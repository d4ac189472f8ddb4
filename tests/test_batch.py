import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxbatch import _batch
from jaxbatch._batch import fill_value, pad_and_stack, unstack

POISONS = (0.0, 1.0, -1e30, 1e30, np.nan, np.inf, -np.inf)


@pytest.fixture
def poison(monkeypatch):
    return lambda value: monkeypatch.setattr(_batch, "padding", value)


# (dtype, padding, what its cells hold)
FILLS = (
    ("float32", 1e30, np.float32(1e30)),
    ("float16", 1e30, np.float16(np.inf)),
    ("bfloat16", -1e30, ml_dtypes.bfloat16(-1e30)),
    ("complex64", 1.0, np.complex64(1)),
    ("int32", 1e30, np.int32(2**31 - 1)),
    ("int32", -1e30, np.int32(-(2**31))),
    ("int32", np.nan, np.int32(-(2**31))),
    ("int8", np.inf, np.int8(127)),
    ("uint8", -np.inf, np.uint8(0)),
    ("uint32", 1e30, np.uint32(2**32 - 1)),
    ("bool", 0.0, np.False_),
    ("bool", 1.0, np.True_),
    ("bool", np.nan, np.True_),
)


@pytest.mark.parametrize(("dtype", "padding", "expected"), FILLS)
def test_padding_takes_the_nearest_value_of_a_dtype(poison, dtype, padding, expected):
    poison(padding)
    value = fill_value(np.dtype(dtype))
    assert value.dtype == np.dtype(dtype)
    assert value == expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_padding_with_nan_is_nan_in_inexact_dtypes(poison, dtype):
    poison(np.nan)
    assert np.isnan(fill_value(np.dtype(dtype)))


def test_rows_stand_at_the_origin_and_filler_rows_repeat_the_first(poison):
    poison(7.0)
    examples = [
        (np.array([1, 2], np.int32), np.array(0.5, np.float32)),
        (np.array([3], np.int32), np.array(2, np.float32)),
    ]
    (ids, scale), residuals = pad_and_stack(examples, np.array([[2], [1]]), [(3,), ()], 4)
    assert ids.dtype == np.int32 and scale.dtype == np.float32
    np.testing.assert_array_equal(ids, [[1, 2, 7], [3, 7, 7], [1, 2, 7], [1, 2, 7]])
    np.testing.assert_array_equal(scale, [0.5, 2, 0.5, 0.5])
    assert residuals.lengths.dtype == np.int32
    assert residuals.lengths.tolist() == [[2], [1], [2], [2]]


SHAPES = ("n", "n m", "m 3 n", "2 n 2", "", "4")


def shape_of(spec: str, lengths: dict) -> tuple:
    return tuple(lengths[e] if e in lengths else int(e) for e in spec.split())


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from(POISONS),
    st.sampled_from(["float32", "bfloat16", "int8", "bool", "complex64"]),
)
def test_unstack_undoes_pad_and_stack_whatever_the_padding_holds(lengths, filler, padding, dtype):
    rng = np.random.default_rng(0)
    named = [dict(zip("nm", each, strict=True)) for each in lengths]
    examples = [
        tuple(np.asarray(rng.integers(0, 2, shape_of(spec, own))).astype(dtype) for spec in SHAPES)
        for own in named
    ]
    before, _batch.padding = _batch.padding, padding
    try:
        shapes = [shape_of(spec, {"n": 5, "m": 8}) for spec in SHAPES]
        arrays, residuals = pad_and_stack(examples, np.array(lengths), shapes, len(examples) + filler)
    finally:
        _batch.padding = before
    assert [a.shape for a in arrays] == [(len(examples) + filler, *shape) for shape in shapes]
    columns = dict(zip("nm", residuals.lengths.T, strict=True))
    rows = unstack(arrays, residuals, [shape_of(spec, columns) for spec in SHAPES])
    assert len(rows) == len(examples)
    for leaves, example in zip(rows, examples, strict=True):
        for leaf, original in zip(leaves, example, strict=True):
            assert type(leaf) is np.ndarray and leaf.dtype == original.dtype
            np.testing.assert_array_equal(leaf, original, strict=True)


def test_a_batch_never_shares_memory_with_its_examples_or_with_another_batch():
    example = np.ones(4, np.float32)
    batches = [pad_and_stack([(example,)], np.array([[4]]), [(4,)], 1)[0][0] for _ in range(3)]
    assert not any(np.shares_memory(a, example) for a in batches)
    assert not np.shares_memory(batches[0], batches[1])
    example[:] = 5
    assert all((a == 1).all() for a in batches)


def test_results_own_their_memory_so_keeping_one_lets_its_batch_go():
    slab = np.zeros((2, 1000), np.float32)
    gone = weakref.ref(slab)
    residuals = _batch.Residuals(2, np.array([[3], [1000]], np.int32))
    kept = unstack([slab], residuals, [(residuals.lengths[:, 0],)])[0][0]
    assert kept.base is None and kept.flags.owndata and kept.flags.writeable and kept.nbytes == 12
    del slab
    gc.collect()
    assert gone() is None


def test_scalars_come_back_as_arrays_of_rank_0():
    residuals = _batch.Residuals(1, np.zeros((2, 0), np.int32))
    ((leaf,),) = unstack([np.array([1.5, 2.5], np.float32)], residuals, [()])
    assert type(leaf) is np.ndarray and leaf.shape == () and leaf == 1.5 and leaf.flags.owndata


def test_a_function_without_outputs_gives_one_empty_row_for_each_example():
    assert unstack([], _batch.Residuals(2, np.zeros((4, 0), np.int32)), []) == [[], []]
