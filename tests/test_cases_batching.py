"""Shapes, buckets, caller's arrays and long lists: what went wrong for people who batched by hand.

The cases that `test_batched`, `test_executables` and `test_grid` show are not repeated here.
"""

import itertools
import re
from typing import Any

import numpy as np
import pytest
from jax import numpy as jnp
from jaxtyping import Array, Float
from ragged import assert_close, assert_exact, normals, unpadded

import jaxbatch as jb

VECTOR = jb.spec("n", "float32")


def centre(x: Float[Array, "n"]):
    return x - x.mean()


# --- buckets --------------------------------------------------------------------------------------


def test_lengths_at_the_edges_of_buckets_take_the_smallest_that_holds_them():
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=(1, 128), rows=1))
    seen = []
    for n in (1, 2, 3, 63, 64, 65):
        before = run.statistics().buckets
        run(normals([n]))
        after = run.statistics().buckets
        (bucket,) = (b for b in after if b not in before or after[b].examples > before[b].examples)
        seen.append(bucket["n"])
    assert seen == [1, 2, 4, 64, 64, 128]
    run(normals([0]))
    assert run.statistics().exact.examples == 1


def test_an_oversize_example_in_a_stream_is_told_its_length_and_the_others_go_on():
    run = jb.batched(centre, grid=jb.Grid(n=(16, 64), rows=(1, 4)))
    xs = normals([10, 70, 20] * 5)
    got = list(run.map(iter(xs), errors="return"))
    for i, (each, want) in enumerate(zip(got, unpadded(centre, xs), strict=True)):
        if i % 3 == 1:
            assert isinstance(each, jb.OversizeError)
            assert (each.lengths, each.limits) == ({"n": 70}, {"n": 64})
            assert re.search(rf"`x\[{i}\]`.*70.*64", str(each))
        else:
            assert_close(each, want)
    assert_close(run(xs[:1]), [got[0]])


def test_a_none_and_a_missing_key_are_the_same_and_their_order_never_matters():
    def f(x):
        return x["a"] * 2 if x.get("b") is None else x["a"] + x["b"]

    run = jb.batched(f, spec={"a": VECTOR, "b": None}, grid=jb.Grid(n=[4], rows=[4]))
    a = normals([3])[0]
    got = run([{"a": a, "b": None}, {"b": None, "a": a}, {"a": a}])
    assert_close(got, [a * 2] * 3)
    assert run.statistics().compiles == 1


def test_images_of_many_sizes_portrait_and_landscape_keep_to_the_cap_and_show_their_waste(count_compiles):
    def f(x):
        return x.mean(axis=(0, 1)), x[::2, ::2, 0]

    rng = np.random.default_rng(0)
    pairs = [(16, 512), (512, 16), (17, 33), *rng.integers(16, 200, (61, 2)).tolist()]
    xs = [rng.normal(size=(h, w, 1)).astype(np.float32) for h, w in pairs]
    grid = jb.Grid(h=[32, 128, 512], w=[32, 128, 512], rows=[1, 8], max_cells=512 * 512)
    run = jb.batched(f, spec=jb.spec("h, w, 1", "float32"), grid=grid)
    heights, widths = zip(*pairs, strict=True)
    explanation = run.explain({"h": heights, "w": widths})
    with count_compiles() as compiles:
        got = run(xs)
    counts = run.statistics()
    assert compiles.count == counts.compiles == explanation.programs <= len(grid)
    assert counts.padding_share == pytest.approx(explanation.padding_share)
    sizes = [grid.ceil({"h": h, "w": w}) for h, w in pairs]
    worst = max(size["h"] * size["w"] / (h * w) for size, (h, w) in zip(sizes, pairs, strict=True))
    assert explanation.worst_pad_ratio >= worst > 1
    for (mean, small), x in zip(got, xs, strict=True):
        assert_close(small, x[::2, ::2, 0])
        assert_close(mean, x.mean(axis=(0, 1)))


# --- whose memory ---------------------------------------------------------------------------------


def aligned(n: int, value: float) -> np.ndarray:
    """Return an array at an address from which a CPU device could read without a copy."""
    raw = np.zeros(4 * n + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + 4 * n].view(np.float32)
    out[:] = value
    return out


