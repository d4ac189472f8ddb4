"""The cases that single fills, clamps, shifts and refusals of the rules are there for.

`tools/mutate_rules.py` takes each of them out in turn; what the cases of `test_mask_rules` let pass is here.
"""

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from masking import Case, assert_exact

import jaxbatch as jb

_rng = np.random.default_rng(2)
TABLE = _rng.standard_normal((8, 4)).astype(np.float32)
KERNEL: Any = _rng.standard_normal((3, 4, 4)).astype(np.float32)
DIMS = ("NWC", "WIO", "NWC")
WINDOW = lax.ScatterDimensionNumbers((0, 1), (), (0,))


def write(scatter, t, x, i, mode):
    """Write one window of ragged size into a table at a computed start."""
    return scatter(t, i[:1], x, WINDOW, mode=mode)


def pool(x, op=lax.max, init=-np.inf):
    return lax.reduce_window(x, np.float32(init), op, (3, 1), (2, 1), "SAME")


def half_pool(x, op=lax.add, init: Any = 0, padding: Any = "SAME", window_strides=(1, 1), **steps):
    """Windows of half the length."""
    window = ((x.shape[0] + 1) // 2, 1)
    return lax.reduce_window(x, np.asarray(init, x.dtype), op, window, window_strides, padding, **steps)


def places(x):
    """Places that a short array does not have: one is held inside, of many the gradient is dropped."""
    late = (x[0, 0, 0] > -9).astype(np.int32) * 3
    rows = jax.vmap(lambda r: r[-2], in_axes=1)(x), jax.vmap(lambda r: r[late], in_axes=1)(x)
    return x[-2], x[2, :, :], x[late], x[:, 7], x[..., -2], x[-2, 0, -3], x[jnp.array([-2, 3])], *rows


def tangent(f, x):
    """The derivative along `x` itself, in forward mode."""
    return jax.jvp(f, (x,), (jnp.sin(x),))[1]


def grown(x):
    """Three rows or more, so that there are always three to rank."""
    return jnp.concatenate([x[:1], x[:1], x])


def last_is_infinite(x):
    return x.at[-1].set(jnp.inf)


def kept(f):
    """Name a function so that it stays a call of its own: composite, or with a rule for vmap."""
    return jax.lax.composite(f, name="test.kept")


@jax.custom_batching.custom_vmap
def doubled(x):
    return x * 2 - x.mean()


@doubled.def_vmap
def _(size, batched, x):
    return jax.vmap(lambda v: v * 2 - v.mean())(x), True


@jax.custom_jvp
def clipped_sum(x):
    return jnp.clip(x, -1, 1).sum(0)


@clipped_sum.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return clipped_sum(x), (t * jnp.cos(x)).sum(0)


REDUCTIONS = {
    "exclusive or": Case(lambda x: jnp.bitwise_xor.reduce(x, axis=0), ["n, 4:int32"], low=1),
    "and of negative numbers": Case(
        lambda x: jnp.bitwise_and.reduce(x, axis=0), ["n, 4:int32"], low=-9, high=-1
    ),
    "extremes of booleans": Case(
        lambda x: (lax.reduce_max(x, (0,)), lax.reduce_min(x, (0,)), lax.argmin(x, 0, np.int32)),
        ["n, 4:bool"],
    ),
    "two folds of no cell": Case(
        lambda x: lax.reduce(
            (x, x * 2), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)
        ),
        ["n, 0, 4"],
        grad=False,
    ),
    # Without a valid cell there is no maximum, and what softmax leaves in the padding is NaN.
    "a product of the softmax of no cell": Case(
        lambda x: (lambda p: (p.T @ p, p.sum(0)))(jax.nn.softmax(x[1:], 0)), lengths=(1, 2, 5, 8)
    ),
    "reductions in reverse": Case(
        lambda x: (lax.cummax(x, 0, reverse=True), lax.cumsum(x, 0, reverse=True)),
        ["n, 4:int32"],
        low=-9,
        high=-1,
    ),
}

