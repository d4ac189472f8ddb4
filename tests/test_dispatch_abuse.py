"""What users do to a dispatcher without meaning to: it stays alive, and nobody waits for ever."""

import asyncio
import concurrent.futures
import os
import pickle
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from dispatching import GRID, SOON, VECTOR, Gate, eventually, on_host, threads

import jaxbatch as jb
from jaxbatch._dispatch._room import Room

WAIT = {"timeout": SOON}
X = np.ones(3, np.float32)


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    eventually(lambda: threads() == [])


@pytest.fixture(scope="module")
def sums() -> jb.Batched:
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=GRID)
    run.warm_up(measure=False)
    return run


# --- options that are no options ------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
NOT_AN_OPTION = (ValueError, TypeError)  # in the tests, annotations are checked too, and say it first


@pytest.mark.parametrize(
    "options",
    [
        {"priority": "high"},
        {"priority": None},
        {"priority": NAN},
        {"priority": INF},
        {"priority": 10**400},
        {"priority": np.ones(2)},
        {"deadline": "soon"},
        {"deadline": NAN},
        {"timeout": NAN},
        {"timeout": "long"},
        {"on_full": "wait"},
    ],
    ids=str,
)
def test_an_option_of_one_example_that_makes_no_sense_is_its_callers_error_alone(sums, options):
    (name,) = options
    with sums.dispatcher() as d:
        before = d.submit(X)
        with pytest.raises(NOT_AN_OPTION, match=name):
            d.submit(X, **options)
        assert d.submit(X).result(**WAIT) == 3 == before.result(**WAIT)


