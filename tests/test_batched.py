"""The oracle everywhere is the function itself, under plain JAX, on each unpadded example."""

import functools
import gc
import inspect
import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Num

import jaxbatch as jb

LENGTHS = (1, 2, 3, 17, 63, 64, 65)
GRID = jb.Grid(n=(1, 128), rows=(1, 8))
VECTOR = jb.spec("n", "float32")
WAIT = 60  # seconds after which a test that hangs fails instead


def examples(*lengths: int, width: int | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=n if width is None else (n, width)).astype(np.float32) for n in lengths]


def assert_close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b)
        assert type(a) is np.ndarray
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = max(1.0, float(np.max(np.abs(b), initial=0, where=np.isfinite(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * scale)


def centre(x: Float[Array, "n"]) -> Float[Array, "n"]:
    return (x - x.mean()) / x.shape[0]


def attend(params, x: Float[Array, "n d"]):
    q, v = x @ params["q"], x @ params["v"]
    return {"out": jax.nn.softmax(q @ q.T, axis=-1) @ v, "first": v[0], "num": x.shape[0]}


def weights(d: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(d, d)).astype(np.float32) for name in ("q", "v")}


# --- results ---------------------------------------------------------------------------------------


def test_results_are_those_of_the_function_in_the_order_of_the_examples():
    xs = examples(*LENGTHS)
    for got, x in zip(jb.batched(centre, grid=GRID)(xs), xs, strict=True):
        assert_close(got, centre(jnp.asarray(x)))


def test_shared_arguments_and_trees_of_outputs_of_several_shapes():
    params, xs = weights(), examples(*LENGTHS, width=4)
    run = jb.batched(attend, (None, 0), grid=GRID)
    for got, x in zip(run(params, xs), xs, strict=True):
        assert_close(got, jax.tree.map(jnp.asarray, attend(params, jnp.asarray(x))))


def test_several_per_example_arguments_with_dims_of_their_own():
    def cross(a: Float[Array, "n 4"], scale, b: Float[Array, "m 4"]):
        return scale * a @ b.T, b.sum(0)

    rng = np.random.default_rng(0)
    a = [rng.normal(size=(n, 4)).astype(np.float32) for n in (1, 5, 9, 9)]
    b = [rng.normal(size=(m, 4)).astype(np.float32) for m in (7, 2, 1, 16)]
    run = jb.batched(cross, (0, None, 0), grid=jb.Grid(n=(4, 16), m=(2, 16)))
    for got, x, y in zip(run(a, 0.5, b), a, b, strict=True):
        assert_close(got, cross(jnp.asarray(x), 0.5, jnp.asarray(y)))


def test_outputs_are_cut_to_their_own_formulas():
    def sizes(x: Float[Array, "n"], y: Float[Array, "m"]):
        doubled = jnp.concatenate([x, x])
        return doubled, x[::2], jnp.pad(x, (0, 1)), jnp.outer(x, y), jnp.outer(x, y).reshape(-1)

    xs, ys = examples(1, 3, 17), examples(5, 2, 9)
    run = jb.batched(sizes, grid=jb.Grid(n=(4, 32), m=(4, 16)))
    for got, x, y in zip(run(xs, ys), xs, ys, strict=True):
        assert_close(got, sizes(jnp.asarray(x), jnp.asarray(y)))


def test_rows_of_an_array_are_examples_too_on_the_host_or_on_a_device():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    run = jb.batched(centre, grid=GRID)
    for given in (array, jnp.asarray(array)):
        assert_close(run(given), [np.asarray(centre(row)) for row in jnp.asarray(array)])


def test_no_examples_give_no_results_and_compile_nothing(count_compiles):
    run = jb.batched(centre, grid=GRID)
    with count_compiles() as compiles:
        assert run([]) == [] and list(run.map([])) == []
    assert compiles.count == 0


def test_bfloat16_and_integers_keep_their_dtype():
    bf16 = [x.astype(jnp.bfloat16) for x in examples(3, 17)]
    for got, x in zip(jb.batched(centre, grid=GRID)(bf16), bf16, strict=True):
        expected = np.asarray(centre(jnp.asarray(x)))
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=0, atol=1e-2)

    def total(x: Integer[Array, "n"]):
        return x.sum(), x * 2

    for dtype in (np.int32, np.int8, np.uint8):
        (got,) = jb.batched(total, grid=GRID, key=dtype)([np.array([1, 2, 3], dtype)])
        assert_close(got, total(jnp.array([1, 2, 3], dtype)))


def test_a_nan_in_one_example_leaves_its_neighbours_bitwise_alone():
    xs = examples(5, 6, 7)
    run = jb.batched(centre, grid=GRID)
    clean = run(xs)
    xs[1][2] = np.nan
    dirty = run(xs)
    assert np.isnan(dirty[1]).all()
    np.testing.assert_array_equal(dirty[0], clean[0])
    np.testing.assert_array_equal(dirty[2], clean[2])


def test_results_own_their_memory_and_may_be_written():
    for got in jb.batched(centre, grid=GRID)(examples(3, 64)):
        assert got.base is None and got.flags.owndata and got.flags.writeable


def test_batches_in_flight_do_not_share_buffers():
    run = jb.batched(centre, grid=jb.Grid(n=4096, rows=1))
    xs = [np.full(4096, i, np.float32) + np.arange(4096, dtype=np.float32) for i in range(8)]
    for got, x in zip(run(xs), xs, strict=True):
        assert_close(got, centre(jnp.asarray(x)))


def test_a_masked_function_with_equinox_and_nnx_modules_and_their_static_leaves():
    import equinox as eqx
    from flax import linen, nnx

    def apply(model, x: Float[Array, "n 3"]):
        return jax.vmap(model)(x).sum(0)

    xs = examples(2, 5, 9, width=3)
    model = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(0))
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    for each in (model, net):
        run = jb.batched(apply, (None, 0), grid=GRID)
        for got, x in zip(run(each, xs), xs, strict=True):
            assert_close(got, apply(each, jnp.asarray(x)))

    dense = linen.Dense(2)
    params = dense.init(jax.random.key(0), xs[0])

    def linen_apply(params, x: Float[Array, "n 3"]):
        return dense.apply(params, x)

    run = jb.batched(linen_apply, (None, 0), grid=GRID)
    for got, x in zip(run(params, xs), xs, strict=True):
        assert_close(got, linen_apply(params, jnp.asarray(x)))


