"""Artifacts of real networks: small beside their weights, for several platforms, alike in a clean process."""

import jax
import numpy as np
import pytest
from artifacts import clean_python
from pretrained import real_bert
from ragged import assert_close

import jaxbatch as jb

pytestmark = pytest.mark.weights

BLOCKED = ("flax", "tokenizers", "safetensors", "optax", "orbax", "models")
SCRIPT = """
    import sys, numpy as np, jax, jaxbatch as jb
    jax.config.update("jax_default_matmul_precision", "highest")
    folder = sys.argv[1]
    loaded = jb.load(f"{folder}/model.jbx", cache_dir=f"{folder}/cache")
    xs = list(np.load(f"{folder}/xs.npz").values())
    np.save(f"{folder}/out.npy", np.stack(loaded(xs)))
    s = loaded.statistics()
    print(s.compiles, s.cached, s.compile_seconds, s.load_seconds)
"""


@pytest.mark.parametrize("name", ["bert-tiny", pytest.param("minilm", marks=pytest.mark.slow)])
def test_a_text_encoder_is_saved_for_three_platforms_and_runs_without_its_code(tmp_path, name):
    model, params, _ = real_bert(name)
    run = jb.batched(model.embed, (None, 0), grid=jb.Grid(n=[16, 64, 128], rows=[1, 4]))
    path = tmp_path / "model.jbx"
    run.save(path, params, platforms=["cpu", "cuda", "tpu"], vjp_order=1)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert 0 < path.stat().st_size - size < 1e6
    rng = np.random.default_rng(0)
    xs = [rng.integers(1000, 2000, n).astype(np.int32) for n in (1, 5, 16, 17, 64, 100, 128)]
    np.savez(tmp_path / "xs.npz", *xs)
    first = clean_python(SCRIPT, tmp_path, blocked=BLOCKED).split()
    got = np.load(tmp_path / "out.npy")
    single = jax.jit(model.embed)
    for one, x in zip(got, xs, strict=True):
        assert_close(one, np.asarray(single(params, x)))
    second = clean_python(SCRIPT, tmp_path, blocked=BLOCKED).split()
    assert (int(first[0]) > 0, int(first[1])) == (True, 0)
    assert (second[0], second[1]) == ("0", first[0])
    np.testing.assert_array_equal(got, np.load(tmp_path / "out.npy"))
