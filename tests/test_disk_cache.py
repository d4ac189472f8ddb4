"""Programs on disk: a second process compiles nothing, and what does not fit is a miss, never a crash."""

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxbatch as jb
from jaxbatch import _disk_cache
from jaxbatch._disk_cache import DiskCache

ROOT = Path(__file__).resolve().parent.parent
DEVICES = tuple(jax.devices()[:1])
GRID = jb.Grid(n=(4, 16), rows=[1, 4])
EXAMPLES = [np.arange(n, dtype=np.float32) for n in (1, 3, 7, 16)]

SCRIPT = """
    import sys
    import numpy as np, jax, jaxbatch as jb
    counted = []
    count = lambda event, seconds, **_: event.endswith("compile_duration") and counted.append(event)
    jax.monitoring.register_event_duration_secs_listener(count)
    run = jb.batched(lambda w, x: (w * x).sum() / x.max(), (None, 0), spec=jb.spec("n", "float32"),
                     grid=jb.Grid(n=(4, 16), rows=[1, 4]), cache_dir=sys.argv[1])
    out = run(np.float32(3), [np.arange(1, n + 1, dtype=np.float32) for n in (1, 3, 7, 16)])
    s = run.statistics()
    print(s.compiles, s.cached, len(counted), np.stack(out).tobytes().hex())
"""


def batched(folder, **options):
    options = {"spec": jb.spec("n", "float32"), "grid": GRID, "cache_dir": folder, **options}
    return jb.batched(lambda x: x - x.mean(), **options)


def compile_one(x=2.0):
    return jax.jit(lambda y: y * x).lower(np.ones(3, np.float32)).compile()


def python(script, *args, **env):
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.split()


def entries(folder):
    return sorted(folder.glob("*.jbexe"))


def test_a_second_process_compiles_nothing_and_gives_the_same_bits(tmp_path):
    first, second = python(SCRIPT, tmp_path), python(SCRIPT, tmp_path)
    assert (int(first[0]), int(first[1])) == (3, 0)
    assert (int(second[0]), int(second[1]), int(second[2])) == (0, 3, 0)
    assert first[3] == second[3]


def test_a_second_function_of_the_same_program_finds_it_and_another_one_does_not(tmp_path, count_compiles):
    first = batched(tmp_path)(EXAMPLES)
    with count_compiles() as compiles:
        again = batched(tmp_path, key="second")
        second = again(EXAMPLES)
    assert compiles.count == 0
    assert again.statistics().cached == 3
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    other = jb.batched(
        lambda x: x - x.max(), spec=jb.spec("n", "float32"), grid=GRID, cache_dir=tmp_path, key="other"
    )
    other(EXAMPLES)
    assert other.statistics().cached == 0


def test_warm_up_of_a_frozen_function_may_read_from_disk(tmp_path):
    batched(tmp_path).warm_up()
    run = batched(tmp_path, frozen=True, key="frozen")
    run.warm_up()
    assert run.statistics().compiles == 0
    run(EXAMPLES)


def test_an_entry_is_for_its_owner_alone(tmp_path):
    folder = tmp_path / "new" / "cache"
    cache = DiskCache(folder)
    cache.store("p", DEVICES, compile_one())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert entries(folder)[0].stat().st_mode & 0o777 == 0o600


def test_a_folder_that_all_may_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="all may write to it.*chmod 700"):
        batched(tmp_path)


@pytest.mark.parametrize("place", [0, 30, 200, -1])
def test_a_damaged_entry_is_a_miss_with_a_warning(tmp_path, place):
    cache = DiskCache(tmp_path)
    cache.store("p", DEVICES, compile_one())
    (path,) = entries(tmp_path)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.warns(UserWarning, match="cannot be used and was removed"):
        assert cache.load("p", DEVICES) is None
    assert not entries(tmp_path)


@pytest.mark.parametrize("size", [0, 10, 100, 1000])
def test_a_truncated_entry_is_a_miss_with_a_warning(tmp_path, size):
    cache = DiskCache(tmp_path)
    cache.store("p", DEVICES, compile_one())
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.warns(UserWarning, match="cannot be used"):
        assert cache.load("p", DEVICES) is None


def test_nothing_is_unpickled_before_its_digest_is_right(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path)
    cache.store("p", DEVICES, compile_one())
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    monkeypatch.setattr(_disk_cache.pickle, "loads", lambda _: pytest.fail("unpickled"))
    with pytest.warns(UserWarning, match="damaged"):
        assert cache.load("p", DEVICES) is None


