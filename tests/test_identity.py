"""What compiled programs are known by on disk: equal programs are found, and no other one is ever taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex_core

import jaxbatch as jb
from jaxbatch import _disk_cache, _identity
from jaxbatch._grid import Bucket
from jaxbatch._mask import Masked

GRID = jb.Grid(n=(4, 16), rows=[1, 4])
EXAMPLES = [np.arange(1, n + 1, dtype=np.float32) for n in (1, 3, 7, 16)]


def known(f, *shared, grid=GRID, bucket=None, spec=None):
    """Return what the program of a bucket is known by, or None where it has to be lowered."""
    run = jb.batched(f, (*(None,) * len(shared), 0), spec=spec or jb.spec("n", "float32"), grid=grid)
    flat, engine = run._ahead.shared(shared), run._engine
    traced = engine.padded(flat, engine.function.spec.dtypes(), {})
    assert traced is not None
    found = traced.known(bucket or Bucket(n=8, rows=4))
    return found and found[0]


def normalised(w, x):
    return w * jax.nn.softmax(x) + x.shape[0]


W = np.float32(2)


def test_a_warm_start_masks_the_function_once_for_all_buckets(tmp_path, monkeypatch, count_compiles):
    traces, call = [], Masked.__call__
    monkeypatch.setattr(Masked, "__call__", lambda *args, **kw: traces.append(1) or call(*args, **kw))

    def results():
        run = jb.batched(normalised, (None, 0), spec=jb.spec("n", "float32"), grid=GRID, cache_dir=tmp_path)
        run(W, EXAMPLES[:1])
        checks = len(traces)
        return run(W, EXAMPLES), run.statistics(), len(traces) - checks

    first, cold, _ = results()
    traces.clear()
    with count_compiles() as compiles:
        second, warm, further = results()
    assert compiles.count == 0 and (cold.compiles, warm.cached) == (4, 4)
    assert further == 0 and len(traces) <= 2  # one for the check of the largest bucket
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_same_function_made_anew_is_known_by_the_same():
    assert known(normalised, W) == known(lambda w, x: w * jax.nn.softmax(x) + x.shape[0], W) is not None


# Pairs that differ in one thing; none may be taken for the other.
DIFFERENT = {
    "a constant": (lambda w, x: x + 0.1, lambda w, x: x + np.nextafter(np.float32(0.1), np.float32(1))),
    "the shape of a table": (
        lambda w, x: x + jnp.asarray(np.ones(40)).sum(),
        lambda w, x: x + jnp.asarray(np.ones(41)).sum(),
    ),
    "an operation": (lambda w, x: x.max() * x, lambda w, x: x.min() * x),
    "order": (lambda w, x: x - w, lambda w, x: w - x),
    "an axis": (lambda w, x: jnp.outer(x, x).sum(0) * x, lambda w, x: jnp.outer(x, x).sum(1).cumsum() * x),
    "a size": (lambda w, x: x / x.shape[0], lambda w, x: x / (x.shape[0] + 1)),
    "precision": (
        lambda w, x: jnp.dot(x, x, precision="highest") * x,
        lambda w, x: jnp.dot(x, x, precision="default") * x,
    ),
    "an output": (lambda w, x: (x, w), lambda w, x: (w, x)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_functions_are_known_by_different_things(name):
    one, other = DIFFERENT[name]
    assert known(one, W) != known(other, W)


def test_bucket_grid_shapes_dtypes_and_settings_are_part_of_it():
    found = {
        known(normalised, W),
        known(normalised, W, bucket=Bucket(n=8, rows=1)),
        known(normalised, W, bucket=Bucket(n=16, rows=4)),
        known(normalised, W, grid=jb.Grid(n=[8, 16], rows=[1, 4])),
        known(normalised, np.ones(1, np.float32)),
        known(normalised, np.float16(2)),
        known(normalised, W, spec=jb.spec("n", "float16")),
        known(normalised, 2.0),
    }
    with jax.threefry_partitionable(False):
        found.add(known(lambda w, x: x + jax.random.normal(jax.random.key(0), (3,)).sum(), W))
    with jax.threefry_partitionable(True):
        found.add(known(lambda w, x: x + jax.random.normal(jax.random.key(0), (3,)).sum(), W))
    assert len(found) == 10 and None not in found


def test_another_version_of_the_library_is_another_program(monkeypatch):
    before = known(normalised, W)
    monkeypatch.setattr("jaxbatch._traced.source_digest", lambda: "another")
    assert known(normalised, W) != before
    assert len(_disk_cache.source_digest()) == 64


# --- what has to be lowered for each bucket ---------------------------------------------------------


@jb.custom_padding
def own_mean(x):
    return x.mean(axis=0)


@own_mean.defpadded
def _(lengths, x):
    return x.sum(axis=0) / lengths[0][0]


own_p = jex_core.Primitive("own")
own_p.def_abstract_eval(lambda aval: aval)


@jax.custom_batching.custom_vmap
def own_rows(x):
    return 2 * x


@own_rows.def_vmap
def _(axis_size, in_batched, x):
    return (2 if axis_size < 3 else 3) * x, True


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * own_mean(x),
        lambda x: x + own_rows(jnp.ones(3)).sum(),
        lambda x: x * 2 if x.shape[0] > 5 else x,
    ],
)
def test_code_of_the_users_own_and_branches_are_lowered_for_each_bucket(tmp_path, f):
    assert known(f) is None
    make = functools.partial(jb.batched, f, spec=jb.spec("n", "float32"), grid=GRID, cache_dir=tmp_path)
    first, again = make(), make(key=f)
    for one, other in zip(first(EXAMPLES), again(EXAMPLES), strict=True):
        np.testing.assert_array_equal(one, other)
    assert again.statistics().cached == first.statistics().compiles


def test_a_rule_of_the_users_own_is_no_shipped_one_whatever_its_name():
    mine = jex_core.Primitive("tanh")
    mine.def_abstract_eval(lambda aval: aval)
    jaxpr = jax.make_jaxpr(lambda x: mine.bind(x) + lax.sin(x))(np.float32(1)).jaxpr
    program = _identity.Program(jaxpr, (), (), {}, None, "f")
    assert _identity._is_closed(program)
    try:
        jb.register(mine)(lambda context, equation, x: x.data)
        assert not _identity._is_closed(program)
    finally:
        from jaxbatch._mask import _registry

        del _registry._rules[mine]


def test_weights_on_several_devices_are_looked_up_by_the_lowered_program(monkeypatch):
    monkeypatch.setattr("jaxbatch._traced.devices_of", lambda shardings: (1, 2))
    assert known(normalised, W) is None
