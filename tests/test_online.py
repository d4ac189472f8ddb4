"""The dispatcher's decisions, in tables and in simulated time: no thread, no clock, no device."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxbatch._costs import Costs
from jaxbatch._estimates import Device, Returns, Seconds
from jaxbatch._grid import Bucket, Grid
from jaxbatch._joining import worth_joining
from jaxbatch._lanes import Kind, Lane, Waiter
from jaxbatch._online import Planner
from jaxbatch._options import OVERHEAD, Rules, worth_waiting
from tools.replay import Arrival, Policy, bulk_service, simulate, single_server

GRID = Grid(n=(16, 64), rows=(1, 8))
LINEAR = Costs({bucket: 1e-3 * bucket.cells for bucket in GRID})  # a batch costs its cells
EAGER = Rules(patient=False)  # where a test is about something else than waiting for mates
BOTH = Costs({bucket: 1e-2 + 1e-3 * bucket.cells for bucket in GRID})
FLAT = Costs({bucket: 0.01 for bucket in GRID})  # a batch costs the same, whatever it holds


def planner(rules=EAGER, costs=FLAT, programs=None, grid=GRID, moves=True) -> tuple[Planner, Kind]:
    kind = Kind(grid.dims, moves=moves)
    made = Planner(rules, lambda _, sizes: grid.rows_for(sizes), costs)
    made.compiled(kind, frozenset(grid if programs is None else programs))
    return made, kind


def add(made: Planner, kind: Kind, size: int, *arrivals: float, **options: float) -> list[Waiter]:
    waiters = [Waiter(kind, (size,), arrival, **options) for arrival in arrivals]
    for waiter in waiters:
        made.add(waiter)
    return waiters


def summary(decision) -> list[tuple[int, int, int]]:
    """Return size, rows and number of examples of each batch."""
    return [(b.bucket["n"], b.bucket["rows"], len(b.waiters)) for b in decision.batches]


def busy(made: Planner, seconds: float | None = 0.01, now: float = 0.0) -> None:
    made.device.start(object(), now, seconds)


# --- what runs now --------------------------------------------------------------------------------

# (what the test shows, costs, {size: how many wait}, batches as size, rows, examples)
IDLE = (
    ("a lone example starts at once", FLAT, {16: 1}, [(16, 1, 1)]),
    ("few fill the rows they need", FLAT, {16: 5}, [(16, 8, 5)]),
    ("the first batch is full, the rest waits for the device", FLAT, {16: 11}, [(16, 8, 8)]),
    ("two full ones may be in flight", FLAT, {16: 17}, [(16, 8, 8), (16, 8, 8)]),
    ("where rows have their price, none is left empty", BOTH, {16: 5}, [(16, 4, 4)]),
    ("where batches bring nothing there are none", LINEAR, {16: 3}, [(16, 1, 1), (16, 1, 1)]),
    ("without any cost there are as few batches as can be", Costs(), {16: 5}, [(16, 8, 5)]),
    ("shorter examples join longer ones where that costs nothing", FLAT, {16: 2, 64: 3}, [(64, 8, 5)]),
    ("also where the shorter ones come first", FLAT, {16: 4, 64: 1}, [(64, 8, 5)]),
    ("and over several sizes", FLAT, {16: 2, 32: 1, 64: 1}, [(64, 4, 4)]),
    ("but not where one after another is sooner", BOTH, {16: 1, 64: 1}, [(16, 1, 1)]),
    ("nor where there are too many", FLAT, {16: 6, 64: 3}, [(16, 8, 6)]),
    ("rows that would be empty are given to shorter ones", FLAT, {16: 3, 64: 7}, [(64, 8, 8)]),
    ("of two sizes the quicker comes first", LINEAR, {64: 1, 16: 1}, [(16, 1, 1), (64, 1, 1)]),
)


@pytest.mark.parametrize(("_", "costs", "waiting", "expected"), IDLE, ids=[case[0] for case in IDLE])
def test_an_idle_device(_, costs, waiting, expected):
    made, kind = planner(costs=costs)
    for size, num in waiting.items():
        add(made, kind, size, *[0.0] * num)
    decision = made.decide(0.0)
    assert summary(decision) == expected
    assert made.count == sum(waiting.values()) - sum(num for _, _, num in expected)


@given(st.integers(1, 32), st.integers(1, 32), st.integers(0, 64), *[st.floats(1e-3, 1.0)] * 3)
def test_joining_pays_exactly_where_the_sum_of_latencies_is_smaller(num, more, behind, one, other, joint):
    apart = [one] * num + [one + OVERHEAD + other] * (more + behind)
    together = [joint] * (num + more + behind)
    if abs(sum(apart) - sum(together)) > 1e-6:
        worth = worth_joining((num, one), (more, other), joint, behind)
        assert worth == (sum(together) < sum(apart))


def test_riders_of_a_kind_that_must_not_move_wait_for_their_own_batch():
    made, kind = planner(moves=False)
    add(made, kind, 64, 0.0, 0.0, 0.0)
    add(made, kind, 16, 0.0)
    assert summary(made.decide(0.0)) == [(64, 4, 3)]


def test_a_busy_device_gets_full_batches_only_and_others_shortly_before_it_is_free():
    made, kind = planner()
    busy(made, 0.1)
    add(made, kind, 16, *[0.0] * 3)
    decision = made.decide(0.0)
    assert summary(decision) == [] and decision.wake == pytest.approx(0.09)
    assert summary(made.decide(0.0899)) == []
    assert summary(made.decide(0.0911)) == [(16, 4, 3)]
    add(made, kind, 16, *[0.0] * 8)
    busy(made, 0.1)
    assert summary(made.decide(0.0)) == [], "two are in flight"


def test_a_busy_device_that_nothing_is_known_of_gets_full_batches_until_it_reports():
    made, kind = planner(costs=Costs())
    busy(made, None)
    add(made, kind, 16, *[0.0] * 3)
    decision = made.decide(5.0)
    assert summary(decision) == [] and decision.wake == math.inf
    add(made, kind, 16, *[0.0] * 5)
    assert summary(made.decide(5.0)) == [(16, 8, 8)]


def test_a_full_device_is_asked_again_only_for_deadlines():
    made, kind = planner(Rules(in_flight=1, patient=False))
    busy(made, 1.0)
    add(made, kind, 16, 0.0)
    assert made.decide(0.0).wake == math.inf
    add(made, kind, 16, 0.0, deadline=0.5)
    assert made.decide(0.0).wake == 0.5


# --- waiting for mates ----------------------------------------------------------------------------


@given(st.integers(1, 32), st.integers(1, 32), *[st.floats(1e-3, 1.0)] * 3, st.floats(0, 1.0))
def test_waiting_pays_exactly_where_the_sum_of_latencies_is_smaller(num, more, one, other, joint, share):
    gap = share * one  # the formula is for mates that come before the end
    start_now = [one] * num + [one - gap + other] * more
    wait = [gap + joint] * num + [joint] * more
    if abs(sum(start_now) - sum(wait)) > 1e-6:
        assert (sum(wait) < sum(start_now)) == (gap < worth_waiting((num, one), (more, other), joint))


def test_an_idle_device_waits_while_mates_are_expected_sooner_than_they_cost():
    made, kind = planner(
        Rules(max_delay=0.02)
    )  # a batch takes 10 ms whatever it holds, so one mate pays 5 ms
    waiting = add(made, kind, 16, 0.0, 0.001, 0.002)
    decision = made.decide(0.002)
    assert summary(decision) == []
    assert decision.wake == pytest.approx(0.002 + 0.01 / 4)  # the gap until which a fourth is worth it
    (batch,) = made.decide(decision.wake).batches
    assert list(batch.waiters) == waiting


def closed_loop(made: Planner, kind: Kind, callers: int, after: float, rounds: int) -> float:
    """Let callers come again `after` their results, for some batches of 10 ms; return when these are over."""
    add(made, kind, 16, *[0.0] * callers)
    now = 0.0
    for i in range(rounds):
        while not (batches := (decision := made.decide(now)).batches):
            now = decision.wake
        (batch,) = batches
        made.device.start(i, now, 0.01)
        made.running += len(batch.waiters)
        now += 0.01
        made.device.finish(i, now)
        made.running -= len(batch.waiters)
        made.delivered(len(batch.waiters), now)
        add(made, kind, 16, *[now + after] * len(batch.waiters))
        now += after
    return now


def test_callers_that_come_again_after_their_results_are_waited_for():
    made, kind = planner(Rules(max_delay=0.02, in_flight=1), grid=Grid(n=16, rows=(1, 16)))
    now = closed_loop(made, kind, 4, 0.001, 8) + 1.0
    made.take()
    made.device.start("a", now, 0.01)
    made.running = 4
    add(made, kind, 16, *[now + 0.001] * 3)  # three more callers, in the other half
    made.device.finish("a", now + 0.01)
    made.running = 0
    made.delivered(4, now + 0.01)
    decision = made.decide(now + 0.01)
    assert summary(decision) == [], "four come again in a millisecond, and a batch takes ten"
    assert decision.wake == pytest.approx(now + 0.01 + 1.5 * 0.001) and decision.enough == 4
    add(made, kind, 16, *[now + 0.011] * 4)
    assert summary(made.decide(now + 0.011)) == [(16, 8, 7)]


def test_who_does_not_come_again_in_time_is_not_waited_for():
    for after, max_delay, until in ((0.008, 1.0, None), (0.001, 1.0, 0.0015), (0.001, 0.0007, 0.0007)):
        made, kind = planner(Rules(max_delay=max_delay, in_flight=1), grid=Grid(n=16, rows=(1, 16)))
        now = closed_loop(made, kind, 4, after, 8) + 1.0
        made.take()
        add(made, kind, 16, now - 0.005)
        made.delivered(4, now)
        decision = made.decide(now)
        if until is None:
            assert summary(decision) == [(16, 1, 1)]
        else:
            assert summary(decision) == [] and decision.wake == pytest.approx(now + until)
            assert summary(made.decide(now + until + 1e-6)) == [(16, 1, 1)]
    for _ in range(3):  # callers who stay away are not expected for long
        made.delivered(1, now)
        now += 1.0
    add(made, kind, 16, now)
    made.delivered(1, now)
    assert summary(made.decide(now)) == [(16, 1, 1)]


def test_an_arrival_counts_for_the_delivery_before_it_though_it_is_told_after_the_next():
    returns = Returns()
    for i in range(8):
        returns.delivered(2, float(i))  # the device was full, and nobody looked at arrivals meanwhile
        returns.arrived(i - 0.9)
        returns.arrived(i - 0.8)
    assert returns.seconds == pytest.approx(0.2)
    assert returns.latest == (2, 7.0)


@pytest.mark.parametrize("think", [0.0005, 0.002])
def test_actors_that_wait_for_each_result_run_all_together_and_not_in_two_halves(think):
    done: list[float] = []

    def again(now):
        done.append(now)
        return Arrival(now + think * (1 + len(done) % 8 / 8), 10) if len(done) < 800 else None

    grid = Grid(n=16, rows=[1, 2, 4, 8, 16])
    costs = Costs({bucket: 0.01 for bucket in grid})
    policy = Policy("actors", rules=Rules(max_delay=0.005))
    got = simulate([Arrival(0.001 * i, 10) for i in range(8)], policy, costs, grid, again=again)
    assert np.mean(got.latency[200:]) < 0.013, "two halves that take turns are twice as late"


def test_nobody_waits_where_mates_are_rare_or_bring_nothing():
    made, kind = planner(Rules(max_delay=1.0))
    add(made, kind, 16, 0.0, 0.1)
    assert summary(made.decide(0.1)) == [(16, 2, 2)]
    made, kind = planner(Rules(max_delay=1.0), costs=LINEAR)
    add(made, kind, 16, 0.0, 1e-6)
    assert summary(made.decide(1e-6)) == [(16, 1, 1), (16, 1, 1)]


def test_no_wait_is_longer_than_max_delay_and_a_deadline_ends_it_before_it_passes():
    made, kind = planner(Rules(max_delay=0.004))
    add(made, kind, 16, 0.0, 0.001, 0.002)
    made.seconds.of(kind, Bucket(n=16, rows=4)).seconds = 1.0  # so that a mate would be worth a long wait
    assert made.decide(0.002).wake == 0.004
    assert len(made.decide(0.004).batches) == 1
    add(made, kind, 16, 0.005, 0.006, deadline=0.0085)
    assert made.decide(0.006).wake == pytest.approx(0.0065)
    assert len(made.decide(0.0066).batches) == 1


def test_a_planner_without_patience_never_waits():
    made, kind = planner(EAGER)
    add(made, kind, 16, 0.0, 1e-6)
    assert summary(made.decide(1e-6)) == [(16, 2, 2)]


# --- who comes first ------------------------------------------------------------------------------


def test_a_higher_priority_comes_first_within_a_lane_and_across_lanes():
    made, kind = planner(Rules(in_flight=1, patient=False), grid=Grid(n=(16, 64), rows=1))
    low = add(made, kind, 16, 0.0, 0.1)
    high = add(made, kind, 16, 0.2, priority=1)
    higher = add(made, kind, 64, 0.3, priority=2)
    order: list[Waiter] = []
    for _ in range(4):
        (batch,) = made.decide(0.3).batches
        order += batch.waiters
    assert order == [*higher, *high, *low]


def test_waiting_raises_an_example_above_any_stream_of_a_higher_priority():
    made, kind = planner(Rules(aging=1.0, in_flight=1, patient=False), grid=Grid(n=16, rows=1))
    (low,) = add(made, kind, 16, 0.0)
    for i in range(1, 100):
        add(made, kind, 16, 0.1 * i, priority=2)
        (batch,) = made.decide(0.1 * i).batches
        if low in batch.waiters:
            break
    assert 2.0 <= 0.1 * i <= 2.2


def test_who_would_miss_a_deadline_comes_before_others_of_the_same_priority():
    made, kind = planner(Rules(in_flight=1, patient=False), costs=LINEAR, grid=Grid(n=(16, 64), rows=1))
    add(made, kind, 16, 0.0)
    urgent = add(made, kind, 64, 0.0, deadline=0.05)
    (batch,) = made.decide(0.0).batches
    assert list(batch.waiters) == urgent


def test_a_deadline_that_passed_is_reported_and_its_neighbours_run():
    made, kind = planner()
    late = add(made, kind, 16, 0.0, deadline=1.0)
    others = add(made, kind, 16, 0.0, 0.5)
    decision = made.decide(1.0)
    assert list(decision.expired) == late
    assert [list(b.waiters) for b in decision.batches] == [others]
    assert made.decide(2.0).expired == ()


def test_what_was_cancelled_neither_runs_nor_counts():
    made, kind = planner()
    first, second = add(made, kind, 16, 0.0, 0.0)
    made.discard(first)
    made.discard(first)
    assert made.count == 1
    (batch,) = made.decide(0.0).batches
    assert batch.waiters == (second,)
    made.discard(second)
    assert made.count == 0 and made.decide(1.0).batches == ()


def test_a_queue_of_cancelled_examples_does_not_grow():
    lane = Lane(Kind(("n",)), (16,), (1,), 1.0)
    for i in range(10_000):
        waiter = Waiter(lane.kind, (16,), float(i), deadline=i + 1e6)
        lane.add(waiter)
        lane.remove(waiter)
    assert lane.count == 0 and len(lane._by_rank) < 100 and len(lane._by_arrival) < 100
    assert len(lane._by_deadline) < 100


# --- programs -------------------------------------------------------------------------------------


def test_a_cold_bucket_is_asked_for_once_and_does_not_hold_up_a_warm_one():
    warm = {Bucket(n=16, rows=r) for r in (1, 2, 4, 8)}
    made, kind = planner(programs=warm)
    add(made, kind, 64, *[0.0] * 3)
    add(made, kind, 16, 0.0)
    decision = made.decide(0.0)
    assert summary(decision) == [(16, 1, 1)]
    assert decision.wanted == ((kind, Bucket(n=64, rows=4)),)
    assert made.decide(0.1).wanted == ()
    made.compiled(kind, frozenset(warm | {Bucket(n=64, rows=4)}))
    assert summary(made.decide(0.3)) == [(64, 4, 3)]


def test_examples_of_a_cold_bucket_ride_a_larger_warm_one_meanwhile():
    made, kind = planner(programs={Bucket(n=64, rows=8)})
    add(made, kind, 16, *[0.0] * 3)
    decision = made.decide(0.0)
    assert summary(decision) == [(64, 8, 3)]


def test_a_better_program_is_asked_for_unless_it_brings_little_or_nothing_may_be_compiled():
    one = {Bucket(n=16, rows=1)}
    made, kind = planner(programs=one)
    add(made, kind, 16, *[0.0] * 8)
    assert made.decide(0.0).wanted == ((kind, Bucket(n=16, rows=8)),)
    made, kind = planner(programs=one, costs=Costs({b: 0.1 * b["rows"] for b in GRID}))
    add(made, kind, 16, *[0.0] * 8)
    assert made.decide(0.0).wanted == ()
    made, kind = planner(Rules(compiles=False, patient=False), programs=one)
    add(made, kind, 16, *[0.0] * 8)
    assert made.decide(0.0).wanted == ()
    add(made, kind, 64, 0.0)  # it has no other way, so its owner must be told that there is no program
    assert made.decide(0.0).wanted == ((kind, Bucket(n=64, rows=1)),)


def test_a_kind_that_is_not_traced_waits_without_asking():
    made, kind = planner(programs=[])
    kind.is_open = False
    add(made, kind, 16, 0.0)
    assert made.decide(0.0).wanted == ()
    kind.is_open = True
    assert len(made.decide(0.0).wanted) == 1


def test_what_ran_out_of_memory_is_never_used_again_and_fewer_rows_are():
    made, kind = planner(costs=FLAT)
    made.exhaust(kind, Bucket(n=32, rows=4))
    add(made, kind, 64, *[0.0] * 8)
    assert summary(made.decide(0.0))[0] == (64, 2, 2)
    made, kind = planner(programs=[])
    made.exhaust(kind, Bucket(n=32, rows=4))
    add(made, kind, 64, *[0.0] * 8)
    assert made.decide(0.0).wanted == ((kind, Bucket(n=64, rows=2)),)
    made.exhaust(kind, Bucket(n=16, rows=1))  # the fewest rows may always be tried
    made.compiled(kind, frozenset({Bucket(n=64, rows=1)}))
    assert summary(made.decide(0.0))[0] == (64, 1, 1)


def test_a_program_that_cannot_be_compiled_fails_those_who_have_no_other():
    made, kind = planner(programs={Bucket(n=16, rows=1)})
    stuck = add(made, kind, 64, 0.0, 0.0)
    add(made, kind, 16, 0.0)
    ((_, bucket),) = made.decide(0.0).wanted
    made.refuse(kind, bucket)
    assert made.take_stuck(kind, bucket) == stuck
    assert made.take_stuck(kind, bucket) == []
    add(made, kind, 64, 0.1)
    assert made.decide(0.1).wanted == ((kind, Bucket(n=64, rows=1)),), "the next example tries again"


# --- latency and costs ----------------------------------------------------------------------------


def test_a_target_latency_keeps_batches_short_until_somebody_is_late():
    costs = Costs({b: 0.001 * b["rows"] ** 0.9 for b in GRID})
    made, kind = planner(Rules(target_latency=0.006, patient=False), costs=costs)
    add(made, kind, 16, *[0.0] * 8)
    assert summary(made.decide(0.0))[0] == (16, 2, 2)  # 2 x 1.87 ms fits, 2 x 3.5 ms does not
    made, kind = planner(Rules(target_latency=0.006, patient=False), costs=costs)
    add(made, kind, 16, *[0.0] * 8)
    assert summary(made.decide(0.01))[0] == (16, 8, 8)


def test_seconds_follow_what_is_observed_and_guess_the_rest_from_it():
    kind, seconds = Kind(("n",)), Seconds(Costs())
    small, large = Bucket(n=16, rows=1), Bucket(n=64, rows=1)
    guess = seconds.of(kind, large)
    assert guess.seconds is None
    seconds.observe(kind, small, 0.01)
    assert guess.seconds == pytest.approx(0.04)
    for _ in range(30):
        seconds.observe(kind, small, 0.02)
    assert seconds.of(kind, small).seconds == pytest.approx(0.02, rel=0.01)
    seconds.observe(kind, large, 0.5)
    assert guess.seconds == 0.5


def test_a_batch_is_tried_before_it_is_known_that_batches_bring_nothing():
    made, kind = planner(costs=Costs())
    made.seconds.observe(kind, Bucket(n=16, rows=1), 0.01)
    add(made, kind, 16, *[0.0] * 8)
    assert summary(made.decide(0.0))[0] == (16, 8, 8)
    made.seconds.observe(kind, Bucket(n=16, rows=8), 0.08)
    for rows in (2, 4):
        made.seconds.observe(kind, Bucket(n=16, rows=rows), 0.01 * rows)
    add(made, kind, 16, *[0.0] * 8)
    assert summary(made.decide(0.0))[0] == (16, 1, 1)


def test_a_decision_follows_what_batches_turn_out_to_take():
    made, kind = planner(costs=FLAT)
    for _ in range(20):
        made.seconds.observe(kind, Bucket(n=16, rows=8), 0.08)
    add(made, kind, 16, *[0.0] * 8)
    assert summary(made.decide(0.0)) == [(16, 4, 4), (16, 4, 4)]


def test_a_device_runs_one_batch_after_another():
    device = Device()
    assert device.free_at(1.0) == 1.0
    device.start("a", 1.0, 0.5)
    device.start("b", 1.1, 0.5)
    assert device.in_flight == 2
    assert device.finish("a", 1.6) == pytest.approx(0.6)
    assert device.free_at(1.7) == pytest.approx(2.1)
    assert device.finish("b", 2.0) == pytest.approx(0.4)
    assert (device.in_flight, device.idle_since) == (0, 2.0)
    device.start("c", 3.0, None)
    assert device.free_at(3.0) == math.inf


# --- in simulated time ----------------------------------------------------------------------------

arrivals = st.lists(
    st.tuples(
        st.floats(0, 0.05), st.integers(1, 64), st.integers(-2, 2), st.one_of(st.none(), st.floats(1e-3, 0.2))
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=25, deadline=None)
@given(arrivals, st.sampled_from([FLAT, LINEAR, Costs()]), st.integers(1, 3), st.floats(0, 0.02))
def test_everybody_runs_or_is_late_and_nobody_waits_longer_than_promised(each, costs, in_flight, max_delay):
    time, trace = 0.0, []
    for gap, length, priority, deadline in each:
        time += gap
        trace.append(Arrival(time, length, priority, math.inf if deadline is None else time + deadline))
    rules = Rules(max_delay=max_delay, in_flight=in_flight)
    really = lambda bucket, _: 1e-3 + 1e-5 * bucket.cells
    got = simulate(trace, Policy("any", rules=rules), costs, GRID, seconds_of=really)
    assert len(got.latency) + got.late == len(trace)
    assert got.waited.max(initial=0) <= max_delay + 1e-9
    assert got.latency.max(initial=0) < len(trace) * really(Bucket(n=64, rows=8), 0.0) + max_delay + 0.01


def test_an_hour_of_arrivals_is_simulated_alike_twice():
    rng = np.random.default_rng(0)
    trace = [Arrival(t, 10) for t in np.cumsum(rng.exponential(5.0, 800)).tolist()]
    one, two = (simulate(trace, Policy("any"), FLAT, GRID) for _ in range(2))
    assert one.seconds > 3600 and (one.latency == two.latency).all()


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_at_a_time_is_as_late_as_queueing_theory_says(load):
    rng = np.random.default_rng(1)
    trace = [Arrival(t, 10) for t in np.cumsum(rng.exponential(0.01 / load, 1500)).tolist()]
    policy = Policy("alone", rules=Rules(in_flight=1, patient=False), rows=[1])
    got = simulate(trace, policy, FLAT, GRID).latency.mean()
    assert got == pytest.approx(single_server(load / 0.01, [0.01], [1]), rel=0.12)


@pytest.mark.parametrize("load", [0.5, 3.0])
def test_a_batch_of_all_that_wait_is_as_late_as_bulk_service_theory_says(load):
    rng = np.random.default_rng(1)
    trace = [Arrival(t, 10) for t in np.cumsum(rng.exponential(0.01 / load, 1500)).tolist()]
    grid = Grid(n=16, rows=list(range(1, 9)))
    costs = Costs({bucket: 0.01 for bucket in grid})
    policy = Policy("elastic", rules=Rules(patient=False, in_flight=1))
    got = simulate(trace, policy, costs, grid).latency.mean()
    assert got == pytest.approx(bulk_service(load / 0.01, lambda _: 0.01, 8), rel=0.08)
