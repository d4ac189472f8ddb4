"""Which examples share a row: each once, none over the border, and hardly a row more than there must be."""

import time

import numpy as np
import pytest

from jaxbatch._packer import pack, pack_rows, row_sizes


def texts(num: int, most: int) -> np.ndarray:
    """Return lengths as those of real texts: many short ones, few long ones."""
    rng = np.random.default_rng(0)
    return np.clip(np.exp(rng.normal(3.2, 0.7, num)).astype(np.int64), 1, most)


def assert_whole(rows, lengths, segments):
    """Check that every example lies in one row, apart from the others and inside."""
    placed = sorted(i for row in rows for i in row.indices)
    assert placed == list(range(len(lengths)))
    for row in rows:
        assert 1 <= len(row.indices) <= segments
        end = 0
        for index, start in zip(row.indices, row.starts, strict=True):
            assert start >= end
            end = start + int(lengths[index])
        assert end <= row.size


@pytest.mark.parametrize("seed", range(20))
def test_every_example_lies_in_one_row_inside_its_border(seed):
    rng = np.random.default_rng(seed)
    size, segments = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    lengths = rng.integers(1, size + 1, int(rng.integers(0, 60)))
    assert_whole(pack_rows(lengths, size, segments), lengths, segments)


@pytest.mark.parametrize(("most", "size"), [(128, 256), (200, 512), (128, 128)])
def test_rows_of_texts_are_within_a_hundredth_of_the_least_number(most, size):
    lengths = texts(4000, most)
    rows = pack_rows(lengths, size, 64)
    least = -(-lengths.sum() // size)
    assert len(rows) <= np.ceil(1.01 * least)


def test_a_limit_of_segments_is_kept_where_it_costs_rows():
    rows = pack_rows(np.ones(10, np.int64), 8, 2)
    assert [len(row.indices) for row in rows] == [2] * 5


def test_a_hundred_thousand_examples_are_packed_in_a_moment():
    lengths = texts(100_000, 256)
    begun = time.process_time()
    pack_rows(lengths, 512, 64)
    assert time.process_time() - begun < 2


def test_short_examples_go_to_short_rows():
    assert row_sizes(np.array([1, 32, 33, 64, 128]), (64, 128)).tolist() == [64, 64, 128, 128, 128]


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_several_sizes_hold_every_example_once(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 129, int(rng.integers(1, 200)))
    packed = pack(lengths, (32, 64, 128), (8, 8, 8))
    assert list(packed) == sorted(packed, reverse=True)
    assert all(row.size == size for size, rows in packed.items() for row in rows)
    assert_whole([row for rows in packed.values() for row in rows], lengths, 8)


def test_a_few_leftovers_ride_in_longer_rows():
    packed = pack(np.array([30, 3]), (16, 64), (8, 8))
    assert list(packed) == [64]
    assert packed[64][0].indices == (0, 1)
