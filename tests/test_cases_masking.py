"""Functions that people found wrong under padding: each must be what it is unpadded, or be refused.

Every function runs under every poison, with neighbours in its batch, and its outputs must not differ by a bit
between poisons (`ragged.assert_exact`).
"""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from ragged import (
    GRID,
    assert_close,
    assert_exact,
    assert_exact_or_refused,
    normals,
    unpadded,
    weights,
)

import jaxbatch as jb

VECTOR, ROWS = jb.spec("n", "float32"), jb.spec("n, 4", "float32")
SMALL = jb.Grid(n=[4, 32], rows=[1, 4])
ODD = (1, 3, 17, 32)
FEW = (3, 17)  # for what takes long to compile

# --- reductions and sizes --------------------------------------------------------------------------


def test_a_softmax_weighted_sum_gives_padding_no_weight():
    assert_exact(lambda x: (jax.nn.softmax(x, 0) * x).sum(0), normals(), spec=VECTOR)


def test_reductions_of_negative_data_do_not_take_zero_for_their_identity():
    def reduce(x):
        return {
            "moments": (x.mean(), x.var(), x.std(), jnp.average(x), x.sum()),
            "extremes": (x.max(), x.min(), x.argmax(), x.argmin(), jnp.ptp(x)),
            "others": (x.prod(), (x < 0).any(), (x < 0).all(), (x > 0).any(), jax.nn.logsumexp(x)),
            "nan": (jnp.nanmax(x), jnp.nanmean(x), jnp.nansum(x)),
            "counts": (jnp.count_nonzero(x), jnp.linalg.norm(x)),
        }

    assert_exact(reduce, [-np.abs(x) - 0.1 for x in normals(ODD)], spec=VECTOR, grid=SMALL)


@pytest.mark.parametrize("reduce", [jnp.median, lambda x: jnp.quantile(x, 0.3)])
def test_order_statistics_of_negative_data(reduce):
    assert_exact(reduce, [-np.abs(x) - 0.1 for x in normals(ODD)], spec=VECTOR, grid=SMALL)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
def test_reductions_of_integers(dtype):
    low, high = (1, 250) if dtype == "uint8" else (-100, -1)
    rng = np.random.default_rng(0)
    xs = [rng.integers(low, high, n).astype(dtype) for n in ODD]

    def reduce(x):
        return x.sum(), x.mean(), x.max(), x.min(), x.argmax(), x.argmin(), x.prod(), (x > 0).any()

    assert_exact(reduce, xs, spec=jb.spec("n", dtype), grid=SMALL)


def test_reductions_of_booleans():
    rng = np.random.default_rng(0)
    xs = [rng.integers(0, 2, n).astype(bool) for n in ODD] + [np.ones(5, bool), np.zeros(5, bool)]
    spec = jb.spec("n", "bool")
    assert_exact(lambda x: (x.any(), x.all(), x.sum(), x.mean(), x.argmax()), xs, spec=spec, grid=SMALL)


def test_a_size_as_a_value_is_the_true_length():
    def positions(x):
        n = x.shape[0]
        angle = jnp.arange(n)[:, None] / n * jnp.arange(1, 3)
        waves = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=1)
        return x / n, jnp.arange(n), x + waves, jnp.full(n, n), n

    assert_exact(positions, normals(ODD, width=4), spec=ROWS, grid=SMALL)


def test_a_ramp_that_ends_at_the_true_length():
    assert_exact(
        lambda x: x * jnp.linspace(0, 1, x.shape[0]), normals((1, 2, 3, 17, 32)), spec=VECTOR, grid=SMALL
    )


# --- order ----------------------------------------------------------------------------------------


def special(n: int) -> np.ndarray:
    """Return data with ties, both infinities and NaN, as far as they fit."""
    values = [np.inf, 1, 1, -np.inf, np.nan, 0, -0.0, np.inf, 3e38, np.nan, -1, -np.inf, 1]
    return np.resize(np.array(values, np.float32), n)


@pytest.mark.parametrize("sort", [jnp.sort, jnp.argsort, jnp.median, lambda x: -jnp.sort(-x)])
def test_sorting_real_infinities_and_nan_never_takes_padding_first(sort):
    xs = [special(n) for n in (1, 2, 3, 8, 13, 32)]
    assert_exact(sort, xs, spec=VECTOR, grid=SMALL)


