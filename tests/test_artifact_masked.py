"""The function inside an artifact: jit, vmap and grad compose with it, and padding stays harmless."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from artifacts import GRID, round_trip
from ragged import assert_close, weights

import jaxbatch as jb

W = weights(3, 3)
POISONS = (0.0, 1e30, np.nan, np.inf)


def attend(w, x):
    scores = jax.nn.softmax((x @ w) @ x.T, axis=-1)
    return jnp.linalg.norm(scores @ x) + x[-1].sum() / x.shape[0]


def centre(x):
    return x - x.mean(0), (x > 0).sum()


@pytest.fixture(scope="module")
def attending(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attend")
    return round_trip(folder, attend, W, spec=jb.spec("n, 3", "float32"), vjp_order=2)


def padded(n, size, poison, seed=0):
    x = np.full((size, 3), poison, np.float32)
    x[:n] = np.random.default_rng(seed).normal(size=(n, 3))
    return x


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("n", "size"), [(1, 1), (3, 7), (17, 32), (32, 32)])
def test_values_and_gradients_are_those_of_the_function(attending, n, size, poison):
    x, lengths = padded(n, size, poison), {"n": np.int32(n)}
    assert_close(np.asarray(attending.masked(lengths, x)), np.asarray(attend(W, x[:n])))
    got = np.asarray(jax.jit(jax.grad(lambda x: attending.masked(lengths, x)))(x))
    assert_close(got[:n], np.asarray(jax.grad(attend, 1)(W, x[:n])), "gradient")
    assert not got[n:].any()


def test_vmap_adds_rows_in_any_order_with_grad(attending):
    ns = np.array([1, 5, 8], np.int32)
    xs = np.stack([padded(n, 8, np.nan, seed=n) for n in ns])
    one = lambda n, x: attending.masked({"n": n}, x)
    want = [np.asarray(jax.grad(attend, 1)(W, x[:n])) for n, x in zip(ns, xs, strict=True)]
    inner = jax.vmap(jax.grad(one, 1))(ns, xs)
    outer = jax.grad(lambda xs: jax.vmap(one)(ns, xs).sum())(xs)
    twice = jax.vmap(jax.vmap(jax.grad(one, 1), (None, 0)), (0, None))(ns, xs[:, :8])
    for i, n in enumerate(ns):
        assert_close(np.asarray(inner)[i, :n], want[i])
        assert_close(np.asarray(outer)[i, :n], want[i])
        assert_close(np.asarray(twice)[i, i, :n], want[i])
        assert not np.asarray(inner)[i, n:].any() and not np.asarray(outer)[i, n:].any()


def test_a_batch_of_rows_may_be_passed_as_it_is(attending):
    ns = np.array([2, 8, 3, 1, 7], np.int32)
    xs = np.stack([padded(n, 8, np.inf, seed=n) for n in ns])
    for got, n, x in zip(attending.masked({"n": ns}, xs), ns, xs, strict=True):
        assert_close(np.asarray(got), np.asarray(attend(W, x[:n])))


def test_gradients_pass_strided_convolutions_and_pooling(tmp_path):
    """Their alignment depends on the true length, forwards and backwards."""
    kernel, conv = weights(3, 3, 2), ("NWC", "WIO", "NWC")

    def pooled(w, x):
        x = jax.lax.conv_general_dilated(x[None], w, (2,), "SAME", dimension_numbers=conv)[0]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (3, 1), (2, 1), "SAME")
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (2, 1), "SAME") / 2
        return (x**2).mean() * x.shape[0]

    grid = jb.Grid(n=(8, 16), rows=[2])
    loaded = round_trip(tmp_path, pooled, kernel, spec=jb.spec("n, 3", "float32"), grid=grid, vjp_order=1)
    of_padded = jax.jit(jax.value_and_grad(lambda x, n: loaded.masked({"n": n}, x)))
    of_exact = jax.jit(jax.value_and_grad(pooled, 1))
    for n, size in ((1, 8), (7, 8), (7, 16), (10, 16), (16, 16)):
        x = padded(n, size, np.nan, seed=n)
        value, got = of_padded(x, np.int32(n))
        wanted, gradient = of_exact(kernel, x[:n])
        assert_close(np.asarray(value), np.asarray(wanted), f"{n} in {size}: value")
        assert_close(np.asarray(got)[:n], np.asarray(gradient), f"{n} in {size}: gradient")
        assert not np.asarray(got)[n:].any()


def test_second_derivatives_need_vjp_order_two(attending, tmp_path):
    x, lengths = padded(3, 4, np.nan), {"n": 3}
    f = lambda loaded, x: jax.grad(lambda x: loaded.masked(lengths, x))(x)[:3].sum()
    got = jax.grad(lambda x: f(attending, x))(x)
    want = jax.grad(lambda x: jax.grad(attend, 1)(W, x).sum())(x[:3])
    assert_close(np.asarray(got)[:3], np.asarray(want), bound=1e-4)
    once = round_trip(tmp_path, attend, W, spec=jb.spec("n, 3", "float32"), vjp_order=1)
    assert (attending.vjp_order, once.vjp_order) == (2, 1)
    assert_close(np.asarray(f(once, x)), np.asarray(f(attending, x)))
    with pytest.raises(jb.ArtifactError, match=r"vjp_order=1.*Save it with vjp_order=2"):
        jax.grad(lambda x: f(once, x))(x)


def test_without_gradients_they_are_refused_at_once(tmp_path):
    loaded = round_trip(tmp_path, attend, W, spec=jb.spec("n, 3", "float32"))
    assert loaded.vjp_order == 0
    loaded.masked({"n": 2}, padded(2, 4, 0))
    with pytest.raises(jb.ArtifactError, match=r"vjp_order=0.*Save it with vjp_order=1"):
        jax.grad(lambda x: loaded.masked({"n": 2}, x))(padded(2, 4, 0))


def test_outputs_that_are_integers_and_several_outputs_are_no_obstacle(tmp_path):
    loaded = round_trip(tmp_path, centre, vjp_order=1)
    x = np.array([1, -2, 3, np.nan], np.float32)
    centred, positive = loaded.masked({"n": 3}, x)
    assert positive == 2 and centred[3] == 0
    got = jax.grad(lambda x: (loaded.masked({"n": 3}, x)[0] ** 2).sum())(x)
    assert_close(np.asarray(got)[:3], np.asarray(jax.grad(lambda x: (centre(x)[0] ** 2).sum())(x[:3])))
    assert loaded.masked.out_lengths({"n": 3}) == ((3,), ())


def test_programs_for_each_size_serve_masked_too(tmp_path):
    f = lambda x: (x * 2 if x.shape[0] > 9 else x - 1).sum()
    loaded = round_trip(tmp_path, f, vjp_order=1)
    for n, size in ((3, 4), (10, 16)):
        x = np.full(size, np.nan, np.float32)
        x[:n] = np.arange(n)
        assert_close(np.asarray(loaded.masked({"n": n}, x)), np.asarray(f(x[:n])))
        got = np.asarray(jax.grad(lambda x, n=n: loaded.masked({"n": n}, x))(x))
        assert_close(got[:n], np.asarray(jax.grad(f)(x[:n])))
        assert not got[n:].any()
    with pytest.raises(jb.ArtifactError, match="no program for the padded sizes {'n': 5}"):
        loaded.masked({"n": 5}, np.ones(5, np.float32))


def test_a_function_that_masks_itself_is_called_with_rows(tmp_path):
    def total(x, lengths):
        valid = jnp.arange(x.shape[1]) < lengths["n"][:, None]
        return jnp.where(valid, x, 0).sum(1)

    run = jb.batched(total, spec=jb.spec("n", "float32"), grid=GRID, per_example=False)
    run.save(tmp_path / "f.jbx", vjp_order=1, references=False)
    loaded = jb.load(tmp_path / "f.jbx")
    xs, ns = np.ones((3, 8), np.float32), np.array([1, 8, 3])
    np.testing.assert_array_equal(loaded.masked({"n": ns}, xs), [1, 8, 3])
    np.testing.assert_array_equal(jax.vmap(lambda n, x: loaded.masked({"n": n}, x))(ns, xs), [1, 8, 3])
    got = jax.grad(lambda xs: loaded.masked({"n": ns}, xs).sum())(xs)
    np.testing.assert_array_equal(got, np.arange(8) < ns[:, None])


def test_wrong_arguments_are_refused_with_what_is_expected(attending):
    x = padded(2, 4, 0)
    for error, message, lengths, args in (
        (ValueError, "lengths are a dict of integers by dim: n", {"m": 2}, (x,)),
        (ValueError, "is an integer, or integers", {"n": 2.5}, (x,)),
        (TypeError, "takes lengths and x", {"n": 2}, (x, x)),
        (jb.SpecError, "has shape .*expected float32", {"n": 2}, (x[0],)),
        (jb.SpecError, "has an axis of size 2, expected 3", {"n": 2}, (x[:, :2],)),
        (jb.SpecError, "dtypes .int32.*expected", {"n": 2}, (x.astype(np.int32),)),
        (jb.ArtifactError, "padded to 64, and its programs go from 1 to 32", {"n": 2}, (padded(2, 64, 0),)),
    ):
        with pytest.raises(error, match=message):
            attending.masked(lengths, *args)