# --- empty and oversize examples -------------------------------------------------------------------


def test_empty_examples_get_the_values_of_the_function_and_leave_neighbours_alone():
    xs = [np.zeros(0, np.float32), *examples(3), np.zeros(0, np.float32)]
    run = jb.batched(centre, grid=GRID)
    got = run(xs)
    assert got[0].shape == (0,) and got[2].shape == (0,)
    assert_close(got[1], centre(jnp.asarray(xs[1])))

    def mean(x: Float[Array, "n"]):
        return x.mean()

    run = jb.batched(mean, grid=GRID)
    got = run(xs)
    assert np.isnan(got[0]) and np.isnan(got[2]) and np.isfinite(got[1])
    counts = run.statistics()
    assert (counts.exact_compiles, counts.exact.examples, counts.exact.batches) == (1, 2, 1)


def test_an_empty_example_fails_as_the_function_does_and_alone():
    def top(x: Float[Array, "n"]):
        return x.max()

    xs = [*examples(3), np.zeros(0, np.float32), *examples(2)]
    run = jb.batched(top, grid=GRID)
    with pytest.raises(ValueError) as plain:
        top(jnp.asarray(xs[1]))
    with pytest.raises(ValueError, match=str(plain.value)[:30]) as caught:
        run(xs)
    assert any("exact size {'n': 0}" in note for note in caught.value.__notes__)
    first, second, third = run(xs, errors="return")
    assert_close([first, third], [np.max(xs[0]), np.max(xs[2])])
    assert type(second) is type(plain.value)


def test_an_oversize_example_is_named_and_nothing_is_cut():
    xs = examples(10, 70, 20)
    run = jb.batched(centre, grid=jb.Grid(n=(16, 64)))
    with pytest.raises(jb.OversizeError, match=r"`x\[1\]` axis 0: dim `n` has length 70.*holds 64") as caught:
        run(xs)
    assert (caught.value.lengths, caught.value.limits) == ({"n": 70}, {"n": 64})
    assert run.statistics().batches == 0
    first, second, third = run(xs, errors="return")
    assert isinstance(second, jb.OversizeError)
    assert_close([first, third], [np.asarray(centre(jnp.asarray(x))) for x in (xs[0], xs[2])])


def test_an_oversize_example_may_run_at_its_exact_size():
    xs = examples(10, 70, 20, 70)
    run = jb.batched(centre, grid=jb.Grid(n=(16, 64)), oversize="exact")
    assert_close(run(xs), [np.asarray(centre(jnp.asarray(x))) for x in xs])
    counts = run.statistics()
    assert (counts.exact_compiles, counts.exact.examples) == (1, 2)


# --- errors ----------------------------------------------------------------------------------------


