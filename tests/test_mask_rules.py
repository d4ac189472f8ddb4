"""Every rule against the unpadded function, under every poison, with gradients."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from masking import Case, assert_exact

import jaxbatch as jb

_rng = np.random.default_rng(1)
W = _rng.standard_normal((4, 4)).astype(np.float32)
KERNEL = _rng.standard_normal((3, 4, 4)).astype(np.float32)
KERNEL5 = _rng.standard_normal((5, 4, 4)).astype(np.float32)
TABLE = _rng.standard_normal((8, 4)).astype(np.float32)
IDS = "3:int32"


def refilled(x):
    """Read one value with several fills, so that what is known of its padding must change with them."""
    top, total = x.max(0), x.sum(0)
    shifted = x - top
    again = x.max(0)
    return jnp.exp(shifted).sum(0) + total + again


def attention(w, x):
    return jax.nn.softmax((x @ w) @ (x @ w.T).T / 2, axis=-1) @ x


def conv(w, x, strides=1, padding: Any = "SAME", **options):
    return lax.conv_general_dilated(
        x[None], w, (strides,), padding, dimension_numbers=("NWC", "WIO", "NWC"), **options
    )[0]


def conv_transpose(w, x, strides, padding):
    return lax.conv_transpose(x[None], w, (strides,), padding, dimension_numbers=("NWC", "WIO", "NWC"))[0]


def causal(x):
    n = x.shape[0]
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((n, n), bool)), x @ x.T, -1e9)) @ x


ELEMENTWISE = {
    "constants": Case(lambda x: x * jnp.exp(1.0) + lax.exp(np.float32(1)) - (1.0 - x) / 2),
    "arithmetic": Case(lambda x: x * 2 + 1),
    "where over the mean": Case(lambda x: jnp.where(x > 0, x, x.mean())),
    "nested vmap": Case(lambda x: jax.vmap(lambda r: r * r.sum() + x.sum())(x)),
}

REDUCTIONS = {
    "mean": Case(lambda x: x.mean(0)),
    "spread": Case(lambda x: (x.sum(0), x.var(0), x.std(0) if x.shape[1] == 4 else x), lengths=(2, 5, 8)),
    "extremes": Case(lambda x: (x.max(0), x.min(0), jax.nn.logsumexp(x, 0))),
    "all negative": Case(lambda x: (jnp.max(-jnp.abs(x), 0), jnp.argmax(-jnp.abs(x), 0)), grad=False),
    "product": Case(lambda x: (x.prod(0), x.prod())),
    "positions": Case(lambda x: (x.argmax(0), x.argmin(0), (x > 0).any(0), (x > 0).all(0)), grad=False),
    "integers": Case(lambda x: (x.sum(0), x.max(0), x.min(0), x.argmax(0)), ["n, 4:int32"], low=-9, high=-1),
    "unsigned bytes": Case(lambda x: (x.max(0), x.min(0), x.argmin(0)), ["n, 4:uint8"], low=1, high=200),
    "bits": Case(
        lambda x: (jnp.bitwise_and.reduce(x, axis=0), jnp.bitwise_or.reduce(x, axis=0)), ["n, 4:int32"], low=1
    ),
    "booleans": Case(lambda x: (x.any(0), x.all(0), x.sum(0), x.argmax(0)), ["n, 4:bool"]),
    "softmax sum": Case(lambda x: (jax.nn.softmax(x, 0) * x).sum(0)),
    "norms": Case(lambda x: (jnp.linalg.norm(x), x / jnp.linalg.norm(x, axis=1, keepdims=True))),
    "softmax over both ragged axes": Case(lambda x: jax.nn.softmax(x @ x.T, axis=(0, 1)) @ x),
    "exp of a shift along another axis": Case(
        lambda x: jnp.exp(x @ x.T - (x @ x.T).max(1)[None, :]).sum(1) * 1e-3, grad=False
    ),
    "maximum, sum, and the shift between them": Case(refilled),
    "contracted with itself": Case(
        lambda x: (jnp.einsum("ab,ab->b", x, x), jnp.einsum("ab,ab->", x, x), x[:, 0] @ x[:, 0])
    ),
    "an arbitrary fold": Case(
        lambda x: (
            lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)),
            lax.reduce(x, np.float32(0), lambda a, b: jnp.maximum(a, b), (0, 1)),
            lax.reduce(
                (x, x * 2), (np.float32(1), np.float32(0)), lambda a, b: (a[0] * b[0], a[1] + b[1]), (0,)
            ),
        ),
        grad=False,
    ),
    "windowed fold": Case(
        lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a + b, (2, 1), (2, 1), "SAME"),
        grad=False,
    ),
    "custom monoid": Case(lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)), grad=False),
}

CONTRACTIONS = {
    "two layers": Case(lambda w, x: jnp.tanh(x @ w) @ w, shared=(W,)),
    "gram": Case(lambda x: x.T @ x),
    "outer": Case(lambda x: x @ x.T),
    "attention": Case(attention, shared=(W,)),
    "causal attention": Case(causal),
    "cross attention": Case(lambda x, y: jax.nn.softmax(x @ y.T) @ y, ["n, 4", "m, 4"]),
    "einsum": Case(lambda x: jnp.einsum("nd,md->nm", x, x).sum(1)),
    "ragged batch": Case(lambda x: jnp.einsum("nd,ne->nde", x, x)),
    "library attention": Case(lambda x: jax.nn.dot_product_attention(*[x[:, None]] * 3)),
}

CUMULATIVE = {
    "cumsum": Case(lambda x: jnp.cumsum(x, 0)),
    "reverse cumsum": Case(lambda x: lax.cumsum(x, 0, reverse=True)),
    "others": Case(lambda x: (jnp.cumprod(x, 0), lax.cummax(x, 0), lax.cummin(x, 0), lax.cumlogsumexp(x, 0))),
    "others in reverse": Case(
        lambda x: tuple(
            f(x, 0, reverse=True) for f in (lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
        ),
    ),
}

LAYOUT = {
    "first and last": Case(lambda x: (x[0], x[-1])),
    "flip": Case(lambda x: jnp.flip(x, 0)),
    "drop the first": Case(lambda x: x[1:], lengths=(2, 5, 8)),
    "drop the last": Case(lambda x: x[:-1], lengths=(2, 5, 8)),
    "every second": Case(lambda x: (x[::2], x[1::3]), lengths=(2, 5, 8)),
    "backwards in threes": Case(lambda x: x[::-3]),
    "last two": Case(lambda x: x[-2:]),
    "a fixed place": Case(lambda x: (x[1], x[:3].sum(0)), lengths=(1, 2, 5)),
    "a fixed place past a length of one": Case(
        lambda x: (x[1], x[-2], x[:, 0][1], x[:, -2:-1].sum(0)), lengths=(1,)
    ),
    "halves": Case(lambda x: (x[x.shape[0] // 2 :], x[: x.shape[0] // 2 + 1])),
    "split": Case(lambda x: tuple(jnp.split(x, [1])), lengths=(2, 5, 8)),
    "concatenate": Case(lambda x: jnp.concatenate([x, x * 2, x[:1]])),
    "prepend": Case(lambda w, x: jnp.concatenate([w[:1], x]), shared=(W,)),
    "two ragged dims joined": Case(lambda x, y: jnp.concatenate([x, y]), ["n, 4", "m, 4"]),
    "roll": Case(lambda x: (jnp.roll(x, 1, 0), jnp.roll(x, -3, 0))),
    "differences": Case(lambda x: jnp.diff(x, axis=0), lengths=(2, 5, 8)),
    "pad": Case(lambda x: jnp.pad(x, ((2, 3), (0, 0)), constant_values=7)),
    "pad to a size": Case(lambda x: jnp.pad(x, ((0, 8 - x.shape[0]), (0, 0)), constant_values=7)),
    "pad on the left": Case(lambda x: jnp.pad(x, ((8 - x.shape[0], 0), (0, 0)), constant_values=7)),
    "repeat the edge": Case(lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="edge")),
    "no cells": Case(
        lambda x: jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode="edge").reshape(-1), ["n, 2, m"], lengths=(1, 5)
    ),
    "interior padding": Case(lambda x: lax.pad(x, np.float32(3), [(1, 2, 1), (0, 0, 0)])),
    "flatten": Case(lambda x: x.reshape(-1)),
    "flatten behind": Case(lambda x: x.T.reshape(-1)),
    "fold and unfold": Case(lambda x: x.T.reshape(2, 2, -1).transpose(2, 0, 1).reshape(-1, 4)),
    "quantile of the other axis": Case(lambda x: jnp.quantile(x, 0.5, axis=1)),
    "flatten two ragged dims": Case(lambda x, y: (x @ y.T).reshape(-1), ["n, 4", "m, 4"]),
    "tile and repeat": Case(lambda x: (jnp.tile(x, (2, 1)), jnp.repeat(x, 2, axis=0))),
    "diagonal": Case(lambda x: (jnp.diag(x @ x.T), jnp.eye(x.shape[0]) @ x)),
    "twice the length": Case(lambda x: x[::2], ["2*n, 4"]),
}

SIZES = {
    "size as a value": Case(lambda x: x / x.shape[0] * jnp.arange(x.shape[0])[:, None]),
    "positions from a table": Case(lambda t, x: x + t[: x.shape[0]], shared=(TABLE,)),
    "resize": Case(lambda x: jax.image.resize(x, (2 * x.shape[0], 4), "linear")),
}

INDEXING = {
    "embedding": Case(lambda t, i: t[i], ["n:int32"], (TABLE,)),
    "take": Case(lambda t, i: jnp.take(t, i, axis=0), ["n:int32"], (TABLE,), low=-2, high=12),
    "from the end": Case(lambda x, i: x[-i], ["n, 4", IDS], lengths=(5, 8)),
    "clipped": Case(lambda x, i: x.at[i].get(mode="clip"), ["n, 4", IDS], high=9),
    "filled": Case(lambda x, i: x.at[i].get(mode="fill", fill_value=-7), ["n, 4", IDS], high=9),
    "ragged into ragged": Case(lambda x, i: x.at[i].get(mode="clip"), ["n, 4", "m:int32"], high=9),
    "dynamic slice": Case(lambda x, i: lax.dynamic_slice_in_dim(x, i[0], 1, 0), ["n, 4", IDS], high=9),
    "dynamic slice of a table": Case(
        lambda t, x, i: x + lax.dynamic_slice_in_dim(t, i[0], x.shape[0], 0), ["n, 4", IDS], (TABLE,), high=9
    ),
    "update": Case(
        lambda x, i: lax.dynamic_update_slice_in_dim(x, x[:1] * 3, i[0], 0), ["n, 4", IDS], high=9
    ),
    "update a table": Case(
        lambda t, x, i: lax.dynamic_update_slice_in_dim(t, x * 3, i[0], 0), ["n, 4", IDS], (TABLE,), high=9
    ),
    "scatter add": Case(lambda x, i: x.at[i].add(1.5), ["n, 4", IDS], high=9),
    "scatter set": Case(lambda x, i: x.at[i].set(1.5, mode="clip"), ["n, 4", IDS], high=9),
    "scatter to clamped places": Case(
        lambda x, i: jnp.zeros((4, 4)).at[i].set(x[0], mode="clip"), ["n, 4", "n:int32"], high=9, grad=False
    ),
    "scatter max": Case(lambda x, i: x.at[i].max(0.5), ["n, 4", IDS], high=9),
    "scatter multiply": Case(lambda x, i: x.at[i].multiply(2.0), ["n, 4", IDS], grad=False),
    "segment sum": Case(lambda x, i: jax.ops.segment_sum(x, i, num_segments=5), ["n, 4", "n:int32"]),
    "segment max": Case(
        lambda x, i: jax.ops.segment_max(x, i, num_segments=5), ["n, 4", "n:int32"], grad=False
    ),
    "write into a table": Case(lambda t, x: t.at[: x.shape[0]].set(x), shared=(TABLE,)),
    "add into a table": Case(lambda t, x: t.at[: x.shape[0]].add(x), shared=(TABLE,)),
    "positions of what is true": Case(
        lambda x: (jnp.nonzero(x[:, 0] > 0, size=3, fill_value=-1)[0], jnp.unique(x[:, 1], size=3)),
        grad=False,
    ),
    "set the last": Case(lambda x: (x.at[-1].set(0), x.at[-1:].set(5))),
}

CONVOLUTIONS = {
    **{
        f"stride {strides}, {padding}": Case(
            lambda w, x, s=strides, p=padding: conv(w, x, s, p),
            shared=(KERNEL,),
            lengths=(3, 6, 7, 8) if padding == "VALID" else (1, 2, 5, 6, 7, 8),
        )
        for strides in (1, 2, 3)
        for padding in ("SAME", "VALID", ((1, 1),), ((2, 0),))
    },
    "kernel 5, stride 4": Case(lambda w, x: conv(w, x, 4), shared=(KERNEL5,), lengths=(1, 2, 3, 5, 6, 7, 8)),
    "dilated": Case(lambda w, x: conv(w, x, rhs_dilation=(2,)), shared=(KERNEL,)),
    "grouped": Case(lambda w, x: conv(w[:, :1], x, feature_group_count=4), shared=(KERNEL,)),
    "transposed, SAME": Case(lambda w, x: conv_transpose(w, x, 2, "SAME"), shared=(KERNEL,)),
    "transposed, VALID": Case(lambda w, x: conv_transpose(w, x, 3, "VALID"), shared=(KERNEL,)),
    "two layers": Case(lambda w, x: conv(w, jax.nn.relu(conv(w, x) + 1)), shared=(KERNEL,)),
    "max pool": Case(lambda x: nn.max_pool(x[None], (2,), (2,), "SAME")[0], lengths=(1, 2, 5, 7, 8)),
    "max pool, VALID": Case(lambda x: nn.max_pool(x[None], (2,), (1,))[0], lengths=(2, 5, 8)),
    "max pool, window 4": Case(
        lambda x: nn.max_pool(x[None], (4,), (3,), "SAME")[0], lengths=(1, 2, 5, 6, 7, 8)
    ),
    "min pool": Case(lambda x: -nn.pooling.pool(-x[None], -jnp.inf, lax.max, (3,), (2,), "SAME")[0]),
    "average pool": Case(lambda x: nn.avg_pool(x[None], (3,), (2,), "SAME", count_include_pad=False)[0]),
    "global pool": Case(lambda x: nn.avg_pool(x[None], (x.shape[0],))[0]),
}

CONTROL = {
    "scan": Case(lambda w, x: lax.scan(lambda c, y: (jnp.tanh(c @ w + y), c), x[0] * 0, x), shared=(W,)),
    "reverse scan": Case(
        lambda w, x: lax.scan(lambda c, y: (jnp.tanh(c @ w + y), c), x[0] * 0, x, reverse=True), shared=(W,)
    ),
    "scan over layers": Case(
        lambda w, x: lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, w)[0], shared=(KERNEL,)
    ),
    "loop to the length": Case(
        lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c * 0.5 + x[i], x[0]), grad=False
    ),
    "loop on data": Case(
        lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] + x), (0, x)), grad=False
    ),
    "loop on each cell": Case(
        lambda x: jax.vmap(lambda v: lax.while_loop(lambda c: c < 1, lambda c: c * 2, v))(
            jnp.abs(x[:, 0]) + 0.1
        ),
        grad=False,
    ),
    "loop in a branch": Case(
        lambda x: lax.cond(
            x.sum() > 0, lambda s: lax.while_loop(lambda c: c < 10, lambda c: c * 2, s), lambda s: -s, x.sum()
        ),
        grad=False,
    ),
    "loop in a loop": Case(
        lambda x: lax.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, lax.while_loop(lambda v: v < 10 * c[0], lambda v: v * 2, c[1])),
            (jnp.argmax(x[:, 0]) * 1.0, jnp.abs(x).max() * jnp.where(x.shape[0] > 1, 1, -1) + 0.1),
        ),
        lengths=(2, 5, 8),
        grad=False,
    ),
    "loop on data in a scan": Case(
        lambda x: lax.scan(
            lambda c, v: (lax.while_loop(lambda a: a < c + 1, lambda a: a * 2, v), v),
            1.0,
            jnp.abs(x[:, 0]) + 0.1,
        ),
        grad=False,
    ),
    "branch": Case(lambda x: lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - x.mean(0), x)),
    "rematerialised": Case(lambda x: jax.checkpoint(lambda x: jnp.sin(jax.nn.relu(x)).mean(0))(x)),
    "inner gradient": Case(
        lambda w, x: jax.grad(lambda w, x: jnp.tanh(attention(w, x)).mean() + jnp.linalg.norm(x), (0, 1))(
            w, x
        ),
        shared=(W,),
    ),
}


def spd(x):
    return x @ x.T + jnp.eye(x.shape[0])


ORDER = {
    "sort": Case(lambda x: (jnp.sort(x, 0), jnp.argsort(x, 0), jnp.median(x, 0))),
    "quantile": Case(lambda x: jnp.quantile(x, 0.3, axis=0)),
    "top k": Case(lambda x: lax.top_k(x.T, 1)),
    "several keys": Case(lambda x: lax.sort((x[:, 0] > 0, x[:, 1], x[:, 2]), num_keys=2), grad=False),
    "one hot of the winner": Case(lambda x: jax.nn.one_hot(jnp.argmax(x[:, 0]), x.shape[0])),
}

LINALG = {
    "cholesky": Case(lambda x: jnp.linalg.cholesky(spd(x)), tolerance=1e-4),
    "solve": Case(lambda x: jnp.linalg.solve(spd(x) + x[:, :1], x), tolerance=1e-4),
    "inverse": Case(lambda x: jnp.linalg.inv(spd(x)), tolerance=1e-4),
    "determinant": Case(lambda x: (jnp.linalg.det(x @ x.T * 0.1 + jnp.eye(x.shape[0])),), tolerance=1e-4),
    "log determinant": Case(lambda x: jnp.linalg.slogdet(spd(x)), tolerance=1e-4),
    "thin QR": Case(lambda x: jnp.linalg.qr(x), lengths=(4, 5, 8), tolerance=1e-4, grad=False),
    "singular values": Case(lambda x: jnp.linalg.svd(x, compute_uv=False), tolerance=1e-4, grad=False),
    "many fixed matrices": Case(
        lambda x: (
            jnp.linalg.eigvalsh(x + x.mT),
            jnp.abs(jnp.fft.fft(x[..., 0], axis=1)),
            jnp.linalg.svd(x)[1],
        ),
        ["n, 3, 3"],
        grad=False,
        tolerance=1e-4,
    ),
    "tridiagonal": Case(
        lambda x: lax.linalg.tridiagonal_solve(x[:, 0], 4 + x[:, 1], x[:, 2], x), tolerance=1e-4, grad=False
    ),
}

RANDOM = {
    "leading axis": Case(lambda x: jax.random.normal(jax.random.key(0), x.shape) * x),
    "one key a row": Case(
        lambda x: jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), x.shape[0])) * x[:, 0]
    ),
    "choice": Case(lambda x: jax.random.choice(jax.random.key(0), x[:, 0])),
    "categorical": Case(lambda x: jax.random.categorical(jax.random.key(0), x.T), grad=False),
    "trailing axis": Case(lambda x: jax.random.uniform(jax.random.key(1), x.T.shape).T * x),
}

CASES = {
    f"{family}: {name}": case
    for family, cases in {
        "elementwise": ELEMENTWISE,
        "reduction": REDUCTIONS,
        "contraction": CONTRACTIONS,
        "cumulative": CUMULATIVE,
        "layout": LAYOUT,
        "sizes": SIZES,
        "indexing": INDEXING,
        "convolution": CONVOLUTIONS,
        "control": CONTROL,
        "order": ORDER,
        "linear algebra": LINALG,
        "random": RANDOM,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_padding_never_changes_values_or_gradients(name):
    assert_exact(CASES[name])


BRANCHES = {
    "linspace": Case(lambda x: jnp.linspace(0, 1, x.shape[0]) + x, ["n"]),
    "above a size": Case(
        lambda x: x * 2 if x.shape[0] > 5 else jnp.cumsum(x), ["n"], lengths=(1, 3, 5, 6, 8)
    ),
    "equal to a size": Case(
        lambda x: jnp.sin(x) if x.shape[0] == 3 else x / x.sum(), ["n"], lengths=(1, 2, 3, 4, 8)
    ),
    "one of some sizes": Case(
        lambda x: jnp.sin(x).sum() if x.shape[0] in (1, 2) else x.max(), ["n"], lengths=(1, 2, 3, 4, 8)
    ),
    "even sizes": Case(lambda x: jnp.sin(x) if x.shape[0] % 2 == 0 else x, ["n"], lengths=(1, 2, 3, 4, 8)),
    "at most three": Case(lambda x: lax.top_k(x, min(3, x.shape[0]))[0], ["n"], lengths=(1, 2, 3, 4, 8)),
    "another output size": Case(lambda x: x[:5] if x.shape[0] > 5 else x, ["n"], lengths=(1, 4, 5, 6, 8)),
    "of two dims": Case(
        lambda x, y: (x.sum() if x.shape[0] > 3 else x.max()) * (y.sum() if y.shape[0] <= 2 else y.min()),
        ["n", "m"],
        lengths=(1, 2, 3, 4, 8),
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_a_size_takes_the_side_of_the_true_length(name):
    assert_exact(BRANCHES[name])


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x, y: x.sum() if x.shape[0] == y.shape[0] else x.max(), "n == m"),
        (lambda x, y: x * {3: 2}.get(x.shape[0], 1), "a look-up by the size n"),
        (lambda x, y: x * int(x.shape[0]), "needs it to be a constant"),
        (lambda x, y: x.reshape(-1, 3), "only possible at some lengths|needs it to be a constant"),
        (lambda x, y: x if x.shape[0] < 3 else (x, x), "structure of the output"),
    ],
)
def test_a_size_test_that_cannot_be_settled_is_refused_with_the_line(f, reason):
    masked = jb.mask(f, spec=(jb.spec("n", "float32"), jb.spec("m", "float32")))
    with pytest.raises(jb.MaskError, match=reason):
        masked({"n": 2, "m": 3}, np.ones(8, np.float32), np.ones(8, np.float32))
