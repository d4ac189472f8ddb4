"""The dispatcher's manners: who is let in, who comes first, who is cancelled or too late, and how it ends."""

import concurrent.futures
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from dispatching import GRID, SOON, VECTOR, Gate, eventually, normal, on_host, threads
from ragged import assert_close

import jaxbatch as jb

WAIT = {"timeout": SOON}


def centre(x):
    return x - x.mean()


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    eventually(lambda: threads() == [])


# --- the way in -----------------------------------------------------------------------------------


def test_an_example_that_does_not_fit_is_refused_in_the_callers_thread_and_others_go_on():
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    with run.dispatcher() as d:
        with pytest.raises(jb.SpecError, match=r"submit.*`x`"):
            d.submit(np.ones((2, 2), np.float32))
        with pytest.raises(jb.OversizeError, match=r"submit: `x` axis 0.* 17.* 16"):
            d.submit(np.ones(17, np.float32))
        with pytest.raises(TypeError, match="one example is 1 values"):
            d.submit(np.ones(2, np.float32), np.ones(2, np.float32))
        assert_close(d.submit(np.ones(2, np.float32)).result(**WAIT), np.zeros(2, np.float32))
    assert d.statistics().invalid == 2 and d.statistics().submitted == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_delay", -1.0), ("max_pending", 0), ("aging", 0.0), ("in_flight", 0)],
)
def test_a_setting_that_makes_no_sense_is_named(option, value):
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    with pytest.raises(ValueError, match=f"{option}="):
        run.dispatcher(**{option: value})


def test_shared_arguments_are_checked_when_the_dispatcher_is_made():
    run = jb.batched(lambda w, x: w * x, (None, 0), spec=VECTOR, grid=GRID)
    with pytest.raises(TypeError, match="shared arguments are w"):
        run.dispatcher()


def test_a_full_dispatcher_says_so_or_lets_the_caller_wait():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    with run.dispatcher(max_pending=3, in_flight=1, on_full="raise") as d:
        first = d.submit(np.ones(2, np.float32))
        assert gate.entered.wait(SOON)
        rest = [d.submit(np.ones(2, np.float32)) for _ in range(3)]
        with pytest.raises(jb.QueueFullError, match="3 examples of 12 cells"):
            d.submit(np.ones(2, np.float32))
        with pytest.raises(jb.QueueFullError, match=r"full for 0.01 s"):
            d.submit(np.ones(2, np.float32), on_full="block", timeout=0.01)
        blocked = concurrent.futures.ThreadPoolExecutor(1)
        late = blocked.submit(d.submit, np.ones(2, np.float32), on_full="block")
        gate.open()
        assert [f.result(**WAIT) for f in (first, *rest, late.result(**WAIT))] == [2] * 5
        blocked.shutdown()
    assert d.statistics().refused == 2


def test_pending_work_is_bounded_in_cells_and_one_large_example_still_has_room():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=[4, 64], rows=1))
    run.warm_up(measure=False)
    with run.dispatcher(max_pending_cells=10, in_flight=1, on_full="raise") as d:
        futures = [d.submit(np.ones(2, np.float32))]
        assert gate.entered.wait(SOON)
        futures += [d.submit(np.ones(2, np.float32)) for _ in range(2)]
        with pytest.raises(jb.QueueFullError, match="2 examples of 8 cells"):
            d.submit(np.ones(3, np.float32))
        gate.open()
        [f.result(**WAIT) for f in futures]
        assert d.submit(np.ones(64, np.float32)).result(**WAIT) == 64


# In a process of its own, where annotations are not checked: there a hundred thousand take half a minute.
SUBMITS = 100_000 if os.environ.get("JAXBATCH_ALL_CASES") else 10_000
MANY = """
import sys, threading, time
import numpy as np
from dispatching import on_host
import jaxbatch as jb
num, most, before = int(sys.argv[1]), 0, 0
run = on_host(lambda rows: time.sleep(1e-3), jb.Grid(n=4, rows=[64]))
run.warm_up(measure=False)
x, ended = np.ones(4, np.float32), threading.Semaphore(0)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 if sys.platform == "linux" else 0
with run.dispatcher(max_pending=100) as d:
    for i in range(num):
        d.submit(x).add_done_callback(lambda _: ended.release())
        if i % 101 == 0:
            counts = d.statistics()
            running = counts.submitted - counts.pending - sum(counts.outcomes.values())
            assert counts.in_flight <= 2 and running <= 100 + 2 * 64, counts
            most = max(most, counts.pending)
        if i == num // 3:
            before = resident()
    for _ in range(num):
        assert ended.acquire(timeout=60)
print(most, d.statistics().completed, (resident() - before) // 10**6)
"""


