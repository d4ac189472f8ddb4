"""Compiled programs on disk, so that a second process compiles nothing.

An entry is machine code, and its container is a pickle: a cache is for its owner's own programs, on
machines that are alike. So a folder that others may write to is refused, an entry's digest is compared
before anything is unpickled, and whatever does not fit (damaged, of another machine, of another JAX) is a
miss. Files are written under another name and then renamed, so several processes may share a folder.

A call knows early which programs it will need. `expect` reads them in the background, in that order, while
the first batches are padded and run; `load` then waits for what is not there yet.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pickle
import platform
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jaxlib.version import __version__ as jaxlib_version

MAX_BYTES = 4 << 30
"""What all entries of a folder may take together; the least recently used ones go first."""

_MAGIC = b"jaxbatch executable 1\n"
_SUFFIX = ".jbexe"
_FLAGS = (
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_xla_profile_version",
)
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_READERS = 2  # reading is mostly waiting for the linker's own threads
_STALE = 3600.0  # seconds after which a file that was never renamed belongs to a process that died


@dataclasses.dataclass(frozen=True, eq=False)
class Retrieved:
    """A program that was not compiled here, but found on disk."""

    program: Any


class DiskCache:
    """A folder of compiled programs.

    Args:
      path: made if it does not exist, for its owner alone.
      max_bytes: of all entries together.

    Raises:
      ValueError: others may write to the folder, and what is in it would be run.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES):
        self._folder = Path(path).expanduser().absolute()  # whatever the working directory will be
        self._max_bytes = max_bytes
        self._warned: set[str] = set()
        self._reader = _Reader()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid"):
            status = self._folder.stat()
            if status.st_uid not in (os.getuid(), 0) or status.st_mode & stat.S_IWOTH:
                raise ValueError(
                    f"cache_dir={str(path)!r} belongs to another user, or all may write to it. Programs "
                    f"found there would be run, so use a folder of your own: chmod 700."
                )

    def load(self, program: str, devices: Sequence[Any]) -> Any:
        """Return the executable for a program, or None; an entry of no use is removed, with a warning.

        Args:
          program: a digest of what is compiled, shapes and shardings included.
          devices: those that it runs on, in order.
        """
        path = self._path(program, devices)
        try:
            executable = self._reader.get(
                path, functools.partial(_read, path, program, machine(devices), devices)
            )
        except OSError:
            self._warn_of_others(program, path)
            return None
        except Exception as error:
            self._warn(f"{path}: this entry cannot be used and was removed; compiling again. {error}")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of the latest use
        return executable

    def expect(self, program: str, devices: Sequence[Any]) -> bool:
        """Begin to read what `load` will soon be asked for, if it is there; return whether it is."""
        path = self._path(program, devices)
        if not path.exists():
            return False
        self._reader.begin(path, functools.partial(_read, path, program, machine(devices), devices))
        return True

    def store(self, program: str, devices: Sequence[Any], compiled: Any) -> None:
        """Keep an executable, if its backend can write it out; a full disk is no reason to fail."""
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception:  # a backend without serialization, or a program that calls back into Python
            return
        header = {"program": program, "machine": machine(devices), "sha256": _digest(payload)}
        path = self._path(program, devices)
        name = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".tmp", delete=False) as file:
                name = file.name
                file.write(_MAGIC + json.dumps(header).encode() + b"\n" + payload)
            os.replace(name, path)
            self._evict()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(name or "")
            self._warn(f"{self._folder}: compiled programs cannot be stored. {error}", once="store")

    def _path(self, program: str, devices: Sequence[Any]) -> Path:
        return self._folder / f"{program[:40]}-{_digest(json.dumps(machine(devices)).encode())[:16]}{_SUFFIX}"

    def _evict(self) -> None:
        """Remove the least recently used entries until the others take no more than they may."""
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime, reverse=True)
        total = 0
        for path, status in entries:
            total += status.st_size
            if total > self._max_bytes:
                with contextlib.suppress(OSError):
                    path.unlink()
        for path in self._folder.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _STALE:
                    path.unlink()

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has just removed it
                yield path, path.stat()

    def _warn_of_others(self, program: str, path: Path) -> None:
        """Say once that a program is there, compiled for a machine unlike this one."""
        if any(other != path for other in self._folder.glob(f"{program[:40]}-*{_SUFFIX}")):
            self._warn(
                f"{self._folder}: programs in this cache were compiled for another machine (its processor, "
                f"devices, JAX or compiler flags differ) and cannot be used here; compiling again.",
                once="machine",
            )

    def _warn(self, message: str, once: str | None = None) -> None:
        if (once or message) not in self._warned:
            self._warned.add(once or message)
            warnings.warn(message, UserWarning, stacklevel=2)