@pytest.mark.parametrize("oversize", ["error", "exact"])
def test_the_callers_array_is_free_as_soon_as_its_example_is_taken(oversize):
    n, num = 4096, 20
    grid = jb.Grid(n=n if oversize == "error" else 16, rows=1)
    run = jb.batched(lambda x: x, spec=VECTOR, grid=grid, oversize=oversize)
    arrays = [aligned(n, i) for i in range(num)]

    def source():
        for array in arrays:
            yield array
            array[:] = -1

    for i, result in enumerate(run.map(source())):
        np.testing.assert_array_equal(result, np.full(n, i, np.float32))
    fresh = [aligned(n, i) for i in range(num)]
    results = run(fresh)
    for array in fresh:
        array[:] = -1
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, np.full(n, i, np.float32))
        assert result.base is None and result.flags.writeable


def test_results_read_at_the_end_are_those_of_their_own_batches():
    run = jb.batched(lambda x: x + 0, spec=VECTOR, grid=jb.Grid(n=1000, rows=4))
    stream = run.map(np.full(1000, i // 4, np.float32) for i in range(24))
    kept = list(stream)
    assert [float(each.mean()) for each in kept] == [i // 4 for i in range(24)]


def test_a_small_result_does_not_keep_its_large_batch_alive():
    run = jb.batched(lambda x: x[:3], spec=VECTOR, grid=jb.Grid(n=262_144, rows=1))
    (kept,) = run([np.arange(200_000, dtype=np.float32)])
    assert kept.base is None and kept.nbytes == 12 and kept.flags.writeable


# --- long lists -----------------------------------------------------------------------------------


def test_1003_rows_in_batches_of_64_come_back_in_order_and_bad_rows_leave_the_others_alone():
    rows: list[Any] = [{"x": x} for x in normals(np.random.default_rng(0).integers(1, 33, 1003).tolist())]
    rows[17] = {"x": "a text"}
    rows[18] = {}
    rows[19]["x"][:] = np.nan
    run = jb.batched(lambda row: row["x"] * 2, spec={"x": VECTOR}, grid=jb.Grid(n=[32], rows=[64]))
    got = list(run.map(iter(rows), errors="return"))
    assert len(got) == 1003
    bad = [i for i, each in enumerate(got) if isinstance(each, Exception)]
    assert bad == [17, 18]
    assert all(isinstance(got[i], jb.SpecError) and f"[{i}]" in str(got[i]) for i in bad)
    for i, each in enumerate(got):
        if i not in bad:
            np.testing.assert_array_equal(each, rows[i]["x"] * 2)
    counts = run.statistics()
    assert counts.examples == 1001 and set(counts.buckets) == {jb.Bucket(n=32, rows=64)}


def test_an_outlier_does_not_pad_its_neighbours_to_its_own_size():
    run = jb.batched(centre, grid=jb.Grid(n=(16, 2048), rows=(1, 8)))
    xs = normals([10, 12, 14, 16, 9, 11, 13, 2000])
    got = run(xs)
    assert_close(got[-1], np.asarray(xs[-1] - xs[-1].mean()))
    buckets = {bucket["n"]: counts.examples for bucket, counts in run.statistics().buckets.items()}
    assert buckets == {16: 7, 2048: 1}


def test_an_endless_source_gives_its_first_results_early():
    pulled = itertools.count()
    run = jb.batched(centre, grid=jb.Grid(n=(1, 64)))
    stream = run.map(np.full(next(pulled) % 60 + 1, 2, np.float32) for _ in itertools.count())
    first = list(itertools.islice(stream, 10))
    assert [each.shape for each in first] == [(n,) for n in range(1, 11)]
    assert next(pulled) <= 10 + 8 * 64


def test_a_function_of_fixed_sizes_only_is_batched_by_rows():
    assert_exact(
        lambda x: (x.sum(), jnp.sort(x)),
        normals([6] * 5),
        spec=jb.spec("6", "float32"),
        grid=jb.Grid(rows=[1, 4]),
    )
