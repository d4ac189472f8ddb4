"""What is counted and timed, against numbers worked out by hand; and how tables show it."""

import copy
import dataclasses
import threading

import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from ragged import normals

import jaxbatch as jb
from jaxbatch import _counts
from jaxbatch._counts import Histogram
from jaxbatch._executables import CompileStatistics
from jaxbatch._explanation import explain
from jaxbatch._plan import Job
from jaxbatch._statistics import TIMELINE, Recorder
from jaxbatch._timing import BatchTimes, Coverage, DeviceClock, TimeStatistics

VECTOR = jb.spec("n", "float32")
SMALL, LARGE = jb.Bucket(n=4, rows=4), jb.Bucket(n=16, rows=2)


def times(begun: float, ready: float | None = None) -> BatchTimes:
    """Return the times of a batch: padded in 1, started in 2, left alone for 4, fetched in 1, cut in 1."""
    begun = float(begun)
    return BatchTimes(begun, begun + 1, begun + 3, begun + 7, begun + 8, begun + 9, ready)


def record(recorder: Recorder, bucket: jb.Bucket, lengths: np.ndarray, at: BatchTimes, call: object) -> None:
    """Add a batch of a call that did something else for 1 before it."""
    recorder.add(bucket, lengths, at, exact=False, call=call, since=at.begun - 1)


def column(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)[:, None]


def snapshot(recorder: Recorder) -> jb.Statistics:
    return recorder.snapshot(CompileStatistics(compiles=2, compile_seconds=0.5, hits=7))


def recorded() -> Recorder:
    """Return a recorder of three batches, of which the second was waited for."""
    recorder, call = Recorder(), object()
    record(recorder, LARGE, column(16, 9), times(0), call)
    record(recorder, SMALL, column(3, 4, 2), times(10, 17.5), call)
    record(recorder, SMALL, column(1, 1, 1, 1), times(20), call)
    return recorder


# --- counts ----------------------------------------------------------------------------------------


def test_lengths_1_to_1024_have_the_pad_ratios_of_powers_of_two():
    explanation = jb.batched(lambda x: x - x.mean(), spec=VECTOR, grid=jb.Grid(n=(1, 1024), rows=1)).explain(
        np.arange(1, 1025)
    )
    valid, padded = 1024 * 1025 // 2, 1 + sum(2**k * 2 ** (k - 1) for k in range(1, 11))
    assert (explanation.total.valid_cells, explanation.total.padded_cells) == (valid, padded)
    assert explanation.pad_ratio == padded / valid == pytest.approx(1.332, abs=5e-4)
    assert explanation.pad_ratio_squared == pytest.approx(1.712, abs=5e-4)
    assert explanation.worst_pad_ratio == 1024 / 513 == pytest.approx(1.996, abs=5e-4)
    assert explanation.padding_by_dim == {"n": pytest.approx(1 - valid / padded)}


def test_what_ran_is_counted_as_it_was():
    done = snapshot(recorded())
    assert (done.batches, done.examples, done.compiles, done.hits) == (3, 9, 2, 7)
    assert (done.valid_cells, done.padded_cells, done.filler_cells) == (38, 2 * 16 + 7 * 4, 4)
    assert list(done.buckets) == [LARGE, SMALL]
    small = done.buckets[SMALL]
    assert (small.batches, small.examples, small.valid_cells) == (2, 7, 13)
    assert small.padding_by_dim == {"n": pytest.approx(1 - 13 / 32)}
    assert (
        done.padding_by_dim == {"n": pytest.approx(1 - 38 / 64)} == {"n": pytest.approx(done.padding_share)}
    )
    assert small.seconds == 2 * (3 + 2) and done.total.seconds == 15
    assert done.lengths == {"n": {1: 4, 2: 1, 3: 1, 4: 1, 9: 1, 16: 1}}