def test_the_top_five_of_real_infinities_and_nan_and_an_error_for_fewer_examples():
    xs = [special(n) for n in (5, 8, 13, 3, 32)]
    run = assert_exact(lambda x: lax.top_k(x, 5), xs, spec=VECTOR, grid=SMALL)
    with pytest.raises(ValueError, match="top_k must be no larger than size"):
        run(xs)


def test_an_error_of_the_functions_own_for_short_examples_is_theirs_alone():
    def differences(x):
        if x.shape[0] < 2:
            raise ValueError("too short")
        return jnp.diff(x)

    run = assert_exact(differences, normals((1, 3, 17, 1)), spec=VECTOR, grid=SMALL)
    assert "too short" in str(run(normals((3, 1)), errors="return")[1])


# --- layers ---------------------------------------------------------------------------------------


def with_parameters(model):
    """Return `f(params, x)` of a Flax module, and normal parameters: biases that are zero hide leaks."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((3, 4), np.float32))
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda p: 0.3 * rng.normal(size=p.shape).astype(np.float32), shapes)
    return lambda params, x: model.apply(params, x), params


def test_a_bidirectional_gru_with_random_biases():
    model = nn.Bidirectional(nn.RNN(nn.GRUCell(5)), nn.RNN(nn.GRUCell(5)))
    f, params = with_parameters(model)
    assert_exact(f, params, normals(FEW, width=4), in_axes=(None, 0), spec=ROWS, grid=SMALL)


def test_a_bidirectional_lstm_that_returns_its_last_states():
    model = nn.Bidirectional(nn.RNN(nn.LSTMCell(5)), nn.RNN(nn.LSTMCell(5)), return_carry=True)
    f, params = with_parameters(model)
    assert_exact(f, params, normals(FEW, width=4), in_axes=(None, 0), spec=ROWS, grid=SMALL)


class Convolutions(nn.Module):
    """SAME convolutions with (kernel, stride), a bias and a relu after each."""

    layers: tuple[tuple[int, int], ...]

    @nn.compact
    def __call__(self, x):
        for kernel, stride in self.layers:
            x = nn.relu(nn.Conv(4, (kernel,), stride)(x))
        return x


@pytest.mark.parametrize(
    "layers",
    [
        ((3, 1), (3, 1)),
        ((3, 2),),
        ((5, 4),),
        ((3, 2), (5, 4)),
    ],
    ids=str,
)
def test_same_convolutions_stay_aligned_and_never_read_what_a_bias_left_in_the_padding(layers):
    model = Convolutions(layers)
    lengths = (1, 15, 16, 17, 18, 19)
    f, params = with_parameters(model)
    assert_exact(f, params, normals(lengths, width=4), in_axes=(None, 0), spec=ROWS, grid=SMALL)


def test_same_convolutions_of_images_with_two_ragged_dims():
    def f(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x[None], kernel, (2, 2), "SAME", dimension_numbers=dims)
        return lax.conv_general_dilated(jax.nn.relu(x + 0.5), kernel, (1, 1), "SAME", dimension_numbers=dims)[
            0
        ]

    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(h, w, 3)).astype(np.float32) for h, w in [(1, 1), (5, 8), (7, 4), (16, 15)]]
    grid = jb.Grid(h=[8, 16], w=[8, 16], rows=[1, 4])
    spec = jb.spec("h, w, 3", "float32")
    assert_exact(f, weights(3, 3, 3, 3), xs, in_axes=(None, 0), spec=spec, grid=grid)


# --- sizes of outputs -----------------------------------------------------------------------------


def test_every_output_is_cut_to_its_own_formula_of_two_independent_lengths():
    def sizes(x, y):
        return {
            "2l": jnp.concatenate([x, x]),
            "l//2": x[: x.shape[0] // 2],
            "l+1": jnp.pad(x, (0, 1), constant_values=3),
            "l*m": jnp.outer(x, y).reshape(-1),
            "m*l": jnp.outer(y, x).reshape(-1),
            "(l,m)": jax.nn.softmax(jnp.outer(x, y), axis=1),
            "l+m": jnp.concatenate([y, x]),
        }

    grid = jb.Grid(n=[4, 32], m=[8, 16], rows=[1, 4])
    spec = (VECTOR, jb.spec("m", "float32"))
    assert_exact(sizes, normals((1, 3, 17, 2)), normals((7, 2, 16, 1), seed=1), spec=spec, grid=grid)


def test_cross_attention_masks_queries_and_keys_by_their_own_lengths():
    def attend(w, q, kv):
        return jax.nn.softmax((q @ w) @ kv.T, axis=-1) @ kv, jax.nn.dot_product_attention(
            q[:, None], kv[:, None], kv[:, None]
        )

    grid = jb.Grid(n=[4, 32], m=[8, 16], rows=[1, 4])
    queries, keys = normals((1, 3, 17, 2), width=4), normals((7, 2, 16, 1), width=4, seed=1)
    spec = (ROWS, jb.spec("m, 4", "float32"))
    assert_exact(attend, weights(4, 4), queries, keys, in_axes=(None, 0, 0), spec=spec, grid=grid)


# --- graphs, matrices, spectra --------------------------------------------------------------------


def test_segment_sums_with_separate_buckets_for_nodes_and_edges():
    def messages(nodes, senders, receivers):
        sent = nodes[senders] * 2 + 1
        num = nodes.shape[0]
        total = jax.ops.segment_sum(sent, receivers, num_segments=num)
        degree = jnp.zeros(num).at[receivers].add(1)
        return total, degree, total.sum(0)

    rng = np.random.default_rng(0)
    graphs = [(1, 3), (3, 2), (5, 17), (20, 4)]
    nodes = normals([n for n, _ in graphs], width=4)
    senders, receivers = ([rng.integers(0, n, e).astype(np.int32) for n, e in graphs] for _ in range(2))
    edges = jb.spec("e", "int32")
    options: Any = dict(spec=(ROWS, edges, edges), grid=jb.Grid(n=[4, 32], e=[4, 32], rows=[1, 4]))
    assert_exact(messages, nodes, senders, receivers, **options)


def positive_definite(n: int) -> np.ndarray:
    a = np.random.default_rng(n).normal(size=(n, n))
    return (a @ a.T / n + np.eye(n)).astype(np.float32)


SQUARES: Any = dict(spec=jb.spec("n, n", "float32"), grid=jb.Grid(n=[4, 8], rows=[1, 4]))


def test_square_matrices_are_not_solved_together_with_their_padding():
    def solve(a):
        b = a[:, 0] + 1
        return jnp.linalg.inv(a), jnp.linalg.slogdet(a), jnp.linalg.solve(a, b), jnp.linalg.cholesky(a)

    xs = [positive_definite(n) for n in (3, 4, 7)]
    assert_exact(solve, xs, **SQUARES)
    assert_exact(lambda a: (jnp.trace(a), jnp.triu(a), jnp.tril(a), a.T @ a, jnp.diag(a)), xs, **SQUARES)


def test_eigenvalues_are_exact_or_refused():
    xs = [positive_definite(n) for n in (1, 3, 4, 7)]
    assert_exact_or_refused(lambda a: jnp.linalg.eigvalsh(a), xs, match="`eigh` over ragged `n`", **SQUARES)


@pytest.mark.parametrize("transform", [jnp.fft.fft, jnp.fft.rfft, lambda x: jnp.fft.irfft(jnp.fft.rfft(x))])
def test_a_spectrum_over_a_ragged_axis_is_refused_or_runs_at_its_exact_size(transform):
    f = lambda x: jnp.abs(transform(x))
    with pytest.raises(jb.MaskError, match=r"fft|floordiv"):
        jb.batched(f, spec=VECTOR, grid=GRID)
    with pytest.warns(UserWarning, match="runs at exact sizes instead"):
        run = jb.batched(f, spec=VECTOR, grid=GRID, on_unmaskable="exact")
    xs = normals((2, 17, 64))
    for got, want in zip(run(xs), unpadded(f, xs), strict=True):
        assert_close(got, want)


# --- nothing at all, and ids ----------------------------------------------------------------------

NOTHING = {
    "sum": (lambda x: x.sum(), [0, 0]),
    "mean": (lambda x: x.mean(), [0, 0]),
    "max": (lambda x: x.max(), [0, 0]),
    "itself": (lambda x: x * 2, [0, 0]),
    "all empty and one not": (lambda x: x.mean(), [0, 3, 0]),
    "an error and neighbours": (lambda x: x.max(), [2, 0, 5]),
}


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("name", NOTHING)
def test_empty_examples_get_the_value_or_the_error_of_the_function(name):
    f, lengths = NOTHING[name]
    assert_exact(f, normals(lengths), spec=VECTOR)


def test_no_examples_give_no_results():
    assert jb.batched(lambda x: x.max(), spec=VECTOR, grid=GRID)([]) == []


def test_the_pad_id_is_a_real_id_and_real_ids_may_be_negative_or_out_of_range():
    def look_up(table, ids):
        return table[ids], jnp.take(table, ids, axis=0), table[ids].sum(0), (ids == 0).sum()

    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 6, n).astype(np.int32) for n in (1, 3, 17)]
    ids += [np.array([0, 0, 0], np.int32), np.array([-1, 5, 3], np.int32), np.array([99, 2], np.int32)]
    spec = jb.spec("n", "int32")
    assert_exact(look_up, weights(6, 4), ids, in_axes=(None, 0), spec=spec, grid=SMALL)


# --- attention without keys -----------------------------------------------------------------------


def masked_attention(low):
    """Return self-attention with an additive mask of the user's own, `keep`, over the keys."""

    def attend(x, keep):
        scores = x @ x.T + jnp.where(keep, 0, low)
        return jax.nn.softmax(scores, axis=-1) @ x

    return attend


