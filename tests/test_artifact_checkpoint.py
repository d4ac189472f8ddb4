"""Weights from training: an artifact copies them from a checkpoint, or refers to it and restores them."""

import contextlib
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from artifacts import GRID, assert_same, clean_python, examples
from ragged import weights
from test_artifact_damage import changed, opened, rewritten

import jaxbatch as jb
from jaxbatch.cli import main

PARAMS = {"layer": {"w": weights(4), "b": [weights(4, seed=2), None]}, "scale": np.float32(2), "times": 3}
FLAT = {"layer/w": weights(4), "layer/b": weights(4, seed=2)}


def scaled(params, x):
    own = params["layer"]["b"][0] * params["scale"]
    return (x.sum() * params["layer"]["w"] + own) * [0, 1, 2, 3][params["times"]]


def assert_gives(path: Path, f: Any = scaled, params: Any = PARAMS) -> None:
    assert_same(jb.load(path), lambda x: f(params, x), examples())


def write(path: Path, params: Any = PARAMS) -> Path:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path.resolve(), params)
    return path


def batched(f=scaled):
    return jb.batched(f, (None, 0), spec=jb.spec("n", "float32"), grid=GRID)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with an artifact, and the checkpoint that it refers to."""
    folder = tmp_path_factory.mktemp("written")
    batched().save(folder / "f.jbx", write(folder / "checkpoint"), copy=False)
    return folder


@pytest.fixture
def moved(written, tmp_path):
    """A copy of that folder; the original place of the checkpoint is empty meanwhile."""
    shutil.copytree(written, tmp_path / "new")
    (written / "checkpoint").rename(written / "gone")
    yield tmp_path / "new"
    (written / "gone").rename(written / "checkpoint")


# --- copied ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_weights_may_come_from_a_file(tmp_path, kind):
    source = tmp_path / f"weights.{kind}"
    if kind == "npz":
        np.savez(source, allow_pickle=False, **FLAT)
    else:
        pytest.importorskip("safetensors.numpy").save_file(FLAT, source)
    f = lambda params, x: x.sum() * params["layer"]["w"] + params["layer"]["b"]
    run = batched(f)
    run.save(tmp_path / "f.jbx", source, references=False)
    params = {"layer": {"w": FLAT["layer/w"], "b": FLAT["layer/b"]}}
    assert_gives(tmp_path / "f.jbx", f, params)
    with pytest.raises(ValueError, match="only an Orbax checkpoint, a folder, can be referred to"):
        run.save(tmp_path / "f.jbx", source, copy=False)
    with pytest.raises(ValueError, match="no shared argument is the pathlib.Path of a checkpoint"):
        run.save(tmp_path / "f.jbx", params, copy=False)


def test_a_copy_needs_the_checkpoint_no_more(tmp_path):
    source = write(tmp_path / "checkpoint")
    batched().save(tmp_path / "f.jbx", source)
    shutil.rmtree(source)
    assert_gives(tmp_path / "f.jbx")


def test_checkpoints_of_training_loops_are_found_by_step(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    kept = checkpoint.args.StandardSave({"w": weights(4)})
    for folder, args in (("one", kept), ("two", checkpoint.args.Composite(params=kept, state=kept))):
        with checkpoint.CheckpointManager(tmp_path / folder) as manager:
            manager.save(3, args=args)
    run = batched(lambda params, x: x.sum() * params["w"])
    run.save(tmp_path / "f.jbx", tmp_path / "one" / "3", copy=False)
    assert jb.load(tmp_path / "f.jbx")([np.ones(2)])[0].shape == (4,)
    for place, message in (
        ("one", "no Orbax checkpoint. It has the steps 3: give the path of one"),
        ("two/3", "several items: params, state"),
        (".", "is no Orbax checkpoint"),
    ):
        with pytest.raises(ValueError, match=message):
            run.save(tmp_path / "f.jbx", tmp_path / place)


# --- referred to -----------------------------------------------------------------------------------


@pytest.mark.parametrize("references", [True, False])
def test_a_reference_holds_no_weights_and_gives_the_same(tmp_path, references):
    params = {**PARAMS, "table": weights(300, 100)}
    f = lambda params, x: scaled(params, x) + params["table"].sum()
    source = write(tmp_path / "checkpoint", params)
    batched(f).save(tmp_path / "f.jbx", source, copy=False, references=references)
    assert (tmp_path / "f.jbx").stat().st_size < params["table"].nbytes
    assert_gives(tmp_path / "f.jbx", f, params)


def test_typed_keys_and_what_is_no_array_are_copied(tmp_path):
    params = {"key": jax.random.key(7), "w": weights(3), "kind": "twice"}
    f = lambda params, x: x.sum() * params["w"] * len(params["kind"]) + jax.random.normal(params["key"])
    batched(f).save(tmp_path / "f.jbx", write(tmp_path / "checkpoint", params), copy=False)
    assert_gives(tmp_path / "f.jbx", f, params)


def test_both_may_be_moved_together_or_the_artifact_alone(moved, written, tmp_path):
    assert_gives(moved / "f.jbx")
    (written / "gone").rename(written / "checkpoint")
    shutil.copy(moved / "f.jbx", tmp_path / "f.jbx")
    assert_gives(tmp_path / "f.jbx")
    (written / "checkpoint").rename(written / "gone")


def test_a_missing_checkpoint_is_named_with_where_it_was_expected(moved, written):
    shutil.rmtree(moved / "checkpoint")
    with pytest.raises(jb.ArtifactError) as caught:
        jb.load(moved / "f.jbx")
    for part in ("jaxbatch.load", "missing: expected the folder", str(moved / "checkpoint"), str(written)):
        assert part in str(caught.value)


def largest(folder: Path) -> Path:
    return max(folder.glob("**/d/*"), key=lambda path: path.stat().st_size)


def overwrite(folder: Path, params: Any) -> None:
    shutil.rmtree(folder)
    write(folder, params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "_METADATA").unlink(), "its file _METADATA is missing"),
        (lambda folder: largest(folder).write_bytes(b""), "has 0 bytes, expected"),
        (
            lambda folder: largest(folder).write_bytes(largest(folder).read_bytes()[:-1] + b"?"),
            "has SHA-256 .*, expected",
        ),
        (lambda folder: overwrite(folder, {"w": weights(4)}), "_METADATA has .* bytes, expected"),
        (lambda folder: overwrite(folder, {**PARAMS, "scale": np.float32(3)}), "is missing"),
    ],
)
def test_a_changed_checkpoint_is_refused_with_what_changed(moved, change, message):
    change(moved / "checkpoint")
    with pytest.raises(jb.ArtifactError, match=f"not the one it was saved with.*{message}"):
        jb.load(moved / "f.jbx")


def test_other_arrays_under_the_same_files_are_refused(written, tmp_path):
    parts, manifest = opened(written / "f.jbx")
    target = tmp_path / "f.jbx"
    leaves = ("checkpoints", 0, "leaves")
    for place, value, message in (
        ((*leaves, 0), ["float32", [5]], r"expected layer.b.0 .* to be \('float32', \(5,\)\), found"),
        ((*leaves, 0), ["int32", [4]], "expected layer.b.0 .* to be .*int32"),
        ((*leaves, 0), None, "is no array of its checkpoint"),
        (("checkpoints", 0, "tree"), {"list": ["*"]}, "the structure differs"),
        (("checkpoints", 0, "files", 0, "name"), "../../etc/passwd", "outside its folder"),
        (("checkpoints", 0, "files", 0, "size"), "1", "makes no sense"),
        (("checkpoints", 0, "relative"), 3, "makes no sense"),
        (("checkpoints",), [], "makes no sense"),
        (("weights", 0, "shape"), [2], "to have the shape"),
        (("weights", 0, "source"), [7, 0], "makes no sense"),
    ):
        rewritten(target, parts, changed(manifest, place, value))
        with pytest.raises(jb.ArtifactError, match=message):
            jb.load(target)


def test_a_checkpoint_that_orbax_cannot_read_is_refused(written, monkeypatch):
    def fail(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr("jaxbatch._artifact._checkpoint._restored", fail)
    with pytest.raises(jb.ArtifactError, match="cannot be restored. OSError: the disk is gone"):
        jb.load(written / "f.jbx")


def test_without_orbax_the_way_out_is_named(written, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "orbax", None)
    with pytest.raises(jb.ArtifactError, match="cannot be restored.*pip install orbax-checkpoint"):
        jb.load(written / "f.jbx")


# --- several devices -------------------------------------------------------------------------------

TWO_DEVICES = """
    import sys, numpy as np, jax, jaxbatch as jb
    from pathlib import Path
    from orbax import checkpoint
    from jax.sharding import NamedSharding, PartitionSpec as P

    folder, names = Path(sys.argv[1]), []
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, P("i")))
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", {"w": w, "b": np.ones(3, np.float32)})
    del w
    f = lambda p, x: p["w"].sum() * x + p["b"].sum()
    run = jb.batched(f, (None, 0), spec=jb.spec("n", "float32"), grid=jb.Grid(n=8))
    run.save(folder / "f.jbx", folder / "checkpoint", copy=False, references=False)
    run.save(folder / "g.jbx", folder / "checkpoint", references=False)

    def shardings(name, array):
        names.append((name, array.shape, array.dtype.name))
        return NamedSharding(mesh, P("i") if array.shape == (8,) else P())

    for path in (folder / "g.jbx", folder / "f.jbx", folder / "f.jbx"):
        loaded = jb.load(path, shardings=shardings, cache_dir=folder / "cache")
        assert loaded([np.ones(2)])[0].tolist() == [31.0, 31.0]
        assert loaded.masked({"n": 1}, np.ones(2, np.float32)).tolist() == [31.0, 0.0]
        shards = [x.addressable_shards for x in jax.live_arrays() if x.shape == (8,)]
        assert shards and all([shard.data.shape for shard in each] == [(4,), (4,)] for each in shards)
        assert names[-2:] == [("p['b']", (3,), "float32"), ("p['w']", (8,), "float32")], names
        try:
            jb.load(path, shardings=NamedSharding(mesh, P("i")))
        except ValueError as error:
            print(error)
    print(loaded.statistics().compiles, loaded.statistics().cached)