def test_the_padding_of_each_dim_counts_rows_that_fill_up():
    lengths = np.array([[3, 10], [5, 40], [8, 1]])
    jobs = [Job(jb.Bucket(h=8, w=64, rows=4), (0, 1)), Job(jb.Bucket(h=8, w=16, rows=1), (2,))]
    explanation = explain(jobs, lengths, missing=2, num_exact=0)
    assert explanation.padding_by_dim == {
        "h": pytest.approx(1 - 16 / (4 * 8 + 8)),
        "w": pytest.approx(1 - 51 / (4 * 64 + 16)),
    }
    assert explanation.total.valid_cells == 30 + 200 + 8
    assert explanation.total.filler_cells == 2 * 8 * 64


def test_exact_sizes_are_counted_apart_and_in_the_total():
    recorder = recorded()
    recorder.add(jb.Bucket(n=100, rows=1), column(100), times(30, 35.0), exact=True, call=None, since=29.0)
    done = snapshot(recorder)
    assert done.exact.examples == 1 and done.exact.median_run_seconds is None and len(done.buckets) == 2
    assert done.total.length_sums == {"n": 138} and done.total.size_sums == {"n": 164}
    assert "exact sizes" in str(done)


def test_a_function_without_ragged_dims_has_no_padding_by_dim():
    run = jb.batched(lambda x: x.sum(), spec=jb.spec("6", "float32"), grid=jb.Grid(rows=[4]))
    run(normals([6] * 5))
    done = run.statistics()
    assert done.padding_by_dim == {} and done.lengths == {}
    assert (done.valid_cells, done.padded_cells, done.filler_cells) == (5, 5, 3)
    assert "padding by dim" not in str(done) and "rows=4" in str(done)


def test_a_snapshot_does_not_change_when_more_runs():
    recorder = recorded()
    before = snapshot(recorder)
    kept = copy.deepcopy(before)
    record(recorder, SMALL, column(4), times(30, 38.5), None)
    recorder.note("something")
    assert before == kept and snapshot(recorder) != before
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.exact = before.total  # pyright: ignore[reportAttributeAccessIssue]  # that is the point


def test_notes_are_kept_once_in_their_order():
    recorder = Recorder()
    for text in ("b", "a", "b"):
        recorder.note(text)
    assert snapshot(recorder).notes == ("b", "a") and "note: a" in str(snapshot(recorder))


def test_a_histogram_of_very_many_lengths_merges_neighbours_and_loses_none(monkeypatch):
    monkeypatch.setattr(_counts, "MAX_LENGTHS", 100)
    histogram = Histogram()
    for start in range(0, 1000, 10):
        histogram.add([*range(start, start + 10), 5])
    counts = histogram.freeze()
    assert sum(counts.values()) == 1100 and len(counts) <= 100 and list(counts) == sorted(counts)
    assert counts == {low: 16 + 100 * (low == 0) if low < 992 else 8 for low in range(0, 1000, 16)}


def test_several_threads_may_count_at_once():
    recorder = Recorder()

    def work(n: int) -> None:
        call = object()
        for i in range(200):
            record(recorder, LARGE, column(n, 16), times(10 * i), call)
            snapshot(recorder)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = snapshot(recorder)
    assert (done.batches, done.examples) == (1600, 3200)
    assert done.lengths == {"n": dict.fromkeys(range(1, 9), 200) | {16: 1600}}
    assert done.time.wall == 200 * 10, "calls at the same time count once"
    assert len(done.timeline) == TIMELINE


# --- times -----------------------------------------------------------------------------------------


def test_the_parts_of_the_time_add_up():
    time = snapshot(recorded()).time
    assert (time.wall, time.padding, time.starting, time.waiting, time.cutting) == (30, 3, 6, 3, 3)
    assert time.other == 30 - 15
    # Known of the second batch; of the third, which was like it, no more than the 4 until the host came.
    assert time.device == 4.5 + 4
    assert snapshot(recorded()).occupancy == 8.5 / 30
    assert TimeStatistics().occupancy is None