def test_a_bad_example_is_named_by_argument_and_index_before_anything_runs():
    def f(params, a: Float[Array, "n"], b: Float[Array, "n"]):
        return a + b

    run = jb.batched(f, (None, 0, 0), grid=GRID)
    good, bad = examples(3, 3), [examples(3)[0], np.zeros((3, 2), np.float32)]
    with pytest.raises(jb.SpecError, match=r"batched\(f\): `b\[1\]` has rank 2"):
        run(None, good, bad)
    assert run.statistics().examples == 0
    first, second = run(None, good, bad, errors="return")
    assert_close(first, good[0] + bad[0])
    assert isinstance(second, jb.SpecError)


def test_fixed_sizes_are_bound_by_shared_arguments_or_the_first_good_example():
    def f(w: Float[Array, "d d"], x: Float[Array, "n d"]):
        return x @ w

    run = jb.batched(f, (None, 0), grid=GRID)
    xs = [*examples(2, width=4), *examples(3, width=5), *examples(4, width=4)]
    with pytest.raises(jb.SpecError, match=r"`x\[1\]` axis 1 \(dim `d`\) has size 5.*have 4"):
        run(np.eye(4, dtype=np.float32), xs)
    got = run(np.eye(4, dtype=np.float32), xs, errors="return")
    assert isinstance(got[1], jb.SpecError)
    assert_close([got[0], got[2]], [xs[0], xs[2]])
    with pytest.raises(jb.SpecError, match=r"`x\[0\]`"):  # the weights, not the first example, decide
        run(np.eye(5, dtype=np.float32), xs)
    (again,) = run(np.eye(5, dtype=np.float32), xs[1:2])
    assert_close(again, xs[1])


# (what is passed for the example argument, the error, a part of its message)
NOT_SEQUENCES = (
    ((x for x in ()), TypeError, "for iterators use map"),
    ({"a": 1}, TypeError, "must be a list or an array of them; got dict"),
    ("text", TypeError, "got str"),
    (3.0, TypeError, "got float"),
    (np.array(3.0), TypeError, "got a scalar ndarray"),
    (jnp.float32(3), TypeError, "got a scalar"),
)


@pytest.mark.parametrize(("given", "error", "message"), NOT_SEQUENCES)
def test_what_is_not_a_sequence_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        jb.batched(centre, grid=GRID)(given)


@pytest.mark.parametrize(("given", "error", "message"), NOT_SEQUENCES[1:])
def test_what_holds_no_examples_is_refused_by_map_too(given, error, message):
    with pytest.raises(error, match=message):
        jb.batched(centre, grid=GRID).map(given)


def test_a_traced_stack_of_examples_is_refused_with_the_way_out():
    run = jb.batched(centre, grid=GRID)
    for call in (run, run.map):
        with pytest.raises(TypeError, match="`x` is traced .* use jaxbatch.mask instead"):
            jax.jit(call)(jnp.ones((2, 3)))


def test_sequences_of_different_lengths_are_refused():
    def f(a: Float[Array, "n"], b: Float[Array, "n"]):
        return a + b

    run = jb.batched(f, grid=GRID)
    with pytest.raises(ValueError, match="`a` 2, `b` 1"):
        run(examples(1, 1), examples(1))
    with pytest.raises(ValueError, match="`b` ended after 1 examples, and others go on"):
        list(run.map(examples(1, 1), iter(examples(1))))
    with pytest.raises(TypeError, match=r"takes 2 arguments \(a, b\), got 1"):
        run(examples(1))


# (keyword arguments, the error, a part of its message)
BAD_OPTIONS = (
    (dict(in_axes=1), ValueError, "use 0 for one value per example"),
    (dict(in_axes=(None,)), ValueError, "at least once"),
    (dict(in_axes=(0, 0)), jb.SpecError, "takes 1 positional"),
    (dict(grid=jb.Grid(m=4)), jb.SpecError, "the grid has dim `m`, but the spec has n"),
    (dict(oversize="cut"), ValueError, "oversize='cut'"),
    (dict(on_unmaskable="ignore"), ValueError, "on_unmaskable='ignore'"),
    (dict(grid={"n": 4}), TypeError, "use jaxbatch.Grid"),
    (dict(key=["a"]), TypeError, "has no hash"),
)


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_options_are_checked_when_the_function_is_wrapped(options, error, message):
    with pytest.raises(error, match=message):
        inspect.unwrap(jb.batched)(centre, **{"grid": GRID, **options})  # without the type check of the tests


def test_a_refusal_shows_where_the_function_is_wrapped_and_compiles_nothing(count_compiles):
    def spectrum(x: Float[Array, "n"]):
        return jnp.abs(jnp.fft.fft(x))

    with count_compiles() as compiles, pytest.raises(jb.MaskError, match=r"batched\(spectrum\)"):
        jb.batched(spectrum, grid=GRID)
    assert compiles.count == 0


