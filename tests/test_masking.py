"""`jaxbatch.mask` as a transformation: what it takes, what it refuses, what it explains and what it costs."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import jaxbatch as jb
from jaxbatch._mask import Masked
from jaxbatch._program import symbolic_dims, trace

VECTOR = jb.spec("n", "float32")
ROWS = jb.spec("n, 4", "float32")


def attend(w, x):
    return (jax.nn.softmax((x @ w) @ x.T) @ x).mean(0)


def test_outputs_hold_zeros_behind_the_valid_part():
    g = jb.mask(lambda x: x - x.mean(), spec=VECTOR)
    out = g({"n": 2}, np.array([1, 3, np.nan, np.inf], np.float32))
    np.testing.assert_array_equal(out, [-1, 1, 0, 0])


def test_out_lengths_follow_the_formulas_of_the_program():
    g = jb.mask(lambda x: {"twice": jnp.concatenate([x, x]), "half": x[::2]}, spec=VECTOR)
    assert g.out_lengths({"n": 5}) == {"twice": (10,), "half": (3,)}


def test_out_lengths_need_a_call_where_shared_sizes_are_unknown():
    g = jb.mask(lambda w, x: x @ w, (None, 0), spec=ROWS)
    with pytest.raises(ValueError, match="call the function first"):
        g.out_lengths({"n": 5})
    g({"n": 5}, np.ones((4, 2), np.float32), np.ones((8, 4), np.float32))
    assert g.out_lengths({"n": 5}) == (5, 2)


def test_second_derivatives_are_those_of_the_unpadded_function():
    f = lambda w, x: jnp.tanh(x @ w).sum() / x.shape[0]  # noqa: E731
    g = jb.mask(f, (None, 0), spec=ROWS)
    w = np.linspace(-1, 1, 4, dtype=np.float32)
    x = np.full((8, 4), np.nan, np.float32)
    x[:3] = np.random.default_rng(0).standard_normal((3, 4))
    twice = lambda h: jax.grad(lambda a: (jax.grad(h)(a) * w).sum())(w)  # noqa: E731
    np.testing.assert_allclose(
        twice(lambda w: g({"n": 3}, w, x)), twice(lambda w: f(w, x[:3])), rtol=0, atol=1e-5
    )


def test_shared_weights_get_the_summed_gradient_of_a_batch():
    g = jb.mask(attend, (None, 0), spec=ROWS)
    rng = np.random.default_rng(0)
    w, lengths = rng.standard_normal((4, 4)).astype(np.float32), np.array([1, 3, 8], np.int32)
    xs = [rng.standard_normal((n, 4)).astype(np.float32) for n in lengths]
    padded = np.full((3, 8, 4), np.nan, np.float32)
    for row, x in zip(padded, xs, strict=True):
        row[: len(x)] = x

    def loss(w):
        return jax.vmap(g, in_axes=(0, None, 0))({"n": lengths}, w, padded).sum()

    want = jax.grad(lambda w: sum(attend(w, x).sum() for x in xs))(w)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), want, rtol=0, atol=1e-5)


def test_explain_names_every_fill_with_its_reader_and_line():
    g = jb.mask(attend, (None, 0), spec=ROWS)
    with pytest.raises(ValueError, match="call the function first"):
        g.explain()
    g({"n": 3}, np.eye(4, dtype=np.float32), np.ones((8, 4), np.float32))
    fills = g.explain()
    assert [(f.primitive, f.needed) for f in fills] == [
        ("reduce_max", True),
        ("reduce_sum", False),
        ("dot_general", False),
        ("dot_general", True),
        ("reduce_sum", True),
    ]
    assert all("test_masking.py" in f.line for f in fills)
    assert str(fills).startswith("3 fills, 2 more left out")


def test_attention_costs_what_the_same_program_masked_by_hand_costs():
    def by_hand(lengths, w, x):
        valid = jnp.arange(x.shape[0]) < lengths["n"]
        scores = jnp.where(valid, (x @ w) @ x.T, -jnp.inf)
        mixed = jax.nn.softmax(scores) @ jnp.where(valid[:, None], x, 0)
        return jnp.where(valid[:, None], mixed, 0).sum(0) / lengths["n"]

    g = jb.mask(attend, (None, 0), spec=ROWS)
    args = {"n": np.ones(16, np.int32)}, np.ones((4, 4), np.float32), np.ones((16, 128, 4), np.float32)

    def cost(f):
        return jax.jit(jax.vmap(f, in_axes=(0, None, 0))).lower(*args).compile().cost_analysis()

    mine, theirs = cost(g) or {}, cost(by_hand) or {}
    for what in ("flops", "bytes accessed", "transcendentals"):
        assert mine[what] <= 1.03 * theirs[what], f"{what}: {mine[what]} by rule, {theirs[what]} by hand"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g, x: g({"n": 9}, x), "length of `n` is 9, expected 1 to 8"),
        (lambda g, x: g({"n": 0}, x), "length of `n` is 0, expected 1 to 8"),
        (lambda g, x: g({}, x), r"lengths must name the dims \['n'\]"),
        (lambda g, x: g({"n": np.ones(3, np.int32)}, x), "must be a scalar; use jax.vmap"),
        (lambda g, x: g({"n": 3}, np.stack([x, x])), "One example is passed here; use jax.vmap"),
        (lambda g, x: g({"n": 3}, x.astype(np.int32)), "has dtype int32, expected float32"),
        (lambda g, x: g({"n": 3}, x[:, :3]), "axis 1 has size 3, expected 4"),
        (lambda g, x: g({"n": 3}, None), r"mask\(.*\): `x`: is a NoneType, not a padded array"),
        (lambda g, x: g.out_lengths({"m": 3}), r"out_lengths: lengths must name the dims \['n'\]"),
    ],
)
def test_wrong_calls_say_what_was_expected(call, message):
    g = jb.mask(lambda x: x * 2, spec=ROWS)
    with pytest.raises(ValueError, match=message):
        call(g, np.ones((8, 4), np.float32))


@pytest.mark.parametrize("wrap", [lambda g: g, jax.jit])
@pytest.mark.parametrize("length", [1.5, True])
def test_a_length_that_is_no_integer_is_refused_rather_than_rounded(wrap, length):
    g = jb.mask(lambda x: x * 2, spec=ROWS)
    with pytest.raises(TypeError, match="the length of `n` must be an integer, got"):
        wrap(g)({"n": length}, np.ones((8, 4), np.float32))


def test_a_grid_with_a_dim_that_no_example_has_is_refused():
    with pytest.raises(jb.SpecError, match="the grid has dim `m`, but the spec has n"):
        jb.mask(lambda x: x * 2, spec=ROWS, grid=jb.Grid(m=8))


def test_two_arrays_padded_to_different_sizes_are_refused():
    g = jb.mask(lambda x, y: x + y, spec=(VECTOR, VECTOR))
    with pytest.raises(jb.SpecError, match="dim `n`.*padded to 16, another to 8"):
        g({"n": 3}, np.ones(8, np.float32), np.ones(16, np.float32))


def test_a_refusal_names_the_primitive_the_dim_and_the_line():
    g = jb.mask(lambda x: jnp.abs(jnp.fft.fft(x)), spec=VECTOR)
    with pytest.raises(jb.MaskError, match=r"`fft` over ragged `n` at .*test_masking\.py"):
        g({"n": 3}, np.ones(8, np.float32))


def test_a_callback_is_refused_even_where_nothing_is_ragged():
    def f(x):
        jax.debug.print("{}", x.sum())
        return x

    with pytest.raises(jb.MaskError, match="calls back to Python"):
        jb.mask(f, spec=VECTOR)({"n": 3}, np.ones(8, np.float32))


def test_closed_over_arrays_are_arguments_and_never_baked_in():
    table = jnp.asarray(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    inner = jax.jit(lambda x: x + jax.jit(lambda x: x * table[0, 0])(x))
    for f in (lambda x: x + table[: x.shape[0]].sum(1), inner):
        leaf = jax.ShapeDtypeStruct(tuple(symbolic_dims({"n": (1, 8)}).values()), np.float32)
        program = trace(f, [leaf], {"n": (1, 8)})
        assert [const.shape for const in program.consts] == [(8, 64)]
        (out,) = Masked(program)({"n": 3}, {"n": 8}, [np.ones(8, np.float32)], consts=[table * 2])
        assert np.abs(out[:3] - f(np.ones(3, np.float32))).min() > 0
