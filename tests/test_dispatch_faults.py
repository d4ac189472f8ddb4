"""Faults in a dispatcher stay with the example at fault, and whatever happens, every future ends."""

import concurrent.futures
import threading
import time

import jax
import numpy as np
import pytest
from dispatching import GRID, SOON, VECTOR, Gate, eventually, on_host, threads

import jaxbatch as jb
from jaxbatch._dispatch import Request

WAIT = {"timeout": SOON}
BAD = 666.0


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    eventually(lambda: threads() == [])


def angry(rows: np.ndarray) -> None:
    if (rows == BAD).any():
        raise ValueError("666 is not for me")


def together(d: jb.Dispatcher, gate: Gate, examples: list[np.ndarray]) -> list[Request]:
    """Submit examples while the device is held up, so that they run in as few batches as can be."""
    d.submit(np.ones(1, np.float32))
    assert gate.entered.wait(SOON)
    futures = [d.submit(x) for x in examples]
    gate.open()
    return futures


# --- one example at fault -------------------------------------------------------------------------


def test_an_error_reaches_the_example_at_fault_alone_and_the_next_batch_is_fine():
    gate = Gate()

    def see(rows):
        gate(rows)
        angry(rows)

    run = on_host(see, jb.Grid(n=4, rows=(1, 8)))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1) as d:
        xs = [np.full(2, BAD if i == 5 else i, np.float32) for i in range(8)]
        futures = together(d, gate, xs)
        for i, future in enumerate(futures):
            if i == 5:
                with pytest.raises(Exception, match="666 is not for me"):
                    future.result(**WAIT)
            else:
                assert future.result(**WAIT) == 2 * i
        assert futures[5].info.state == "failed" and futures[5].info.attempts == 4
        assert d.submit(np.ones(3, np.float32)).result(**WAIT) == 3
    counts = d.statistics()
    assert (counts.completed, counts.failed, counts.failed_batches) == (9, 1, 4)


def test_where_all_are_at_fault_all_get_the_error():
    run = on_host(angry, jb.Grid(n=4, rows=(1, 8)))
    with run.dispatcher() as d:
        futures = [d.submit(np.full(2, BAD, np.float32)) for _ in range(11)]
        assert all("666" in str(f.exception(**WAIT)) for f in futures)


def test_an_example_that_fails_before_it_runs_is_the_callers_alone():
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=GRID)
    with run.dispatcher() as d:
        futures: list = []
        for i in range(8):
            try:
                futures.append(d.submit("text" if i == 5 else np.full(2, i, np.float32)))
            except jb.SpecError as error:
                futures.append(error)
        assert isinstance(futures[5], jb.SpecError)
        assert [f.result(**WAIT) for i, f in enumerate(futures) if i != 5] == [0, 2, 4, 6, 8, 12, 14]


def test_a_batch_without_memory_runs_in_smaller_ones_from_then_on():
    seen: list[int] = []

    def see(rows):
        seen.append(len(rows))
        if len(rows) > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 1 TB")

    run = on_host(see, jb.Grid(n=4, rows=(1, 8)))
    run.warm_up(measure=False)
    with run.dispatcher() as d:
        for _ in range(2):
            futures = [d.submit(np.full(2, i, np.float32)) for i in range(20)]
            assert [f.result(**WAIT) for f in futures] == [2 * i for i in range(20)]
            large, seen[:] = [rows for rows in seen if rows > 2], []
        assert large == [], "learned once"


def test_a_single_example_without_memory_gets_the_error_and_may_try_again():
    full = [True]

    def see(rows):
        if full[0]:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    run = on_host(see, jb.Grid(n=4, rows=1))
    with run.dispatcher() as d:
        assert "RESOURCE_EXHAUSTED" in str(d.submit(np.ones(2, np.float32)).exception(**WAIT))
        full[0] = False
        assert d.submit(np.ones(2, np.float32)).result(**WAIT) == 2


def test_a_wrong_number_of_rows_is_an_error_of_all_of_them():
    f = lambda _, x: x[1:].sum(1)
    run = jb.batched(f, (None, 0), spec=VECTOR, grid=jb.Grid(n=4, rows=[8]), per_example=False)
    with pytest.raises(jb.MaskError, match="rows - 1.*without a leading axis of rows"):
        run.dispatcher(1.0)


def test_rows_that_a_key_permutes_find_their_examples_again():
    def f(x):
        order = jax.numpy.argsort(-x[:, 0])  # as a sort by length would
        return x[order].sum(1)[jax.numpy.argsort(order)]

    run = jb.batched(f, spec=VECTOR, grid=jb.Grid(n=4, rows=[8]), per_example=False)
    with run.dispatcher() as d:
        futures = [d.submit(np.full(1, i, np.float32)) for i in range(8)]
        assert [f.result(**WAIT) for f in futures] == list(range(8))


