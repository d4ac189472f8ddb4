"""The functions that padding is tried on, packed: every layout of a row, every poison around and inside."""

import os

import pytest
import test_mask_rules
import test_mask_rules_more
from packing import assert_packed

CASES = {
    name: case
    for table in (test_mask_rules.CASES, test_mask_rules_more.CASES, test_mask_rules.BRANCHES)
    for name, case in table.items()
    if len(case.dims) == 1
}
# All of them take minutes; an eighth is in the default run, and JAXBATCH_ALL_CASES=1 asks for the rest.
CHOSEN = sorted(CASES)[:: 1 if os.environ.get("JAXBATCH_ALL_CASES") else 8]


@pytest.mark.parametrize("name", CHOSEN)
def test_nothing_of_one_segment_reaches_another(name):
    assert_packed(CASES[name])
