"""The command line: every command does what it says, says what it did, and ends with a code to rely on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts import ROOT
from ragged import assert_close, normals, weights

import jaxbatch as jb
from jaxbatch.cli import main
from jaxbatch.cli._grids import parse_grid

W = weights(3)
GRID = jb.Grid(n=(4, 32), rows=[1, 8, 64])


def model(w, x):
    return {"mean": x.mean() * w, "double": 2 * x}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "model.jbx"
    run = jb.batched(model, (None, 0), spec=jb.spec("n", "float32"), grid=GRID)
    run.save(path, W, metadata={"made": "here"}, platforms=["cpu", "cuda"])
    return str(path)


def rows(num=1003, seed=0):
    lengths = np.random.default_rng(seed).integers(1, 33, num)
    return [x.round(3) for x in normals(lengths.tolist())]


def write_jsonl(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def command(*args):
    return [sys.executable, "-m", "jaxbatch", *map(str, args)]


# --- run -------------------------------------------------------------------------------------------


def test_every_row_has_a_line_in_input_order(artifact, tmp_path, capsys):
    xs = rows()
    source = write_jsonl(tmp_path / "in.jsonl", [{"id": f"r{i}", "x": x.tolist()} for i, x in enumerate(xs)])
    code = main(
        ["run", artifact, source, "-o", str(tmp_path / "out.jsonl"), "--summary", str(tmp_path / "s.json")]
    )
    assert code == 0
    found = read_jsonl(tmp_path / "out.jsonl")
    assert [each["id"] for each in found] == [f"r{i}" for i in range(len(xs))]
    for each, x in zip(found, xs, strict=True):
        assert_close(np.float32(each["mean"]), np.float32(x.mean()) * W)
        assert_close(np.float32(each["double"]), 2 * x)
    summary = json.loads((tmp_path / "s.json").read_text())
    assert (summary["rows"], summary["errors"]) == (1003, 0)
    assert sum(int(size) * number for size, number in summary["batches"].items()) >= 1003
    assert "1003 rows, 0 errors" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "s.json"]


def test_bad_rows_are_records_with_their_id(artifact, tmp_path):
    lines = [json.dumps({"x": x.tolist()}) for x in rows()]
    bad = {
        17: ('{"x": "text"}', "SpecError", "x[17]"),
        18: ('{"y": [1]}', "KeyError", "has no x"),
        19: ("{not json", "ValueError", "line 20 is no JSON"),
        20: ('{"x": [1, null]}', "SpecError", "x[20]"),
        21: (json.dumps({"x": [1.0] * 33}), "OversizeError", "33"),
        22: ("[[1], [2, 3]]", "SpecError", "x[22]"),
        23: ('{"x": ["NaN", 1]}', "SpecError", "x[23]"),
        24: ('{"x": "NaN"}', "SpecError", "x[24]"),
        25: ("NaN", "SpecError", "x[25]"),
        26: ("{}", "KeyError", "has no x"),
        27: ("", "ValueError", "line 28 is no JSON"),
    }
    for i, (line, *_) in bad.items():
        lines[i] = line
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    code = main(
        ["run", artifact, str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--chunk", "100"]
    )
    assert code == 3
    found = read_jsonl(tmp_path / "out.jsonl")
    assert [each["id"] for each in found] == list(range(1003))
    assert {i for i, each in enumerate(found) if "error" in each} == set(bad)
    for i, (_, kind, words) in bad.items():
        assert found[i]["error"].startswith(kind) and words in found[i]["error"]


@pytest.mark.parametrize("value", [None, [1.0, None]])
def test_a_null_in_a_parquet_file_is_an_error_of_its_row_alone(artifact, tmp_path, value):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    xs: list[Any] = [x.tolist() for x in rows(40)]
    xs[17] = value
    ids = [f"r{i}" for i in range(40)]
    pq.write_table(pa.table({"id": ids, "x": pa.array(xs, pa.list_(pa.float32()))}), tmp_path / "in.parquet")
    target = tmp_path / "out.parquet"
    assert main(["run", artifact, str(tmp_path / "in.parquet"), "-o", str(target), "--chunk", "16"]) == 3
    table = pq.read_table(target).to_pydict()
    assert table["id"] == ids
    assert [i for i, error in enumerate(table["error"]) if error] == [17] and "x[17]" in table["error"][17]
    for i in (0, 16, 18, 39):
        assert_close(np.float32(table["double"][i]), 2 * np.float32(xs[i]))


def test_a_nan_is_a_number_and_stays_at_home(artifact, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [[1.0, float("nan")], [1.0, 3.0]])
    assert main(["run", artifact, source, "-o", str(tmp_path / "out.jsonl")]) == 0
    first, second = read_jsonl(tmp_path / "out.jsonl")
    assert np.isnan(first["mean"]).all() and not np.isnan(second["mean"]).any()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "npz"])
def test_all_formats_hold_the_same_rows(artifact, tmp_path, kind):
    xs = rows(150)
    source, target = tmp_path / f"in.{kind}", tmp_path / f"out.{kind}"
    ids = [100 + i for i in range(len(xs))]
    if kind == "jsonl":
        write_jsonl(source, [{"id": i, "x": x.tolist()} for i, x in zip(ids, xs, strict=True)])
    elif kind == "npz":
        np.savez(source, x=np.concatenate(xs), x_offsets=np.cumsum([0, *map(len, xs)]), id=np.array(ids))
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(
            pa.table({"x": pa.array([x.tolist() for x in xs], pa.list_(pa.float32())), "id": ids}), source
        )
    assert main(["run", artifact, str(source), "-o", str(target), "--chunk", "64"]) == 0
    if kind == "jsonl":
        found = [(r["id"], np.float32(r["mean"]), np.float32(r["double"])) for r in read_jsonl(target)]
    elif kind == "npz":
        with np.load(target) as arrays:
            stored = dict(arrays)
        split = lambda name: np.split(stored[name], stored[f"{name}_offsets"][1:-1])
        found = list(zip(stored["id"].tolist(), split("mean"), split("double"), strict=True))
        assert stored["double_shapes"].tolist() == [[len(x)] for x in xs]
        assert not any(stored["error"])
    else:
        table = pq.read_table(target).to_pydict()
        assert set(table) == {"id", "mean", "double", "error"} and not any(table["error"])
        found = [
            (i, np.float32(a), np.float32(b))
            for i, a, b in zip(table["id"], table["mean"], table["double"], strict=True)
        ]
    assert [own for own, *_ in found] == ids
    for (_, mean, double), x in zip(found, xs, strict=True):
        assert_close(mean, np.float32(x.mean()) * W)
        assert_close(double, 2 * x)


@pytest.mark.parametrize("kind", ["parquet", "npz"])
def test_a_chunk_of_errors_alone_fits_between_others(artifact, tmp_path, kind):
    pytest.importorskip("pyarrow")
    source = write_jsonl(tmp_path / "in.jsonl", [[1.0], "bad", "worse", [2.0, 3.0]])
    target = tmp_path / f"out.{kind}"
    assert main(["run", artifact, source, "-o", str(target), "--chunk", "1"]) == 3
    if kind == "npz":
        with np.load(target) as arrays:
            assert arrays["double"].tolist() == [2, 4, 6] and arrays["double_offsets"].tolist() == [
                0,
                1,
                1,
                1,
                3,
            ]
    else:
        import pyarrow.parquet as pq

        table = pq.read_table(target).to_pydict()
        assert table["double"] == [[2], None, None, [4, 6]]
        assert [bool(error) for error in table["error"]] == [False, True, True, False]


def test_an_empty_input_gives_an_empty_output(artifact, tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    assert main(["run", artifact, str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def run_and_kill(arguments, target, done, delay=0.0):
    """Start a run in a process, and kill it some seconds after so many of its chunks are there."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command("run", *arguments), env=env, stderr=subprocess.DEVNULL)
    parts, deadline = target.with_name(f"{target.name}.parts"), time.monotonic() + 120
    while process.poll() is None and len(list(parts.glob("*.part"))) < done and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return process.wait(60) == -signal.SIGKILL