@pytest.mark.parametrize(
    "options",
    [
        {"priority": -1e9},
        {"deadline": INF},
        {"deadline": 1e300},
        {"timeout": 1e300},
        {"timeout": -1},
    ],
    ids=str,
)
def test_extreme_options_work_as_they_say(sums, options):
    with sums.dispatcher() as d:
        assert [d.submit(X, **options).result(**WAIT) for _ in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("deadline", [0, -1, -INF])
def test_a_deadline_that_has_passed_already_is_told_and_costs_nothing(sums, deadline):
    with sums.dispatcher() as d:
        future = d.submit(X, deadline=deadline)
        assert isinstance(future.exception(**WAIT), jb.DeadlineError) and future.info.state == "expired"
        assert d.submit(X).result(**WAIT) == 3
    assert d.statistics().expired == 1


@pytest.mark.parametrize(
    "options",
    [{"max_delay": "long"}, {"max_delay": NAN}, {"aging": INF}, {"in_flight": 1.5}, {"max_pending": None}],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_named(sums, options):
    (name,) = options
    with pytest.raises(NOT_AN_OPTION, match=name):
        sums.dispatcher(**options)


@pytest.mark.parametrize("value", ["high", None, NAN, 10**400, np.ones(2)], ids=str)
def test_a_value_that_is_no_number_is_named(sums, value):
    with sums.dispatcher() as d:
        assert d._number("priority", np.float32(2)) == 2
        with pytest.raises(ValueError, match="submit: priority=.*; use a number"):
            d._number("priority", value)


def test_a_huge_max_delay_keeps_nobody_for_whom_no_mate_is_expected(sums):
    with sums.dispatcher(max_delay=1e9, target_latency=INF) as d:
        assert [d.submit(X).result(**WAIT) for _ in range(5)] == [3] * 5
        assert [f.result(**WAIT) for f in [d.submit(X) for _ in range(50)]] == [3] * 50


# --- callbacks ------------------------------------------------------------------------------------


def test_what_a_callback_raises_stops_no_other_callback_and_no_coroutine(sums):
    async def main(d):
        future = d.submit(X)
        for error in (SystemExit(3), KeyboardInterrupt(), ZeroDivisionError()):

            def fail(_, error=error):
                raise error

            future.add_done_callback(fail)
        return await asyncio.wait_for(asyncio.wrap_future(future), SOON)

    with sums.dispatcher() as d:
        assert asyncio.run(main(d)) == 3
        assert d.submit(X).result(**WAIT) == 3


def test_callbacks_that_submit_to_each_others_full_dispatchers_never_wait(sums):
    one, two = (sums.dispatcher(max_pending=1, in_flight=1) for _ in range(2))
    full: list[Exception] = []

    def passing_on(d):
        def again(_):
            try:
                d.submit(X)
            except (jb.QueueFullError, jb.DispatcherClosedError) as error:
                full.append(error)

        return again

    for _ in range(50):
        one.submit(X).add_done_callback(passing_on(two))
        two.submit(X).add_done_callback(passing_on(one))
    one.close()
    two.close()
    counts = [d.statistics() for d in (one, two)]
    assert sum(each.completed for each in counts) + len(full) == 200


def test_callbacks_that_close_each_others_dispatchers_never_wait(sums):
    one, two = (sums.dispatcher() for _ in range(2))
    both = threading.Barrier(2)

    def closing(d):
        def close(_):
            both.wait(SOON)
            d.close()

        return close

    one.submit(X).add_done_callback(closing(two))
    two.submit(X).add_done_callback(closing(one))
    eventually(lambda: threads() == [])
    one.close()
    two.close()


def test_a_callback_that_waits_for_its_own_dispatcher_is_told_so(sums):
    caught: list[BaseException | None] = []

    def waits(_):
        for method in ("result", "exception"):
            try:
                getattr(d.submit(X), method)()
            except RuntimeError as error:
                caught.append(error)

    with sums.dispatcher(in_flight=1) as d:
        d.submit(X).add_done_callback(waits)
        eventually(lambda: len(caught) == 2)
    assert all("holds up" in str(error) for error in caught)
    assert d.statistics().completed == 3


# --- room -----------------------------------------------------------------------------------------


def test_room_is_given_in_the_order_of_the_queue_and_a_large_example_is_not_passed_by():
    room = Room(10, 10)
    assert room.enter(8, 0)
    large, small = room.ask(6), room.ask(1)
    assert not room.enter(1, 0), "others wait already"
    assert not large.done() and not small.done()
    room.leave(8)
    assert large.done() and small.done() and room.cells == 7


def test_whoever_leaves_the_queue_lets_those_behind_in_and_keeps_no_room():
    room = Room(10, 10)
    assert room.enter(8, 0)
    large, small = room.ask(6), room.ask(1)
    assert room.withdraw(large) and small.done() and room.cells == 9
    assert not room.withdraw(small), "it has its room"
    room.abandon(small)
    assert (room.pending, room.cells) == (1, 8)
    assert not room.enter(6, 0.01), "it waits, and gives up"
    assert room.enter(2, 0.01)


def test_a_closed_room_lets_everybody_in():
    room = Room(1, 10)
    assert room.enter(1, None)
    tickets = [room.ask(1) for _ in range(3)]
    room.close()
    assert all(ticket.done() for ticket in tickets) and room.enter(1, None)


def test_coroutines_that_no_longer_want_to_wait_for_room_leave_none_behind():
    gate = Gate()
    run = on_host(gate, jb.Grid(n=4, rows=1))
    run.warm_up(measure=False)

    async def main(d):
        first = asyncio.ensure_future(d(X))
        while not gate.entered.is_set():
            await asyncio.sleep(0.001)
        tasks = [asyncio.ensure_future(d(X)) for _ in range(20)]
        await asyncio.sleep(0.01)
        for task in tasks[3:]:
            task.cancel()
        gate.open()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    with run.dispatcher(max_pending=1, in_flight=1) as d:
        got = asyncio.run(asyncio.wait_for(main(d), SOON))
        assert got[:4] == [3, 3, 3, 3]
        assert all(isinstance(each, asyncio.CancelledError) for each in got[4:])
        eventually(lambda: d.statistics().pending == 0)
        assert d.submit(X, on_full="raise").result(**WAIT) == 3


# --- errors ---------------------------------------------------------------------------------------


def test_a_host_that_returns_too_few_rows_is_the_error_of_that_example_and_another_dtype_is_cast():
    def see(rows):
        total = np.asarray(rows).sum(1)
        return total[1:] if (rows == 5).any() else total.astype(np.float64)

    def f(x, mask):
        shape = jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
        return jax.pure_callback(see, shape, jax.numpy.where(mask, x, 0))

    grid = jb.Grid(n=4, rows=(1, 8))
    run = jb.batched(f, spec=VECTOR, grid=grid, per_example=False, mask_arg="mask")
    with run.dispatcher() as d:
        futures = [d.submit(np.full(1, i, np.float32)) for i in range(8)]
        errors = [future.exception(**WAIT) for future in futures]
        assert [i for i, error in enumerate(errors) if error is not None] == [5]
        got = [f.result(**WAIT) for i, f in enumerate(futures) if i != 5]
        assert got == [0, 1, 2, 3, 4, 6, 7] and all(each.dtype == np.float32 for each in got)
        assert d.submit(X).result(**WAIT) == 3


def test_an_error_that_cannot_even_be_shown_is_still_that_of_its_examples():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("not even this")

    def f(x):
        if x.shape[0] > 4:
            raise Mute
        return x.sum()

    run = jb.batched(f, spec=VECTOR, grid=GRID)
    with run.dispatcher() as d:
        assert isinstance(d.submit(np.ones(9, np.float32)).exception(**WAIT), Mute)
        assert d.submit(X).result(**WAIT) == 3


def test_what_a_dispatcher_raises_or_tells_can_be_sent_to_another_process(sums):
    told: list = []
    with sums.dispatcher() as d:
        for x in (np.ones(17, np.float32), np.ones((2, 2), np.float32), "text"):
            with pytest.raises(jb.JaxbatchError) as caught:
                d.submit(x)
            told.append(caught.value)
        late = d.submit(X, deadline=0)
        told += [late.exception(**WAIT), d.submit(X).info]
    told.append(d.statistics())
    with pytest.raises(jb.DispatcherClosedError) as caught:
        d.submit(X)
    told.append(caught.value)
    for each in told:
        copy = pickle.loads(pickle.dumps(each))
        assert type(copy) is type(each) and str(copy) == str(each) and vars(copy) == vars(each)


# --- the ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancel", [True, False])
def test_a_close_while_programs_compile_cancels_at_once_or_runs_what_waits(monkeypatch, cancel):
    from jaxbatch import _traced

    begun, go_on, plain = threading.Event(), threading.Event(), _traced.Traced.build

    def build(self, *args):
        begun.set()
        assert go_on.wait(SOON)
        return plain(self, *args)

    monkeypatch.setattr(_traced.Traced, "build", build)
    d = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=GRID).dispatcher()
    futures = [d.submit(np.ones(n, np.float32)) for n in (3, 9, 16)]
    assert begun.wait(SOON)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        closing = pool.submit(d.close, cancel_pending=cancel)
        if cancel:
            eventually(lambda: all(future.cancelled() for future in futures))
        go_on.set()
        closing.result(**WAIT)
    if not cancel:
        assert [float(future.result(**WAIT)) for future in futures] == [3, 9, 16]


FORK = """
import os, signal, sys, warnings, numpy as np, jaxbatch as jb
warnings.simplefilter("ignore")  # JAX warns of forks, since it has threads of its own
run = jb.batched(lambda x: x.sum(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=4, rows=1))
d, x = run.dispatcher(max_pending=1), np.ones(2, np.float32)
assert d.submit(x).result() == 2
open_one = d._request((x,), 0, None, 0.0)
child = os.fork()
if not child:
    signal.alarm(30)
    for what in (lambda: d.submit(x), open_one.result):
        try:
            what()
            print("no error", flush=True)
        except jb.DispatcherClosedError as error:
            print("told", "forked" in str(error), flush=True)
    d.close()
    print("closed", d.closed, flush=True)
    os._exit(0)
print("child", os.waitpid(child, 0)[1], flush=True)
print("parent", d.submit(x).result(30), flush=True)
d.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_in_a_forked_process_a_dispatcher_is_closed_and_in_the_first_one_it_goes_on():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == ["told True", "told True", "closed True", "child 0", "parent 2.0"], (
        done.stdout + done.stderr
    )


BUSY_EXIT = """
import threading, time, numpy as np, jax, jaxbatch as jb
def f(x):
    y = jax.numpy.outer(x, x)
    for _ in range(20):
        y = jax.numpy.tanh(y @ y.T)
    return y.sum()
run = jb.batched(f, spec=jb.spec("n", "float32"), grid=jb.Grid(n=[16, 32, 64], rows=[1, 4]))
d = run.dispatcher()
def produce():
    try:
        while True:
            d.submit(np.ones(40, np.float32))
    except jb.DispatcherClosedError:
        pass
for _ in range(8):
    threading.Thread(target=produce, daemon=True).start()
time.sleep(0.3)
print("leaving", flush=True)
"""


def test_an_interpreter_may_end_while_producers_submit_and_programs_compile():
    done = subprocess.run([sys.executable, "-c", BUSY_EXIT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, ["leaving"]), done.stderr
    assert "Error" not in done.stderr, done.stderr