@pytest.mark.parametrize("low", [-1e9, -np.inf, np.finfo(np.float32).min])
def test_a_users_mask_that_hides_all_keys_gives_what_it_gives_unpadded(low):
    xs = normals((3, 17, 2, 5), width=4)
    keep = [np.arange(len(x)) % 2 == 0 for x in xs]
    keep[2][:] = False
    spec = (ROWS, jb.spec("n", "bool"))
    run = assert_exact(masked_attention(np.float32(low)), xs, keep, spec=spec, grid=SMALL)
    hidden = run(xs, keep)[2]
    if low == np.finfo(np.float32).min:
        assert_close(hidden, np.broadcast_to(xs[2].mean(0), (2, 4)))  # uniform over its own 2 keys, not 4


def test_an_example_without_keys_attends_to_nothing_and_stays_finite():
    def attend(q, kv):
        return jax.nn.softmax(q @ kv.T, axis=-1) @ kv

    spec = (ROWS, jb.spec("m, 4", "float32"))
    grid = jb.Grid(n=[4, 32], m=[8], rows=[1, 4])
    queries, keys = normals((3, 17, 2), width=4), normals((5, 0, 8), width=4, seed=1)
    run = assert_exact(attend, queries, keys, spec=spec, grid=grid)
    np.testing.assert_array_equal(run(queries, keys)[1], np.zeros((17, 4), np.float32))


