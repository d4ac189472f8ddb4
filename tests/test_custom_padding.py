"""`custom_padding` and `register`: a user's own padded versions and rules."""

from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import mlir
from masking import Case, assert_exact

import jaxbatch as jb


@jb.custom_padding
def attend(q, k, v):
    return jax.nn.dot_product_attention(q[None], k[None], v[None])[0]


calls = []


@attend.defpadded
def _(lengths, q, k, v):
    calls.append(q.shape)
    (queries, *_), (keys, *_), _ = lengths
    return jax.nn.dot_product_attention(
        q[None],
        k[None],
        v[None],
        query_seq_lengths=jnp.reshape(queries, 1),
        key_value_seq_lengths=jnp.reshape(keys, 1),
    )[0]


def test_a_kernel_that_takes_lengths_is_used_and_exact_with_its_gradient():
    calls.clear()
    assert_exact(Case(lambda q, k: attend(q, k, jnp.sin(k)), ["n, 2, 4", "m, 2, 4"]))
    assert (8, 2, 4) in calls


def test_at_fixed_sizes_the_function_is_itself():
    calls.clear()
    x = np.ones((3, 2, 4), np.float32)
    np.testing.assert_array_equal(attend(x, x, x), jax.vmap(attend)(x[None], x[None], x[None])[0])
    assert not calls


def test_vmap_inside_the_function_batches_the_padded_version():
    @jb.custom_padding
    def total(x):
        return x.sum()

    @total.defpadded
    def _(lengths, x):
        ((n,),) = lengths
        return jnp.where(jnp.arange(x.shape[0]) < n, x, 0).sum() + 0 * n

    assert_exact(Case(lambda x: jax.vmap(total, in_axes=1)(x) + jax.grad(lambda y: total(y[:, 0]))(x).sum()))


def test_arguments_come_filled_unless_asked_otherwise():
    seen = {}
    for fill in (0, 7, None):
        f = jb.custom_padding(lambda x: x * 1, fill=fill)
        f.defpadded(lambda lengths, x, fill=fill: seen.setdefault(fill, x))
        with jax.disable_jit():
            jb.mask(lambda x, f=f: f(x), spec=jb.spec("n", "float32"))(
                {"n": 1}, np.array([1, np.nan], np.float32)
            )
    assert [np.asarray(seen[fill])[1] for fill in (0, 7)] == [0, 7]
    assert np.isnan(np.asarray(seen[None])[1])


def test_a_padded_version_of_the_wrong_shape_is_refused():
    f = jb.custom_padding(lambda x: x * 1)
    f.defpadded(lambda lengths, x: x[:1])
    with pytest.raises(jb.MaskError, match=r"returns float32\[1\], expected float32\[4\]"):
        jb.mask(lambda x: f(x), spec=jb.spec("n", "float32"))({"n": 1}, np.ones(4, np.float32))


def test_a_primitive_without_a_rule_is_refused_until_it_gets_one():
    double_p = jex_core.Primitive("test_double")
    double_p.def_impl(lambda x: x * 2)
    double_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(double_p, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    g = jb.mask(lambda x: double_p.bind(x), spec=jb.spec("n", "float32"))
    x = np.array([1, 2, np.nan], np.float32)
    with pytest.raises(jb.MaskError, match="`test_double` over ragged `n`.*jb.register"):
        g({"n": 2}, x)

    @jb.register(double_p)
    def _(context, equation, x):
        return context.bind(equation, context.fill(x, [0], 5))

    np.testing.assert_array_equal(g({"n": 2}, x), [2, 4, 0])


# --- packed rows -----------------------------------------------------------------------------------


@jb.custom_padding
def self_attend(q, k, v):
    return jax.nn.dot_product_attention(q[None], k[None], v[None])[0]


@self_attend.defpacked
def _(segments, q, k, v):
    ((own, *_), (others, *_), _) = segments
    same = (own[:, None] == others) & (others >= 0)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], mask=same[None, None])[0]


def network(w, x):
    q, k, v = (jnp.einsum("nd,dhe->nhe", x, each) for each in w)
    return self_attend(q, k, v)


def test_a_kernel_with_segment_masks_is_used_packed_exact_and_never_lets_nan_across():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(3, 4, 2, 4)).astype(np.float32)
    xs = [rng.normal(size=(n, 4)).astype(np.float32) for n in (3, 7, 1, 5)]
    spec = jb.spec("n, 4", "float32")
    options: Any = dict(in_axes=(None, 0), spec=spec, grid=jb.Grid(n=[16], rows=[1, 4], segments=4))
    jb.testing.assert_padding_invariant(
        network, w, xs, layouts=("packed",), grad=True, poisons=(0.0, np.nan), **options
    )
    xs[1][2, 0] = np.nan
    run = jb.batched(network, layout="packed", **options)
    for got, x in zip(run(w, xs), xs, strict=True):
        np.testing.assert_allclose(got, jax.jit(network)(w, x), rtol=0, atol=1e-5)
    assert run.statistics().run_again == 4 and run.statistics().batches == 2
    packed = jb.pack(network, (None, 0), spec=spec)
    place = np.array([0, 0, -1, 1], np.int32), np.array([0, 3]), np.array([2, 1])
    packed(*place, w, np.ones((4, 4), np.float32))
    assert not packed.explain(), packed.explain()  # nothing was padded inside
    several = jb.pack(lambda x: jax.vmap(self_attend, 2, 2)(x, x, x), spec=jb.spec("n, 1, 2, 3", "float32"))
    row = rng.normal(size=(3, 1, 2, 3)).astype(np.float32)
    out, _ = several(np.array([0, 0, 1], np.int32), np.array([0, 2]), np.array([2, 1]), row)
    for cells in (slice(0, 2), slice(2, 3)):
        want = self_attend(*[row[cells, :, 0]] * 3)
        np.testing.assert_allclose(out[cells, :, 0], want, rtol=0, atol=1e-5)


def test_a_packed_version_of_the_wrong_shape_is_refused_and_of_other_operands_left_alone():
    f = jb.custom_padding(lambda x, s: x * s)
    f.defpacked(lambda segments, x, s: x[:1])
    place = np.array([0, 0, 1], np.int32), np.array([0, 2]), np.array([2, 1])
    wrong = jb.pack(lambda x: f(x, 2.0), spec=jb.spec("n", "float32"))
    with pytest.raises(jb.MaskError, match=r"packed rows that returns float32\[1\], expected float32\[3\]"):
        wrong(*place, np.ones(3, np.float32))
    each = jb.pack(lambda x: f(x, x.sum()), spec=jb.spec("n", "float32"))
    out, _ = each(*place, np.array([1, 2, 5], np.float32))
    np.testing.assert_array_equal(out, [3, 6, 25])