def test_device_time_is_known_where_the_host_waited_for_two_batches_on_end():
    clock, call = DeviceClock(), object()
    assert clock.run(times(0, ready=7.5), call, None) == (3, 7.5, True)
    # Started at 5, while the one before it ran until 7.5.
    assert clock.run(times(2, ready=9.5), call, None) == (7.5, 9.5, True)
    # Started when the device was idle already.
    assert clock.run(times(10, ready=17.5), call, None) == (13, 17.5, True)


def test_device_time_is_an_estimate_where_an_end_is_unknown():
    clock, call = DeviceClock(), object()
    assert clock.run(times(0), call, None) == (3, 3, False)
    assert clock.run(times(1), call, typical=2.0) == (4, 6, False)
    assert clock.run(times(2), call, typical=50.0) == (6, 9, False), "it was done when the host came to it"
    # Nobody knows when the batch before it was done, except that it was by 9, after this one was started.
    assert not clock.run(times(3, ready=10.5), call, None).is_exact
    # By then it must have been done.
    clock.run(times(20), call, None)
    assert clock.run(times(30, ready=37.5), call, None) == (33, 37.5, True)


def test_a_program_that_ran_inside_its_call_is_no_exact_time_but_does_not_spoil_the_next():
    clock, call = DeviceClock(), object()
    assert clock.run(times(0, ready=3), call, None) == (1, 3, False)
    assert clock.run(times(1, ready=8.5), call, None) == (4, 8.5, True)


def test_device_time_is_an_estimate_while_another_call_has_batches_on_the_device():
    clock, one, two = DeviceClock(), object(), object()
    assert clock.run(times(0, ready=7.5), one, None).is_exact
    assert not clock.run(times(1, ready=8.5), two, None).is_exact
    assert not clock.run(times(2, ready=9.5), one, None).is_exact
    assert clock.run(times(10, ready=17.5), two, None).is_exact


def test_the_median_is_that_of_the_latest_sixteen_times():
    recorder, call = Recorder(), object()
    for i in range(20):
        ready = 20 * i + 3 + (0.5 if i < 4 else 4 + i / 100)
        record(recorder, LARGE, column(16), times(20 * i, ready), call)
    bucket = snapshot(recorder).buckets[LARGE]
    assert bucket.timed == 20
    assert bucket.median_run_seconds == pytest.approx(4 + 11.5 / 100)
    assert (bucket + bucket).median_run_seconds is None and (bucket + bucket).timed == 40


def test_covered_time_counts_once():
    coverage = Coverage()
    for begin, end in ((0, 2), (1, 3), (5, 6), (5.5, 5.7), (2.5, 5.2), (9, 9), (9, 8)):
        coverage.add(float(begin), float(end))
    assert coverage.seconds == 6
    for i in range(10, 1000, 2):
        coverage.add(float(i), i + 1.0)
    assert coverage.seconds == 6 + 495


def test_the_times_of_real_batches_are_in_order_and_some_device_times_are_known():
    def slow(x):
        return lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x[:, None] * x[None, :]).sum()

    run = jb.batched(slow, spec=VECTOR, grid=jb.Grid(n=[128], rows=[4]))
    run(normals([100] * 30))
    done = run.statistics()
    assert len(done.timeline) == done.batches == 8
    for each in done.timeline:
        t = each.times
        assert t.begun <= t.padded <= t.started <= t.waited <= t.fetched <= t.delivered
        assert each.run.begin <= each.run.end <= t.fetched
        assert each.examples <= each.bucket["rows"]
    begins = [each.run.begin for each in done.timeline]
    assert begins == sorted(begins)
    bucket = done.buckets[jb.Bucket(n=128, rows=4)]
    assert 1 <= bucket.timed <= 8
    assert bucket.median_run_seconds is not None and 0 < bucket.median_run_seconds < done.time.wall
    assert done.occupancy is not None and 0 < done.occupancy <= 1
    assert done.time.device <= done.time.wall
    host = done.time.padding + done.time.starting + done.time.waiting + done.time.cutting
    assert done.total.seconds == pytest.approx(host) and host <= done.time.wall * (1 + 1e-9)


