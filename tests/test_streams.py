"""Batches that run at the same time, each started by a thread of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbatch as jb

GRID = jb.Grid(n=(4, 16), rows=(1, 4))


def weighted(w, x):
    return jnp.tanh(x) @ w[: x.shape[0]]


W = np.linspace(-1, 1, 16, dtype=np.float32)


def examples(num: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=int(n)).astype(np.float32) for n in rng.integers(1, 17, num)]


def test_results_are_those_of_one_stream_in_order():
    run = jb.batched(weighted, (None, 0), spec=jb.spec("n", "float32"), grid=GRID, streams=2)
    xs = examples(200)
    for got, x in zip(run(W, xs), xs, strict=True):
        np.testing.assert_allclose(got, np.tanh(x) @ W[: len(x)], rtol=1e-5, atol=1e-6)
    for got, x in zip(run.map(W, iter(xs)), xs, strict=True):
        np.testing.assert_allclose(got, np.tanh(x) @ W[: len(x)], rtol=1e-5, atol=1e-6)
    assert run.statistics().examples == 400


def test_two_programs_are_in_progress_at_once():
    both = threading.Barrier(2, timeout=30)

    def f(x):
        def meet(x):
            both.wait()
            return x.sum(axis=1)

        return jax.pure_callback(meet, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)

    grid = jb.Grid(n=[4, 16], rows=1)
    run = jb.batched(f, spec=jb.spec("n", "float32"), grid=grid, per_example=False, streams=2)
    assert run([np.ones(3, np.float32), np.ones(9, np.float32)]) == [3.0, 9.0]


def test_an_error_stays_with_the_examples_of_its_batch():
    def f(x):
        def fail(x):
            if np.any(x == 7):
                raise ValueError("seven")
            return x.sum(axis=1)

        return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape[:1], x.dtype), x)

    grid = jb.Grid(n=4, rows=1)
    run = jb.batched(f, spec=jb.spec("n", "float32"), grid=grid, per_example=False, streams=2)
    results = run([np.full(2, v, np.float32) for v in (1, 7, 2)], errors="return")
    assert results[0] == 2 and results[2] == 4 and "seven" in str(results[1])


def test_several_threads_share_the_streams_of_one_function():
    run = jb.batched(weighted, (None, 0), spec=jb.spec("n", "float32"), grid=GRID, streams=2)
    xs = examples(40)
    expected = run(W, xs)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: run(W, xs), range(8)):
            np.testing.assert_array_equal(results, expected)
    names = {t.name.rsplit("_", 1)[0] for t in threading.enumerate() if t.name.startswith("jaxbatch")}
    assert names == {"jaxbatch-stream"}


@pytest.mark.parametrize("streams", [0, -1, True])
def test_what_is_no_number_of_threads_is_refused(streams):
    with pytest.raises(ValueError, match="streams=.* it is a number of threads"):
        jb.batched(weighted, (None, 0), spec=jb.spec("n", "float32"), grid=GRID, streams=streams)
