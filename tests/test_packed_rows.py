"""`layout="packed"`: the same results in the same order, in rows that examples share."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from ragged import assert_close, normals, unpadded, weights

import jaxbatch as jb
from jaxbatch._packed_rows import lay_out
from jaxbatch.testing import POISONS, padding_value

GRID = jb.Grid(n=[16, 64], rows=(1, 4))
SPEC = jb.spec("n, 8", "float32")
W = weights(8, 8)
LENGTHS = (3, 17, 1, 64, 30, 30, 5, 9, 9, 3, 12, 1)


def attend(w, x):
    h = jax.nn.softmax((x @ w) @ x.T) @ x
    return {"tokens": h, "vector": h.mean(0), "size": x.shape[0], "rest": x[1:]}


def packed(f=attend, **options):
    return jb.batched(f, (None, 0), spec=SPEC, grid=GRID, layout="packed", **options)


def test_results_are_those_of_each_example_alone_and_in_order():
    xs = normals(LENGTHS, width=8)
    run, want = packed(), unpadded(attend, W, xs, in_axes=(None, 0))
    for poison in POISONS:
        with padding_value(poison):
            got = run(W, xs)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_close(a, b, f"example {i}, {poison} around")


def test_rows_hold_several_examples_and_hardly_any_padding():
    xs = normals([20, 12] * 40, width=8)
    run = jb.batched(attend, (None, 0), spec=SPEC, grid=jb.Grid(n=[32], rows=[4]), layout="packed")
    run(W, xs)
    found = run.statistics()
    assert found.examples == 80 and found.batches == 10 and found.compiles == 1
    assert found.padding_share == 0
    assert found.valid_cells == 80 * 16


def test_explain_says_what_a_run_then_does():
    xs = normals(LENGTHS, width=8)
    run = packed()
    told = run.explain([len(x) for x in xs], W)
    run(W, xs)
    done = run.statistics()
    assert (told.programs, told.batches) == (done.compiles, done.batches)
    assert told.padding_share == pytest.approx(done.padding_share)


def test_nothing_compiles_after_a_warm_up():
    xs = normals(LENGTHS, width=8)
    run = packed(frozen=True)
    run.warm_up(W)
    bound = len(GRID.packed) + 1  # and a padded one for what may run again
    assert run.statistics().compiles == bound
    xs[3][5] = np.nan
    results, want = list(run.map(W, xs)) + run(W, xs), unpadded(attend, W, xs, in_axes=(None, 0)) * 2
    for i, (a, b) in enumerate(zip(results, want, strict=True)):
        assert_close(a, b, f"example {i}")
    assert run.statistics().compiles == bound
    assert 2 <= run.statistics().run_again < len(xs)


def test_an_example_with_something_not_finite_does_not_reach_its_row_mates():
    xs = normals((5, 6, 7), width=8)
    xs[1][2, 3] = np.nan
    run = packed()
    got = run(W, xs)
    for i, (a, b) in enumerate(zip(got, unpadded(attend, W, xs, in_axes=(None, 0)), strict=True)):
        assert_close(a, b, f"example {i}")
    assert np.isnan(got[1]["vector"]).all() and np.isfinite(got[0]["vector"]).all()
    done = run.statistics()
    assert done.run_again == 2 and done.examples == 3
    assert [bucket.segments for bucket in done.buckets] == [None, 2] and done.compiles == 2


def test_examples_of_no_cell_and_errors_have_their_places():
    xs = normals((5, 70, 3), width=8)
    got = packed()(W, xs, errors="return")
    assert isinstance(got[1], jb.OversizeError)
    np.testing.assert_allclose(got[2]["vector"], attend(W, xs[2])["vector"], atol=1e-5)
    sums = jb.batched(lambda x: x.sum(), spec=jb.spec("n", "float32"), grid=GRID, layout="packed")
    assert [float(v) for v in sums([np.ones(3), np.ones(0), np.ones(2)])] == [3, 0, 2]


def test_map_is_lazy_and_in_order():
    xs = normals(LENGTHS, width=8)
    want = unpadded(attend, W, xs, in_axes=(None, 0)) * 5
    for a, b in zip(packed().map(W, iter(xs * 5)), want, strict=True):
        assert_close(a, b)


def test_what_cannot_be_packed_is_padded_and_the_notes_say_why():
    f = lambda x, y: x.sum() * y  # noqa: E731
    spec = jb.spec("n", "float32"), jb.spec("m", "float32")
    run = jb.batched(f, spec=spec, grid=jb.Grid(n=8, m=8), layout="packed")
    (out,) = run([np.ones(3)], [np.ones(2)])
    np.testing.assert_array_equal(out, [3, 3])
    assert "packed rows need one ragged dim" in str(run.statistics())


def test_several_arguments_on_the_row_and_beside_it():
    f = lambda x, i, s, m: (x[i] * s, m @ x)  # noqa: E731
    spec = (
        jb.spec("n", "float32"),
        jb.spec("n", "int32"),
        jb.spec("", "float32"),
        jb.spec("n, n", "float32"),
    )
    rng = np.random.default_rng(0)
    lengths = (3, 1, 7, 5)
    args = (
        normals(lengths),
        [rng.integers(0, n, n).astype(np.int32) for n in lengths],
        [np.float32(k + 1) for k in range(4)],
        [rng.standard_normal((n, n)).astype(np.float32) for n in lengths],
    )
    run = jb.batched(f, spec=spec, grid=jb.Grid(n=[16], rows=[2]), layout="packed")
    for a, b in zip(run(*args), unpadded(f, *args), strict=True):
        assert_close(a, b)
    assert run.statistics().batches == 1


def test_the_grid_may_limit_the_examples_of_a_row():
    run = jb.batched(
        jnp.sum, spec=jb.spec("n", "float32"), grid=jb.Grid(n=[64], rows=[1], segments=2), layout="packed"
    )
    run([np.ones(2)] * 6)
    assert run.statistics().batches == 3


def test_examples_lie_one_after_the_other_and_spare_rows_repeat_the_first():
    where = lay_out(np.array([[3], [2], [4]]), 3, 6, 4)
    assert where.rows.tolist() == [0, 0, 1] and where.starts.tolist() == [0, 3, 0]
    ids, starts, lengths = where.place
    assert ids.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1], [0, 0, 0, 1, 1, -1]]
    assert lengths.tolist() == [[3, 2, 0, 0], [4, 0, 0, 0], [3, 2, 0, 0]]
    assert starts.tolist() == [[0, 3, 0, 0], [0, 0, 0, 0], [0, 3, 0, 0]]


def test_packing_without_a_grid_is_refused():
    with pytest.raises(ValueError, match="needs grid="):
        jb.batched(lambda x: x, spec=jb.spec("n", "float32"), layout="packed")
