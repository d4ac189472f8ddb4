"""What users met with, packed: recurrences in both directions, prompts in one row, NaN that stays home."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from ragged import assert_close, normals, unpadded, weights

import jaxbatch as jb

LENGTHS = (3, 4, 17, 1, 64, 2, 30, 7)
GRID = jb.Grid(n=[64, 128], rows=(1, 2), segments=8)


def assert_packed(f, *args, spec, in_axes, bound=None):
    run = jb.batched(f, in_axes, spec=spec, grid=GRID, layout="packed")
    results = run(*args)
    for i, (got, want) in enumerate(zip(results, unpadded(f, *args, in_axes=in_axes), strict=True)):
        assert_close(got, want, f"example {i}", bound)
    assert not run.statistics().notes
    return run


def gru(w, u, b, x, *, reverse=False):
    def step(h, v):
        z, r = jax.nn.sigmoid(v @ w[0] + h @ u[0] + b[0]), jax.nn.sigmoid(v @ w[1] + h @ u[1] + b[1])
        h = (1 - z) * h + z * jnp.tanh(v @ w[2] + (r * h) @ u[2] + b[2])
        return h, h

    return lax.scan(step, jnp.full(u.shape[-1], 0.1), x, reverse=reverse)


def test_a_recurrence_in_both_directions_starts_anew_in_every_segment():
    def both(w, u, b, x):
        (end, there), (begin, back) = gru(w, u, b, x), gru(w, u, b, x, reverse=True)
        return jnp.concatenate([there, back], -1), end + begin

    shared = weights(3, 4, 6), weights(3, 6, 6), weights(3, 6)
    run = assert_packed(
        both, *shared, normals(LENGTHS, width=4), spec=jb.spec("n, 4", "float32"), in_axes=(None,) * 3 + (0,)
    )
    assert run.statistics().batches == 2


def test_prompts_in_one_row_see_their_own_past_alone():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, ids):
            n = ids.shape[0]
            angle = jnp.arange(n)[:, None] / 10.0 ** jnp.arange(4)
            x = nn.Embed(30, 8)(ids) + jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
            past = jnp.arange(n)[None] <= jnp.arange(n)[:, None]
            for _ in range(2):
                h = nn.RMSNorm()(x)
                q, k, v = nn.DenseGeneral((4, 2))(h), nn.DenseGeneral((2, 2))(h), nn.DenseGeneral((2, 2))(h)
                k, v = jnp.repeat(k, 2, axis=1), jnp.repeat(v, 2, axis=1)
                scores = jnp.where(past, jnp.einsum("qhd,khd->hqk", q, k), -jnp.inf)
                mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v)
                x = x + nn.DenseGeneral(8, axis=(-2, -1))(mixed)
            logits = jax.nn.log_softmax(nn.Dense(30)(x))
            return jnp.take_along_axis(logits[:-1], ids[1:, None], axis=1)[:, 0], logits[-1]

    model = Decoder()
    params = model.init(jax.random.key(0), jnp.zeros(3, jnp.int32))
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 30, n).astype(np.int32) for n in LENGTHS if n > 1]
    spec = jb.spec("n", "int32")
    assert_packed(model.apply, params, ids, spec=spec, in_axes=(None, 0), bound=2e-5)


def attend(w, x):
    return jax.nn.softmax((x @ w) @ x.T) @ x


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_stays_home(bad):
    xs, w = normals((5, 6, 7, 9), width=4), weights(4, 4)
    run = jb.batched(attend, (None, 0), spec=jb.spec("n, 4", "float32"), grid=GRID, layout="packed")
    xs[2][3, 1] = bad
    for i, (got, want) in enumerate(zip(run(w, xs), unpadded(attend, w, xs, in_axes=(None, 0)), strict=True)):
        assert_close(got, want, f"example {i}")
        assert i == 2 or np.isfinite(got).all()


def test_a_stack_of_dilated_convolutions_never_looks_over_a_border():
    def stack(kernels, x):
        for k, kernel in enumerate(kernels):
            y = lax.conv_general_dilated(
                x[None], kernel, (1,), "SAME", rhs_dilation=(2**k,), dimension_numbers=("NWC", "WIO", "NWC")
            )
            x = x + jnp.tanh(y[0])
        y = lax.conv_general_dilated(
            x[None], kernels[0], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return y[0], x.max(0)

    kernels = [weights(3, 4, 4, seed=k) for k in range(3)]
    assert_packed(
        stack, kernels, normals(LENGTHS, width=4), spec=jb.spec("n, 4", "float32"), in_axes=(None, 0)
    )


def test_a_class_token_in_front_and_an_end_behind():
    def f(cls, end, w, x):
        x = jnp.concatenate([cls[None], x, end[None]])
        h = jax.nn.softmax((x @ w) @ x.T) @ x
        return h[0], h[1:-1], jnp.roll(h, 2, axis=0)[1:-1]

    shared = weights(4), weights(4, seed=3), weights(4, 4)
    run = jb.batched(f, (None,) * 3 + (0,), spec=jb.spec("n, 4", "float32"), grid=GRID, layout="packed")
    xs = normals(LENGTHS, width=4)
    for got, want in zip(run(*shared, xs), unpadded(f, *shared, xs, in_axes=(None,) * 3 + (0,)), strict=True):
        assert_close(got, want)


def test_the_gradient_of_a_recurrence_is_summed_over_a_row():
    w, u, b = weights(3, 4, 6), weights(3, 6, 6), weights(3, 6)
    loss = lambda w, u, b, x: (gru(w, u, b, x)[0] ** 2).sum()  # noqa: E731
    g = jb.pack(loss, (None,) * 3 + (0,), spec=jb.spec("n, 4", "float32"))
    xs = normals((5, 3), width=4)
    row = np.full((10, 4), np.nan, np.float32)
    row[0:5], row[6:9] = xs
    place = np.array([0] * 5 + [-1] + [1] * 3 + [-1]), np.array([0, 6]), np.array([5, 3])
    total = lambda *shared: g(*place, *shared, row)[0].sum()  # noqa: E731
    want = jax.tree.map(np.add, *(jax.grad(loss, (0, 1, 2))(w, u, b, x) for x in xs))
    for got, expected in zip(jax.grad(total, (0, 1, 2))(w, u, b), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    text = str(jax.make_jaxpr(jax.grad(total))(w, u, b))
    assert "f32[10,3,4,6]" not in text and "f32[2,3,4,6]" not in text
