"""Artifacts: what is saved in one process runs in another, without the code, and answers alike."""

import concurrent.futures
import dataclasses
import json
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from artifacts import GRID, LENGTHS, assert_same, clean_python, examples, round_trip
from jaxtyping import Array, Float
from ragged import assert_close, normals, unpadded, weights

import jaxbatch as jb
from jaxbatch import _disk_cache
from jaxbatch._artifact import references
from jaxbatch._disk_cache import DiskCache


def softmax_mean(w, x):
    return (jax.nn.softmax(w * x) * x).sum() / x.shape[0]


def manifest(folder):
    with zipfile.ZipFile(folder / "f.jbx") as archive:
        return json.loads(archive.read("manifest.json"))


def programs(folder):
    return [program for variant in manifest(folder)["variants"] for program in variant["programs"]]


# --- round trips -----------------------------------------------------------------------------------


def test_one_symbolic_program_serves_all_buckets_and_compiles_once_for_each(tmp_path, count_compiles):
    loaded = round_trip(tmp_path, softmax_mean, np.float32(2))
    (program,) = programs(tmp_path)
    assert (program["sizes"], program["rows"]) == ({}, None)
    xs = examples()
    with count_compiles() as compiles:
        loaded(xs)
    assert compiles.count == loaded.statistics().compiles <= len(GRID)
    with count_compiles() as compiles:
        loaded(xs)
    assert compiles.count == 0
    assert_same(loaded, softmax_mean, xs, np.float32(2))


def test_a_clean_process_needs_no_model_code_and_traces_nothing_from_its_cache(tmp_path):
    round_trip(tmp_path, softmax_mean, np.float32(2))
    np.savez(tmp_path / "xs.npz", *examples())
    script = """
        import sys, numpy as np, jax, jaxbatch as jb
        events = []
        listen = lambda event, seconds, **_: events.append(event)
        jax.monitoring.register_event_duration_secs_listener(listen)
        folder = sys.argv[1]
        loaded = jb.load(f"{folder}/f.jbx", cache_dir=f"{folder}/cache")
        xs = list(np.load(f"{folder}/xs.npz").values())
        events.clear()
        out = np.stack(loaded(xs))
        s = loaded.statistics()
        traced = sum("trace" in event or "lower" in event or "compile" in event for event in events)
        print(s.compiles, s.cached, traced, out.tobytes().hex())
    """
    blocked = ("flax", "tokenizers", "safetensors", "optax", "orbax", "models", "tests", "artifacts")
    first = clean_python(script, tmp_path, blocked=blocked).split()
    second = clean_python(script, tmp_path, blocked=blocked).split()
    assert int(first[0]) > 0 and int(first[1]) == 0
    assert [int(number) for number in second[:3]] == [0, int(first[0]), 0]
    assert first[3] == second[3]
    got = np.frombuffer(bytes.fromhex(first[3]), np.float32)
    want = unpadded(softmax_mean, np.float32(2), examples(), in_axes=(None, 0))
    for a, b in zip(got, want, strict=True):
        assert_close(np.asarray(a), b)


