"""What happens before a run: costs, warm-up, tuning, and the plans that follow from them."""

import itertools
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbatch as jb
from jaxbatch import Bucket, Costs

GRID = jb.Grid(n=(4, 64), rows=(1, 8))


def mean_square(x):
    return jnp.mean(x * x)


def texts(*lengths: int) -> list[np.ndarray]:
    return [np.arange(1, n + 1, dtype=np.float32) for n in lengths]


def wrapped(f=mean_square, grid=GRID, **options) -> jb.Batched:
    return jb.batched(f, spec=jb.spec("n", "float32"), grid=grid, **options)


def check(run: jb.Batched, examples, f=mean_square) -> None:
    for got, example in zip(run(examples), examples, strict=True):
        np.testing.assert_allclose(got, f(jnp.asarray(example)), rtol=1e-5)


def priced(grid: jb.Grid, seconds) -> Costs:
    return Costs({bucket: float(seconds(bucket)) for bucket in grid}, {}, 1.0)


# --- warm-up ------------------------------------------------------------------------------------


def test_warming_up_measures_every_bucket_and_then_nothing_compiles():
    run = wrapped(grid=jb.Grid(n=(4, 16), rows=(1, 4)))
    assert not run.costs
    run.warm_up()
    assert set(run.costs.measured) == set(run.grid or ())
    assert all(0 < seconds < 5 for seconds in run.costs.measured.values())
    compiled = run.statistics().compiles
    check(run, texts(1, 2, 3, 4, 5, 9, 16, 16))
    assert run.statistics().compiles == compiled == len(run.grid or ())


def test_after_a_warm_up_for_lengths_a_run_of_such_examples_compiles_nothing():
    lengths = np.random.default_rng(0).integers(1, 65, 100)
    run = wrapped()
    run.warm_up(lengths=lengths)
    compiled = run.statistics().compiles
    assert run.explain(lengths).missing == 0
    check(run, texts(*lengths))
    assert run.statistics().compiles == compiled < len(GRID)


def test_other_lengths_ride_in_programs_that_exist_rather_than_wait_for_a_compile():
    run = wrapped()
    run.warm_up(lengths=[60] * 8)
    check(run, texts(3, 20))
    assert run.statistics().compiles == 1
    assert set(run.statistics().buckets) == {Bucket(n=64, rows=8)}


def test_without_measuring_plans_go_by_cells():
    run = wrapped()
    run.warm_up(lengths=[60], measure=False)
    assert not run.costs
    check(run, texts(3))
    assert set(run.statistics().buckets) == {Bucket(n=4, rows=1)}


def test_a_loop_that_data_end_is_never_run_on_made_up_data():
    def halvings(x):  # of zeros it would not end
        return jax.lax.while_loop(lambda c: c < 1.0, lambda c: c * 2.0, jnp.max(x))

    run = wrapped(halvings)
    run.warm_up(lengths=[3, 20])
    assert not run.costs and run.statistics().compiles == 2
    check(run, [np.array([0.1, 0.3], np.float32)], halvings)


def test_a_callback_is_never_called_with_made_up_data():
    seen = []

    def f(x, mask):
        total = lambda x: seen.append(x) or x.sum(axis=1)  # noqa: E731
        return jax.pure_callback(total, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)

    run = wrapped(f, per_example=False)
    run.warm_up(lengths=[3])
    assert not seen and not run.costs
    assert run(texts(3)) == [6.0]


def test_costs_of_one_run_steer_another():
    costs = priced(GRID, lambda bucket: 1.0 + 1e-6 * bucket.cells)
    run = wrapped(costs=Costs.from_json(costs.to_json()))
    check(run, texts(3, 60, 10))
    assert set(run.statistics().buckets) == {Bucket(n=64, rows=4)}


def test_a_function_that_branches_on_a_size_keeps_to_the_smallest_sizes():
    def f(x):
        return jnp.sum(x) if x.shape[0] > 8 else jnp.max(x)

    run = wrapped(f, costs=priced(GRID, lambda bucket: 1.0))
    check(run, texts(3, 60, 8, 9), f)
    assert {bucket["n"] for bucket in run.statistics().buckets} == {4, 8, 16, 64}


# --- frozen -------------------------------------------------------------------------------------


def test_frozen_runs_use_warm_buckets_only_and_miss_only_what_none_holds():
    run = wrapped(frozen=True)
    run.warm_up(lengths=[20, 20], measure=False)
    check(run, texts(3, 32, 17))
    assert set(run.statistics().buckets) == {Bucket(n=32, rows=2)}
    with pytest.raises(jb.CompileMissError, match="no program for bucket n=64, rows=1"):
        run(texts(33))