def test_a_run_that_was_killed_is_resumed_without_holes_or_duplicates(artifact, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", [x.tolist() for x in rows(1500)])
    options = ["--chunk", "50", "--cache-dir", str(tmp_path / "cache")]
    assert main(["run", artifact, source, "-o", str(tmp_path / "want.jsonl"), *options]) == 0
    target, parts = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    for done in (1, 11, 23):
        run_and_kill([artifact, source, "-o", target, *options], target, done)
        assert not target.exists() or not parts.exists()
    summary = tmp_path / "summary.json"
    assert main(["run", artifact, source, "-o", str(target), *options, "--summary", str(summary)]) == 0
    assert target.read_bytes() == (tmp_path / "want.jsonl").read_bytes()
    assert not parts.exists()


@pytest.mark.skipif(not os.environ.get("JAXBATCH_ALL_CASES"), reason="minutes; JAXBATCH_ALL_CASES=1 runs it")
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "npz"])
def test_a_kill_at_any_of_ten_random_moments_never_changes_a_byte(artifact, tmp_path, kind):
    pytest.importorskip("pyarrow")
    lines = [x.tolist() for x in rows(3000)]
    lines[17], lines[2999] = ["text"], "bad"
    source, want, target = (
        write_jsonl(tmp_path / "in.jsonl", lines),
        tmp_path / f"w.{kind}",
        tmp_path / f"o.{kind}",
    )
    options = ["--chunk", "50", "--cache-dir", str(tmp_path / "cache")]
    assert main(["run", artifact, source, "-o", str(want), *options]) == 3
    rng, killed, resumed = np.random.default_rng(sum(kind.encode())), 0, 0
    for done in (0, 60, *rng.integers(0, 61, 8).tolist()):
        killed += run_and_kill([artifact, source, "-o", target, *options], target, done, rng.uniform(0, 0.05))
        assert not target.exists() or target.read_bytes() == want.read_bytes()
        summary = tmp_path / "summary.json"
        assert main(["run", artifact, source, "-o", str(target), *options, "--summary", str(summary)]) == 3
        assert target.read_bytes() == want.read_bytes()
        resumed += json.loads(summary.read_text())["resumed"]
        assert sorted(path.name for path in tmp_path.glob("*o.*")) == [target.name]
        target.unlink()
    print(f"{kind}: {killed} of 10 killed before the end, {resumed} rows were not run again")
    assert killed >= 5 and resumed > 0