def test_programs_of_a_call_are_read_ahead_in_the_order_of_its_batches(tmp_path, monkeypatch):
    first = round_trip(tmp_path, softmax_mean, np.float32(2), loading={"cache_dir": tmp_path / "cache"})
    want = first(examples())
    asked, reads = list[str](), list[str]()
    expect, read = DiskCache.expect, _disk_cache._read
    monkeypatch.setattr(DiskCache, "expect", lambda self, *args: asked.append(args[0]) or expect(self, *args))
    monkeypatch.setattr(_disk_cache, "_read", lambda *args: reads.append(args[1]) or read(*args))
    loaded = jb.load(tmp_path / "f.jbx", cache_dir=tmp_path / "cache")
    for one, other in zip(loaded(examples()), want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (
        sorted(asked) == sorted(reads)
        and len(reads) == loaded.statistics().cached == first.statistics().compiles
    )
    loaded(examples())
    assert len(asked) == len(reads) == loaded.statistics().cached


def test_specs_grid_policies_costs_and_metadata_are_kept(tmp_path):
    run = jb.batched(
        lambda x: x.sum(0),
        spec=jb.spec("n, 3", "bfloat16"),
        grid=jb.Grid(n=[4, 10], rows=[1, 6], max_cells=30),
    )
    run.warm_up(lengths=[4, 4])
    run.save(tmp_path / "f.jbx", metadata={"a": [1, None]})
    loaded = jb.load(tmp_path / "f.jbx")
    assert (loaded.grid, loaded.costs) == (run.grid, run.costs)
    assert loaded.metadata == {"a": [1, None]}
    assert loaded.platforms == ("cpu",)
    assert loaded.explain([3, 9]).jobs == run.explain([3, 9]).jobs
    with pytest.raises(jb.OversizeError, match="load.*`x.*has length 11"):
        loaded([np.zeros((11, 3), np.float32)])
    with pytest.raises(jb.SpecError, match="expected 3"):
        loaded([np.zeros((2, 4), np.float32)])
    (result,) = loaded([np.ones((2, 3))])
    assert result.dtype == jnp.bfloat16


def test_a_frozen_function_stays_frozen_until_it_is_warm(tmp_path):
    loaded = round_trip(tmp_path, lambda x: x * 2, options={"frozen": True})
    with pytest.raises(jb.CompileMissError, match="frozen"):
        loaded(examples())
    loaded.warm_up(lengths=LENGTHS)
    loaded(examples())


def test_all_calls_of_a_batched_function_exist(tmp_path):
    loaded = round_trip(tmp_path, softmax_mean, np.float32(2))
    xs = examples()
    loaded.warm_up()
    assert loaded.costs
    want = loaded(xs)
    for one, other in zip(loaded.map(iter(xs)), want, strict=True):
        np.testing.assert_array_equal(one, other)
    with loaded.dispatcher() as dispatcher:
        futures = [dispatcher.submit(x) for x in xs]
        for future, other in zip(futures, want, strict=True):
            assert_close(future.result(60), other)
    loaded.report(tmp_path / "report.html")
    with pytest.raises(jb.ArtifactError, match="copy the file"):
        loaded.save(tmp_path / "again.jbx")


@pytest.mark.parametrize("n", [0, 1])
def test_empty_examples_give_what_the_function_gives(tmp_path, n):
    loaded = round_trip(tmp_path, lambda x: {"mean": x.mean(), "twice": jnp.concatenate([x, x])})
    (got,) = loaded([np.ones(n, np.float32)])
    assert got["twice"].shape == (2 * n,)
    assert np.isnan(got["mean"]) == (n == 0)


def test_an_error_of_the_function_for_empty_examples_is_of_its_class(tmp_path):
    loaded = round_trip(tmp_path, lambda x: x.max())
    good, bad = loaded([np.ones(3, np.float32), np.ones(0, np.float32)], errors="return")
    assert good == 1 and type(bad) is ValueError and "zero-size" in str(bad)


def test_with_two_ragged_dims_each_may_be_empty_and_stays_itself(tmp_path):
    grid = jb.Grid(b=(1, 8), t=(1, 8), rows=[1, 4])
    f = lambda x: x.sum(axis=(1, 2)) + x.shape[1]
    loaded = round_trip(tmp_path, f, spec=jb.spec("b, t, 1", "float32"), grid=grid)
    xs = [normals([b * t])[0].reshape(b, t, 1) for b, t in ((2, 5), (5, 2), (0, 3), (3, 0), (0, 0), (8, 8))]
    assert_same(loaded, f, xs)


def test_examples_above_the_grid_run_at_their_own_size_where_that_was_the_policy(tmp_path, count_compiles):
    f = lambda w, x: {"y": jnp.cumsum(x) * w, "last": jax.nn.softmax(x)[-1] + x.shape[0]}
    loaded = round_trip(tmp_path, f, np.float32(2), options={"oversize": "exact"})
    xs = [*examples(), *examples((33, 100, 33, 0))]
    assert_same(loaded, f, xs, np.float32(2))
    assert loaded.statistics().exact_compiles == 2  # for 33 and 100; for 0 the function raises
    again = round_trip(tmp_path, f, np.float32(2), options={"oversize": "exact"})
    again.warm_up(lengths=[40, 3])
    with count_compiles() as compiles:
        again([*examples((40, 3))])
    assert compiles.count == 0


def test_two_ragged_dims_may_both_be_above_the_grid(tmp_path):
    grid = jb.Grid(b=4, t=(2, 4), rows=2)
    f = lambda x: x.sum(axis=1) + x.shape[1]
    loaded = round_trip(
        tmp_path, f, spec=jb.spec("b, t", "float32"), grid=grid, options={"oversize": "exact"}
    )
    xs = [normals([b * t])[0].reshape(b, t) for b, t in ((9, 2), (3, 9), (9, 9), (4, 4), (0, 2))]
    assert_same(loaded, f, xs)


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: x * 2 if x.shape[0] > 9 else x, "it branches"),
        (lambda x: x + jnp.ones(32)[: x.shape[0]], ""),
    ],
)
def test_where_no_program_can_be_made_for_what_is_above_the_grid_save_says_so_at_once(tmp_path, f, reason):
    with pytest.raises(
        jb.ArtifactError, match=f"oversize='exact' there must be .* made: {reason}.*oversize='error'"
    ):
        round_trip(tmp_path, f, options={"oversize": "exact"})
    assert not list(tmp_path.iterdir())