def test_with_shared_arguments_a_refusal_comes_with_the_first_call_even_if_errors_are_returned(
    count_compiles,
):
    def spectrum(scale, x: Float[Array, "n"]):
        return scale * jnp.abs(jnp.fft.fft(x))

    run = jb.batched(spectrum, (None, 0), grid=GRID)
    with count_compiles() as compiles, pytest.raises(jb.MaskError, match=r"batched\(spectrum\)"):
        run(2.0, examples(3), errors="return")
    assert compiles.count == 0


def test_a_refused_function_may_run_at_exact_sizes_after_one_warning():
    def spectrum(x: Float[Array, "n"]):
        return jnp.abs(jnp.fft.fft(x))

    with pytest.warns(UserWarning, match="runs at exact sizes instead"):
        run = jb.batched(spectrum, grid=GRID, on_unmaskable="exact")
    xs = examples(3, 17, 3)
    assert_close(run(xs), [np.asarray(spectrum(jnp.asarray(x))) for x in xs])
    counts = run.statistics()
    assert (counts.compiles, counts.exact_compiles, counts.exact.batches) == (0, 2, 2)


def test_what_cannot_be_batched_at_all_runs_row_by_row_at_exact_sizes():
    def on_host(x: Float[Array, "n"]):
        return jax.pure_callback(lambda x: np.sort(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(jb.MaskError, match="pure_callback"):
        jb.batched(on_host, grid=GRID)
    xs = examples(3, 5, 3, 3)
    with pytest.warns(UserWarning, match="runs at exact sizes instead"):
        run = jb.batched(on_host, grid=GRID, on_unmaskable="exact")
    assert_close(run(xs), [np.sort(x) for x in xs])
    assert run.statistics().exact.batches == 2


def test_a_functions_own_error_while_tracing_is_its_examples_error():
    def g(x: Num[Array, "n"]):
        if x.dtype == jnp.int32:
            raise TypeError("no integers please")
        return x * 2

    run = jb.batched(g, grid=GRID)
    xs = [np.ones(2, np.float32), np.ones(2, np.int32)]
    first, second = run(xs, errors="return")
    assert_close(first, np.full(2, 2, np.float32))
    assert isinstance(second, TypeError)
    with pytest.raises(TypeError, match="no integers please"):
        run(xs)


def test_wrong_shared_arguments_are_nobodys_own_error():
    params, xs = weights(5), [*examples(3, width=4), np.zeros((0, 4), np.float32)]
    run = jb.batched(attend, (None, 0), grid=GRID)
    with pytest.raises(TypeError, match="dot_general"):
        run(params, xs, errors="return")
    with pytest.raises(TypeError, match="dot_general"):
        list(run.map(params, xs, errors="return"))


def test_one_failed_batch_is_the_failure_of_its_examples_only(monkeypatch):
    from jaxbatch import _traced

    run = jb.batched(centre, grid=jb.Grid(n=(4, 64), rows=(1, 8)))
    plain = _traced.pad_and_stack

    def failing(examples, lengths, shapes, rows):
        if shapes == [(64,)]:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return plain(examples, lengths, shapes, rows)

    monkeypatch.setattr(_traced, "pad_and_stack", failing)
    xs = examples(3, 60, 4, 50)
    got = run(xs, errors="return")
    assert [isinstance(each, RuntimeError) for each in got] == [False, True, False, True]
    assert_close([got[0], got[2]], [np.asarray(centre(jnp.asarray(x))) for x in (xs[0], xs[2])])
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        run(xs)


# --- programs --------------------------------------------------------------------------------------


def test_sixteen_lengths_need_five_programs_and_the_second_pass_none(count_compiles):
    def total(x: Float[Array, "n"]):
        return x.sum()

    xs = examples(*range(1, 62, 4))
    run = jb.batched(total, grid=jb.Grid(n=(1, 64)))
    with count_compiles() as first:
        got = run(xs)
    with count_compiles() as second:
        run(xs)
    assert first.count == run.statistics().compiles <= 5 and second.count == 0
    assert_close(got, [np.asarray(x.sum()) for x in xs])


def test_nothing_compiles_after_a_warm_up_whatever_legal_examples_come(count_compiles):
    params = weights()
    run = jb.batched(
        attend, (None, 0), spec=jb.spec("n, 4", "float32"), grid=jb.Grid(n=(4, 16), rows=(1, 4)), frozen=True
    )
    run.warm_up(params)
    assert run.grid and run.statistics().compiles == len(run.grid)
    rng = np.random.default_rng(0)
    with count_compiles() as compiles:
        for _ in range(40):
            xs = examples(*rng.integers(1, 17, rng.integers(1, 7)), width=4)
            fed_back = [each["out"] for each in run(params, xs)]
            run(jax.device_put(params), fed_back)
            list(run.map(params, fed_back))
    assert compiles.count == 0
    assert run.statistics().compiles == len(run.grid)


def test_a_warm_up_for_lengths_compiles_what_these_lengths_need():
    run = jb.batched(centre, grid=GRID, frozen=True)
    run.warm_up(lengths=[3, 3, 17])
    assert run.statistics().compiles == 2
    run(examples(3, 4, 20))
    with pytest.raises(jb.CompileMissError, match=r"bucket n=64, rows=1.*size `n` of `x`: 32 -> 64"):
        run(examples(40), errors="return")


def test_a_warm_up_for_lengths_covers_exact_sizes_so_that_a_frozen_function_may_have_them():
    run = jb.batched(centre, grid=GRID, oversize="exact", frozen=True)
    xs = examples(3, 0, 999, 999, 999)
    run.warm_up(lengths=[len(x) for x in xs])
    assert run.statistics().exact_compiles == 2
    assert_close(run(xs), [np.asarray(centre(jnp.asarray(x))) for x in xs])


def test_a_warm_up_and_an_explanation_of_an_unmaskable_function_are_for_exact_sizes():
    run = jb.batched(jnp.fft.fft, spec=jb.spec("n", "float32"), grid=GRID, on_unmaskable="exact", frozen=True)
    xs = examples(3, 5, 3)
    with pytest.warns(UserWarning, match="exact sizes"):
        run.warm_up(lengths=[3, 5, 3])
    assert run.explain([3, 5, 3]).programs == 0 and run.explain([3, 5, 3]).num_exact == 3
    assert_close(run(xs), [np.asarray(jnp.fft.fft(x)) for x in xs])


def test_a_call_on_concrete_values_while_something_else_is_traced_is_a_call():
    run = jb.batched(attend, (None, 0), grid=GRID)
    xs, params = examples(3, 1, width=4), weights()
    got = jax.jit(lambda scale: jax.tree.map(lambda y: scale * y, run(params, xs)[0]))(1.0)
    jax.tree.map(np.testing.assert_allclose, got, run(params, xs)[0])


def test_a_traced_shared_argument_is_named():
    run = jb.batched(attend, (None, 0), grid=GRID)
    with pytest.raises(TypeError, match=r"`params\['.'\]` is traced .* jaxbatch.mask"):
        jax.jit(lambda params: run(params, examples(3, width=4)))(weights())


def test_a_warm_up_needs_every_size():
    with pytest.raises(jb.SpecError, match="size of `d` is not known"):
        jb.batched(attend, (None, 0), grid=GRID).warm_up(weights())
    with pytest.raises(ValueError, match="nothing to warm up"):
        jb.batched(centre).warm_up()
    with pytest.raises(TypeError, match="shared arguments are params; got 0"):
        jb.batched(attend, (None, 0), grid=GRID).warm_up()


def test_one_scalar_in_many_spellings_is_one_program(count_compiles):
    def scale(x: Float[Array, "n"], s: Float[Array, ""]):
        return x * s

    run = jb.batched(scale, spec=(VECTOR, jb.spec("", "float32")), grid=GRID)
    spellings = [1.0, np.float32(1), np.float64(1), jnp.float32(1), 1, np.int32(1), True]
    xs = examples(*[5] * len(spellings))
    with count_compiles() as compiles:
        got = [run([x], [s])[0] for x, s in zip(xs, spellings, strict=True)]
    assert compiles.count == run.statistics().compiles == 1
    assert_close(got, xs)


def test_dict_keys_in_any_order_are_one_program():
    def f(x):
        return x["a"] + x["b"]

    run = jb.batched(f, spec={"a": VECTOR, "b": VECTOR}, grid=GRID)
    a, b = examples(3, 3)
    assert_close(run([{"a": a, "b": b}])[0], a + b)
    assert_close(run([{"b": b, "a": a}])[0], a + b)
    assert run.statistics().compiles == 1


def test_new_weights_are_no_new_program_and_no_program_holds_a_copy(count_compiles):
    def f(w, x: Float[Array, "n"]):
        return (x[:, None] * w["w"][:8]).sum()

    run = jb.batched(f, (None, 0), grid=jb.Grid(n=(1, 64), rows=1))
    params = {"w": jax.device_put(np.ones(2_500_000, np.float32))}  # 10 MB
    xs = examples(1, 2, 4, 8, 16, 32, 64)
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    run(params, xs)
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 2 * 64 * 8 * 4
    with count_compiles() as compiles:
        got = run({"w": 2 * np.ones(2_500_000, np.float32)}, xs)
    assert compiles.count == 0 and run.statistics().compiles == 7
    assert_close(got[3], np.float32(16) * xs[3].sum())


def test_arrays_that_a_function_closes_over_are_arguments_too():
    table = np.random.default_rng(0).normal(size=(1000, 100)).astype(np.float32)

    def look_up(ids: Int[Array, "n"]):
        return jnp.asarray(table)[ids].sum(0)

    run = jb.batched(look_up, grid=GRID)
    (got,) = run([np.array([1, 5, 999])])
    assert_close(got, table[[1, 5, 999]].sum(0))
    traced = run._engine.padded(run._ahead.shared([]), (np.dtype("int32"),), {})
    assert traced is not None
    bucket = jb.Bucket(n=4, rows=1)
    text = jax.jit(traced.run(bucket)).lower(*traced.avals(bucket)).as_text()
    assert len(text) < 100_000  # the table alone would take 800,000 characters


def test_a_program_for_an_exact_size_takes_closed_over_arrays_too():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(100, 3)), np.float32)
    run = jb.batched(lambda ids: table[ids].sum(0), spec=jb.spec("n", "int32"), grid=GRID, oversize="exact")
    for got, ids in zip(run([np.arange(0), np.arange(200) % 100]), (slice(0), slice(None)), strict=True):
        assert_close(got, np.asarray(table)[ids].sum(0) * (2 if ids.stop is None else 1))