def test_a_missing_program_in_frozen_mode_is_the_error_of_those_who_need_it():
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=[4, 16], rows=[1]), frozen=True)
    run.warm_up(lengths=[3])
    with run.dispatcher() as d:
        missing, fine = d.submit(np.ones(9, np.float32)), d.submit(np.ones(2, np.float32))
        assert isinstance(missing.exception(**WAIT), jb.CompileMissError)
        assert fine.result(**WAIT) == 2


def test_a_program_that_does_not_compile_fails_its_examples_and_the_next_one_tries_again(monkeypatch):
    from jaxbatch import _traced

    plain, broken = _traced.Traced.build, [True]

    def build(self, bucket, *args):
        if broken[0] and bucket["n"] == 16:
            raise RuntimeError("INTERNAL: no such luck")
        return plain(self, bucket, *args)

    monkeypatch.setattr(_traced.Traced, "build", build)
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=[4, 16], rows=[1]))
    with run.dispatcher() as d:
        bad, fine = d.submit(np.ones(9, np.float32)), d.submit(np.ones(2, np.float32))
        assert "no such luck" in str(bad.exception(**WAIT))
        assert fine.result(**WAIT) == 2
        broken[0] = False
        assert d.submit(np.ones(9, np.float32)).result(**WAIT) == 9


# --- the dispatcher at fault ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [AssertionError("a bug"), SystemExit(1)], ids=["bug", "exit"])
@pytest.mark.parametrize("place", ["decide", "run", "compile"])
def test_a_broken_thread_ends_all_futures_with_the_cause_and_all_threads(monkeypatch, place, error):
    from jaxbatch._dispatch import _loop, _runners
    from jaxbatch._online import Planner

    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=GRID)
    if place != "compile":
        run.warm_up(measure=False)

    def broken(*_, **__):
        raise error

    if place == "decide":
        monkeypatch.setattr(Planner, "decide", broken)
    elif place == "run":
        monkeypatch.setattr(_runners.Work, "_deliver", broken)
    else:
        monkeypatch.setattr(_loop.Loop, "_report_made", broken)
    d = run.dispatcher()
    futures: list[Request] = []
    try:
        for _ in range(20):
            futures.append(d.submit(np.ones(3, np.float32)))
    except jb.DispatcherClosedError:
        pass
    for future in futures:
        caught = future.exception(**WAIT)
        assert isinstance(caught, jb.DispatcherClosedError) and caught.__cause__ is error
    eventually(lambda: d.closed and threads() == [])
    with pytest.raises(jb.DispatcherClosedError, match=f"broke.*{type(error).__name__}"):
        d.submit(np.ones(3, np.float32))
    d.close()
    assert d.statistics().failed == len(futures)


# --- everything at once ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_every_future_ends_whatever_happens(seed):
    from tools.soak_dispatcher import soak

    result = soak(seed, events=300)
    assert result.open == 0 and result.wrong == 0, result
    assert result.slowest_end < 30, "bounded, on a machine that may be busy"


def test_a_close_from_all_sides_is_one_close():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    d = run.dispatcher(in_flight=1)
    futures = [d.submit(np.ones(1, np.float32)) for _ in range(5)]
    assert gate.entered.wait(SOON)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        closes = [pool.submit(d.close, cancel_pending=i % 2 == 0) for i in range(8)]
        time.sleep(0.02)
        gate.open()
        for close in closes:
            close.result(**WAIT)
    assert all(f.done() for f in futures) and threads() == []


def test_a_time_line_of_the_profiler_names_each_batch(monkeypatch):
    names: list[str] = []
    plain = jax.profiler.TraceAnnotation

    def noted(name, **options):
        names.append(name)
        return plain(name, **options)

    monkeypatch.setattr(jax.profiler, "TraceAnnotation", noted)
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=4, rows=[1]))
    with run.dispatcher() as d:
        d.submit(np.ones(3, np.float32)).result(**WAIT)
    assert names[0].endswith("n=4 rows=1"), names


def test_batches_of_the_dispatcher_are_in_the_functions_statistics_too():
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=GRID)
    with run.dispatcher() as d:
        for future in [d.submit(np.ones(3, np.float32)) for _ in range(20)]:
            future.result(**WAIT)
    counts = d.statistics()
    assert run.statistics().examples == 20 == counts.completed == counts.submitted
    assert run.statistics().batches == counts.batches
    assert counts.filled_rows == 20 and counts.valid_cells == 60
    assert 0 < counts.fill <= 1 and 0 <= counts.padding_share < 1
    assert "20 submitted (20 completed)" in str(counts)
    assert counts.total.count == 20 and counts.total.p50 <= counts.total.p99 <= counts.total.max


def test_statistics_may_be_read_from_any_thread_meanwhile():
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=GRID)
    stop, errors = threading.Event(), []

    def read(d):
        while not stop.is_set():
            try:
                counts = d.statistics()
                assert counts.submitted >= sum(counts.outcomes.values())
            except Exception as error:
                errors.append(error)

    with run.dispatcher() as d:
        reader = threading.Thread(target=read, args=(d,))
        reader.start()
        for future in [d.submit(np.ones(3, np.float32)) for _ in range(300)]:
            future.result(**WAIT)
        stop.set()
        reader.join()
    assert errors == []