INDEXING = {
    # -3 of 2 is -1 once it is counted from the end, which is before the start and not the last.
    "a place before the start": Case(
        lambda x: (
            lax.dynamic_update_index_in_dim(x, x.mean(1), jnp.int8(-3) - 0 * x.shape[0], 1),
            lax.dynamic_index_in_dim(x, jnp.int8(-3), 1),
        ),
        ["n, 2"],
        grad=False,
    ),
    # The derivative promises a place that is inside, and at its true size drops this one.
    "maximum at a clipped place": Case(lambda x: x.at[jnp.sum(x == x)].max(-1.5, mode="clip"), ["n"]),
    "scatter subtract": Case(lambda x, i: x.at[i].subtract(1.5), ["n, 4", "3:int32"], high=9),
    "scatter min": Case(lambda x, i: x.at[i].min(-0.5), ["n, 4", "3:int32"], high=9),
    "ragged into a table": Case(
        lambda t, x, i: (
            t.at[i].set(x[0]),
            t.at[i].add(x),
            t.at[i].subtract(x),
            t.at[i].min(x),
            t.at[i].max(x),
        ),
        ["n, 4", "n:int32"],
        (TABLE,),
    ),
    "multiplied into a table": Case(
        lambda t, x, i: t.at[i].multiply(x), ["n, 4", "n:int32"], (TABLE,), grad=False
    ),
    "prefix of a table": Case(
        lambda t, x: (
            t.at[: x.shape[0]].min(x),
            t.at[: x.shape[0]].max(x),
            t.at[: x.shape[0]].subtract(x),
        ),
        shared=(TABLE,),
    ),
    "multiplied into a prefix": Case(
        lambda t, x: t.at[: x.shape[0]].multiply(x), shared=(TABLE,), grad=False
    ),
    **{
        f"window at a start, {mode}, {scatter.__name__}": Case(
            lambda t, x, i, s=scatter, m=mode: write(s, t, x, i, m),
            ["n, 4", "3:int32"],
            (TABLE,),
            lengths=(1, 2, 3, 5, 6, 8),
            low=-3,
            high=9,
            grad=scatter is not lax.scatter_mul,
        )
        for scatter in (lax.scatter, lax.scatter_add, lax.scatter_mul, lax.scatter_min, lax.scatter_max)
        for mode in ("clip", "drop")
    },
    "window at a start in two axes": Case(
        lambda t, x, i: lax.scatter(
            t, i[:2], x[:, :2], lax.ScatterDimensionNumbers((0, 1), (), (0, 1)), mode="drop"
        ),
        ["n, 4", "3:int32"],
        (TABLE,),
        lengths=(1, 2, 3, 5, 6, 8),
        low=-1,
        high=5,
    ),
    "places past a length of one": Case(lambda x: places(x), ["n, 3, m"], lengths=(1,)),
    "the gradient of places past a length of one": Case(
        jax.grad(lambda x: sum((jnp.sin(v) * jnp.cos(1 + x[:1].mean())).sum() for v in places(x))),
        ["n, 3, m"],
        lengths=(1, 2, 5),
        grad=False,
    ),
    # Along the axis of fixed size too, positions are held against its end as the mode says.
    "past the end of a fixed axis": Case(
        lambda x, i, j: (
            x.at[i, i].get(mode="clip"),
            x.at[i, j].add(1.5, mode="clip"),
            x.at[j, i].max(jnp.sin(x[0, :3]), mode="clip"),
            x.at[i, i].min(-0.5, mode="clip", wrap_negative_indices=False),
            x.at[i, j].get(mode="fill", fill_value=-7),
            x.at[i, j].add(jnp.cos(x[0, :3]), mode="drop"),
        ),
        ["n, 4", "3:int32", "3:int32"],
        low=-6,
        high=12,
        grad=False,
    ),
    "the gradient past the end of a fixed axis": Case(
        lambda x, i: (
            x.at[i, i].get(mode="clip"),
            x.at[i, i].get(mode="fill", fill_value=-7),
            x.at[i, i].add(jnp.sin(x[0, :3]), mode="clip"),
        ),
        ["n, 4", "3:int32"],
        low=-6,
        high=12,
    ),
    "small positions": Case(
        lambda x, i: (x.at[i].get(mode="fill", fill_value=-7), x.at[i].add(1.5, mode="drop")),
        ["n, 4", "3:uint8"],
        high=9,
    ),
    "many small positions": Case(lambda t, i: t.at[i].add(1.5), ["n:uint8"], (TABLE,), grad=False),
    "negative and past the end": Case(
        lambda x, i: (
            x.at[i].get(mode="fill", fill_value=-7, wrap_negative_indices=False),
            x.at[i].get(mode="clip", wrap_negative_indices=False),
            x.at[i].add(1.0, mode="drop", wrap_negative_indices=False),
        ),
        ["n, 4", "5:int32"],
        low=-3,
        high=9,
    ),
    "slice that would reach past the end": Case(
        lambda x, i: (
            lax.dynamic_slice_in_dim(x, i[0], x.shape[0] // 2, 0),
            lax.dynamic_slice(x, (i[1], i[2]), (1, 2)),
        ),
        ["n, 4", "3:int32"],
        lengths=(2, 5, 8),
        low=-3,
        high=9,
    ),
    "written past the end": Case(
        lambda x, i: lax.dynamic_update_slice(x, x[: x.shape[0] // 2 + 1] * 3, (i[0], i[1])),
        ["n, 4", "3:int32"],
        low=-3,
        high=9,
    ),
    "slices of a table": Case(
        lambda t, x, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(t, k, x.shape[0]))(i) * x,
        ["n, 4", "3:int32"],
        (TABLE,),
        high=9,
    ),
}

LAYOUT = {
    "padded on both sides": Case(lambda x: lax.pad(x, np.float32(7), [(8 - x.shape[0], 3, 0), (0, 0, 0)])),
    "padded on both sides, apart": Case(
        lambda x: lax.pad(x, np.float32(7), [(8 - x.shape[0], 3, 2), (0, 0, 0)])
    ),
    "cropped at the end": Case(
        lambda x: lax.pad(x, np.float32(7), [(2, -1, 0), (0, 0, 0)]), lengths=(1, 2, 5, 8)
    ),
    "flipped both ways": Case(lambda x: lax.rev(x, (0, 1))),
    "tiled": Case(lambda x: (jnp.tile(x, (3, 2)), jnp.tile(x[:, 0], 2))),
    "three pieces joined": Case(lambda x, y: jnp.concatenate([x, y, x[:1], y * 2]), ["n, 4", "m, 4"]),
    "filled up from a table": Case(
        lambda t, x: jnp.concatenate([lax.dynamic_slice_in_dim(t, 0, 9 - x.shape[0]), x]), shared=(TABLE,)
    ),
    "an empty rest": Case(lambda x: (x[1:].T.reshape(-1), jnp.concatenate([x[1:], x]).sum(0))),
    "ragged axes merged and split": Case(
        lambda x, y: ((x @ y.T).reshape(-1), (x @ y.T).reshape(-1).reshape(y.shape[0], x.shape[0])),
        ["n, 4", "m, 4"],
    ),
    "split into a fixed part and a rest": Case(lambda x: jnp.split(x, [1, x.shape[0] - 1]), ["2*n, 4"]),
}

WINDOWS = {
    "ragged features": Case(
        lambda x, w: lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=DIMS)[0],
        ["4, n", "3, n, 2"],
    ),
    "ragged output features": Case(
        lambda x, w: lax.conv_general_dilated(x[None], w, (2,), "SAME", dimension_numbers=DIMS)[0],
        ["n, 4", "3, 4, m"],
    ),
    "ragged kernel": Case(
        lambda x, w: lax.conv_general_dilated(x[None], w, (1,), ((2, 2),), dimension_numbers=DIMS)[0],
        ["8, 4", "n, 4, 2"],
    ),
    "ragged kernel over a ragged axis": Case(
        lambda x, w: lax.conv_general_dilated(
            x[None], w, (1,), ((w.shape[0] - 1, w.shape[0] - 1),), dimension_numbers=DIMS
        )[0],
        ["n, 4", "m, 4, 2"],
    ),
    # Its derivative has arrays of fixed size alone: only its padding follows the length.
    "ragged kernel over a fixed signal": Case(
        lambda x, w: lax.conv_general_dilated(x[None], w, (1,), "SAME", dimension_numbers=DIMS)[0],
        ["8, 4", "n, 4, 2"],
    ),
    "ragged batch": Case(
        lambda w, x: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=DIMS),
        ["n, 5, 4"],
        (KERNEL,),
    ),
    "extreme pools": Case(
        lambda x: (pool(x), pool(x, lax.min, np.inf), pool(x, lax.add, 0)), lengths=(1, 2, 5, 7, 8)
    ),
    # JAX alone takes minutes for the bounds of the last size.
    "strided windows in a row": Case(
        lambda x: lax.reduce_window(
            lax.reduce_window(x, 0.0, lax.add, (2, 2), (3, 1), "SAME")[1:],
            -np.inf,
            lax.max,
            (2, 1),
            (3, 3),
            "SAME",
        ),
        ["n, n"],
        lengths=(2, 4, 5, 8),
        grad=False,
    ),
    # At its allocated size such a window would see valid cells that it must not.
    "windows of a ragged size": Case(
        lambda x: (
            half_pool(x),
            half_pool(x, lax.max, -np.inf, "VALID", window_strides=(2, 1)),
            half_pool(x, lax.min, np.inf, ((3, 1), (0, 0)), window_dilation=(2, 1)),
            half_pool(x, lax.mul, 1, base_dilation=(3, 1)),
            half_pool(x > 0, lax.bitwise_or, np.False_),
            half_pool(x > 0, lax.bitwise_and, np.True_),
        ),
        lengths=(1, 2, 3, 4, 5, 7, 8),
        grad=False,
    ),
    "the gradient of windows of a ragged size": Case(
        lambda x: (half_pool(x), half_pool(x, padding="VALID", window_strides=(2, 1))), lengths=(1, 5, 8)
    ),
    "windows of two ragged sizes": Case(
        lambda x: lax.reduce_window(x, -np.inf, lax.max, x.shape, (1, 2), "SAME"),
        ["n, m"],
        lengths=(1, 2, 5, 8),
        grad=False,
    ),
    "no window of a ragged size": Case(
        lambda t, x: lax.reduce_window(
            t, 0.0, lax.add, ((x.shape[0] + 1) // 2, 1), (1, 1), ((0, -8), (0, 0))
        ),
        shared=(TABLE,),
        grad=False,
    ),
    "windows of the whole axis": Case(
        lambda x: (
            lax.reduce_window(x, -np.inf, lax.max, (x.shape[0], 2), (1, 1), "VALID"),
            lax.reduce_window(x, 0.0, lax.add, (x.shape[0], 1), (1, 1), "VALID"),
            tangent(lambda v: lax.reduce_window(v, np.inf, lax.min, (v.shape[0], 1), (1, 1), "VALID"), x),
        )
    ),
    "pools of all negative and all positive": Case(
        lambda x: (pool(-jnp.abs(x) - 1), pool(jnp.abs(x) + 1, lax.min, np.inf)), lengths=(1, 2, 5, 7, 8)
    ),
    "pools from a start of their own": Case(
        lambda x: (pool(x, lax.mul, 1), pool(x, lax.mul, 2), pool(x, lax.add, 5), pool(x, lax.max, 0)),
        lengths=(1, 2, 5, 7, 8),
        grad=False,
    ),
    "derivative of a max pool": Case(lambda x: tangent(pool, x), lengths=(1, 2, 5, 7, 8)),
    "derivative of a min pool": Case(
        lambda x: tangent(lambda x: pool(x, lax.min, np.inf), x), lengths=(1, 2, 5, 7, 8)
    ),
    "gradient of a pool": Case(
        lambda x: jax.grad(lambda x: (pool(x) ** 2).sum())(x), lengths=(1, 2, 5, 7, 8)
    ),
    "integers in a pool": Case(
        lambda x: lax.reduce_window(x, np.int32(-(2**31)), lax.max, (2, 1), (1, 1), "SAME"),
        ["n, 4:int32"],
        low=-9,
        high=-1,
    ),
}

CALLS = {
    "composite": Case(lambda x: kept(lambda x: x - x.mean(0))(x), grad=False),
    "custom vmap": Case(lambda x: jax.vmap(doubled)(x.T).T + doubled(x), grad=False),
    "custom jvp": Case(lambda x: (clipped_sum(x), tangent(clipped_sum, x))),
    "platform": Case(
        lambda x: lax.platform_dependent(x, cpu=lambda x: x - x.mean(0), default=lambda x: x + x.mean(0))
    ),
}

# Loops that would never end on a padding of 0, or on what a frozen step leaves there.
LOOPS = {
    "on each cell": Case(
        lambda x: jax.vmap(lambda v: lax.while_loop(lambda c: c < 1, lambda c: c * 2, v))(jnp.abs(x)),
        ["n"],
        grad=False,
    ),
    "in each step": Case(
        lambda x: lax.scan(
            lambda c, v: (lax.while_loop(lambda a: a < c + 1, lambda a: a * 2, v), v), 1.0, jnp.abs(x)
        ),
        ["n"],
        grad=False,
    ),
    "in a loop that ends earlier for others": Case(
        lambda x: lax.while_loop(
            lambda c: c[0] > 0,
            lambda c: (
                c[0] - 1,
                jnp.where(c[0] == 1, 0, lax.while_loop(lambda v: v < 9, lambda v: v * 2, c[1])),
            ),
            (x.shape[0], 1.0 + x.max() * 0),
        ),
        ["n"],
        grad=False,
    ),
    "of a fixed number of steps, in one on each cell": Case(
        lambda x: jax.vmap(
            lambda v: lax.while_loop(
                lambda c: c < 9,
                lambda c: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 1.5), (0, c))[1],
                v,
            )
        )(jnp.abs(x)),
        ["n"],
        grad=False,
    ),
}

