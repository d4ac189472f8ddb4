"""Models of each framework, and real ones, on lists of examples: what they return alone and unpadded.

The models hold what padding leaks through most easily: attention, strided convolutions, norms, positions,
pooling, and biases that are not zero.
"""

import functools
import itertools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax import numpy as jnp
from pretrained import real_bert
from ragged import (
    GRID,
    LENGTHS,
    assert_close,
    assert_exact,
    assert_exact_gradients,
    normals,
    unpadded,
    weights,
)

import jaxbatch as jb
from examples.embed_texts import docstrings

ROWS = jb.spec("n, 4", "float32")
ALL = ((*LENGTHS, 512), jb.Grid(n=[4, 64, 128, 512], rows=[1, 4]))
FEW = ((1, 3, 17, 32), jb.Grid(n=[4, 32], rows=[1, 4]))


def randomised(tree, seed=7):
    """Return a model or parameters, abstract ones too, with normal arrays for all floating leaves."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return (0.4 * rng.normal(size=leaf.shape)).astype(leaf.dtype) if floating(leaf) else leaf

    return jax.tree.map(draw, tree)


def floating(leaf):
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def as_function_of_parameters(f, model):
    """Return `f` as a function of floating arrays and an example, for jit and grad, and the arrays."""
    params, static = eqx.partition(model, floating)
    return lambda params, x: f(eqx.combine(params, static), x), params


# --- Flax linen -----------------------------------------------------------------------------------


class LinenLayers(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        n = x.shape[0]
        x = nn.Dense(8)(x) + nn.Embed(512, 8)(jnp.arange(n))
        for _ in range(self.depth):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
            x = x + nn.gelu(nn.Conv(8, (3,))(nn.GroupNorm(2)(x)))
        strided = nn.relu(nn.Conv(8, (5,), strides=2)(x))
        return {"tokens": x, "strided": strided, "mean": x.mean(0), "last": x[-1]}


class LinenRecurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.asarray(nn.Bidirectional(nn.RNN(nn.GRUCell(3)), nn.RNN(nn.LSTMCell(3)))(x))
        return x, nn.max_pool(x[None], (2,), (2,), "SAME")[0], nn.ConvTranspose(4, (3,), strides=(2,))(x)


def linen(module):
    variables = jax.eval_shape(module.init, jax.random.key(0), np.zeros((3, 4), np.float32))
    return module.apply, randomised(variables)


# --- Flax nnx -------------------------------------------------------------------------------------


class NnxLayers(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 8, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)])
        make = functools.partial(nnx.MultiHeadAttention, 2, 8, 8, decode=False, rngs=rngs)
        self.attention = nnx.List([make(), make()])
        self.convolution = nnx.Conv(8, 8, (3,), strides=2, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return {"strided": nnx.relu(self.convolution(x)), "mean": x.mean(0)}


class NnxRecurrent(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(4, 3, rngs=rngs))

    def __call__(self, x):
        x = self.rnn(x, initial_carry=jnp.ones(3))
        return x, x[-1]


def call(model, x):
    return model(x)


def of_nnx(cls):
    graph, state = nnx.split(nnx.eval_shape(lambda: cls(nnx.Rngs(0))))
    return call, nnx.merge(graph, randomised(state))


# --- equinox --------------------------------------------------------------------------------------


class EquinoxLayers(eqx.Module):
    embed: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    convolutions: list[eqx.nn.Conv1d]
    groups: eqx.nn.GroupNorm

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.MLP(4, 8, 8, 1, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=keys[1])
        self.convolutions = [
            eqx.nn.Conv1d(8, 8, 3, stride, padding="SAME", key=key)
            for stride, key in zip((1, 2), keys[2:], strict=True)
        ]
        self.groups = eqx.nn.GroupNorm(2, 8)

    def __call__(self, x):
        x = jax.vmap(self.embed)(x)
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        once = jax.nn.relu(self.convolutions[0](self.groups(x.T)))
        return {"tokens": x + once.T, "strided": jax.nn.relu(self.convolutions[1](once)).T, "mean": x.mean(0)}


class EquinoxRecurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(4, 3, key=key)

    def __call__(self, x):
        return lax.scan(lambda h, row: ((h := self.cell(row, h)), h), jnp.zeros(3), x)


def equinox(make):
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    return call, randomised(model)


# --- plain functions ------------------------------------------------------------------------------


def plain_layers(params, x):
    for w in params["layers"]:
        centred = x - x.mean(-1, keepdims=True)
        y = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        x = x + jax.nn.softmax((y @ w["q"]) @ (y @ w["k"]).T / 2) @ y
        dims = ("NWC", "WIO", "NWC")
        out = lax.conv_general_dilated(x[None], w["kernel"], (1,), "SAME", dimension_numbers=dims)
        x = jax.nn.relu(out[0] + w["bias"])
    return {"tokens": x, "mean": x.mean(0), "last": x[-1], "spread": x.std(0)}


def plain():
    shapes = {"q": (4, 4), "k": (4, 4), "kernel": (3, 4, 4), "bias": (4,)}
    layer = {name: weights(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return plain_layers, {"layers": [layer]}


MODELS = {
    "linen, attention and convolutions": lambda: linen(LinenLayers(1)),
    "linen, recurrent": lambda: linen(LinenRecurrent()),
    "nnx, attention and a convolution": lambda: of_nnx(NnxLayers),
    "nnx, recurrent": lambda: of_nnx(NnxRecurrent),
    "equinox, attention and convolutions": lambda: equinox(EquinoxLayers),
    "equinox, recurrent": lambda: equinox(EquinoxRecurrent),
    "a plain function": plain,
}


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_on_a_list_what_it_gives_on_each_example_with_one_program_a_bucket(
    name, count_compiles
):
    f, model = MODELS[name]()
    lengths, grid = FEW if "recurrent" in name else ALL
    xs = normals(lengths, width=4)
    apply, params = as_function_of_parameters(f, model)
    expected = unpadded(apply, params, xs, in_axes=(None, 0))
    with count_compiles() as compiles:
        run = assert_exact(f, model, xs, in_axes=(None, 0), spec=ROWS, grid=grid, expected=expected)
    assert compiles.count == run.statistics().compiles == len(run.statistics().buckets)


@pytest.mark.parametrize("name", ["linen, attention and convolutions", "equinox, recurrent"])
def test_debugging_for_nans_trips_over_no_padding(name):
    f, model = MODELS[name]()
    xs = normals((1, 3, 17), width=4)
    with jax.debug_nans(True):
        results = jb.batched(f, (None, 0), spec=ROWS, grid=GRID)(model, xs)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results))


def logarithms(x):
    """Return what is not defined in padding of zeros."""
    return jnp.log(x).mean(), (x / jnp.linalg.norm(x, axis=1, keepdims=True)), 1 / x.sum(1)


def test_debugging_for_nans_trips_over_no_padding_of_a_gradient():
    loss = lambda x: sum(leaf.sum() for leaf in logarithms(x))
    x = np.zeros((8, 4), np.float32)
    x[:3] = np.abs(normals((3,), width=4)[0]) + 0.1
    with jax.debug_nans(True):
        outs = jb.batched(logarithms, spec=ROWS, grid=GRID)([x[:3]])
        one = jax.jit(jax.grad(lambda x: jb.mask(loss, spec=ROWS)({"n": 3}, x)))(x)
        two = jax.jit(lambda x: jb.mask(jax.grad(loss), spec=ROWS)({"n": 3}, x))(x)
    assert_close(outs, unpadded(logarithms, [x[:3]]))
    for got in (one, two):
        assert_close(np.asarray(got)[:3], jax.jit(jax.grad(loss))(x[:3]))


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_of_a_two_layer_model_in_both_orders_are_the_sum_of_the_unpadded_ones():
    # `test_cases_gradients` has those of a plain function, under every poison.
    apply, params = as_function_of_parameters(*linen(LinenLayers(2)))

    def loss(params, x):
        outs = jax.tree.leaves(apply(params, x))
        return sum((out * jnp.cos(jnp.arange(out.shape[-1]))).sum() for out in outs)

    options: Any = dict(in_axes=(None, 0), argnums=(0, 1), spec=ROWS)
    assert_exact_gradients(loss, params, normals((3, 17), width=4), poisons=[np.nan], **options)


# --- real models ----------------------------------------------------------------------------------


def texts(num):
    """Return paragraphs that any machine has."""
    paragraphs = (part for _, text in docstrings("numpy") for part in text.split("\n\n"))
    return list(itertools.islice(paragraphs, num))


RELATED = (
    ("How do I solve a system of linear equations?", "Find x such that A x = b, for a square matrix."),
    ("A man is eating food.", "Someone is having lunch."),
    ("The parliament passed the law.", "Lawmakers approved the new bill."),
    ("The cat sleeps on the sofa.", "A kitten is napping on a couch."),
)


@pytest.mark.weights
def test_minilm_embeds_each_of_200_texts_as_in_an_unpadded_call_and_ranks_related_sentences_first():
    model, params, tokenizer = real_bert("minilm")
    lengths = np.array([3, 17, 65])  # few, since the oracle compiles for each
    tokens = [ids[: lengths[lengths <= len(ids)].max()] for ids in tokenizer(texts(200)) if len(ids) > 2]
    assert len(tokens) == 200 and len({len(ids) for ids in tokens}) == 3
    run = jb.batched(model.embed, (None, 0), grid=jb.Grid(n=[32, 80], rows=[8]))
    vectors = run(params, tokens)
    single = jax.jit(model.embed)
    for vector, ids in zip(vectors, tokens, strict=True):
        assert_close(vector, np.asarray(single(params, ids)))
    questions, answers = (
        np.stack(run(params, tokenizer(list(sentences)))) for sentences in zip(*RELATED, strict=True)
    )
    assert np.argmax(questions @ answers.T, axis=1).tolist() == [0, 1, 2, 3]


@pytest.mark.weights
def test_2000_texts_compile_one_program_a_bucket_and_nothing_the_second_time(count_compiles):
    model, params, tokenizer = real_bert("bert-tiny")
    tokens = [ids[:32] for ids in tokenizer(texts(2000))]
    assert len(tokens) == 2000 and len({len(ids) for ids in tokens}) > 20
    run = jb.batched(model.embed, (None, 0), grid=jb.Grid(n=(8, 32), rows=(1, 64)))
    explanation = run.explain([len(ids) for ids in tokens], params)
    with count_compiles() as first:
        vectors = run(params, tokens)
    counts = run.statistics()
    assert first.count == counts.compiles == explanation.programs == len(counts.buckets) <= 12
    assert counts.examples == 2000 and counts.valid_cells == sum(map(len, tokens))
    assert counts.padding_share == pytest.approx(explanation.padding_share)
    with count_compiles() as second:
        again = run(params, tokens)
    assert second.count == 0 and run.statistics().compiles == counts.compiles
    np.testing.assert_array_equal(again, vectors)
