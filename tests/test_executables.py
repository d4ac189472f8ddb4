import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jaxbatch as jb
from jaxbatch import CompileMissError, _executables
from jaxbatch._executables import (
    CompileStatistics,
    Executables,
    Key,
    Leaf,
    Signature,
    SingleFlight,
    Store,
    compile_program,
    differences,
    store_for,
)

WAIT = 30  # seconds after which a test that hangs fails instead

SIGNATURE = Signature(
    examples=(Leaf("x", ("n",), np.dtype("float32")), Leaf("y", ("2*m", 3), np.dtype("int32"))),
    shared=(Leaf("params['w']", (3, 4), np.dtype("float32")),),
    static=("tree",),
)
KEY = Key(SIGNATURE, (("n", 16), ("m", 8), ("rows", 4)))


def replace_leaf(key: Key, field: str, index: int, **changes) -> Key:
    leaves = list(getattr(key.signature, field))
    leaves[index] = dataclasses.replace(leaves[index], **changes)
    return dataclasses.replace(key, signature=dataclasses.replace(key.signature, **{field: tuple(leaves)}))


# (what changes, the words for it)
CHANGES = (
    (dataclasses.replace(KEY, sizes=(("n", 32), ("m", 8), ("rows", 4))), ["size `n` of `x`: 16 -> 32"]),
    (dataclasses.replace(KEY, sizes=(("n", 16), ("m", 16), ("rows", 4))), ["size `m` of `y`: 8 -> 16"]),
    (dataclasses.replace(KEY, sizes=(("n", 16), ("m", 8), ("rows", 1))), ["size `rows`: 4 -> 1"]),
    (dataclasses.replace(KEY, exact=True), ["an exact size instead of a bucket"]),
    (replace_leaf(KEY, "examples", 0, dtype=np.dtype("int32")), ["dtype of `x`: float32 -> int32"]),
    (replace_leaf(KEY, "shared", 0, shape=(3, 5)), ["shape of `params['w']`: (3, 4) -> (3, 5)"]),
    (replace_leaf(KEY, "shared", 0, weak_type=True), ["weak_type of `params['w']`: False -> True"]),
    (replace_leaf(KEY, "shared", 0, name="params['b']"), ["the structure of the arguments"]),
    (Key(dataclasses.replace(SIGNATURE, static=("other",)), KEY.sizes), ["a static value, tree structure"]),
)


@pytest.mark.parametrize(("changed", "words"), CHANGES)
def test_every_part_of_a_key_counts_and_is_named_when_it_differs(changed, words):
    assert changed != KEY
    found = differences(KEY, changed)
    assert len(found) == len(words)
    for each, expected in zip(found, words, strict=True):
        assert expected in each


def test_equal_keys_are_found_however_they_were_made():
    again = Key(Signature(SIGNATURE.examples, SIGNATURE.shared, ("tree",)), KEY.sizes)
    assert again == KEY and hash(again) == hash(KEY) and differences(again, KEY) == []


def test_eight_threads_that_want_one_program_get_it_from_one_compile():
    executables, start = Executables("f", Store()), threading.Barrier(8)
    builds = []

    def build():
        builds.append(1)
        return compile_program(lambda x: x + 1, jax.ShapeDtypeStruct((3,), np.float32))

    def ask(_):
        start.wait(WAIT)
        return executables.get(KEY, build)(np.ones(3, np.float32))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, range(8), timeout=WAIT))
    assert builds == [1]
    for each in results:
        np.testing.assert_array_equal(each, [2, 2, 2])
    counts = executables.statistics()
    assert (counts.compiles, counts.hits) == (1, 7) and counts.compile_seconds > 0


def test_a_hit_returns_while_another_program_compiles():
    executables, compiling, release = Executables("f", Store()), threading.Event(), threading.Event()
    executables.get(KEY, lambda: "warm")
    other = dataclasses.replace(KEY, exact=True)

    def slow():
        compiling.set()
        assert release.wait(WAIT)
        return "cold"

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(executables.get, other, slow)
        assert compiling.wait(WAIT)
        assert executables.get(KEY, pytest.fail) == "warm"  # would wait for `release` if there were one lock
        release.set()
        assert future.result(WAIT) == "cold"
    assert executables.statistics().exact_compiles == 1


