"""Numbers and dtypes: what a batch may change in the last digits, and what it must never change."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from ragged import assert_close, assert_exact, normals, unpadded, weights

import jaxbatch as jb

VECTOR, ROWS = jb.spec("n", "float32"), jb.spec("n, 4", "float32")
SMALL = jb.Grid(n=[4, 32], rows=[1, 4])


def test_a_row_alone_and_in_a_batch_of_32_differ_by_no_more_than_the_documented_bound():
    w = np.random.default_rng(1).normal(size=(512, 512)).astype(np.float32)
    xs = normals([8] * 32, width=512)
    grid = jb.Grid(n=8, rows=[1, 8, 32])
    run = jb.batched(lambda w, x: x @ w, (None, 0), spec=jb.spec("n, 512", "float32"), grid=grid)
    together = run(w, xs)
    assert run.statistics().buckets[jb.Bucket(n=8, rows=32)].examples == 32
    for rows in (1, 8):
        alone = [each for i in range(0, 32, rows) for each in run(w, xs[i : i + rows])]
        assert_close(alone, together)
    reference = jax.jit(lambda w, x: x @ w)
    assert_close(together, [np.asarray(reference(w, x)) for x in xs])


def test_counts_of_a_thousand_are_right_in_half_precision():
    def count(x):
        ones = jnp.ones_like(x)
        stuck = lax.fori_loop(0, x.shape[0], lambda i, c: c + jnp.ones((), x.dtype), jnp.zeros((), x.dtype))
        return ones.sum(), ones.mean(), (x == x).sum(), x / x.shape[0], x.mean(), stuck

    xs = [np.ones(n, jnp.bfloat16) for n in (1000, 3)]
    run = assert_exact(count, xs, spec=jb.spec("n", "bfloat16"), grid=jb.Grid(n=[4, 1024], rows=1))
    total, mean, *_ = run(xs)[0]
    assert (total, mean) == (1000, 1)


def layers(x):
    w = jnp.eye(4, dtype=x.dtype) + 1
    attended = jax.nn.softmax((x @ w) @ x.T, axis=-1) @ x if jnp.issubdtype(x.dtype, jnp.floating) else x @ w
    return attended, x.sum(0), x.max(0), x.mean(0), jnp.cumsum(x, 0), x[::-1], jnp.where(x > 0, x, 0), x > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "uint8"])
def test_every_output_has_the_dtype_that_it_has_unpadded(dtype):
    xs = [(3 * x).astype(jnp.dtype(dtype)) for x in map(np.abs, normals((3, 17), width=4))]
    assert_exact(layers, xs, spec=jb.spec("n, 4", dtype), grid=SMALL)


def test_mask_constants_of_half_precision_mean_what_they_mean_unpadded():
    def attend(x, keep):
        low = jnp.where(keep, 0, -1e9).astype(x.dtype)  # -inf in float16
        lowest = jnp.where(keep, 0, jnp.finfo(x.dtype).min).astype(x.dtype)
        once, twice = x @ x.T + lowest, x @ x.T + lowest + lowest
        return jax.nn.softmax(x @ x.T + low), jax.nn.softmax(once), jax.nn.softmax(twice)

    for dtype in ("float16", "bfloat16"):
        xs = [x.astype(jnp.dtype(dtype)) for x in normals((17, 2), width=4)]
        keep = [np.arange(17) % 2 == 0, np.zeros(2, bool)]
        spec = (jb.spec("n, 4", dtype), jb.spec("n", "bool"))
        assert_exact(attend, xs, keep, spec=spec, grid=SMALL)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_one_example_stays_there(bad):
    def f(w, x):
        dims = ("NWC", "WIO", "NWC")
        out = lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=dims)[0]
        return jax.nn.softmax(out @ x.T, axis=-1) @ x + x.mean(0)

    w, xs = weights(3, 4, 4), normals((5, 6, 7, 8), width=4)
    run = jb.batched(f, (None, 0), spec=ROWS, grid=jb.Grid(n=8, rows=4))
    clean = run(w, xs)
    xs[2][3, 1] = bad
    dirty = run(w, xs)
    for i in (0, 1, 3):
        np.testing.assert_array_equal(dirty[i], clean[i])
    assert np.isnan(dirty[2]).any()
    assert_close(dirty[2], unpadded(f, w, xs[2:3], in_axes=(None, 0))[0])