ORDER = {
    "top k of integers": Case(lambda x: lax.top_k(grown(x).T, 3), ["n, 4:int32"], low=-9, high=-1),
    "top k of bytes": Case(lambda x: lax.top_k(grown(x).T, 3), ["n, 4:uint8"], high=2),
    "top k of infinities": Case(
        lambda x: lax.top_k(grown(jnp.where(x > 0, -jnp.inf, -jnp.nan)).T, 3), grad=False
    ),
    "order of infinities": Case(
        lambda x: (
            jnp.sort(jnp.where(x > 0, jnp.inf, x), 0),
            jnp.argsort(jnp.where(x > 0, jnp.nan, x), 0, descending=True),
        ),
        grad=False,
    ),
}

LINALG = {
    "the gradient of a determinant of one cell": Case(
        lambda x: jnp.linalg.det(x @ x.T * 0.1 + jnp.eye(x.shape[0])), lengths=(8, 1, 5), tolerance=1e-4
    ),
    "the gradient of a determinant of one cell without padding": Case(
        lambda x: jnp.linalg.det(x @ x.T * 0.1 + jnp.eye(x.shape[0])), lengths=(1,), size=1, tolerance=1e-4
    ),
    "LU of a tall matrix": Case(
        lambda x: lax.linalg.lu(x), lengths=(1, 2, 4, 5, 8), grad=False, tolerance=1e-4
    ),
    "LU of a wide matrix": Case(
        lambda x: lax.linalg.lu(x.T), lengths=(1, 2, 4, 5, 8), grad=False, tolerance=1e-4
    ),
    "LU of a square matrix": Case(
        lambda x: lax.linalg.lu(x @ x.T + jnp.eye(x.shape[0])), grad=False, tolerance=1e-4
    ),
    "pivots": Case(
        lambda i: lax.linalg.lu_pivots_to_permutation(
            jnp.clip(i, jnp.arange(i.shape[0]), i.shape[0] - 1), i.shape[0]
        ),
        ["n:int32"],
        high=9,
    ),
    "singular values of two ragged sides": Case(
        lambda x: jnp.linalg.svd(x, compute_uv=False), ["n, m"], grad=False, tolerance=1e-4
    ),
    "triangular, lower and upper": Case(
        lambda x, b: tuple(
            lax.linalg.triangular_solve(
                x @ x.T + jnp.eye(x.shape[0]), b, left_side=True, lower=lower, transpose_a=transposed
            )
            for lower in (True, False)
            for transposed in (True, False)
        ),
        ["n, 4", "n, m"],
        grad=False,
        tolerance=1e-4,
    ),
    "triangular from the right": Case(
        lambda x, b: tuple(
            lax.linalg.triangular_solve(x @ x.T + jnp.eye(x.shape[0]), b, lower=lower)
            for lower in (True, False)
        ),
        ["n, 4", "m, n"],
        grad=False,
        tolerance=1e-4,
    ),
    "tridiagonal with anything behind its diagonals": Case(
        lambda x: lax.linalg.tridiagonal_solve(
            x[:, 0].at[0].set(jnp.inf), 4 + x[:, 1], last_is_infinite(x[:, 2]), x
        ),
        lengths=(3, 5, 8),
        tolerance=1e-4,
        grad=False,
    ),
}

