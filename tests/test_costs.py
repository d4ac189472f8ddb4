import json

import pytest

from jaxbatch._costs import Costs
from jaxbatch._grid import Bucket

TABLE = {"format": 1, "measured": [], "work": [], "compile_seconds": None}
SMALL, LARGE = Bucket(n=16, rows=1), Bucket(n=64, rows=8)


def test_a_measured_bucket_has_its_own_cost_and_others_are_scaled_from_the_nearest():
    costs = Costs({SMALL: 1.0, LARGE: 10.0})
    assert costs.seconds(SMALL) == 1.0
    assert costs.seconds(Bucket(n=16, rows=2)) == 2.0
    assert costs.seconds(Bucket(n=128, rows=8)) == 20.0
    assert Costs().seconds(SMALL) is None


def test_the_work_that_the_compiler_counts_comes_before_cells():
    other = Bucket(n=32, rows=1)
    costs = Costs({SMALL: 1.0}, {SMALL: 100.0, other: 500.0})
    assert costs.seconds(other) == 5.0
    assert costs.seconds(Bucket(n=64, rows=1)) == 4.0


def test_costs_without_a_measured_bucket_are_false():
    assert not Costs() and not Costs(work={SMALL: 1.0}) and Costs({SMALL: 1.0})


def test_costs_come_back_from_json():
    costs = Costs({SMALL: 0.001, LARGE: 0.25}, {SMALL: 7.0}, 1.5)
    again = Costs.from_json(costs.to_json())
    assert again == costs and hash(again) == hash(costs)
    assert again.seconds(LARGE) == 0.25


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps(TABLE | {"format": 9}),
        json.dumps(TABLE | {"measured": [[{"n": 4, "rows": 1}, -1]]}),
        json.dumps(TABLE | {"measured": [[{"n": "4"}, 1]]}),
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="Costs.from_json: this is no cost table"):
        Costs.from_json(text)


def test_costs_print_as_a_table_small_buckets_first():
    lines = str(Costs({LARGE: 0.25, SMALL: 0.001})).splitlines()
    assert "2 buckets measured" in lines[0]
    assert lines[1].split() == ["n=16", "rows=1", "1.000", "ms", "1.000", "ms/row"]
    assert lines[2].split() == ["n=64", "rows=8", "250.000", "ms", "31.250", "ms/row"]
