"""`layout="auto"`: padded or packed, whichever is predicted to take less; and how packed rows are planned."""

import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from ragged import assert_close, normals, unpadded, weights

import jaxbatch as jb
from jaxbatch._packed_plan import plan_packed
from jaxbatch._plan import Means

SPEC = jb.spec("n, 4", "float32")
W = weights(4, 4)
GRID = jb.Grid(n=[8, 32], rows=[1, 4])


def embed(w, x):
    return jnp.tanh(x @ w).mean(0)


def auto(f=embed, grid=GRID, **options):
    return jb.batched(f, (None, 0), spec=SPEC, grid=grid, layout="auto", **options)


def costs(padded, packed, *, segments=None):
    """Return costs of one row of 32 cells; others follow by their cells."""
    grid = GRID if segments is None else jb.Grid(n=[8, 32], rows=[1, 4], segments=segments)
    of = {jb.Bucket(n=32, rows=1): padded, grid.packed[-1].with_rows(1): packed}
    return jb.Costs({bucket: seconds for bucket, seconds in of.items() if seconds})


# --- which layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padded", "packed", "layout"), [(1e-3, 1e-3, "packed"), (1e-3, 50e-3, "padded"), (50e-3, 1e-3, "packed")]
)
def test_the_layout_of_fewer_predicted_seconds_is_taken_and_said(padded, packed, layout):
    xs = normals([9, 10, 5, 12, 20, 3], width=4)  # four rows of 32 padded, and two packed
    run = auto(costs=costs(padded, packed))
    told = run.explain([len(x) for x in xs], W)
    assert told.layout == layout and " s padded and " in str(told.layout_reason)
    assert f"layout: {layout} (predicted " in str(told)
    for i, (got, want) in enumerate(zip(run(W, xs), unpadded(embed, W, xs, in_axes=(None, 0)), strict=True)):
        assert_close(got, want, f"example {i}")
    done = run.statistics()
    assert done.layouts == {layout: 6} and done.layout_reason == told.layout_reason
    assert (told.programs, told.batches) == (done.compiles, done.batches)
    assert f"layout: 6 examples {layout} (predicted " in str(done)


def test_each_call_has_its_own_layout():
    run = auto(costs=costs(0.2, 0.3))
    run(W, normals([32] * 4, width=4))  # nothing to gain by packing
    run(W, normals([9] * 12, width=4))
    assert run.statistics().layouts == {"padded": 4, "packed": 12}


def test_what_one_layout_was_measured_at_scales_the_other_by_their_work():
    run = auto(costs=costs(1e-3, None))
    told = run.explain([9] * 12, W)
    assert told.layout == "packed" and "of which one was measured" in str(told.layout_reason)
    assert run.explain([32] * 12, W).layout == "padded"


def test_before_anything_was_measured_the_operations_decide():
    run = auto()
    assert run.explain([9] * 12, W).layout == "packed"
    told = run.explain([32] * 12, W)
    assert told.layout == "padded" and "nothing was measured; packed rows are 2." in str(told.layout_reason)


def test_a_recurrence_is_not_packed_into_long_rows():
    def last(w, x):
        return lax.scan(lambda h, v: (jnp.tanh(h @ w + v), None), jnp.zeros(4), x)[0]

    told = auto(last, jb.Grid(n=[8, 256], rows=[1, 16])).explain([8] * 16, W)
    assert told.layout == "padded"


def test_a_warm_up_measures_both_and_nothing_compiles_afterwards():
    run = auto(frozen=True)
    run.warm_up(W)
    assert run.statistics().compiles == len(GRID) + len(GRID.packed)
    assert {bucket.segments is None for bucket in run.costs.measured} == {True, False}
    for lengths in ([32, 32, 32], [9, 3, 12, 5, 7]):
        run(W, normals(lengths, width=4))
    assert run.statistics().compiles == len(GRID) + len(GRID.packed)
    assert "predicted" in str(run.statistics().layout_reason)


def test_frozen_takes_the_layout_that_has_programs():
    run = auto(costs=costs(1e-3, 50e-3), frozen=True)
    packed = jb.batched(embed, (None, 0), spec=SPEC, grid=GRID, layout="packed", key="frozen auto")
    packed.warm_up(W, lengths=[9, 9, 9])
    run = auto(costs=costs(1e-3, 50e-3), frozen=True, key="frozen auto")
    assert run.explain([9, 9, 9], W).layout_reason == "there are no programs for padded rows"
    assert len(run(W, normals([9, 9, 9], width=4))) == 3


def test_a_function_without_a_packed_form_is_padded_and_the_notes_say_why():
    spec = jb.spec("n", "float32"), jb.spec("m", "float32")
    run = jb.batched(lambda x, y: x.sum() * y, spec=spec, grid=jb.Grid(n=8, m=8), layout="auto")
    np.testing.assert_array_equal(run([np.ones(3)], [np.ones(2)])[0], [3, 3])
    assert run.statistics().layouts == {"padded": 1} and "one ragged dim" in run.statistics().notes[0]


