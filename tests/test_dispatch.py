"""The dispatcher: right answers for examples from many threads and coroutines, in batches."""

import asyncio
import concurrent.futures
import threading
import time

import jax
import numpy as np
import pytest
from dispatching import GRID, SOON, VECTOR, Gate, eventually, normal, on_host, threads
from jax import numpy as jnp
from ragged import assert_close, unpadded

import jaxbatch as jb

WAIT = {"timeout": SOON}


def centre(x):
    return x - x.mean()


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    eventually(lambda: threads() == [])


# --- answers --------------------------------------------------------------------------------------


def test_examples_of_all_sizes_from_eight_threads_get_their_own_answers():
    run = jb.batched(lambda w, x: {"y": x * w, "top": x.max(initial=-9.0)}, (None, 0), spec=VECTOR, grid=GRID)
    xs = normal(*(np.random.default_rng(1).integers(0, 17, 240).tolist()))
    want = unpadded(
        lambda w, x: {"y": x * w, "top": x.max(initial=-9.0)}, np.float32(3), xs, in_axes=(None, 0)
    )
    with run.dispatcher(np.float32(3)) as d, concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda x: d.submit(x).result(**WAIT), xs))
    for each, expected in zip(got, want, strict=True):
        assert_close(each, expected)
    assert run.statistics().compiles <= len(GRID)


def test_results_are_those_of_a_call_and_own_their_memory():
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    xs = normal(3, 9, 16)
    with run.dispatcher() as d:
        got = [d.submit(x).result(**WAIT) for x in xs]
    assert_close(got, run(xs))
    assert all(each.base is None and each.flags.writeable for each in got)


def test_an_array_may_be_changed_right_after_it_was_submitted():
    run = jb.batched(lambda x: x * 2, spec=VECTOR, grid=jb.Grid(n=16, rows=(1, 8)))
    with run.dispatcher() as d:
        buffer, futures = np.zeros(16, np.float32), []
        for i in range(6):
            buffer[:] = i
            futures.append(d.submit(buffer))
            buffer[:] = -1
        assert [future.result(**WAIT)[0] for future in futures] == [0, 2, 4, 6, 8, 10]


def test_after_a_warm_up_nothing_is_compiled(count_compiles):
    run = jb.batched(centre, spec=VECTOR, grid=jb.Grid(n=(4, 8), rows=[1, 4]), frozen=True)
    run.warm_up()
    xs = normal(*[1, 3, 4, 5, 8] * 8)
    with count_compiles() as compiles, run.dispatcher() as d:
        for future in [d.submit(x) for x in xs]:
            future.result(**WAIT)
    assert compiles.count == 0


def test_settings_of_one_thread_hold_in_the_dispatcher_too():
    run = jb.batched(lambda x: x @ x, spec=VECTOR, grid=jb.Grid(n=4, rows=1), frozen=True)
    with jax.default_matmul_precision("float32"):
        run.warm_up()
        with run.dispatcher() as d:
            d.submit(normal(3)[0]).result(**WAIT)
    with run.dispatcher() as d, pytest.raises(jb.CompileMissError, match="frozen"):
        d.submit(normal(3)[0]).result(**WAIT)


def test_a_nan_stays_with_its_example():
    run = jb.batched(lambda x: x @ jnp.outer(x, x), spec=VECTOR, grid=jb.Grid(n=8, rows=8))
    xs = normal(*range(1, 9))
    xs[3] = np.full(4, np.nan, np.float32)
    with run.dispatcher() as d:
        got = [f.result(**WAIT) for f in [d.submit(x) for x in xs]]
    for i, (each, x) in enumerate(zip(got, xs, strict=True)):
        assert_close(each, x @ np.outer(x, x)) if i != 3 else None
        assert np.isnan(each).all() == (i == 3)


def test_empty_and_oversize_examples_run_at_their_exact_sizes():
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=[4], rows=(1, 4)), oversize="exact")
    with run.dispatcher() as d:
        futures = [d.submit(np.ones(n, np.float32)) for n in (0, 3, 9, 9, 4, 0)]
        assert [float(f.result(**WAIT)) for f in futures] == [0, 3, 9, 9, 4, 0]
        assert (bucket := futures[2].info.bucket) and bucket["n"] == 9
    assert d.statistics().completed == 6