def test_a_bucket_holds_only_the_branch_that_its_examples_take():
    def f(x: Float[Array, "n"]):
        return jnp.sin(x) if x.shape[0] <= 8 else jnp.cos(x)

    run = jb.batched(f, grid=jb.Grid(n=[8, 16], rows=1), key="branches")
    traced = run._engine.padded(run._ahead.shared([]), (np.dtype("float32"),), {})
    assert traced is not None
    for size, there, absent in ((8, "sine", "cosine"), (16, "cosine", "sine")):
        bucket = jb.Bucket(n=size, rows=1)
        text = jax.jit(traced.run(bucket)).lower(*traced.avals(bucket)).as_text()
        assert f"stablehlo.{there} " in text and f"stablehlo.{absent} " not in text
    xs = examples(3, 12)
    assert_close(run(xs), [np.sin(xs[0]), np.cos(xs[1])])
    # In a grid without the smaller size the larger bucket holds short examples, so it is another program.
    other = jb.batched(f, grid=jb.Grid(n=16, rows=1), key="branches")
    assert_close(other(xs), [np.sin(xs[0]), np.cos(xs[1])])


def test_fresh_closures_share_programs_under_a_key_and_see_their_own_arrays(count_compiles):
    xs = examples(3, 9)
    jnp.asarray(np.zeros(1, np.float32))
    with count_compiles() as compiles:
        for i in range(20):
            added = jnp.asarray(np.full(1, i, np.float32))
            run = jb.batched(lambda x, added=added: x * 2 + added, spec=VECTOR, grid=GRID, key="doubled")
            assert_close(run(xs), [x * 2 + np.float32(i) for x in xs])
    assert compiles.count == 2