def test_a_hundred_thousand_submits_keep_memory_flat_by_holding_the_caller():
    command = [sys.executable, "-c", MANY, str(SUBMITS)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    most, completed, grown_mb = map(int, done.stdout.split())
    assert 32 <= most <= 100, "the caller was held, at the bound"
    assert completed == SUBMITS and grown_mb < 50


# --- cancelling, deadlines, priorities ------------------------------------------------------------


def test_a_cancelled_request_never_runs_and_its_room_is_free_again():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1, max_pending=1, on_full="raise") as d:
        running = d.submit(np.full(1, 1, np.float32))
        assert gate.entered.wait(SOON)
        assert not running.cancel()
        pending = d.submit(np.full(1, 2, np.float32))
        assert pending.cancel() and pending.cancelled() and pending.cancel()
        assert pending.info.state == "cancelled"
        assert concurrent.futures.wait([pending], SOON).done == {pending}, "waiters are told"
        eventually(lambda: d.statistics().pending == 0)
        later = d.submit(np.full(1, 3, np.float32))
        gate.open()
        assert (running.result(**WAIT), later.result(**WAIT)) == (1, 3)
    assert [float(rows[0, 0]) for rows in gate.batches] == [1, 3]
    assert d.statistics().outcomes == {"completed": 2, "failed": 0, "cancelled": 1, "expired": 0}


def test_an_expired_request_is_not_run_and_its_neighbours_are():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=4))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1) as d:
        first = d.submit(np.full(1, 1, np.float32))
        assert gate.entered.wait(SOON)
        late = d.submit(np.full(1, 2, np.float32), deadline=0.02)
        others = [d.submit(np.full(1, i, np.float32), deadline=SOON) for i in (3, 4)]
        assert isinstance(late.exception(**WAIT), jb.DeadlineError), "at its time, with the device busy"
        assert late.info.state == "expired"
        gate.open()
        assert [f.result(**WAIT) for f in (first, *others)] == [1, 3, 4]
    assert not any((rows == 2).any() for rows in gate.batches)
    assert d.statistics().expired == 1


def test_what_was_dispatched_in_time_is_delivered_however_long_it_takes():
    run = on_host(lambda rows: time.sleep(0.3), jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    with run.dispatcher() as d:
        assert d.submit(np.ones(2, np.float32), deadline=0.25).result(**WAIT) == 2


def test_a_deadline_that_passes_while_the_caller_waits_for_room_is_kept_too():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1, max_pending=1) as d:
        futures = [d.submit(np.ones(1, np.float32))]
        assert gate.entered.wait(SOON)
        futures.append(d.submit(np.ones(1, np.float32)))
        late = d.submit(np.ones(1, np.float32), deadline=0.02)
        assert isinstance(late.exception(**WAIT), jb.DeadlineError)
        gate.open()
        assert [f.result(**WAIT) for f in futures] == [1, 1]


def test_higher_priorities_run_first_in_all_buckets():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=[4, 16], rows=1))
    run.warm_up(measure=False)
    with run.dispatcher(in_flight=1, aging=100.0) as d:
        d.submit(np.full(1, 9, np.float32))
        assert gate.entered.wait(SOON)
        for value, (size, priority) in enumerate([(1, 0), (16, 1), (1, 2), (16, 3)]):
            d.submit(np.full(size, value, np.float32), priority=priority)
        gate.open()
    assert [float(rows[0, 0]) for rows in gate.batches] == [9, 3, 2, 1, 0]


# --- the way out ----------------------------------------------------------------------------------


def test_closing_runs_what_is_pending_and_a_second_close_changes_nothing():
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    d = run.dispatcher()
    futures = [d.submit(x) for x in normal(*range(1, 17))]
    d.close()
    assert all(future.done() and future.exception() is None for future in futures)
    d.close(cancel_pending=True)
    assert d.closed and threads() == []
    with pytest.raises(jb.DispatcherClosedError, match="is closed"):
        d.submit(np.ones(2, np.float32))
    assert d.statistics().completed == 16