def test_trees_come_back_as_dicts_lists_tuples_and_none(tmp_path):
    spec = {"ids": jb.spec("n", "int32"), "pair": (jb.spec("2*n", "float32"), None)}
    f = lambda x: {"b": [x["ids"], (x["pair"][0].sum(), None)], "a": ()}
    loaded = round_trip(tmp_path, f, spec=spec)
    xs = [{"ids": np.arange(n), "pair": (np.ones(2 * n), None)} for n in (1, 5, 32)]
    for got, x in zip(loaded(xs), xs, strict=True):
        assert got["a"] == () and got["b"][1] == (2 * len(x["ids"]), None)
        np.testing.assert_array_equal(got["b"][0], x["ids"])


def test_every_dtype_round_trips_in_weights_and_results(tmp_path):
    names = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32")
    ws = {name: jnp.asarray(np.arange(3) % 2, name) for name in (*names, "complex64", "float8_e4m3fn")}
    f = lambda ws, x: (ws, x.sum())
    loaded = round_trip(tmp_path, f, ws)
    ((got, _),) = loaded([np.ones(3, np.float32)])
    for name, w in ws.items():
        assert got[name].dtype == w.dtype
        np.testing.assert_array_equal(got[name].astype(np.complex64), np.asarray(w).astype(np.complex64))


def test_typed_keys_are_weights_too(tmp_path):
    f = lambda key, x: x + jax.random.normal(key, (3,)).sum()
    loaded = round_trip(tmp_path, f, jax.random.key(7))
    assert_same(loaded, f, examples(), jax.random.key(7))


def test_numbers_stay_weak_and_static_leaves_are_baked_in(tmp_path):
    f = lambda scale, config, x: x * scale * config["times"]
    spec = jb.spec("n", "bfloat16")
    run = jb.batched(f, (None, None, 0), spec=spec, grid=GRID)
    config = {"times": 3, "name": "three"}
    run.save(tmp_path / "f.jbx", 2.0, config)
    (got,) = jb.load(tmp_path / "f.jbx")([np.ones(2)])
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), [6, 6])


def test_closed_over_arrays_are_stored_once_and_shared_ones_by_name(tmp_path):
    table, w = weights(1000, 8), weights(8)
    path = tmp_path / "f.jbx"
    f = lambda params, x: (jnp.asarray(table).sum(0) * params["w"]).sum() * x
    jb.batched(f, (None, 0), spec=jb.spec("n", "float32"), grid=GRID).save(path, {"w": w})
    assert path.stat().st_size < table.nbytes + w.nbytes + 2**16
    safetensors = pytest.importorskip("safetensors")
    with zipfile.ZipFile(path) as archive:
        stored = dict(safetensors.deserialize(archive.read("weights.safetensors")))
    (name,) = [name for name in stored if "params" in name]
    assert name.endswith("params['w']") or name == "params['w']"
    assert_same(jb.load(path), f, examples(), {"w": w})