def test_one_key_for_two_functions_is_refused():
    jb.batched(lambda x: jnp.sin(x), spec=VECTOR, grid=GRID, key=("two", "functions"))
    with pytest.raises(ValueError, match="sin.*there.*cos.*here"):
        jb.batched(lambda x: jnp.cos(x), spec=VECTOR, grid=GRID, key=("two", "functions"))


def test_fresh_closures_without_a_key_warn_once():
    def turn():
        return jb.batched(functools.partial(lambda scale, x: x * scale, 2.0), spec=VECTOR, grid=GRID)(
            examples(3)
        )

    turn()
    with pytest.warns(UserWarning, match=r"<lambda> \(.*test_batched.py:\d+\) was made anew.*Pass key="):
        turn()
    turn()


def test_the_same_function_and_functions_that_were_not_compiled_warn_nothing():
    def make():
        return lambda x: x + 1

    jb.batched(make(), spec=VECTOR)
    f = make()
    jb.batched(f, spec=VECTOR, grid=GRID)(examples(3))
    jb.batched(f, spec=VECTOR, grid=jb.Grid(n=4))(examples(3))


def test_a_change_of_precision_is_a_new_program_not_a_wrong_one():
    def f(x: Float[Array, "n 4"]):
        return x.T @ x

    run = jb.batched(f, grid=jb.Grid(n=8))
    run(examples(3, width=4))
    with jax.default_matmul_precision("bfloat16"):
        run(examples(3, width=4))
    assert run.statistics().compiles == 2