def test_a_function_that_cannot_be_padded_runs_at_exact_sizes_where_that_was_allowed():
    fft = lambda x: jnp.abs(jnp.fft.fft(x))
    with pytest.raises(jb.MaskError, match="fft"):
        jb.batched(fft, spec=VECTOR, grid=GRID)
    run = jb.batched(lambda _, x: fft(x), (None, 0), spec=VECTOR, grid=GRID)
    with pytest.raises(jb.MaskError, match="fft"):
        run.dispatcher(1.0)
    run = jb.batched(lambda _, x: fft(x), (None, 0), spec=VECTOR, grid=GRID, on_unmaskable="exact")
    with pytest.warns(UserWarning, match="exact sizes"):
        d = run.dispatcher(1.0)
    with d:
        xs = normal(5, 5, 7)
        for x, future in zip(xs, [d.submit(x) for x in xs], strict=True):
            assert_close(future.result(**WAIT), np.abs(np.fft.fft(x)).astype(np.float32))


def test_without_a_grid_one_is_inferred_and_grows():
    run = jb.batched(centre, spec=VECTOR)
    with run.dispatcher() as d, pytest.warns(UserWarning, match="no grid was given"):
        xs = normal(3, 40, 5)
        for x in xs:
            assert_close(d.submit(x).result(**WAIT), x - x.mean())


def test_what_the_function_raises_at_some_size_is_the_error_of_such_examples_alone():
    def f(x):
        if x.shape[0] > 12:
            raise ArithmeticError("too long for me")
        return x.sum()

    run = jb.batched(f, spec=VECTOR, grid=GRID)
    with run.dispatcher() as d:
        good, bad = d.submit(np.ones(3, np.float32)), d.submit(np.ones(13, np.float32))
        assert good.result(**WAIT) == 3
        assert isinstance(bad.exception(**WAIT), ArithmeticError)
        assert d.submit(np.ones(12, np.float32)).result(**WAIT) == 12


# --- how batches form -----------------------------------------------------------------------------


def test_a_lone_example_is_not_kept_waiting_and_a_ninth_is_not_forgotten():
    run = jb.batched(centre, spec=VECTOR, grid=jb.Grid(n=4, rows=(1, 8)))
    run.warm_up()
    with run.dispatcher(max_delay=0.02) as d:
        lone = d.submit(np.ones(2, np.float32))
        lone.result(**WAIT)
        assert lone.info.waited is not None and lone.info.waited <= 0.02 + 0.05
        futures = [d.submit(np.ones(2, np.float32)) for _ in range(9)]
        assert len([f.result(**WAIT) for f in futures]) == 9


def test_what_comes_while_the_device_is_busy_runs_together():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=(1, 8)))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1) as d:
        first = d.submit(np.ones(1, np.float32))
        assert gate.entered.wait(SOON)
        mates = [d.submit(np.ones(1, np.float32)) for _ in range(8)]
        gate.open()
        [f.result(**WAIT) for f in mates]
    assert (first.info.mates, {f.info.mates for f in mates}) == (0, {7})
    info = mates[0].info
    assert (info.state, info.lengths, info.bucket) == ("done", {"n": 1}, jb.Bucket(n=4, rows=8))
    parts = [info.queued, info.waited, info.ran]
    assert info.total == pytest.approx(sum(part for part in parts if part is not None))
    assert parts[0] and parts[0] > 0 and info.attempts == 1


