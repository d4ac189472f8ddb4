"""Damaged and hostile artifacts: always an `ArtifactError`, never a crash, a wrong number or a stray file."""

import contextlib
import json
import random
import shutil
import zipfile

import jax
import numpy as np
import pytest
from artifacts import GRID, round_trip
from ragged import weights

import jaxbatch as jb
from jaxbatch._artifact._archive import create, manifest_digest

X = np.arange(5, dtype=np.float32)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    f = lambda w, x: {"y": (w * x.sum()).sum(), "x": x * 2}
    loaded = round_trip(folder, f, weights(7), references=True)
    return folder / "f.jbx", loaded([X])[0]


def assert_refused(path, expected=None):
    """Check that loading and running is refused; `expected` is what a harmless change must still give."""
    before = set(path.parent.iterdir())
    with contextlib.ExitStack() as stack:
        if expected is None:
            stack.enter_context(pytest.raises(jb.ArtifactError, match="jaxbatch.load"))
        got = jb.load(path)([X])[0]
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert set(path.parent.iterdir()) == before


def parts_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(path, parts, manifest):
    """Write an archive as jaxbatch would, with these parts and this manifest, digests all right."""
    with create(path) as archive:
        for name, data in parts.items():
            archive.add(name, lambda write, data=data: write(data))
        if "parts" in manifest and isinstance(manifest["parts"], dict):
            for name in archive.parts:
                if name in manifest["parts"]:
                    manifest["parts"][name] = archive.parts[name]
        manifest["sha256"] = manifest_digest(json.loads(json.dumps(manifest)))
        archive.add("manifest.json", lambda write: write(json.dumps(manifest).encode()))


def opened(path):
    parts = parts_of(path)
    return parts, json.loads(parts.pop("manifest.json"))


# --- damage ----------------------------------------------------------------------------------------


def test_every_kind_of_flipped_bit_is_noticed(good, tmp_path):
    path, _ = good
    data, rng = path.read_bytes(), random.Random(0)
    target = tmp_path / "f.jbx"
    for _ in range(250):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        target.write_bytes(damaged)
        assert_refused(target)


def test_every_truncation_is_noticed(good, tmp_path):
    path, _ = good
    data, rng = path.read_bytes(), random.Random(1)
    target = tmp_path / "f.jbx"
    for size in [0, 1, 4, 22, len(data) - 1, *(rng.randrange(len(data)) for _ in range(75))]:
        target.write_bytes(data[:size])
        assert_refused(target)


def test_bytes_that_are_added_removed_or_made_zero_are_noticed(good, tmp_path):
    path, _ = good
    data, rng = path.read_bytes(), random.Random(2)
    target = tmp_path / "f.jbx"
    for _ in range(25):
        at, length = rng.randrange(len(data)), rng.randrange(1, 400)
        for damaged in (
            data[:at] + rng.randbytes(length) + data[at:],
            data[:at] + data[at + length :],
            data[:at] + bytes(length + 1) + data[at + length + 1 :],
        ):
            if damaged != data:
                target.write_bytes(damaged)
                assert_refused(target)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x05\x06" + bytes(18), b"PK\x03\x04" * 100, b"{}"])
def test_what_is_no_artifact_is_refused(tmp_path, content):
    path = tmp_path / "f.jbx"
    path.write_bytes(content)
    assert_refused(path)


def test_a_missing_file_and_a_folder_are_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError):
        jb.load(tmp_path / "none.jbx")
    with pytest.raises(OSError):
        jb.load(tmp_path)


def test_a_zip_that_was_packed_anew_is_refused(good, tmp_path):
    path, _ = good
    target = tmp_path / "f.jbx"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts_of(path).items():
            archive.writestr(name, data)
    with pytest.raises(jb.ArtifactError, match="packed anew"):
        jb.load(target)


def test_swapped_parts_are_noticed(good, tmp_path):
    path, _ = good
    parts, manifest = opened(path)
    target = tmp_path / "f.jbx"
    names = list(parts)
    for one, other in zip(names, names[1:], strict=False):
        with create(target) as archive:
            swapped = {**parts, one: parts[other], other: parts[one]}
            for name, data in swapped.items():
                archive.add(name, lambda write, data=data: write(data))
            archive.add("manifest.json", lambda write: write(json.dumps(manifest).encode()))
        assert_refused(target)


def test_a_part_that_is_missing_is_named(good, tmp_path):
    path, _ = good
    parts, manifest = opened(path)
    target = tmp_path / "f.jbx"
    for name in parts:
        rewritten(target, {n: data for n, data in parts.items() if n != name}, dict(manifest))
        with pytest.raises(jb.ArtifactError, match=f"{name}.* is missing"):
            jb.load(target)