def test_the_log_says_what_changed(caplog):
    def f(a: Int[Array, "n"], b: Float[Array, "m"]):
        return a.sum() + b.sum()

    run = jb.batched(f, grid=jb.Grid(n=8, m=(8, 32)))
    with caplog.at_level(logging.INFO, logger="jaxbatch"):
        run([np.zeros(3, np.int32)], examples(4))
        run([np.zeros(3, np.int16)], examples(20))
    last = caplog.records[-1].getMessage()
    assert "f: compiled bucket n=8, m=32, rows=1 in" in last
    assert "size `m` of `b`: 8 -> 32" in last and "dtype of `a`: int32 -> int16" in last


def test_eight_threads_on_a_cold_function_compile_once_and_are_all_right(count_compiles):
    run, xs = jb.batched(centre, grid=jb.Grid(n=8, rows=1)), examples(*[7] * 8)
    start = threading.Barrier(8)

    def ask(x):
        start.wait(WAIT)
        return run([x])[0]

    with count_compiles() as compiles, ThreadPoolExecutor(8) as pool:
        got = list(pool.map(ask, xs, timeout=WAIT))
    assert compiles.count == run.statistics().compiles == 1
    assert_close(got, [np.asarray(centre(jnp.asarray(x))) for x in xs])


def test_debugging_for_nans_finds_none_in_padding():
    def f(x: Float[Array, "n"]):
        return jnp.log(x).sum() / x.shape[0]

    with jax.debug_nans(True):
        got = jb.batched(f, grid=GRID)([np.abs(x) + 1 for x in examples(3, 17)])
    assert all(np.isfinite(got))


# --- inferred grids --------------------------------------------------------------------------------


def test_without_a_grid_powers_of_two_are_inferred_with_one_warning_and_grow(count_compiles):
    run = jb.batched(centre)
    with pytest.warns(UserWarning, match=r"no grid was given.*Grid\(n=\(1, 16\), rows=\(1, 64\)\)"):
        run(examples(3, 9))
    with count_compiles() as compiles:
        run(examples(9, 3))  # what was compiled before is still used after growing
    assert compiles.count == 0
    got = run(examples(300))
    assert got[0].shape == (300,) and run.grid and run.grid.limits == {"n": 512}
    run(examples(5))
    assert run.grid.limits == {"n": 512}


# --- the lazy way ----------------------------------------------------------------------------------


def test_map_is_lazy_and_ordered_on_an_endless_iterator():
    pulled = 0

    def source():
        nonlocal pulled
        for i in itertools.count():
            pulled += 1
            yield np.full(i % 100 + 1, i, np.float32)

    def first(x: Float[Array, "n"]):
        return x[0]

    results = jb.batched(first, grid=jb.Grid(n=(1, 128))).map(source())
    assert pulled == 0
    assert next(results) == 0 and pulled < 100
    assert [int(each) for each in itertools.islice(results, 9)] == list(range(1, 10))
    assert pulled < 100
    assert [int(each) for each in itertools.islice(results, 3000)] == list(range(10, 3010))
    assert pulled <= 3010 + 32 * 64


def test_map_copies_examples_so_that_an_iterator_may_reuse_its_buffer():
    buffer = np.zeros(4, np.float32)

    def source():
        for i in range(40):
            buffer[:] = i
            yield buffer

    def first(x: Float[Array, "n"]):
        return x[0]

    assert [int(each) for each in jb.batched(first, grid=GRID).map(source())] == list(range(40))


@pytest.mark.parametrize("good", [0, 5, 40, 100])
def test_an_error_of_the_iterator_comes_after_all_results_before_it(good):
    def source():
        yield from examples(*[3] * good)
        raise OSError("disk gone")

    results, got = jb.batched(centre, grid=GRID).map(source()), []
    with pytest.raises(OSError, match="disk gone"):
        got.extend(results)
    for each in results:
        got.append(each)
    assert len(got) == good


def test_map_raises_an_examples_error_in_its_turn_or_yields_it():
    xs = [*examples(*[3] * 20), np.zeros((2, 2), np.float32), *examples(*[3] * 30)]
    run = jb.batched(centre, grid=GRID)
    results = run.map(iter(xs))
    assert len(list(itertools.islice(results, 20))) == 20
    with pytest.raises(jb.SpecError, match=r"`x\[20\]` has rank 2"):
        next(results)
    got = list(run.map(iter(xs), errors="return"))
    assert [i for i, each in enumerate(got) if isinstance(each, jb.SpecError)] == [20] and len(got) == 51


def test_a_missing_program_ends_a_map_after_the_results_before_it():
    run = jb.batched(centre, grid=GRID, frozen=True)
    run.warm_up(lengths=[3] * 16)
    results, got = run.map(examples(*[3] * 16, *[60] * 5)), []
    with pytest.raises(jb.CompileMissError, match="n=64"):
        got.extend(results)
    assert len(got) == 16