def test_weights_are_on_the_device_once_however_many_buckets(tmp_path):
    w = weights(512, 512)
    f = lambda w, x: (x.sum() * w).sum()
    loaded = round_trip(tmp_path, f, w)
    before = sum(array.nbytes for array in jax.live_arrays())
    loaded(examples())
    grown = sum(array.nbytes for array in jax.live_arrays()) - before
    assert grown < 1.5 * w.nbytes


def test_a_dtype_family_keeps_the_dtypes_that_were_run(tmp_path):
    def double(x: Float[Array, "n"]) -> Float[Array, "n"]:
        return 2 * x

    run = jb.batched(double, grid=GRID)
    run([np.ones(3, np.float16), np.ones(3, np.float32)])
    run.save(tmp_path / "f.jbx")
    loaded = jb.load(tmp_path / "f.jbx")
    kinds = [np.float16, np.float32, np.float64]
    results = loaded([np.ones(3, kind) for kind in kinds])
    assert [result.dtype.name for result in results] == ["float16", "float32", "float32"]
    with pytest.raises(jb.SpecError, match="complex64"):
        loaded([np.ones(3, np.complex64)])


def test_fixed_sizes_come_from_shared_arguments_or_from_examples(tmp_path):
    def project(w: Float[Array, "d k"], x: Float[Array, "n d"]) -> Float[Array, "n k"]:
        return x @ w

    run = jb.batched(project, (None, 0), grid=GRID)
    w = weights(5, 2)
    run.save(tmp_path / "f.jbx", w)
    loaded = jb.load(tmp_path / "f.jbx")
    assert_same(loaded, project, normals(LENGTHS, width=5), w)
    with pytest.raises(jb.SpecError, match="has size 4, expected 5"):
        loaded(normals([3], width=4))
    run = jb.batched(lambda x: x.sum(0), spec=jb.spec("n, d", "float32"), grid=GRID)
    with pytest.raises(jb.SpecError, match="the size of `d` must be known"):
        run.save(tmp_path / "g.jbx")
    run(normals([3], width=6))
    run.save(tmp_path / "g.jbx")
    assert jb.load(tmp_path / "g.jbx")(normals([3], width=6))[0].shape == (6,)


def test_a_function_that_masks_itself_is_saved_too(tmp_path):
    def centre(x, lengths, mask):
        mean = jnp.where(mask["n"], x, 0).sum(1) / lengths["n"]
        count = mask["rows"].sum()
        return {"centred": x - mean[:, None], "rows": jnp.full(x.shape[0], count)}

    run = jb.batched(centre, spec=jb.spec("n", "float32"), grid=GRID, per_example=False)
    run.save(tmp_path / "f.jbx")
    loaded = jb.load(tmp_path / "f.jbx")
    xs = examples()
    for got, want in zip(loaded(xs), run(xs), strict=True):
        assert_close(got, want)


