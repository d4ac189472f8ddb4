"""`jaxbatch.pack` as a transformation: what it takes, what it gives, what it refuses and what it explains."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import jaxbatch as jb

VECTOR = jb.spec("n", "float32")
ROWS = jb.spec("n, 4", "float32")
SEGMENTS = np.array([0, 0, -1, 1, 1, 1, -1], np.int32)
STARTS, LENGTHS = np.array([0, 3, 0], np.int32), np.array([2, 3, 0], np.int32)
ROW = np.array([1, 3, np.nan, 5, 6, 7, np.inf], np.float32)


def attend(w, x):
    return (jax.nn.softmax((x @ w) @ x.T) @ x).mean(0)


def two(width=4):
    """Return a row of two examples with NaN around them, and the examples."""
    rng = np.random.default_rng(0)
    row = np.full((len(SEGMENTS), width), np.nan, np.float32)
    examples = [rng.standard_normal((n, width)).astype(np.float32) for n in (2, 3)]
    row[0:2], row[3:6] = examples
    return row, examples


def test_ragged_results_lie_on_the_row_with_zeros_where_no_segment_is():
    g = jb.pack(lambda x: x - x.mean(), spec=VECTOR)
    out, flag = g(SEGMENTS, STARTS, LENGTHS, ROW)
    np.testing.assert_array_equal(out, [-1, 1, 0, -1, 0, 1, 0])
    assert not flag


def test_other_results_have_an_axis_of_segments_with_zeros_in_unused_slots():
    g = jb.pack(lambda x: (x.sum(), x.shape[0], x[1:]), spec=VECTOR)
    (total, size, rest), _ = g(SEGMENTS, STARTS, LENGTHS, ROW)
    np.testing.assert_array_equal(total, [4, 18, 0])
    np.testing.assert_array_equal(size, [2, 3, 0])
    assert rest.shape == (3, len(SEGMENTS) - 1)
    np.testing.assert_array_equal(rest[:, :3], [[3, 0, 0], [6, 7, 0], [0, 0, 0]])


def test_arguments_without_a_ragged_axis_have_one_value_for_each_segment():
    g = jb.pack(lambda x, s: x * s, spec=(VECTOR, jb.spec("", "float32")))
    out, _ = g(SEGMENTS, STARTS, LENGTHS, ROW, np.array([10, 100, np.nan], np.float32))
    np.testing.assert_array_equal(out, [10, 30, 0, 500, 600, 700, 0])


def test_arguments_of_other_ragged_sizes_are_padded_behind_an_axis_of_segments():
    g = jb.pack(lambda x, m: m @ x, spec=(VECTOR, jb.spec("n, n", "float32")), longest=3)
    matrices = np.full((3, 3, 3), np.nan, np.float32)
    matrices[0, :2, :2], matrices[1] = 1, 2
    out, _ = g(SEGMENTS, STARTS, LENGTHS, ROW, matrices)
    np.testing.assert_array_equal(out, [4, 4, 0, 36, 36, 36, 0])


def test_unused_slots_may_lie_anywhere():
    g = jb.pack(lambda x: jnp.concatenate([x, x[:1]]).sum(), spec=VECTOR)
    segments = np.where(SEGMENTS == 0, 1, np.where(SEGMENTS == 1, 3, -1)).astype(np.int32)
    starts, lengths = np.array([6, 0, 6, 3], np.int32), np.array([0, 2, 0, 3], np.int32)
    out, _ = g(segments, starts, lengths, ROW)
    np.testing.assert_array_equal(out, [0, 5, 0, 23])


def test_a_row_with_something_not_finite_in_an_attention_is_flagged():
    g = jb.pack(attend, (None, 0), spec=ROWS)
    row, (first, _) = two()
    w = np.eye(4, dtype=np.float32)
    out, flag = g(SEGMENTS, STARTS, LENGTHS, w, row)
    assert not flag
    np.testing.assert_allclose(out[0], attend(w, first), atol=1e-5)
    row[4] = np.inf
    assert g(SEGMENTS, STARTS, LENGTHS, w, row)[1]


def test_something_not_finite_stays_in_its_segment_where_no_contraction_mixes():
    g = jb.pack(lambda x: jnp.cumsum(x) / x.sum(), spec=VECTOR)
    row = ROW.copy()
    row[3] = np.nan
    out, flag = g(SEGMENTS, STARTS, LENGTHS, row)
    np.testing.assert_allclose(out[:2], [0.25, 1])
    assert not flag and np.isnan(out[3:6]).all()


def test_shared_weights_get_the_sum_of_the_gradients_of_all_segments():
    g = jb.pack(attend, (None, 0), spec=ROWS)
    row, examples = two()
    w = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    got = jax.grad(lambda w: (g(SEGMENTS, STARTS, LENGTHS, w, row)[0] ** 2).sum())(w)
    want = sum(jax.grad(lambda w: (attend(w, x) ** 2).sum())(w) for x in examples)  # noqa: B023
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_gradients_of_a_row_that_had_something_replaced_are_nan():
    g = jb.pack(attend, (None, 0), spec=ROWS)
    row, _ = two()
    row[4] = np.inf
    w = np.eye(4, dtype=np.float32)
    got = jax.grad(lambda w: g(SEGMENTS, STARTS, LENGTHS, w, row)[0][0].sum())(w)
    assert np.isnan(got).all()


def test_the_gradient_of_a_weight_is_one_product_over_the_row():
    g = jb.pack(lambda w, x: jnp.tanh(x @ w).sum(), (None, 0), spec=jb.spec("n, 32", "float32"))
    row, _ = two(32)
    w = np.ones((32, 48), np.float32)
    grad = jax.make_jaxpr(jax.grad(lambda w: g(SEGMENTS, STARTS, LENGTHS, w, row)[0].sum()))(w)
    assert "f32[3,32,48]" not in str(grad) and "f32[32,48]" in str(grad)


def test_the_gradient_of_an_embedding_is_one_table_for_all_segments():
    f = lambda table, i: jnp.sin(table[i]).sum()  # noqa: E731
    g = jb.pack(f, (None, 0), spec=jb.spec("n", "int32"))
    table = np.linspace(0, 1, 60, dtype=np.float32).reshape(20, 3)
    ids = np.array([3, 3, -9, 1, 3, 19, 99], np.int32)
    grad = jax.grad(lambda table: g(SEGMENTS, STARTS, LENGTHS, table, ids)[0].sum())
    want = sum(jax.grad(f)(table, i) for i in (ids[0:2], ids[3:6]))
    np.testing.assert_allclose(grad(table), want, rtol=0, atol=1e-6)
    assert "f32[3,20,3]" not in str(jax.make_jaxpr(grad)(table))


def test_second_derivatives_are_those_of_the_unpadded_function():
    f = lambda w, x: jnp.tanh(x @ w).sum() / x.shape[0]  # noqa: E731
    g = jb.pack(f, (None, 0), spec=ROWS)
    row, examples = two()
    w = np.linspace(-1, 1, 4, dtype=np.float32)
    twice = lambda h: jax.grad(lambda a: (jax.grad(h)(a) * w).sum())(w)  # noqa: E731
    got = twice(lambda w: g(SEGMENTS, STARTS, LENGTHS, w, row)[0].sum())
    want = twice(lambda w: sum(f(w, x) for x in examples))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_several_rows_are_a_vmap():
    g = jb.pack(attend, (None, 0), spec=ROWS)
    row, examples = two()
    w = np.eye(4, dtype=np.float32)
    rows = np.stack([row, row[::-1]])
    segments = np.stack([SEGMENTS, np.array([-1, 0, 0, 0, -1, 1, 1], np.int32)])
    starts, lengths = np.array([[0, 3, 0], [1, 5, 0]], np.int32), np.array([[2, 3, 0], [3, 2, 0]], np.int32)
    out, _ = jax.jit(jax.vmap(g, (0, 0, 0, None, 0)))(segments, starts, lengths, w, rows)
    for got, x in zip(
        out[:, :2].reshape(4, 4), [*examples, examples[1][::-1], examples[0][::-1]], strict=True
    ):
        np.testing.assert_allclose(got, attend(w, x), atol=1e-5)


def test_what_has_no_packed_rule_is_told_with_its_line():
    g = jb.pack(lambda x: jnp.linalg.inv(x[:, None] * x + jnp.eye(x.shape[0])).sum() + x.sum(), spec=VECTOR)
    g(SEGMENTS, STARTS, LENGTHS, ROW)
    found = g.explain()
    assert {s.primitive for s in found} >= {"lu"} and "test_pack.py" in found[0].line
    assert "padded to the longest" in str(found)


def test_an_encoder_runs_packed_as_a_whole():
    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, ids):
            table = self.param("positions", nn.initializers.normal(1.0), (16, 8))
            x = nn.Embed(20, 8)(ids) + table[: ids.shape[0]]
            for _ in range(2):
                h = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
                x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
            return x, x.mean(axis=0), x[-1], jnp.flip(x, 0)

    model = Encoder()
    params = model.init(jax.random.key(0), jnp.zeros(3, jnp.int32))
    g = jb.pack(model.apply, (None, 0), spec=jb.spec("n", "int32"))
    ids = np.array([3, 4, 77, 5, 6, 7, -8], np.int32)
    (row, mean, last, flipped), flag = jax.jit(g)(SEGMENTS, STARTS, LENGTHS, params, ids)
    assert not flag and not g.explain()
    for k, cells in enumerate((slice(0, 2), slice(3, 6))):
        want: Any = model.apply(params, ids[cells])
        for got, expected in zip((row[cells], mean[k], last[k], flipped[cells]), want, strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_a_loop_over_the_row_starts_anew_at_every_segment():
    step = lambda c, v: (jnp.tanh(c + v), c * 2)  # noqa: E731
    f = lambda x: lax.scan(step, x[0] * 0 + 1, x)  # noqa: E731
    g = jb.pack(f, spec=VECTOR)
    (last, steps), _ = g(SEGMENTS, STARTS, LENGTHS, ROW)
    for k, cells in enumerate((slice(0, 2), slice(3, 6))):
        want = f(ROW[cells])
        np.testing.assert_allclose(last[k], want[0], atol=1e-6)
        np.testing.assert_allclose(steps[cells], want[1], atol=1e-6)
    assert not g.explain()


def test_several_ragged_dims_are_refused():
    with pytest.raises(jb.MaskError, match="one ragged dim, the spec has `n`, `m`"):
        jb.pack(lambda x, y: x, spec=(VECTOR, jb.spec("m", "float32")))


def test_what_cannot_be_padded_is_refused_with_the_line():
    g = jb.pack(lambda x: jnp.abs(jnp.fft.fft(x)), spec=VECTOR)
    with pytest.raises(jb.MaskError, match="test_pack.py.*frequencies"):
        g(SEGMENTS, STARTS, LENGTHS, ROW)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((SEGMENTS, STARTS, LENGTHS), TypeError, "takes segments, starts, lengths and 1 arguments"),
        ((SEGMENTS, STARTS, LENGTHS, ROW[:-1]), jb.SpecError, r"shape \(6,\), expected \(7,\): on the row"),
        ((SEGMENTS, STARTS, LENGTHS, np.ones(7, np.int32)), jb.SpecError, "dtype int32, expected float32"),
        ((SEGMENTS, STARTS[:2], LENGTHS, ROW), ValueError, "starts has 2 entries and lengths 3"),
        ((SEGMENTS[None], STARTS, LENGTHS, ROW), TypeError, "segments must be a vector of integers"),
        ((SEGMENTS, STARTS, LENGTHS, "no"), jb.SpecError, "no arrays in the form of the spec"),
    ],
)
def test_arguments_of_another_layout_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        jb.pack(lambda x: x, spec=VECTOR)(*arguments)


def test_explain_needs_a_call():
    with pytest.raises(ValueError, match="call the function first"):
        jb.pack(lambda x: x, spec=VECTOR).explain()


def test_slots_that_no_segment_uses_may_stand_anywhere():
    def f(x):  # a value of size n + 1, whose place on its own row follows from all segments before it
        y = jnp.concatenate([jnp.zeros(1), jnp.cumsum(x)])
        return y, y.sum()

    x = np.arange(1.0, 8.0, dtype=np.float32)
    segments = np.array([1, 1, 1, 3, 3, 3, 3], np.int32)
    starts, lengths = np.array([0, 0, 0, 3], np.int32), np.array([0, 3, 0, 4], np.int32)
    (_, sums), _ = jb.pack(f, spec=VECTOR)(segments, starts, lengths, x)
    for slot, part in ((1, x[:3]), (3, x[3:])):
        np.testing.assert_allclose(sums[slot], f(jnp.asarray(part))[1], rtol=1e-6)
    np.testing.assert_array_equal(sums[np.array([0, 2])], 0)