# --- never slower -------------------------------------------------------------------------------


def test_where_batching_is_measured_slower_single_rows_are_used_and_the_statistics_say_so():
    run = wrapped(costs=priced(GRID, lambda bucket: bucket["n"] * bucket["rows"] ** 1.5))
    check(run, texts(3, 4, 2))
    assert {bucket["rows"] for bucket in run.statistics().buckets} == {1}
    notes = [note for note in run.statistics().notes if "at n=4 single rows are used" in note]
    assert len(notes) == 1 and "4e+03 ms alone" in notes[0]


def test_an_outlier_drags_nobody_up():
    run = wrapped(grid=jb.Grid(n=(16, 2048)))
    check(run, texts(2000, *[9] * 7))
    by_size = {bucket["n"]: each.examples for bucket, each in run.statistics().buckets.items()}
    assert by_size == {2048: 1, 16: 7}


# --- tuning -------------------------------------------------------------------------------------


def test_a_tuned_grid_has_no_more_rows_than_pay(monkeypatch):
    from jaxbatch import _measure

    seconds = {1: 1.0, 2: 1.5, 4: 2.0, 8: 9.0}
    monkeypatch.setattr(_measure, "run_seconds", lambda _, __, bucket, ___: seconds[bucket["rows"]] * 1e-3)
    run = wrapped()
    grid = jb.Grid.tune(run)
    assert grid.sizes == GRID.sizes
    assert all(grid.rows_for(bucket.sizes) == (1, 2, 4) for bucket in grid)
    assert len(grid) == 3 * 5 == len(list(grid))


def test_programs_that_memory_cannot_hold_are_not_run(monkeypatch):
    from jaxbatch import _measure

    ran = []

    def run_seconds(program, traced, bucket, shared):
        ran.append(bucket)
        return 1e-3

    monkeypatch.setattr(_measure, "run_seconds", run_seconds)
    monkeypatch.setattr(_measure, "peak_bytes", lambda program: 10**9 if ran else 10)
    grid = jb.Grid.tune(wrapped(grid=jb.Grid(n=4, rows=(1, 8))), max_bytes=10**6)
    assert ran == [Bucket(n=4, rows=1)] and grid.rows_for([4]) == (1,)


def test_peak_bytes_cover_the_arguments():
    run = wrapped()
    run.warm_up(lengths=[60] * 8, measure=False)
    explained = run.explain([60] * 8)
    assert explained.peak_bytes is not None and explained.peak_bytes >= 8 * 64 * 4


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (jb.batched(mean_square, spec=jb.spec("n", "float32")), "without a grid"),
        (wrapped(lambda x: jax.lax.while_loop(lambda c: c < 9, lambda c: c + 1, x.sum())), "made-up data"),
    ],
)
def test_what_cannot_be_tuned_says_why(run, message):
    with pytest.raises(ValueError, match=message):
        run.best_rows()


# --- long runs ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_hundred_thousand_examples_from_a_generator_need_flat_memory():
    run = wrapped(grid=jb.Grid(n=(4, 16), rows=(1, 64)))
    lengths = np.random.default_rng(0).integers(1, 17, 100_000).tolist()
    results = run.map(np.ones(n, np.float32) for n in lengths)
    for _ in itertools.islice(results, 20_000):
        pass
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, the most so far
    assert sum(1 for _ in results) == 80_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_a_window_ends_early_where_its_examples_are_large(monkeypatch):
    from jaxbatch import _batched

    monkeypatch.setattr(_batched, "_WINDOW_BYTES", 1000)
    pulled = 0

    def source():
        nonlocal pulled
        for _ in range(100):
            pulled += 1
            yield np.ones(60, np.float32)  # 240 bytes

    results = wrapped().map(source())
    assert next(results) == 1.0 and pulled == 10
    assert sum(1 for _ in results) == 99


# --- advice -------------------------------------------------------------------------------------


def test_explanations_say_when_a_finer_ladder_repays_its_compiles():
    costs = priced(GRID, lambda bucket: 1e-4 * bucket.cells)
    few, many = np.full(8, 33), np.full(4_000, 33)
    run = wrapped(costs=costs)
    run(texts(*few))  # what the ladder at hand needs is compiled
    for lengths, verdict in ((few, "it pays from"), (many, "it pays here")):
        advice = run.explain(lengths).advice
        assert advice is not None and "max_sizes=2" in advice and verdict in advice
    assert wrapped(costs=costs).explain(np.full(8, 64)).advice is None
    assert wrapped().explain(few).advice is None
