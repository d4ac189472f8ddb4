"""The benchmark's own arithmetic: batches by hand, the comparison of answers, ratios, and the report."""

import json
import math

import numpy as np
import pytest

from tools.bench import cli, online, report
from tools.bench.batching import by_count, by_tokens, pad, pooled, valid
from tools.bench.ratios import faster, find, thousands, valid_share
from tools.bench.rounds import Record, Table, difference
from tools.bench.systems import BOTH, PAGES, TEXT, entries

LENGTHS = np.array([3, 9, 1, 4, 9])


def test_batches_by_hand_are_sorted_and_hold_every_text_once():
    assert [batch.tolist() for batch in by_count(LENGTHS, 2)] == [[1, 4], [3, 0], [2]]
    assert [batch.tolist() for batch in by_tokens(LENGTHS, 18)] == [[1, 4], [3, 0, 2]]
    assert [batch.tolist() for batch in by_tokens(LENGTHS, 5)] == [[1], [4], [3], [0], [2]]


def test_pooling_by_hand_sees_no_padding():
    ids = [np.array([5, 6]), np.array([7])]
    mask = valid(np.array([2, 1]), 3, 3)
    assert pad(ids, 3, 3).tolist() == [[5, 6, 0], [7, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    hidden = np.array([[[3.0, 0], [0, 3], [9, 9]], [[0, 2], [9, 9], [9, 9]], [[1, 1]] * 3])
    np.testing.assert_allclose(pooled(hidden, mask)[:2], [[math.sqrt(0.5)] * 2, [0, 1]])


@pytest.mark.parametrize(
    "answers, expected",
    [
        ([[1.0, 2.5], [3.0, 4.0]], 0.5),
        ([[np.nan, np.nan], [3.0, 4.0]], 0.0),
        ([[np.nan, 2.0], [3.0, 4.0]], math.inf),
        ([[np.nan, np.nan], [np.nan, np.nan]], None),
        ([[1.0, 2.0]], math.inf),
        ([[1.0], [3.0]], math.inf),
    ],
)
def test_only_whole_missing_answers_are_not_compared(answers, expected):
    right = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    assert difference([np.array(each) for each in answers], right) == expected


def table(**seconds):
    systems = [
        Record(name, seconds=dict(enumerate(each)), cores={0: 1.5}, padded_cells=2000, programs=3)
        for name, each in seconds.items()
    ]
    systems.append(Record("torch, token budget", skipped="not installed: torch"))
    return Table(
        workload="wide",
        about="texts",
        unit="tokens",
        products="float32",
        budget=1024,
        examples=5,
        valid_cells=1000,
        lengths={"n": LENGTHS.tolist()},
        rounds=3,
        others=0.0,
        systems=systems,
    )


TABLE = table(**{"jaxbatch, 20 fitted sizes": [1.0, 2.0, 4.0], "oracle": [0.5, 1.5, 1.0]})


def test_ratios_are_taken_within_a_round():
    ours, oracle = find(TABLE, "jaxbatch, 20 fitted sizes"), find(TABLE, "oracle")
    assert ours and oracle and find(TABLE, "torch, token budget") is None
    assert str(faster(oracle, ours)) == "2.00 [1.33, 4.00]"
    assert faster(ours, None) is None
    assert (thousands(TABLE, ours), valid_share(TABLE, ours)) == (0.5, 0.5)


def test_the_report_names_what_was_not_timed_and_judges_its_aims(tmp_path):
    stream = {"examples": 10, "tokens": 50, "seconds": 1.0, "resident_bytes": [1e6] * 10, "programs": 2}
    results = {
        "date": "2026-01-01",
        "minutes": 1.0,
        "machine": {"jax": "0"},
        "tables": [TABLE],
        "stream": stream,
    }
    text = report.write(results, [])
    assert "- Not timed: torch, token budget; not installed: torch." in text
    assert (
        "| wide: 20 fitted sizes against the oracle (valid share 0.50) | 0.48 | 0.50 [0.25, 0.75] | yes |"
        in text
    )
    assert "memory in its second half | flat | +0.0% | yes |" in text
    file = tmp_path / "numbers.json"
    file.write_text(json.dumps(results, default=lambda each: each.__dict__))
    assert report.write(cli.load(file), []) == text


def test_every_system_of_a_table_exists_and_says_what_it_needs():
    for entry in (*TEXT, *PAGES):
        assert isinstance(entry.kind().needs, tuple)
    assert len({entry.name for entry in TEXT}) == len(TEXT)
    assert all(set(entry.products) <= set(BOTH) for entry in TEXT)
    names = [entry.name for entry in entries("tokens", "float32")]
    by_hand = [name for name in names if name.startswith("JAX by hand, 20")]
    assert names.index("jaxbatch, 20 fitted sizes") < min(map(names.index, by_hand))


ONLINE = {
    "date": "2026-01-02",
    "model": "MiniLM",
    "overhead": [
        {"producers": 8, "how": how, "seconds": seconds, "core_seconds": 4e-5, "examples_per_batch": 3.0}
        for how, seconds in (("one at a time each", 7e-5), ("16 ahead each", 5e-5))
    ],
    "throughput": {
        **{"examples": 512, "run": 60.0, "dispatcher": 57.0, "ratio": [0.95, 0.93, 0.97]},
        **{"fill": 0.9, "padding": 0.2},
    },
    "poisson": [
        {"load": 0.6, "way": way, "requests": 900, "p50": 0.02, "p99": p99, "examples_per_batch": 2.5}
        for way, p99 in (("jaxbatch", 0.05), ("pad to longest", 0.1), ("one at a time", 3.0))
    ],
    "ticker": {"ticks": 900, "p50": 1e-4, "p99": 0.004, "max": 0.12, "compiles": 10, "compile_seconds": 4.0},
    "simulation": [{"load": 0.9, "mean": [0.1, 0.12], "p99": [0.2, 0.21], "batches": [300, 310]}],
}


def test_the_dispatchers_numbers_are_judged_by_their_aims_and_shown():
    met = {what: (measured, met) for what, _, measured, met in online.claims(ONLINE)}
    assert list(met.values()) == [
        ("70 us", False),
        ("50 us", True),
        ("0.95 [0.93, 0.97]", True),
        ("0.50", True),
        ("p99 4.0 ms, longest 120.0 ms", False),
        ("+20%", False),
    ]
    text = online.section(ONLINE)
    assert "| 60% | pad to longest | 900 | 20.0 | 100.0 | 2.50 |" in text
    assert "| 90% | 100.0 | 120.0 | +20.0% | 200.0 | 210.0 | 300 | 310 |" in text
    assert online.claims({"date": "2026-01-02", "model": "MiniLM"}) == []


def test_a_run_of_the_benchmark_keeps_what_was_measured_of_the_dispatcher(tmp_path, monkeypatch):
    data, output = tmp_path / "numbers.json", tmp_path / "REPORT.md"
    data.write_text(json.dumps({"online": ONLINE}))
    command = ["bench", "--workloads=", "--same=", "--stream", "0"]
    monkeypatch.setattr("sys.argv", [*command, "--data", str(data), "--output", str(output)])
    assert cli.main() == 0
    assert json.loads(data.read_text())["online"] == ONLINE
    assert "## Online" in output.read_text()
