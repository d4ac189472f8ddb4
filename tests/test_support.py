"""docs/support.md says of every primitive what the rules say, and no primitive of JAX is left out."""

import subprocess
import sys
from pathlib import Path

import pytest
from jax.extend import core as jex_core

from jaxbatch import _compat
from jaxbatch._mask import rules
from tools import mutate_rules, support_table

ROOT = Path(__file__).resolve().parent.parent


def test_the_support_table_is_current_and_leaves_no_primitive_out():
    # In a process of its own: other tests import parts of JAX that define more primitives.
    command = [sys.executable, "-m", "tools.support_table", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_rule_has_its_own_status_in_the_document():
    lines = (ROOT / "docs" / "support.md").read_text().splitlines()
    for name, rule in support_table.shipped().items():
        cells = [line.removesuffix(".").split(" | ") for line in lines if line.startswith(("| `", "Exact: "))]
        (found,) = [row for row in cells if f"`{name}`" in row[0]]
        assert (found[1] if len(found) > 1 else "exact") == rule.status, name


def test_a_new_primitive_must_be_given_a_rule_or_a_place(monkeypatch):
    everything = _compat.all_primitives() | {"brand_new": jex_core.Primitive("brand_new")}
    monkeypatch.setattr(_compat, "all_primitives", lambda: everything)
    (problem,) = [p for p in support_table.problems() if "brand_new" in p]
    assert "`brand_new` has no rule and no place" in problem
    assert "NO_RULE or ELSEWHERE of tools/support_table.py" in problem


def test_a_rule_for_a_primitive_that_is_gone_is_noticed(monkeypatch):
    everything = {name: p for name, p in _compat.all_primitives().items() if name != "cumsum"}
    monkeypatch.setattr(_compat, "all_primitives", lambda: everything)
    if support_table.of_these_versions():
        assert any("`cumsum` is in the tables and not in JAX" in p for p in support_table.problems())


def test_a_rule_without_a_family_sentence_or_a_second_place_is_noticed(monkeypatch):
    monkeypatch.delitem(support_table.FAMILIES, "order")
    monkeypatch.setitem(support_table.NO_RULE, "said twice", "cumsum")
    problems = support_table.problems()
    assert any("'order' has no sentence" in p for p in problems)
    assert "`cumsum` is classified twice." in problems


@pytest.mark.parametrize("path", sorted((ROOT / mutate_rules.RULES).glob("*.py")), ids=lambda path: path.name)
def test_mutants_change_one_thing_and_are_still_python(path):
    source = path.read_text()
    for mutant in mutate_rules.mutants(path.name, source):
        changed = mutant.apply(source)
        assert changed != source, mutant
        compile(changed, path.name, "exec")


def test_every_rule_that_reads_along_an_axis_has_a_mutant():
    found = set()
    for path in (ROOT / mutate_rules.RULES).glob("*.py"):
        found |= {mutant.primitive for mutant in mutate_rules.mutants(path.name, path.read_text())}
    missing = {name for name, rule in rules().items() if rule.identity is not None} - found
    assert not missing