def test_a_librarys_attention_with_a_length_of_its_own():
    def attend(x, length):
        q = x[None, :, None]
        return jax.nn.dot_product_attention(q, q, q, key_value_seq_lengths=length[None])[0, :, 0]

    xs, spec = normals((3, 17, 5), width=4), (ROWS, jb.spec("", "int32"))
    assert_exact(attend, xs, [np.int32(2), np.int32(17), np.int32(1)], spec=spec, grid=SMALL)


def test_flax_attention_with_random_biases():
    model = nn.MultiHeadDotProductAttention(num_heads=2)
    f, params = with_parameters(model)
    assert_exact(f, params, normals(FEW, width=4), in_axes=(None, 0), spec=ROWS, grid=SMALL)


# --- loops on data --------------------------------------------------------------------------------


def doublings(x):
    """Count doublings until the largest of `x` reaches 1."""
    start = (jnp.int32(0), x.max())
    return lax.while_loop(lambda c: (c[1] < 1) & (c[0] < 1000), lambda c: (c[0] + 1, c[1] * 2), start)[0]


def test_a_loop_on_data_ends_for_each_example_on_its_own():
    xs = [np.array(x, np.float32) for x in ([0.3, 0.1], [0.1], [0.3, 0, 0, 0.2, 0.1], [2])]
    run = assert_exact(doublings, xs, spec=VECTOR, grid=SMALL)
    assert [int(each) for each in run(xs)] == [2, 4, 2, 0]