def test_two_runs_of_one_output_do_not_disturb_each_other(artifact, tmp_path, capsys):
    fcntl = pytest.importorskip("fcntl")
    source, target = write_jsonl(tmp_path / "in.jsonl", [[1.0]] * 3), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.parts").mkdir()
    with open(tmp_path / "out.jsonl.parts" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["run", artifact, source, "-o", str(target)]) == 1
        assert "another run is writing it" in capsys.readouterr().err
    assert not target.exists()
    assert main(["run", artifact, source, "-o", str(target)]) == 0
    assert len(read_jsonl(target)) == 3 and not (tmp_path / "out.jsonl.parts").exists()


def test_odd_places_are_no_obstacle(artifact, tmp_path, monkeypatch):
    folder = tmp_path / "a folder, größer \u2603 'quoted'"
    folder.mkdir()
    (folder / "f.jbx").write_bytes(Path(artifact).read_bytes())
    write_jsonl(folder / "in put.jsonl", [[1.0], [2.0, 3.0]])
    monkeypatch.chdir(folder)
    for command in ("inspect", "verify"):
        assert main([command, "f.jbx"]) == 0
    assert main(["run", "f.jbx", "in put.jsonl", "-o", "out put.jsonl", "--cache-dir", "ca che"]) == 0
    assert [each["double"] for each in read_jsonl("out put.jsonl")] == [[2], [4, 6]]
    assert len(list((folder / "ca che").glob("*.jbexe"))) == 1


def test_parts_of_another_input_are_not_reused(artifact, tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [[1.0]] * 3)
    parts = tmp_path / "out.jsonl.parts"
    parts.mkdir()
    (parts / "job.json").write_text('{"input": "another"}')
    (parts / "chunk-000000000.part").write_text("stale\n")
    (parts / "chunk-000000000.json").write_text('{"errors": 0}')
    assert main(["run", artifact, first, "-o", str(tmp_path / "out.jsonl")]) == 0
    assert len(read_jsonl(tmp_path / "out.jsonl")) == 3


# --- the other commands ----------------------------------------------------------------------------