class _Reader:
    """Threads that read files ahead, in the order in which they are told of them."""

    def __init__(self):
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._coming: dict[Path, concurrent.futures.Future] = {}
        self._process = os.getpid()

    def begin(self, path: Path, read: Callable[[], Any]) -> None:
        """Read a file in the background, once."""
        if self._process != os.getpid():  # the threads stayed behind where this process was forked off
            self.__init__()
        if path not in self._coming:
            # Idle threads end with this object, or with the interpreter.
            self._pool = self._pool or concurrent.futures.ThreadPoolExecutor(_READERS, "jaxbatch-cache")
            self._coming[path] = self._pool.submit(read)

    def get(self, path: Path, read: Callable[[], Any]) -> Any:
        """Return what `read` gives or raises, in the background or now."""
        begun = self._coming.pop(path, None) if self._process == os.getpid() else None
        return read() if begun is None else begun.result()


def _read(path: Path, program: str, expected: dict[str, str], devices: Sequence[Any]) -> Any:
    data = path.read_bytes()
    try:
        return _unpack(data, program, expected, devices)
    except OSError as error:  # of whatever is in the file, and not of the file
        raise ValueError(str(error)) from error


def _unpack(data: bytes, program: str, expected: dict[str, str], devices: Sequence[Any]) -> Any:
    head, _, payload = data.removeprefix(_MAGIC).partition(b"\n")
    if not data.startswith(_MAGIC):
        raise ValueError("It is no entry of this version.")
    header = json.loads(head)
    if header["program"] != program:
        raise ValueError("It is another program's.")
    if header["machine"] != expected:
        wrong = [name for name in expected if header["machine"].get(name) != expected[name]]
        raise ValueError(f"It was compiled for another machine: {', '.join(wrong)} differ.")
    if header["sha256"] != _digest(payload):
        raise ValueError("It is damaged.")
    return serialize_executable.deserialize_and_load(
        *pickle.loads(payload), backend=devices[0].client, execution_devices=devices
    )


# --- what a program depends on ---------------------------------------------------------------------


def program_digest(*parts: Any) -> str:
    """Return a digest of texts that together say what is compiled."""
    return _digest("\0".join(map(str, parts)).encode())


@functools.cache
def source_digest() -> str:
    """Return a digest of the source of this library."""
    digest, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def machine(devices: Sequence[Any]) -> dict[str, str]:
    """Return in words what machine code depends on besides the program."""
    first = devices[0]
    client = first.client
    flags = {name: getattr(jax.config, name, None) for name in _FLAGS}
    return {
        "jax": f"{jax.__version__}, jaxlib {jaxlib_version}",
        "platform": f"{client.platform} {client.platform_version}",
        "devices": f"{first.device_kind}, {[device.id for device in devices]} of {client.device_count()}",
        "flags": json.dumps([flags, {name: os.environ.get(name, "") for name in _ENVIRONMENT}], default=str),
        "processor": processor(),
    }


@functools.cache
def processor() -> str:
    """Return a digest of what the host's processor is and can do."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        wanted = ("model name", "flags", "Features", "CPU part")
        features = "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    return f"{platform.machine()} {_digest(features.encode())[:16]}"


def devices_of(shardings: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return the devices that a program for such arguments runs on, in order; None if that is not known.

    Args:
      shardings: of each argument, None where it is bound to no device.
    """
    found = set()
    for sharding in filter(None, set(shardings)):
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.AbstractMesh):  # of arrays that are bound to no device
            continue
        if mesh is not None:
            found.add(tuple(mesh.devices.flat))
        elif len(sharding.device_set) == 1:
            found.add(tuple(sharding.device_set))
        else:
            return None
    if len(found) > 1:
        return None
    return found.pop() if found else (_default_device(),)


def _default_device() -> Any:
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