def test_a_loop_over_each_cell_never_runs_for_padding():
    def count(x):
        return jax.vmap(lambda v: doublings(v[None]))(x)

    xs = [np.array(x, np.float32) for x in ([0.3, 0.1], [0.1], [0.3, 0.2, 0.4], [2])]
    grid = jb.Grid(n=[4], rows=[4])
    run = assert_exact(count, xs, spec=VECTOR, grid=grid)
    assert [each.tolist() for each in run(xs)] == [[2, 4], [4], [2, 3, 2], [0]]


# --- random draws ---------------------------------------------------------------------------------


def keyed(draw):
    """Return a function of one example and the data of its key."""
    return lambda x, key: draw(x, jax.random.wrap_key_data(key))


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x, 0)


DRAWS = {
    "dropout [l, d]": dropout,
    "dropout [d, l] and [b, l, d]": lambda x, key: (
        dropout(x.T, key),
        dropout(jnp.stack([x, x + 1]), key),
    ),
    "categorical": lambda x, key: jax.random.categorical(key, x[:, 0]),
    "one key a row": lambda x, key: jax.vmap(lambda r, k: r + jax.random.normal(k))(
        x, jax.random.split(key, x.shape[0])
    ),
}


KEYED: Any = dict(spec=(ROWS, jb.spec("2", "uint32")), grid=SMALL)
SHUFFLES = {
    "permutation": lambda x, key: x[jax.random.permutation(key, x.shape[0])],
    "choice": lambda x, key: x[jax.random.choice(key, x.shape[0])],
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_draws_are_those_of_the_unpadded_example_with_the_same_key(name):
    xs = normals(FEW, width=4)
    keys = [np.array([0, seed], np.uint32) for seed in range(len(xs))]
    assert_exact(keyed(DRAWS[name]), xs, keys, **KEYED)


@pytest.mark.parametrize("name", SHUFFLES)
def test_shuffles_of_the_ragged_axis_are_exact_or_refused(name):
    xs = normals(FEW, width=4)
    keys = [np.array([0, seed], np.uint32) for seed in range(len(xs))]
    assert_exact_or_refused(keyed(SHUFFLES[name]), xs, keys, match="constant", **KEYED)


# --- operations that nobody can mask --------------------------------------------------------------


def called_back(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda v: np.asarray(v) * 2, shape, x)


def kernel(x):
    from jax.experimental import pallas as pl

    def double(source, target):
        target[...] = source[...] * 2

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, out_shape=out, interpret=True)(x)


UNKNOWN = {
    "pure_callback": (called_back, r"`pure_callback`.*test_cases_masking\.py:[\d:]+ \(called_back\)"),
    "pallas": (kernel, r"test_cases_masking\.py:[\d:]+ \(kernel\)"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operation_that_cannot_be_masked_is_refused_where_it_is_wrapped(name, count_compiles):
    f, message = UNKNOWN[name]
    with count_compiles() as compiles, pytest.raises(jb.MaskError, match=message):
        jb.batched(f, spec=VECTOR, grid=GRID)
    assert compiles.count == 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_operation_that_cannot_be_masked_may_run_at_exact_sizes(name):
    f, _ = UNKNOWN[name]
    with pytest.warns(UserWarning, match="runs at exact sizes instead"):
        run = jb.batched(f, spec=VECTOR, grid=GRID, on_unmaskable="exact")
    xs = normals((3, 17, 3))
    for got, x in zip(run(xs), xs, strict=True):
        assert_close(got, x * 2)


def test_unique_values_do_not_count_padding_or_are_refused():
    xs = [np.array(x, np.float32) for x in ([1, 1, 2], [3, 0, -1, 0, 3], [5])]
    f = lambda x: jnp.unique(x, size=3, fill_value=-7)
    # From JAX 0.12 on it is a call that cannot be looked into.
    assert_exact_or_refused(f, xs, spec=VECTOR, grid=SMALL, match="`call_hi_primitive`")