def test_inspect_shows_what_is_in_it(artifact, capsys):
    assert main(["inspect", artifact]) == 0
    text = capsys.readouterr().out
    parts = ("all digests are right", "model", "cpu, cuda", "x: float32[n]", "Grid(n=(4, 32)", "vjp_order=0")
    more = ("1 array, 12 bytes", "float32[3]", "serves all sizes and rows", "weights.safetensors", '"made"')
    for part in (*parts, *more):
        assert part in text
    assert main(["inspect", artifact, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == 1


def test_verify_runs_every_bucket_against_the_references(artifact, capsys):
    assert main(["verify", artifact]) == 0
    text = capsys.readouterr().out
    assert "all digests are right" in text and "18 of 18 runs of references agree" in text


def test_verify_notices_weights_that_are_not_those_of_the_references(artifact, tmp_path, capsys):
    from test_artifact_damage import opened, rewritten

    parts, manifest = opened(artifact)
    data = bytearray(parts["weights.safetensors"])
    data[-1] ^= 64
    rewritten(tmp_path / "f.jbx", {**parts, "weights.safetensors": bytes(data)}, manifest)
    assert main(["verify", str(tmp_path / "f.jbx"), "--quick"]) == 1
    assert "WRONG: reference 0" in capsys.readouterr().out


def test_export_reads_functions_weights_and_grids(tmp_path, monkeypatch, capsys):
    (tmp_path / "mymodel.py").write_text(
        "import jax.numpy as jnp\n"
        "from jaxtyping import Array, Float\n"
        "def scale(params, x: Float[Array, 'n']):\n"
        "    return x * params['layer']['w']\n"
    )
    named: dict[str, Any] = {"layer/w": np.float32(3)}
    np.savez(tmp_path / "params.npz", **named)
    monkeypatch.chdir(tmp_path)
    options = ["--params", "params.npz", "--grid", "n=4:16 rows=1,8", "-o", "f.jbx", "--metadata", '{"a": 1}']
    assert main(["export", "mymodel:scale", *options]) == 0
    loaded = jb.load(tmp_path / "f.jbx")
    assert loaded.grid == jb.Grid(n=(4, 16), rows=[1, 8]) and loaded.metadata == {"a": 1}
    np.testing.assert_array_equal(loaded([np.ones(3)])[0], [3, 3, 3])
    for arguments, message in (
        (["mymodel:nothing"], "there is no 'nothing' in mymodel"),
        (["mymodel"], "write module:function"),
        (["mymodel:scale"], "--grid is needed"),
    ):
        assert main(["export", *arguments, "-o", "g.jbx"]) == 1
        assert message in capsys.readouterr().err


def test_plan_explains_and_fits(tmp_path, artifact, capsys):
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    assert main(["plan", "--lengths", str(tmp_path / "lengths.txt"), "--artifact", artifact]) == 0
    text = capsys.readouterr().out
    assert "the artifact's grid: Grid(n=(4, 32)" in text and "a fitted grid: Grid(n=[" in text
    (tmp_path / "lengths.json").write_text(json.dumps({"h": [3, 5], "w": [7, 1]}))
    assert main(["plan", "--lengths", str(tmp_path / "lengths.json"), "--grid", "h=4 w=8 rows=2"]) == 0
    assert "1 examples are larger than it" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["n", "n=", "n=a", "n=1:2:3", "n=1:2,3"])
def test_a_grid_that_cannot_be_read_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="Write n=16:512"):
        parse_grid(text)


def test_errors_are_one_line_and_an_exit_code(artifact, tmp_path, capsys):
    (tmp_path / "bad.jbx").write_bytes(b"junk")
    (tmp_path / "in.txt").write_text("")
    for arguments, message in (
        (["inspect", str(tmp_path / "bad.jbx")], "is no artifact"),
        (["inspect", str(tmp_path / "none.jbx")], "No such file"),
        (["run", artifact, str(tmp_path / "in.txt"), "-o", "x.jsonl"], "does not say its format"),
        (["run", artifact, "none.jsonl", "-o", str(tmp_path / "x.jsonl")], "No such file"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["dance"])
    assert exit_.value.code == 2


def test_python_m_jaxbatch_is_the_same_command(artifact):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command("inspect", artifact), capture_output=True, text=True, env=env, timeout=120)
    assert found.returncode == 0 and "all digests are right" in found.stdout