# --- hostile manifests -----------------------------------------------------------------------------

VALUES = (
    *(
        None,
        True,
        -1,
        0,
        2**62,
        2**70,
        1e308,
        float("-inf"),
        "",
        "cuda",
        "../../etc/passwd",
        "__import__('os')",
    ),
    *("x" * 5000, "n" * 900, "n^99999999", [], {}, [[[]]], ["*"] * 1000, {"dict": [["a", "*"], ["a", "*"]]}),
)


def places(value, path=()):
    """Yield the path of every value in JSON data."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def changed(manifest, path, value):
    manifest = json.loads(json.dumps(manifest))
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return manifest


def test_hostile_manifests_are_refused_or_harmless(good, tmp_path):
    path, expected = good
    parts, manifest = opened(path)
    target = tmp_path / "f.jbx"
    rng = random.Random(3)
    ignored = ("metadata", "written_by", "references", "matmul_precision", "costs", "name", "sha256", "parts")
    where = [p for p in places(manifest) if p and p[0] not in ignored and "tree" not in p]
    for place in rng.sample(where, min(120, len(where))):
        value = rng.choice(VALUES)
        rewritten(target, parts, changed(manifest, place, value))
        try:
            loaded = jb.load(target)
            (got,) = loaded([X])
        except jb.JaxbatchError:
            continue  # what the manifest says may also not fit the example, or the grid
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("format",), 2, "has format 2, and this jaxbatch reads format 1"),
        (("format",), "1", "has format 1"),
        (("calling_convention",), 99, r"newer than JAX .* can read \(calling convention 99"),
        (("calling_convention",), 5, "older than JAX"),
        (("platforms",), ["tpu"], "programs for tpu, and JAX runs on cpu here"),
        (("platforms",), "cpu", "has programs for"),
        (("variants", 0, "programs", 0, "part"), "../../etc/passwd", "'../../etc/passwd' is missing"),
        (("variants", 0, "programs", 0, "part"), "weights.safetensors", "cannot be read"),
        (("variants", 0, "programs", 0, "weights"), [99], "takes an array that is missing"),
        (("variants", 0, "outputs", "shapes", 0), ["n^99999999"], "is no size"),
        (("variants", 0, "outputs", "shapes", 0), ["os"], "unknown name 'os'"),
        (("weights", 0, "shape"), [2**40], "another one than the manifest says"),
        (("weights", 0, "dtype"), "object", "makes no sense"),
        (("spec", "tree"), {"tuple": [{"code": []}]}, "no structure 'code'"),
        (("grid", "dims", "n"), [2**61, 2**62], None),
        (("variants",), [], "no program"),
    ],
)
def test_a_hostile_manifest_is_refused_with_what_is_wrong(good, tmp_path, place, value, message):
    path, _ = good
    parts, manifest = opened(path)
    target = tmp_path / "f.jbx"
    rewritten(target, parts, changed(manifest, place, value))
    with pytest.raises(jb.ArtifactError, match=message):
        jb.load(target)([X])


def test_the_writer_and_the_way_out_are_named(good, tmp_path):
    path, _ = good
    parts, manifest = opened(path)
    manifest["written_by"] = {"jaxbatch": "9.9", "jax": "8.8", "jaxlib": "8.8"}
    rewritten(tmp_path / "f.jbx", parts, {**manifest, "format": 7})
    with pytest.raises(jb.ArtifactError, match=r"jaxbatch 9.9 with JAX 8.8 wrote it: use that version"):
        jb.load(tmp_path / "f.jbx")


def test_a_program_that_calls_out_is_refused_before_it_is_compiled(good, tmp_path):
    path, _ = good
    parts, manifest = opened(path)

    def run(flat):
        lengths, weight, x = flat
        called = jax.ffi.ffi_call("format_the_disk", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return [called, weight.sum() * x.sum(1)]

    shapes = (((1, 1), "int32"), ((7,), "float32"), ((1, 8), "float32"))
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    checks = [jax.export.DisabledSafetyCheck.custom_call("format_the_disk")]
    name = manifest["variants"][0]["programs"][0]["part"]
    parts[name] = bytes(jax.export.export(jax.jit(run), disabled_checks=checks)(avals).serialize())
    rewritten(tmp_path / "f.jbx", parts, manifest)
    with pytest.raises(jb.ArtifactError, match="calls format_the_disk, .*might run code of others"):
        jb.load(tmp_path / "f.jbx")([X])


def test_nothing_is_written_beside_the_file(good, tmp_path):
    path, expected = good
    shutil.copy(path, tmp_path / "f.jbx")
    (tmp_path / "f.jbx").chmod(0o400)
    assert_refused(tmp_path / "f.jbx", expected)
    assert jb.load(path).grid == GRID