"""


def test_weights_are_restored_as_the_caller_shards_them_and_load_on_any_number_of_devices(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    flags = "--xla_force_host_platform_device_count=2"
    *refused, counts = clean_python(TWO_DEVICES, tmp_path, XLA_FLAGS=flags).splitlines()
    assert len(refused) == 3 and all("shardings: `p['b']` (3,)" in each for each in refused)
    assert counts == "0 1"  # sharded programs are kept on disk too
    for name in ("f.jbx", "g.jbx"):
        assert jb.load(tmp_path / name)([np.ones(2)])[0].tolist() == [31, 31]


# --- the command line ------------------------------------------------------------------------------


def test_export_refers_inspect_says_where_and_verify_compares_every_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text("from test_artifact_checkpoint import scaled\n")
    monkeypatch.chdir(tmp_path)
    note = write(tmp_path / "checkpoint") / "note.txt"
    note.write_text("before")
    grid = ["--grid", "n=4:8 rows=1", "--spec", "n: float32"]
    assert main(["export", "mine:scaled", "--params", "checkpoint", "--refer", *grid, "-o", "f.jbx"]) == 0
    assert main(["inspect", "f.jbx"]) == 0
    assert f"weights of a checkpoint: {tmp_path / 'checkpoint'}" in capsys.readouterr().out
    assert main(["verify", "f.jbx"]) == 0
    monkeypatch.setattr("jaxbatch._artifact._checkpoint.SMALL", 0)
    note.write_text("behind")
    with contextlib.chdir(tmp_path.parent):
        assert main(["verify", str(tmp_path / "f.jbx")]) == 1
    assert "note.txt has SHA-256" in capsys.readouterr().err
    shutil.rmtree("checkpoint")
    assert main(["inspect", "f.jbx"]) == 0
    assert "which is missing" in capsys.readouterr().out


def test_the_manifest_says_where_and_what(written):
    with zipfile.ZipFile(written / "f.jbx") as archive:
        (found,) = json.loads(archive.read("manifest.json"))["checkpoints"]
    assert (found["relative"], found["absolute"]) == ("checkpoint", str((written / "checkpoint").resolve()))
    assert found["leaves"] == [["float32", [4]], ["float32", [4]], ["float32", []], None]
    assert {"_METADATA", "manifest.ocdbt"} <= {file["name"] for file in found["files"]}
