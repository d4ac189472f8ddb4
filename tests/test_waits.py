import numpy as np
import pytest

from jaxbatch._waits import WINDOW, DispatcherStatistics, Ledger, Quantiles, Times, freeze, quantiles


def test_quantiles_are_those_of_the_latest_and_mean_and_maximum_of_all():
    times = Times()
    times.add([100.0])
    rng = np.random.default_rng(0)
    latest = rng.random(WINDOW)
    for part in np.split(latest, 64):
        times.add(part.tolist())
    got = quantiles(*times.copy())
    assert got.count == WINDOW + 1 and got.max == 100.0
    assert got.mean == pytest.approx((100 + latest.sum()) / got.count)
    assert got.sum == pytest.approx(100 + latest.sum())
    assert (got.p50, got.p90, got.p99) == pytest.approx(tuple(np.quantile(latest, (0.5, 0.9, 0.99))))


def test_nothing_counted_is_no_error():
    assert quantiles(*Times().copy()) == Quantiles()
    empty = DispatcherStatistics()
    assert (empty.fill, empty.padding_share) == (1.0, 0.0)
    assert "none ended" in str(empty)


def test_a_ledger_adds_up():
    ledger = Ledger()
    ledger.add_batch(8, 6, 30, 64)
    ledger.add_batch(4, 4, 10, 16)
    ledger.add_times([0.001] * 2, [0.0] * 2, [0.01] * 2, [0.011] * 2)
    ledger.counts.update({"completed": 10, "submitted": 12, "expired": 1})
    got = freeze(*ledger.copy(), pending=1, pending_cells=8, in_flight=0)
    assert (got.batches, got.rows, got.filled_rows, got.valid_cells, got.padded_cells) == (2, 12, 10, 40, 80)
    assert got.fill == pytest.approx(10 / 12) and got.padding_share == 0.5
    assert got.outcomes == {"completed": 10, "failed": 0, "cancelled": 0, "expired": 1}
    assert got.total.p99 == pytest.approx(0.011) and got.pending == 1
    text = str(got)
    assert "12 submitted (10 completed, 1 expired), 1 pending" in text
    assert "83.3% of rows filled, 50.0% padding" in text and "11.0 ms" in text
