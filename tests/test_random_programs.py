"""Random programs of supported operations: padding never changes a value or a gradient.

A sample with fixed seeds; `python -m tools.fuzz_programs` runs many more, and makes a failing one small.
"""

import numpy as np
import pytest
from program_check import check
from program_ops import OPS
from program_shrink import shrink
from programs import Input, Program, Step, generate

from jaxbatch._mask import _registry

CHUNK = 10
SEEDS = range(0, 40)
SEEDS_WITH_GRADIENTS = range(1000, 1010)


def assert_no_wrong_number(seeds, gradients):
    failures = []
    for seed in seeds:
        program = generate(seed, OPS)
        verdict = check(program, gradients=gradients)
        if verdict.failed:
            failures.append(f"{program.listing()}\n# {verdict.stage}: {verdict.detail}")
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("first", SEEDS[::CHUNK])
def test_random_programs_are_exact_or_refused(first):
    assert_no_wrong_number(range(first, first + CHUNK), gradients=False)


@pytest.mark.parametrize("first", SEEDS_WITH_GRADIENTS[::CHUNK])
def test_gradients_of_random_programs_are_exact_in_both_orders(first):
    assert_no_wrong_number(range(first, first + CHUNK), gradients=True)


def program(*steps):
    inputs = (Input("x", "n, 4", "float32"),)
    made = tuple(Step(f"v{k}", "test", code, operands) for k, (code, operands) in enumerate(steps))
    return Program(inputs, made, (made[-1].target,), {"n": 7}, seed=0)


def test_the_same_seed_gives_the_same_program():
    assert generate(7, OPS).listing() == generate(7, OPS).listing()


def test_a_wrong_rule_is_found_and_made_small(monkeypatch):
    leaky = _registry.Rule(lambda ctx, eqn, x: ctx.bind(eqn, x.data), "reduction")
    monkeypatch.setitem(_registry._rules, "reduce_sum", leaky)
    large = program(
        ("jnp.sin({0})", ("x",)),
        ("jnp.tanh({0})", ("v0",)),
        ("jnp.sin({0}.sum(0))", ("v1",)),
        ("{0} * 2", ("v2",)),
    )
    verdict = check(large)
    assert verdict.status == "wrong" and "padding nan" in verdict.detail
    small = shrink(large, lambda p: check(p).status == "wrong")
    assert [step.text for step in small.steps] == ["v1.sum(0)"]


def test_a_refusal_is_told_by_primitive_and_reason():
    verdict = check(program(("jnp.abs(jnp.fft.fft({0}, axis=0))", ("x",))))
    assert verdict.status == "refused" and verdict.detail.startswith("fft: ")


def test_a_function_that_fails_by_itself_is_skipped():
    verdict = check(program(("{0}.reshape(11, -1)", ("x",))))
    assert verdict.status == "skipped"


def test_a_printed_program_runs_as_it_is():
    f = program(("{0} - {0}.mean(0)", ("x",))).function()
    np.testing.assert_allclose(f(np.ones((3, 4), np.float32))[0], np.zeros((3, 4)))


def test_a_function_without_a_gradient_is_checked_for_its_values_alone():
    slides = "lax.reduce_window({0}, F(1.0), lax.mul, (2, 2), (2, 1), 'VALID')"
    assert check(program((f"{slides}.sum()", ("x",))), gradients=True).status == "exact"


def test_a_function_that_fails_at_some_lengths_is_skipped_where_that_surfaces():
    fails = "jnp.zeros(()).reshape(0, -1) if {0}.shape[0] < 2 else {0}.sum()"
    verdict = check(program((fails, ("x",))))
    assert verdict.status == "skipped" and verdict.detail.startswith("ZeroDivisionError")