def test_a_cold_bucket_does_not_hold_up_a_warm_one():
    begun, go_on = threading.Event(), threading.Event()

    def f(x):
        if isinstance(x.shape[0], int) and x.shape[0] == 16:  # traced at this size: in the background
            begun.set()
            assert go_on.wait(SOON)
        return x.sum(1)

    run = jb.batched(
        lambda x, lengths: f(x), spec=VECTOR, grid=jb.Grid(n=[4, 16], rows=[1]), per_example=False
    )
    run.warm_up(lengths=[4], measure=False)
    slow = run._engine.executables.get

    def held(key, build, **options):
        if dict(key.sizes)["n"] == 16 and key not in run._engine.executables:
            begun.set()
            assert go_on.wait(SOON)
        return slow(key, build, **options)

    run._engine.executables.get = held
    with run.dispatcher() as d:
        cold = d.submit(np.ones(16, np.float32))
        assert begun.wait(SOON)
        for _ in range(20):
            assert d.submit(np.ones(4, np.float32)).result(**WAIT) == 4
        assert not cold.done()
        go_on.set()
        assert cold.result(**WAIT) == 16


def test_several_dispatchers_share_a_device():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1) as one, run.dispatcher(in_flight=1) as two:
        first = one.submit(np.ones(1, np.float32))
        assert gate.entered.wait(SOON)
        second = two.submit(np.ones(2, np.float32))
        time.sleep(0.05)
        assert len(gate.batches) == 1, "the device is busy for both"
        gate.open()
        assert (first.result(**WAIT), second.result(**WAIT)) == (1, 2)


# --- coroutines -----------------------------------------------------------------------------------


def test_coroutines_await_results_and_cancel_what_they_no_longer_want():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)

    async def main(d):
        first = asyncio.ensure_future(d(np.full(1, 1, np.float32)))
        while not gate.entered.is_set():
            await asyncio.sleep(0.01)
        unwanted = asyncio.ensure_future(d(np.full(1, 2, np.float32)))
        wrapped = asyncio.wrap_future(d.submit(np.full(1, 3, np.float32)))
        await asyncio.sleep(0.01)
        unwanted.cancel()
        gate.open()
        return await asyncio.gather(first, wrapped, unwanted, return_exceptions=True)

    with run.dispatcher(in_flight=1) as d:
        one, three, cancelled = asyncio.run(asyncio.wait_for(main(d), SOON))
    assert (one, three) == (1, 3) and isinstance(cancelled, asyncio.CancelledError)
    assert [float(rows[0, 0]) for rows in gate.batches] == [1, 3]


def test_a_coroutine_waits_for_room_and_the_loop_goes_on():
    run = on_host(lambda rows: time.sleep(0.02), jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)

    async def main(d):
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.002)
                ticks += 1

        ticker = asyncio.ensure_future(tick())
        got = await asyncio.gather(*[d(np.full(1, i, np.float32)) for i in range(12)])
        late = asyncio.gather(
            *[d(np.ones(1, np.float32), deadline=0.001) for _ in range(4)], return_exceptions=True
        )
        assert any(isinstance(each, jb.DeadlineError) for each in await late)
        ticker.cancel()
        return got, ticks

    with run.dispatcher(max_pending=2, in_flight=1) as d:
        got, ticks = asyncio.run(asyncio.wait_for(main(d), SOON))
    assert got == list(range(12)) and ticks >= 12


def test_an_event_loop_goes_on_while_programs_are_traced_compiled_and_run(monkeypatch):
    from jaxbatch import _traced

    ticks, seen, loop_thread, plain = [0], [], threading.get_ident(), _traced.Traced.build

    def build(self, *args):
        assert threading.get_ident() != loop_thread
        begin, end = ticks[0], time.perf_counter() + SOON
        while ticks[0] < begin + 5:  # it is not done before the loop went on
            assert time.perf_counter() < end
            time.sleep(0.001)
        seen.append(dict(args[0])["n"])
        return plain(self, *args)

    monkeypatch.setattr(_traced.Traced, "build", build)

    async def main(d):
        async def tick():
            while True:
                await asyncio.sleep(0.001)
                ticks[0] += 1

        ticker = asyncio.ensure_future(tick())
        got = await asyncio.gather(*[d(np.ones(n, np.float32)) for n in (3, 4, 9, 16)])
        ticker.cancel()
        return got

    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=[4, 16], rows=[1]))
    with run.dispatcher() as d:
        assert asyncio.run(asyncio.wait_for(main(d), SOON)) == [3, 4, 9, 16]
    assert 16 in seen