def test_what_is_expected_is_read_once_in_the_background(tmp_path, monkeypatch):
    cache, threads, read = DiskCache(tmp_path), list[str](), _disk_cache._read
    monkeypatch.setattr(
        _disk_cache, "_read", lambda *args: threads.append(threading.current_thread().name) or read(*args)
    )
    for name in "abc":
        cache.store(name, DEVICES, compile_one())
    assert cache.expect("a", DEVICES) and cache.expect("b", DEVICES) and cache.expect("a", DEVICES)
    assert not cache.expect("none", DEVICES)
    for name in "bac":
        assert cache.load(name, DEVICES)(np.ones(3, np.float32))[0] == 2
    assert [name.startswith("jaxbatch-cache") for name in sorted(threads)] == [False, True, True]


def test_what_is_expected_and_damaged_is_a_miss_with_a_warning_where_it_is_needed(tmp_path):
    cache = DiskCache(tmp_path)
    cache.store("p", DEVICES, compile_one())
    (path,) = entries(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert cache.expect("p", DEVICES)
    with pytest.warns(UserWarning, match="damaged"):
        assert cache.load("p", DEVICES) is None
    assert not cache.expect("p", DEVICES) and cache.load("p", DEVICES) is None


def test_what_was_read_ahead_in_another_process_is_read_anew(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path)
    cache.store("p", DEVICES, compile_one())
    for _ in range(2):  # as in a process that was forked off meanwhile, without the thread
        cache.expect("p", DEVICES)
        monkeypatch.setattr(cache._reader, "_process", -1)
    assert cache.load("p", DEVICES) is not None
    assert cache.expect("p", DEVICES) and cache.load("p", DEVICES) is not None


def test_an_entry_of_another_processor_is_a_miss_with_a_warning(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(_disk_cache, "processor", lambda: "avx1024")
        cache.store("p", DEVICES, compile_one())
    with pytest.warns(UserWarning, match="another machine"):
        assert cache.load("p", DEVICES) is None
    (foreign,) = entries(tmp_path)
    foreign.rename(cache._path("p", DEVICES))
    with pytest.warns(UserWarning, match="another machine: processor differ"):
        assert cache.load("p", DEVICES) is None


def test_an_entry_under_another_name_is_a_miss_with_a_warning(tmp_path):
    cache = DiskCache(tmp_path)
    cache.store("p", DEVICES, compile_one())
    entries(tmp_path)[0].rename(cache._path("q", DEVICES))
    with pytest.warns(UserWarning, match="another program's"):
        assert cache.load("q", DEVICES) is None


def test_compiler_flags_are_part_of_the_machine(monkeypatch):
    before = _disk_cache.machine(DEVICES)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    after = _disk_cache.machine(DEVICES)
    assert {name for name in before if before[name] != after[name]} == {"flags"}


def test_where_nothing_can_be_stored_one_warning_says_so_and_all_runs(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_disk_cache.os, "replace", full)
    with pytest.warns(UserWarning, match="compiled programs cannot be stored.*No space left") as caught:
        assert len(batched(tmp_path)(EXAMPLES)) == 4
    assert len(caught) == 1 and not list(tmp_path.iterdir())


def test_a_folder_that_is_removed_meanwhile_is_missed_with_one_warning(tmp_path):
    run = batched(tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    with pytest.warns(UserWarning, match="compiled programs cannot be stored") as caught:
        run(EXAMPLES)
    assert len(caught) == 1


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = batched("cache")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(EXAMPLES)
    assert len(entries(tmp_path / "cache")) == 3 and not list((tmp_path / "elsewhere").iterdir())


def test_the_least_recently_used_entries_go_first(tmp_path):
    cache = DiskCache(tmp_path)
    for i, name in enumerate("abc"):
        cache.store(name, DEVICES, compile_one(float(i)))
        os.utime(cache._path(name, DEVICES), (i, i))
    assert cache.load("a", DEVICES) is not None  # now the latest
    size = max(path.stat().st_size for path in entries(tmp_path))
    small = DiskCache(tmp_path, max_bytes=2 * size + size // 2)
    small.store("d", DEVICES, compile_one(4.0))
    assert {name for name in "abcd" if cache._path(name, DEVICES).exists()} == {"a", "d"}


def test_several_processes_may_fill_one_folder_at_once(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=env) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0].split()[3] for process in several]
    assert len(set(outputs)) == 1 and not any(process.returncode for process in several)
    assert len(entries(tmp_path)) == 3 and not list(tmp_path.glob("*.tmp"))


def test_what_jax_finds_in_its_own_cache_is_no_compile(tmp_path):
    script = SCRIPT.replace("cache_dir=sys.argv[1]", "cache_dir=None").replace(
        "counted = []",
        "counted = []\n    jax.config.update('jax_compilation_cache_dir', sys.argv[1])"
        "\n    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)",
    )
    first, second = python(script, tmp_path), python(script, tmp_path)
    assert (int(first[0]), int(first[1])) == (3, 0)
    assert (int(second[0]), int(second[1])) == (0, 3)
    assert first[3] == second[3]