def test_closing_can_cancel_a_hundred_that_are_pending():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    d = run.dispatcher(in_flight=1)
    running = d.submit(np.ones(1, np.float32))
    assert gate.entered.wait(SOON)
    pending = [d.submit(np.ones(1, np.float32)) for _ in range(100)]
    closer = threading.Thread(target=d.close, kwargs={"cancel_pending": True})
    closer.start()
    eventually(lambda: all(f.cancelled() for f in pending))
    assert not running.done()
    gate.open()
    closer.join(SOON)
    assert running.result(**WAIT) == 1
    assert d.statistics().cancelled == 100


def test_an_exception_in_the_block_cancels_what_is_pending():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    with pytest.raises(KeyError), run.dispatcher(in_flight=1) as d:
        d.submit(np.ones(1, np.float32))
        assert gate.entered.wait(SOON)
        pending = d.submit(np.ones(1, np.float32))
        threading.Timer(0.05, gate.open).start()
        raise KeyError
    assert pending.cancelled()


def test_a_blocked_caller_is_told_that_the_dispatcher_closed():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)
    d = run.dispatcher(in_flight=1, max_pending=1)
    futures = [d.submit(np.ones(1, np.float32))]
    assert gate.entered.wait(SOON)
    futures.append(d.submit(np.ones(1, np.float32)))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(d.submit, np.ones(1, np.float32))
        time.sleep(0.05)
        threading.Timer(0.05, gate.open).start()
        d.close()
        if blocked.exception(**WAIT) is None:  # room came before the close
            assert blocked.result().result(**WAIT) == 1
        else:
            assert isinstance(blocked.exception(), jb.DispatcherClosedError)
    assert [f.result(**WAIT) for f in futures] == [1, 1]


def test_callbacks_may_submit_and_close():
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    d = run.dispatcher(max_pending=1)
    got: list = []

    def again(future):
        if len(got) < 5:
            got.append(future.result())
            d.submit(np.ones(2, np.float32)).add_done_callback(again)
        else:
            d.close()

    d.submit(np.ones(2, np.float32)).add_done_callback(again)
    eventually(lambda: d.closed and threads() == [])
    assert len(got) == 5
    d.close()


def test_what_a_callback_raises_stops_nobody():
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    with run.dispatcher() as d:
        future = d.submit(np.ones(2, np.float32))
        future.add_done_callback(lambda _: sys.exit(3))
        future.add_done_callback(lambda _: 1 / 0)
        assert d.submit(np.ones(2, np.float32)).result(**WAIT).sum() == 0


def test_a_dispatcher_that_is_dropped_delivers_and_then_its_threads_end():
    run = jb.batched(centre, spec=VECTOR, grid=GRID)
    future = run.dispatcher().submit(np.ones(2, np.float32))
    gc.collect()
    assert future.result(**WAIT).sum() == 0
    eventually(lambda: threads() == [])


def test_nothing_of_a_request_is_kept_after_its_end():
    run = jb.batched(lambda w, x: x * w, (None, 0), spec=VECTOR, grid=GRID)

    class Array(np.ndarray):
        pass

    with run.dispatcher(1.0) as d:
        x = np.ones(3, np.float32).view(Array)
        dead = weakref.ref(x)
        future = d.submit(x)
        result = weakref.ref(future.result(**WAIT))
        del x, future
        eventually(lambda: gc.collect() >= 0 and dead() is None and result() is None)


EXIT = """
import atexit
futures = []
# `atexit` runs the latest first, so what is registered before the library sees the end.
atexit.register(lambda: print("ended", sum(f.done() for f in futures), len(futures), flush=True))
import time, numpy as np, jax, jaxbatch as jb
def f(x):
    def slow(rows):
        time.sleep(0.2)
        return np.asarray(rows).sum(1)
    return jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)
run = jb.batched(f, spec=jb.spec("n", "float32"), grid=jb.Grid(n=4, rows=1), per_example=False)
run.warm_up(measure=False)
d = run.dispatcher(in_flight=1)
futures += [d.submit(np.ones(2, np.float32)) for _ in range(50)]
futures[0].result()
print("first", flush=True)
"""


def test_an_interpreter_that_ends_ends_all_futures_and_hangs_on_nothing():
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["first", "ended", "50", "50"], done.stdout + done.stderr
    assert "Error" not in done.stderr, done.stderr
