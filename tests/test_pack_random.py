"""Random programs of one ragged dim, packed: each segment gets what it gets alone."""

import pack_check
import pytest
from program_ops import OPS
from programs import Input, Program, Step, generate

SEEDS = range(0, 30)
SEEDS_WITH_GRADIENTS = range(2000, 2008)


def assert_no_wrong_number(seeds, gradients):
    failures = []
    for seed in seeds:
        program = generate(seed, OPS)
        verdict = pack_check.check(program, gradients=gradients)
        if verdict.failed:
            failures.append(f"{program.listing()}\n# {verdict.detail}")
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("first", SEEDS[::10])
def test_random_programs_are_exact_packed(first):
    assert_no_wrong_number(range(first, first + 10), gradients=False)


def test_gradients_of_random_programs_are_exact_packed():
    assert_no_wrong_number(SEEDS_WITH_GRADIENTS, gradients=True)


def test_a_leak_between_segments_is_found(monkeypatch):
    step = Step("v0", "test", "jnp.exp(-({0} @ {0}.T)).sum(1)", ("x",))
    program = Program((Input("x", "n, 4", "float32"),), (step,), ("v0",), {"n": 7}, seed=0)
    assert pack_check.check(program).status == "exact"
    monkeypatch.setattr("jaxbatch._pack._context.Row.fill", lambda self, x, value: x.data)
    assert pack_check.check(program).status == "wrong"