def test_streams_of_auto_keep_their_order():
    xs = normals([9, 1, 32, 5, 8, 8, 31], width=4)
    want = unpadded(embed, W, xs, in_axes=(None, 0)) * 8
    for got, each in zip(auto().map(W, iter(xs * 8)), want, strict=True):
        assert_close(got, each)


# --- what works with which -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dispatcher", "save"])
def test_what_takes_no_lists_is_refused_packed_and_padded_with_auto(method, tmp_path):
    run = jb.batched(embed, (None, 0), spec=SPEC, grid=GRID, layout="packed")
    path = tmp_path / "f.jbx"
    with pytest.raises(ValueError, match=rf"{method}: layout='packed' is for lists; .* or with 'auto'"):
        getattr(run, method)(*([path] if method == "save" else []), W)
    x = normals([9], width=4)[0]
    if method == "save":
        auto().save(path, W, references=False)
        (got,) = jb.load(path)([x])
    else:
        with auto().dispatcher(W) as d:
            got = d.submit(x).result()
    assert_close(got, np.asarray(embed(W, x)))


def test_tuned_rows_are_those_of_packed_buckets():
    run = jb.batched(embed, (None, 0), spec=SPEC, grid=GRID, layout="packed")
    tuned = jb.Grid.tune(run, W)
    assert tuned.sizes == GRID.sizes and len(tuned.packed) <= len(GRID.packed)
    assert all(bucket.segments for bucket in run.costs.measured)


# --- rows and segments -----------------------------------------------------------------------------


def test_each_number_of_segments_is_a_program_and_the_smallest_that_holds_a_batch_runs():
    grid = jb.Grid(n=[64], rows=[1], segments=[4, 16])
    run = jb.batched(jnp.sum, spec=jb.spec("n", "float32"), grid=grid, layout="packed")
    run([np.ones(30, np.float32)] * 2)
    run([np.ones(4, np.float32)] * 16)
    assert [bucket.segments for bucket in run.statistics().buckets] == [4, 16]
    assert [float(x) for x in run([np.ones(4, np.float32)] * 17)] == [4] * 17
    assert run.statistics().compiles == len(grid.packed) == 2


def test_grids_print_and_bound_their_segments():
    assert repr(jb.Grid(n=[64], rows=2, segments=(4, 16))) == "Grid(n=64, rows=2, segments=(4, 16))"
    assert [b.segments for b in jb.Grid(n=[8, 64], rows=1, segments=[4, 16]).packed] == [4, 8, 4, 16]
    bucket = jb.Bucket(n=64, rows=2, segments=4)
    assert bucket.cells == 128 and bucket.sizes == {"n": 64} and bucket.with_rows(1).segments == 4
    assert jb.Costs.from_json(jb.Costs({bucket: 0.5}).to_json()).measured == {bucket: 0.5}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("segments", [None, (2, 16)])
def test_every_example_is_planned_once_and_rows_hold_what_they_get(known, segments):
    rng = np.random.default_rng(0)
    grid = jb.Grid(n=[16, 32, 100], rows=(1, 8), segments=segments)
    means = Means(
        jb.Costs({bucket: 1e-4 * bucket.cells for bucket in grid.packed[::2]}) if known else jb.Costs()
    )
    for num in (1, 2, 5, 40, 300):
        lengths = np.minimum(rng.geometric(0.05, num), 100)[:, None]
        jobs = plan_packed(lengths, grid, means)
        assert sorted(i for job in jobs for i in job.indices) == list(range(num))
        for job in jobs:
            most = job.bucket["segments"]
            assert job.bucket in grid.packed and job.used is not None and job.used <= job.bucket["rows"]
            rows, left, slots = 1, job.bucket["n"], most
            for length in lengths[list(job.indices), 0].tolist():
                if length > left or not slots:
                    rows, left, slots = rows + 1, job.bucket["n"], most
                left, slots = left - length, slots - 1
            assert rows == job.used


def test_known_costs_choose_the_sizes_and_the_numbers_of_rows():
    grid = jb.Grid(n=[16, 64], rows=[1, 2, 4], segments=8)
    cheap = {jb.Bucket(n=64, rows=r, segments=8): 1e-3 * r for r in (1, 2, 4)}
    dear = {jb.Bucket(n=16, rows=r, segments=8): 1.0 for r in (1, 2, 4)}
    jobs = plan_packed(np.full((6, 1), 8), grid, Means(jb.Costs({**cheap, **dear})))
    assert [dict(job.bucket) for job in jobs] == [{"n": 64, "rows": 1, "segments": 8}]
    frozen = Means(ready=frozenset([jb.Bucket(n=16, rows=1, segments=8)]), frozen=True)
    assert len(plan_packed(np.full((6, 1), 8), grid, frozen)) == 3