CASES = {
    f"{family}: {name}": case
    for family, cases in {
        "reduction": REDUCTIONS,
        "indexing": INDEXING,
        "layout": LAYOUT,
        "window": WINDOWS,
        "call": CALLS,
        "loop": LOOPS,
        "order": ORDER,
        "linear algebra": LINALG,
    }.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_padding_never_changes_values_or_gradients(name):
    assert_exact(CASES[name])


# What is not zero is true: JAX takes every size of which it does not know for that.
TRUTHS = {
    "a remainder": Case(lambda x: jnp.sin(x) if x.shape[0] % 2 else x),
    "no remainder": Case(lambda x: x if not x.shape[0] % 3 else jnp.sin(x)),
    "or": Case(lambda x: x * (x.shape[0] // 4 or 7)),
    "and": Case(lambda x: x * ((x.shape[0] - 1) and 5)),
    "any": Case(lambda x: x * 2 if any([x.shape[0] - 1, 0]) else x),
    "a sum that is never zero": Case(lambda x: x * 2 if x.shape[0] else x),
    "the gradient of a determinant": Case(
        jax.grad(lambda x: jnp.linalg.det(x @ x.T * 0.1 + jnp.eye(x.shape[0]))),
        lengths=(1, 2, 3, 5, 8),
        grad=False,
        tolerance=1e-4,
    ),
    "a float": Case(lambda x: x * 2 if x.shape[0] == 2.0 else x),
    "a NumPy number": Case(lambda x: x * 2 if np.int64(5) == x.shape[0] else x),
    "an array without axes": Case(lambda x: x * 2 if x.shape[0] != np.array(5) else x),
    "a test by NumPy": Case(lambda x: x * 2 if np.isin(x.shape[0], [2, 5]) else x),
    "whole bytes": Case(lambda x: jnp.packbits(x > 0, axis=0), grad=False),
}


@pytest.mark.parametrize("name", TRUTHS)
def test_the_truth_of_a_size_is_that_of_the_true_length(name):
    assert_exact(TRUTHS[name])


def test_the_padding_of_a_matrix_is_the_identity_before_it_is_factored():
    # Libraries of other devices give up on a matrix with NaN anywhere in it; the CPU's does not show it.
    masked = jb.mask(jnp.linalg.cholesky, spec=jb.spec("n, n", "float32"))
    text = str(jax.make_jaxpr(lambda x: masked({"n": 3}, x))(np.zeros((8, 8), np.float32)))
    assert re.search(r"(\w+):f32\[8,8\] = select_n .*\n\s*\w+:f32\[8,8\] = cholesky.* \1\n", text)


def test_the_places_in_no_cell_are_jaxs_own():  # 0, whatever the fill value
    case = Case(lambda x: jnp.flatnonzero(x[1:] > 0, size=3, fill_value=-1), lengths=(1, 2, 5, 8), grad=False)
    if jax.__version_info__ < (0, 12):
        assert_exact(case)
    else:  # JAX looks whether there is a cell after the trace, when it is too late for two sides
        with pytest.raises(jb.MaskError, match="== 0, which differs between examples"):
            assert_exact(case)


# --- refusals --------------------------------------------------------------------------------------


def conv(x: Any, w: Any, **groups: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=DIMS, **groups)


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def max_of_half(x: Any) -> Any:
    return half_pool(x, lax.max, -np.inf).sum()


REFUSALS = {
    "fft": (lambda x: jnp.fft.fft(x, axis=0), "fft"),
    "eigh": (lambda x: jnp.linalg.eigh(x @ x.T), "eigh"),
    "eig": (lambda x: lax.linalg.eig(x @ x.T), "eig"),
    "schur": (lambda x: lax.linalg.schur(x @ x.T), "schur"),
    "hessenberg": (lambda x: lax.linalg.hessenberg(x @ x.T), "hessenberg"),
    "tridiagonal": (lambda x: lax.linalg.tridiagonal(x @ x.T), "tridiagonal"),
    "householder": (lambda x: lax.linalg.householder_product(x @ x.T, x[:, 0]), "householder_product"),
    "gamma": (lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x)), "random_gamma|key"),
    "bare bits": (lambda x: lax.rng_uniform(x.sum() * 0, 1.0, x.shape), "rng_uniform"),
    "approximate": (lambda x: lax.approx_max_k(x[:, 0], 1), "approx_top_k"),
    "another generator": (
        lambda x: jax.random.normal(jax.random.key(0, impl="rbg"), x.shape),
        "whole shape",
    ),
    "many keys": (
        lambda x: jax.vmap(lambda k: jax.random.bits(k, x.shape))(jax.random.split(jax.random.key(0), 3)),
        "many keys",
    ),
    "singular vectors": (lambda x: jnp.linalg.svd(x), "singular vectors"),
    "columns of QR": (lambda x: jnp.linalg.qr(x.T), "number of columns is ragged"),
    "full QR": (lambda x: jnp.linalg.qr(x, mode="complete"), "number of columns is ragged|inconclusive"),
    "QR with pivots": (lambda x: lax.linalg.qr(x, pivoting=True, full_matrices=False), "with pivots"),
    "reordered": (lambda x: lax.reshape(x, (4 * x.shape[0],), dimensions=(1, 0)), "reorders"),
    "some lengths": (lambda x: x[:, 0].reshape(2, -1), "only possible at some lengths|divide"),
    "many ragged windows": (
        lambda x: lax.scatter(
            jnp.zeros((3, 8, 4)),
            np.array([[0], [2]]),
            jnp.stack([x, x]),
            lax.ScatterDimensionNumbers((1, 2), (0,), (0,)),
        ),
        "many windows of ragged size",
    ),
    "a stride by a size": (lambda x: lax.slice(x, (0, 0), x.shape, (x.shape[0] // 3 + 1, 1)), "stride that"),
    "a dilation by a size": (lambda x: lax.pad(x, 0.0, ((0, 0, x.shape[0]), (0, 0, 0))), "dilation that"),
    "windows a size apart": (lambda x: half_pool(x, window_strides=(x.shape[0] // 3 + 1, 1)), "a stride or"),
    "windows dilated by a size": (lambda x: half_pool(x, window_dilation=(x.shape[0], 1)), "a stride or"),
    "a pool dilated by a size": (lambda x: half_pool(x, base_dilation=(x.shape[0], 1)), "a stride or"),
    "kernels a size apart": (
        lambda x: lax.conv_general_dilated(
            x[None], KERNEL, (x.shape[0] // 3 + 1,), "VALID", dimension_numbers=DIMS
        ),
        "a stride or",
    ),
    "a kernel dilated by a size": (
        lambda x: conv(x[None], KERNEL, rhs_dilation=(x.shape[0],)),
        "a stride or",
    ),
    "a convolution dilated by a size": (
        lambda x: lax.conv_general_dilated(
            x[None], KERNEL, (1,), ((0, 0),), lhs_dilation=(x.shape[0],), dimension_numbers=DIMS
        ),
        "a stride or",
    ),
    "the largest of a ragged window": (lambda x: jax.grad(max_of_half)(x), "that slides"),
    "the slope of a ragged window": (lambda x: tangent(max_of_half, x), "that slides"),
    "features in groups": (
        lambda x: conv(jnp.concatenate([x, x]).T[None], jnp.ones((3, x.shape[0], 4)), feature_group_count=2),
        "splits a ragged feature axis",
    ),
    "batch in groups": (
        lambda x: conv(jnp.concatenate([x, x])[:, None], ones(1, 4, 2), batch_group_count=2),
        "splits a ragged batch axis",
    ),
    "output features in groups": (
        lambda x: conv(ones(1, 5, 4), jnp.concatenate([x, x])[:, :2].T[None], feature_group_count=2),
        "ragged number of output features",
    ),
    "Python": (
        lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), "float32"), 1.0),
        "calls back",
    ),
    "a print": (lambda x: (jax.debug.print("{}", 1), x)[1], "calls back"),
    "a callback": (lambda x: (jax.debug.callback(lambda: None), x)[1], "calls back"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_padding_would_change_is_refused(name):
    f, reason = REFUSALS[name]
    masked = jb.mask(f, spec=jb.spec("n, 4", "float32"))
    with pytest.raises(jb.MaskError, match=reason):
        jax.eval_shape(masked, {"n": np.int32(5)}, jax.ShapeDtypeStruct((8, 4), "float32"))


def test_an_lu_with_two_ragged_sides_is_refused_and_a_square_one_is_not():
    spec = jb.spec("n, m", "float32")
    with pytest.raises(jb.MaskError, match="two different ragged sides"):
        jb.mask(lax.linalg.lu, spec=spec)({"n": 2, "m": 3}, ones(8, 8))


def test_draws_are_refused_when_the_generator_depends_on_the_whole_shape():
    masked = jb.mask(lambda x: jax.random.normal(jax.random.key(0), x.shape), spec=jb.spec("n", "float32"))
    with jax.threefry_partitionable(False), pytest.raises(jb.MaskError, match="whole shape"):
        masked({"n": 2}, ones(8))


# --- promises to the compiler ----------------------------------------------------------------------


@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("ragged", ["the array", "the positions", "another axis"])
@pytest.mark.parametrize("name", ["gather", "scatter-add"])
def test_positions_are_called_sorted_and_unique_only_where_they_still_are(name, ragged, promised):
    # A CPU ignores these promises; where one is wrong, another device may answer anything.
    flags = {"indices_are_sorted": promised, "unique_indices": promised}

    def f(x, i):
        at = x.at[i]
        return at.get(mode="clip", **flags) if name == "gather" else at.add(1.0, mode="drop", **flags)

    specs = {"the array": ["n, 4", "3"], "the positions": ["8, 4", "n"], "another axis": ["8, n", "3"]}[
        ragged
    ]
    spec = tuple(jb.spec(s, d) for s, d in zip(specs, ("float32", "int32"), strict=True))
    masked = jb.mask(f, spec=spec)
    shape = (8,) if ragged == "the positions" else (3,)
    columns = 8 if ragged == "another axis" else 4
    text = jax.jit(masked).lower({"n": np.int32(5)}, ones(8, columns), np.zeros(shape, np.int32)).as_text()
    assert name.removesuffix("-add") in text
    kept = ragged == "another axis" or (ragged == "the array" and name == "gather")
    assert ("indices_are_sorted = true" in text) == (promised and kept)
    # XLA takes the second promise for a scatter only.
    assert ("unique_indices = true" in text) == (promised and kept and name == "scatter-add")


def test_a_masked_gradient_of_a_determinant_holds_at_size_one_where_jax_has_another_formula():
    def f(x):
        return jnp.linalg.det(x @ x.T + 3 * jnp.eye(x.shape[0]))

    masked = jb.mask(jax.grad(f), spec=jb.spec("n, 1", "float32"))
    for n in (1, 2, 3):
        x = np.linspace(0.5, 0.9, n, dtype=np.float32)[:, None]
        padded = np.full((4, 1), np.nan, np.float32)
        padded[:n] = x
        np.testing.assert_allclose(masked({"n": n}, padded)[:n], jax.grad(f)(x), rtol=1e-5)