def test_map_checks_its_arguments_at_once():
    run = jb.batched(attend, (None, 0), grid=GRID)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        run.map([])
    with pytest.raises(ValueError, match="errors='ignore'"):
        inspect.unwrap(jb.Batched.map)(run, weights(), [], errors="ignore")


def test_map_gives_what_a_call_gives():
    xs, params = examples(*np.random.default_rng(3).integers(0, 60, 150), width=4), weights()
    run = jb.batched(attend, (None, 0), grid=GRID)
    xs = [x if len(x) else x + 0 for x in xs if len(x)]
    assert_close(list(run.map(params, iter(xs))), run(params, xs))


# --- accounts --------------------------------------------------------------------------------------


def test_padding_is_reported_as_it_is():
    explanation = jb.batched(centre, grid=jb.Grid(n=(1, 1024), rows=1)).explain(np.arange(1, 1025))
    assert explanation.total.examples == explanation.batches == 1024
    assert explanation.pad_ratio == pytest.approx(1.332, abs=5e-4)
    assert explanation.pad_ratio_squared == pytest.approx(1.712, abs=5e-4)
    assert explanation.worst_pad_ratio == pytest.approx(1.996, abs=5e-4)
    finer = jb.Grid(n=[*range(32, 1025, 32)], rows=1)
    assert jb.batched(centre, grid=finer).explain(np.arange(1, 1025)).pad_ratio < 1.05


def test_statistics_count_what_ran(count_compiles):
    run = jb.batched(centre, grid=jb.Grid(n=(4, 16), rows=[1, 4]))
    explanation = run.explain([3, 4, 16, 9, 2])
    before = run.statistics()
    with count_compiles() as compiles:
        run(examples(3, 4, 16, 9, 2))
    counts = run.statistics()
    assert counts.compiles == compiles.count == explanation.missing == explanation.programs == 2
    assert (counts.examples, counts.batches, counts.hits) == (5, 2, 0)
    assert counts.valid_cells == 34
    assert counts.padded_cells == 3 * 4 + 2 * 16
    assert counts.filler_cells == 1 * 4 + 2 * 16
    assert counts.padding_share == pytest.approx(1 - 34 / 80) == explanation.padding_share
    assert counts.buckets[jb.Bucket(n=4, rows=4)].examples == 3
    assert list(counts.buckets) == list(explanation.buckets)
    assert counts.total.seconds > 0 and counts.compile_seconds > 0
    assert before.examples == 0, "a snapshot does not change"
    run(examples(3, 4, 16, 9, 2))
    assert run.statistics().hits == 2 and run.explain([3]).missing == 1
    assert run.explain([3, 3]).missing == 0
    assert "5 examples in 2 batches" in str(explanation) and "n=16 rows=4" in str(run.statistics())


def test_explain_compiles_nothing_and_counts_missing_programs_for_the_given_weights(count_compiles):
    run = jb.batched(attend, (None, 0), spec=jb.spec("n, 4", "float32"), grid=GRID)
    params = weights()
    with count_compiles() as compiles:
        assert run.explain([1, 50, 0], params).missing == 2
        assert run.explain([1, 50, 0], params).num_exact == 1
    assert compiles.count == 0
    run(params, examples(1, 50, width=4))
    assert run.explain([1, 50], params).missing == 0
    assert run.explain([1, 50]).missing == 2
    with pytest.raises(jb.OversizeError):
        run.explain([1000], params)


def test_lengths_of_several_dims_are_a_dict():
    def f(x: Float[Array, "h w"]):
        return x.sum()

    run = jb.batched(f, grid=jb.Grid(h=(1, 8), w=(1, 8)))
    assert run.explain({"h": [3, 5], "w": [8, 1]}).programs == 2
    with pytest.raises(ValueError, match="a dict of arrays by dim: h, w"):
        run.explain([1, 2])
    with pytest.raises(ValueError, match=r"lengths of \['h'\], expected \['h', 'w'\]"):
        run.explain({"h": [1]})
    with pytest.raises(ValueError, match="integers of at least 0"):
        run.explain({"h": [1.5], "w": [1]})
    with pytest.raises(ValueError, match=r"the shapes are `h` \(2,\), `w` \(3,\)"):
        run.explain({"h": [1, 2], "w": [1, 2, 3]})


def test_a_function_that_raises_at_all_lengths_of_the_largest_bucket_serves_the_others():
    def f(x):
        if x.shape[0] > 8:
            raise ValueError("too long for this function")
        return x.sum()

    run = jb.batched(f, spec=jb.spec("n", "float32"), grid=jb.Grid(n=[4, 8, 16]))
    short, long, middle = run([np.ones(n, np.float32) for n in (3, 12, 8)], errors="return")
    assert short == 3 and middle == 8 and "too long for this function" in str(long)