def test_the_working_directory_may_change_after_loading(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    round_trip(tmp_path, softmax_mean, np.float32(2), references=True)
    loaded = jb.load("f.jbx", cache_dir="cache")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_same(loaded, softmax_mean, examples(), np.float32(2))
    assert references(loaded.artifact) and not list((tmp_path / "elsewhere").iterdir())


def test_threads_may_load_and_call_one_file_at_once(tmp_path):
    want = round_trip(tmp_path, softmax_mean, np.float32(2))(examples())

    def work(_):
        return jb.load(tmp_path / "f.jbx", cache_dir=tmp_path / "cache")(examples())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in pool.map(work, range(8)):
            for one, other in zip(results, want, strict=True):
                np.testing.assert_array_equal(one, other)


def test_threads_may_save_at_once_to_one_place_and_to_others(tmp_path):
    runs = [
        jb.batched(lambda w, x, k=k: x * w + k, (None, 0), spec=jb.spec("n", "float32"), grid=GRID)
        for k in range(2)
    ]

    def work(i):
        runs[i % 2].save(tmp_path / ("f.jbx" if i < 4 else f"{i}.jbx"), np.float32(i), references=False)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    for i in range(4, 8):
        np.testing.assert_array_equal(jb.load(tmp_path / f"{i}.jbx")([np.ones(2)])[0], [i + i % 2] * 2)
    assert jb.load(tmp_path / "f.jbx")([np.ones(2)])[0][0] in (0, 2, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4.jbx", "5.jbx", "6.jbx", "7.jbx", "f.jbx"]


# --- what cannot be symbolic -----------------------------------------------------------------------


def branch(x):
    return x * 2 if x.shape[0] > 9 else x - 1


def test_a_function_that_branches_on_sizes_has_a_program_for_each_size(tmp_path):
    loaded = round_trip(tmp_path, branch)
    assert [program["sizes"] for program in programs(tmp_path)] == [{"n": n} for n in (4, 8, 16, 32)]
    assert_same(loaded, branch, examples())


def test_a_function_that_needs_its_sizes_has_a_program_for_each_bucket(tmp_path):
    def chunked(x, lengths):
        pieces = [x[:, i : i + 2] for i in range(0, x.shape[1], 2)]
        return jnp.concatenate(pieces, axis=1) * int(x.shape[0] ** 0)

    run = jb.batched(chunked, spec=jb.spec("n", "float32"), grid=GRID, per_example=False)
    run.save(tmp_path / "f.jbx")
    assert len(programs(tmp_path)) in (4, 8)
    loaded = jb.load(tmp_path / "f.jbx")
    for got, want in zip(loaded(examples()), examples(), strict=True):
        np.testing.assert_array_equal(got, want)


def test_lengths_at_which_the_function_raises_raise_alike(tmp_path):
    f = lambda x: jax.lax.top_k(x, 5)[0]
    loaded = round_trip(tmp_path, f)
    assert_same(loaded, f, examples())


FALLBACKS = {
    "top_k": lambda x: jax.lax.top_k(x, 3)[0],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "rfft": lambda x: jnp.abs(jnp.fft.rfft(x)),
    "linspace": lambda x: x * jnp.linspace(0, 1, x.shape[0]),
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x), x),
    "interp": lambda x: jnp.interp(jnp.linspace(0, 1, 7), jnp.linspace(0, 1, x.shape[0]), x),
    "split": lambda x: jnp.split(jnp.concatenate([x, x]), 2)[0],
    "permutation": lambda x: jax.random.permutation(jax.random.key(0), x),
    "associative_scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "convolve": lambda x: jnp.convolve(x, jnp.array([1.0, 2.0, 3.0]), mode="same"),
    "len": lambda x: x / len(x),
    "python sum": lambda x: sum(x),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_masking_serves_is_exported_and_what_it_refuses_is_refused(tmp_path, name):
    f = FALLBACKS[name]
    try:
        run = jb.batched(f, spec=jb.spec("n", "float32"), grid=GRID)
    except jb.MaskError:
        assert name not in ("top_k", "linspace", "split")
        return
    run.save(tmp_path / "f.jbx", references=False)
    assert_same(jb.load(tmp_path / "f.jbx"), f, examples((1, 3, 5, 17, 32)))


# --- refusals at save ------------------------------------------------------------------------------


def printing(x):
    jax.debug.print("{}", x.sum())
    return x * 2


def calling_back(x):
    return jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize("f", [printing, calling_back])
def test_what_calls_back_into_python_is_refused(tmp_path, f):
    with pytest.raises(jb.MaskError, match="calls back to Python"):
        jb.batched(f, spec=jb.spec("n", "float32"), grid=GRID)
    run = jb.batched(f, spec=jb.spec("n", "float32"), grid=GRID, per_example=False)
    with pytest.raises(
        jb.ArtifactError, match=rf"batched\({f.__name__}\).save: it (cannot be exported|has side)"
    ):
        run.save(tmp_path / "f.jbx")
    assert not list(tmp_path.iterdir())


def test_results_of_a_class_of_their_own_are_refused(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Result:
        value: jax.Array

    run = jb.batched(lambda x: Result(x), spec=jb.spec("n", "float32"), grid=GRID)
    with pytest.raises(jb.ArtifactError, match="holds a Result, and an artifact keeps dicts"):
        run.save(tmp_path / "f.jbx")


def test_without_a_grid_or_with_exact_sizes_only_there_is_nothing_to_save(tmp_path):
    with pytest.raises(jb.ArtifactError, match="Pass grid="):
        jb.batched(lambda x: x, spec=jb.spec("n", "float32")).save(tmp_path / "f.jbx")
    with pytest.warns(UserWarning, match="exact sizes"):
        run = jb.batched(
            lambda x: jnp.abs(jnp.fft.fft(x)),
            spec=jb.spec("n", "float32"),
            grid=GRID,
            on_unmaskable="exact",
        )
    with pytest.raises(jb.ArtifactError, match="exact sizes only"):
        run.save(tmp_path / "f.jbx")


def test_metadata_must_be_json(tmp_path):
    run = jb.batched(lambda x: x, spec=jb.spec("n", "float32"), grid=GRID)
    with pytest.raises(jb.ArtifactError, match="JSON"):
        run.save(tmp_path / "f.jbx", metadata={"a": object()})


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f.jbx"
    path.write_bytes(b"old")
    run = jb.batched(lambda x: x, spec=jb.spec("n", "float32"), grid=GRID)
    with pytest.raises(jb.ArtifactError):
        run.save(path, metadata={"a": object()})
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


# --- other machines --------------------------------------------------------------------------------


def test_a_file_for_other_platforms_is_refused_and_one_for_several_is_not(tmp_path):
    with pytest.raises(
        jb.ArtifactError, match=r"has programs for cuda, and JAX runs on cpu here.*platforms="
    ):
        round_trip(tmp_path, softmax_mean, np.float32(2), platforms=["cuda"])
    loaded = round_trip(tmp_path, softmax_mean, np.float32(2), platforms=["cpu", "cuda", "tpu", "rocm"])
    assert loaded.platforms == ("cpu", "cuda", "tpu", "rocm")
    assert_same(loaded, softmax_mean, examples(), np.float32(2))


def test_64_bit_types_need_64_bit_types(tmp_path):
    script = """
        import sys, numpy as np, jaxbatch as jb
        run = jb.batched(lambda x: x * 2, spec=jb.spec("n", "float64"), grid=jb.Grid(n=(4, 8)))
        run.save(sys.argv[1])
    """
    clean_python(script, tmp_path / "wide.jbx", JAX_ENABLE_X64="1")
    with pytest.raises(jb.ArtifactError, match="takes or gives float64.*jax_enable_x64"):
        jb.load(tmp_path / "wide.jbx")
    clean_python(script, tmp_path / "narrow.jbx", JAX_ENABLE_X64="0")
    call = """
        import sys, numpy as np, jaxbatch as jb
        print(jb.load(sys.argv[1])([np.ones(3), np.ones(3, np.float32)])[0].dtype)
    """
    assert clean_python(call, tmp_path / "wide.jbx", JAX_ENABLE_X64="1") == "float64\n"
    assert clean_python(call, tmp_path / "narrow.jbx", JAX_ENABLE_X64="1") == "float32\n"
    assert clean_python(call, tmp_path / "narrow.jbx", JAX_ENABLE_X64="0") == "float32\n"


def test_weights_spread_over_devices_are_gathered_and_load_on_any_number(tmp_path):
    save = """
        import sys, numpy as np, jax, jaxbatch as jb
        mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
        w = jax.device_put(np.arange(8, dtype=np.float32), sharding)
        run = jb.batched(lambda w, x: w.sum() * x, (None, 0), spec=jb.spec("n", "float32"), grid=jb.Grid(n=8))
        run.save(sys.argv[1], w)
    """
    flags = "--xla_force_host_platform_device_count="
    clean_python(save, tmp_path / "f.jbx", XLA_FLAGS=f"{flags}4")
    call = """
        import sys, numpy as np, jaxbatch as jb
        print(jb.load(sys.argv[1])([np.ones(2)])[0].tolist())
    """
    for devices in (1, 2):
        assert clean_python(call, tmp_path / "f.jbx", XLA_FLAGS=f"{flags}{devices}") == "[28.0, 28.0]\n"
