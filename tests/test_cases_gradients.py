"""Gradients that people found to be NaN, infinite or wrong under padding, in both orders of grad and mask."""

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from ragged import GRID, POISONS, assert_exact, assert_exact_gradients, normals, unpadded, weights

import jaxbatch as jb

VECTOR, ROWS = jb.spec("n", "float32"), jb.spec("n, 4", "float32")
EVERY = (*POISONS, 100.0)

# What has no finite derivative, or value, where padding may stand; data are positive.
DEAD_IN_PADDING = {
    "norm": lambda x: jnp.linalg.norm(x),
    "norm of each row": lambda x: jnp.linalg.norm(x, axis=1),
    "std": lambda x: x.std(0),
    "std of each row": lambda x: x.std(1),
    "sqrt": jnp.sqrt,
    "log": jnp.log,
    "reciprocal": lambda x: 1 / x,
    "power": lambda x: x**0.5,
    "unit rows": lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),
    "unit whole": lambda x: x / jnp.linalg.norm(x),
}


def test_gradients_are_finite_next_to_padding_where_the_derivative_is_not():
    cotangent = jnp.cos(jnp.arange(4))

    def loss(x):
        return sum((g(x) * (cotangent if np.ndim(g(x)) > 1 else 1)).sum() for g in DEAD_IN_PADDING.values())

    xs = [np.abs(x) + 0.1 for x in normals((2, 3, 17), width=4)]
    assert_exact_gradients(loss, xs, argnums=(0,), spec=ROWS, poisons=EVERY)


def test_a_nan_gradient_of_the_functions_own_stays_in_its_place():
    def loss(x, keep):
        return jnp.where(keep, jnp.sqrt(jnp.sum(x**2, axis=1)), 0).sum()  # at a row of zeros, 0 * inf

    xs, spec = normals((3, 5), width=4), (ROWS, jb.spec("n", "bool"))
    keep = [np.array([True, False, True]), np.array([True, True, False, True, True])]
    xs[0][1], xs[1][2] = 0, 0
    assert np.isnan(unpadded(jax.grad(loss), xs, keep)[0]).any()
    assert_exact_gradients(loss, xs, keep, argnums=(0,), spec=spec)


def exp_normalise(x):
    e = jnp.exp(x)
    return e / e.sum()


def test_exponentials_that_overflow_in_padding_leave_values_and_gradients_finite():
    xs = normals((3, 17))
    assert_exact(exp_normalise, xs, spec=VECTOR, grid=GRID, poisons=EVERY)
    loss = lambda x: (exp_normalise(x) * jnp.sin(x)).sum()
    assert_exact_gradients(loss, xs, argnums=(0,), spec=VECTOR, poisons=EVERY)


def two_layers(params, x):
    for w in params:
        centred = x - x.mean(-1, keepdims=True)
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["scale"]
        x = x + jax.nn.softmax((y @ w["q"]) @ (y @ w["k"]).T / 2) @ y
        dims = ("NWC", "WIO", "NWC")
        out = jax.lax.conv_general_dilated(x[None], w["kernel"], (1,), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(out[0] + w["bias"])
    return x


SHAPES = {"scale": (4,), "q": (4, 4), "k": (4, 4), "kernel": (3, 4, 4), "bias": (4,)}


def test_gradients_of_weights_and_inputs_are_those_of_the_unpadded_sum_under_every_poison():
    params = [{k: weights(*s, seed=i) for i, (k, s) in enumerate(SHAPES.items(), 10 * j)} for j in range(2)]

    def loss(params, x):
        y = two_layers(params, x)
        return y.sum() + y.var(0).sum() + y[-1, 0]

    xs = normals((2, 17), width=4)
    assert_exact_gradients(loss, params, xs, argnums=(0, 1), in_axes=(None, 0), spec=ROWS)


def test_lengths_may_be_constants_of_the_traced_function():
    masked = jb.mask(lambda x: (x * x.shape[0]).sum(), spec=VECTOR)
    lengths = {"n": np.array([1, 2, 3], np.int32)}
    got = jax.jit(jax.grad(lambda x: jax.vmap(masked)(lengths, x).sum()))(np.full((3, 4), 5, np.float32))
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [2, 2, 0, 0], [3, 3, 3, 0]])


def test_gradients_of_ids_and_of_a_table_touch_no_pad_id():
    def loss(table, ids):
        return (table[ids] ** 2 * jnp.arange(1, 4)).sum()

    ids = [np.array([0, 1, 1], np.int32), np.array([3, 0], np.int32), np.array([-1, 2, 2, 5], np.int32)]
    poisons = [0, 1, 5, -1, 99]
    options: Any = dict(argnums=(0,), in_axes=(None, 0), spec=jb.spec("n", "int32"), size=8, poisons=poisons)
    assert_exact_gradients(loss, weights(6, 3), ids, **options)