def test_a_failed_compile_reaches_all_who_wait_and_is_tried_again():
    flight, making, release = SingleFlight(), threading.Event(), threading.Event()

    def fail():
        making.set()
        assert release.wait(WAIT)
        raise RuntimeError("out of memory")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(flight.get, "key", fail)
        assert making.wait(WAIT)
        second = pool.submit(flight.get, "key", lambda: pytest.fail("the second must wait for the first"))
        assert not second.done()
        release.set()
        for each in (first, second):
            error = each.exception(WAIT)
            # The second may have asked after the first had failed; then its own attempt counts.
            assert isinstance(error, RuntimeError | pytest.fail.Exception)
        assert str(first.exception()) == "out of memory"
    assert "key" not in flight and flight.items() == []
    assert flight.get("key", lambda: 5) == (5, True)
    assert flight.get("key", pytest.fail) == (5, False)


def test_what_interrupts_one_thread_does_not_interrupt_those_who_wait_for_it():
    flight = SingleFlight()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flight.get("key", interrupt)
    assert flight.get("key", lambda: 1) == (1, True)


def test_a_frozen_miss_names_the_key_and_what_differs_from_the_nearest_one():
    executables = Executables("f", Store())
    with pytest.raises(CompileMissError, match="bucket n=16, m=8, rows=4.*No program exists yet"):
        executables.get(KEY, pytest.fail, frozen=True)
    executables.get(dataclasses.replace(KEY, sizes=(("n", 32), ("m", 8), ("rows", 64))), lambda: None)
    executables.get(dataclasses.replace(KEY, sizes=(("n", 32), ("m", 8), ("rows", 4))), lambda: None)
    with pytest.raises(LookupError, match="nearest program is for bucket n=32, m=8, rows=4") as caught:
        executables.get(KEY, pytest.fail, frozen=True)
    assert "`x` float32[n], `y` int32[2*m, 3]" in str(caught.value)
    assert "size `n` of `x`: 32 -> 16" in str(caught.value) and "rows`" not in str(caught.value)
    assert executables.get(KEY, lambda: "made") == "made"
    assert executables.get(KEY, pytest.fail, frozen=True) == "made"


def test_each_compile_is_logged_with_bucket_seconds_and_reason(caplog):
    executables = Executables("embed", Store())
    with caplog.at_level(logging.INFO, logger="jaxbatch"):
        executables.get(KEY, lambda: None)
        changed = replace_leaf(KEY, "examples", 0, dtype=np.dtype("int32"))
        executables.get(dataclasses.replace(changed, sizes=(("n", 16), ("m", 32), ("rows", 4))), lambda: None)
        executables.get(KEY, pytest.fail)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("embed: compiled bucket n=16, m=8, rows=4 in 0.00 s. No program exists yet")
    assert "size `m` of `y`: 8 -> 32" in second and "dtype of `x`: float32 -> int32" in second


def test_a_users_key_shares_programs_between_functions_and_counts_apart():
    one, two = (Executables("f", store_for("shared between two")) for _ in range(2))
    assert one.get(KEY, lambda: "program") == two.get(KEY, pytest.fail) == "program"
    assert KEY in two
    assert (one.statistics().compiles, two.statistics().compiles) == (1, 0)
    assert KEY not in Executables("f", store_for(None))


def test_a_users_key_for_two_different_functions_is_refused_with_the_line_that_differs():
    store = Store()
    store.check(SIGNATURE, "let a = add\nb = sin a")
    store.check(SIGNATURE, "let a = add\nb = sin a")
    with pytest.raises(ValueError, match="`b = sin a` there, `b = cos a` here.*a key of its own"):
        store.check(SIGNATURE, "let a = add\nb = cos a")


def test_statistics_are_snapshots():
    executables = Executables("f", Store())
    before = executables.statistics()
    executables.get(KEY, lambda: None)
    assert before == CompileStatistics() and executables.statistics() != before


def test_programs_for_exact_sizes_are_bounded_and_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(_executables, "MAX_EXACT", 2)
    run = jb.batched(lambda x: x * 2, spec=jb.spec("n", "float32"), grid=jb.Grid(n=1), oversize="exact")
    for n in (3, 4, 3, 5, 3):  # 4 is the least recently used when 5 comes
        run([np.ones(n, np.float32)])
    assert (run.statistics().exact_compiles, run.statistics().evictions) == (3, 1)
    run([np.ones(4, np.float32)])
    assert (run.statistics().exact_compiles, run.statistics().evictions) == (4, 2)