def test_only_the_latest_batches_keep_their_times():
    run = jb.batched(lambda x: x + 1, spec=VECTOR, grid=jb.Grid(n=[4], rows=[1]))
    run(normals([3] * (TIMELINE + 10)))
    done = run.statistics()
    assert len(done.timeline) == TIMELINE and done.batches == TIMELINE + 10


# --- predictions -----------------------------------------------------------------------------------


def explained(**callables) -> jb.Explanation:
    jobs = [Job(LARGE, (0, 1)), Job(SMALL, (2, 3, 4)), Job(SMALL, (5,))]
    return explain(jobs, column(16, 9, 3, 4, 2, 1), missing=1, num_exact=2, **callables)


def test_predicted_seconds_are_the_sum_over_batches():
    explanation = explained(cost=lambda bucket: bucket.cells / 100, memory=lambda bucket: 1000 * bucket["n"])
    assert explanation.bucket_seconds == {LARGE: 0.32, SMALL: 0.32} and explanation.seconds == 0.64
    assert explanation.peak_bytes == 16000
    assert "640.0 ms" in str(explanation) and "15.6 KiB" in str(explanation)


def test_what_is_unknown_of_one_bucket_makes_the_sum_unknown_but_not_the_known_peak():
    explanation = explained(
        cost=lambda bucket: 1.0 if bucket == SMALL else None,
        memory=lambda bucket: 5 if bucket == SMALL else None,
    )
    assert explanation.bucket_seconds == {LARGE: None, SMALL: 2.0} and explanation.seconds is None
    assert explanation.peak_bytes == 5
    assert explained().seconds is None and explained().peak_bytes is None
    assert "predicted time: unknown; peak memory: unknown" in str(explained())


# --- tables ----------------------------------------------------------------------------------------


def assert_aligned(text: str, headers: list[str], names: list[str]) -> None:
    """Raise unless the part after the empty line is a table of these headers and rows, in columns."""
    head, *rows = text.split("\n\n")[1].split("\n")
    assert [part.strip() for part in head.split("  ") if part] == headers
    assert {len(line) for line in rows} == {len(head)}
    assert [row.split("  ")[0] for row in rows] == names
    ends = [head.index(header) + len(header) for header in headers[1:]]
    for row in rows:
        for end in ends:
            assert row[end - 1] != " " and row[end : end + 1] in ("", " "), (row, end)


def test_statistics_print_as_a_table():
    text = str(snapshot(recorded()))
    assert "9 examples in 3 batches, 40.6% padding (1.579 padded cells for each valid one)" in text
    assert "2 programs (0 more for exact sizes) compiled in 0.50 s, 7 hits, 0 evictions" in text
    assert "padding by dim: n 40.6%" in text
    assert "30.00 s in calls: device busy 28.3%; host padding 10.0%" in text
    headers = ["bucket", "batches", "examples", "valid cells", "all cells", "padding"]
    headers += ["host time", "device, median", "timed"]
    assert_aligned(text, headers, ["n=16 rows=2", "n=4 rows=4", "all"])


def test_an_explanation_prints_as_a_table():
    text = str(explained(cost=lambda bucket: 0.001))
    assert "6 examples in 3 batches, and 2 examples at exact sizes; 2 programs, 1 of them to compile" in text
    assert "predicted time: 3.0 ms; peak memory: unknown" in text
    headers = ["bucket", "batches", "examples", "valid cells", "all cells", "padding", "time", "memory"]
    assert_aligned(text, headers, ["n=16 rows=2", "n=4 rows=4", "all"])


def test_nothing_prints_as_nothing():
    assert str(Recorder().snapshot(CompileStatistics())).count("\n") == 1
    assert "\n" not in str(explain([], np.zeros((0, 1), np.int64), missing=0, num_exact=0))
