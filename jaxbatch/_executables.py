"""Compiled programs: one for each key, compiled once even when many threads ask at once, counted and timed.

A request looks its key up under a lock that is held for a dictionary access only. The first to miss
compiles outside the lock; others that want the same key wait for it alone, and a hit on another key waits
for nothing. A failed compile is reported to all who waited and is not remembered.
"""

import collections
import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from ._disk_cache import DiskCache, Retrieved, devices_of, program_digest
from ._errors import CompileMissError

_log = logging.getLogger("jaxbatch")


# --- keys ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array argument, as far as a program depends on it.

    Attributes:
      name: where it is, as messages show it: `params['w']`.
      shape: ints; entries that depend on a ragged dim are text, such as `"2*n"`.
      sharding: of arrays that are committed to devices, else None.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: Any
    weak_type: bool = False
    sharding: Hashable = None


@dataclasses.dataclass(frozen=True)
class Signature:
    """All that a trace depends on, apart from the function itself.

    Attributes:
      examples: the leaves of one example, at its exact size.
      shared: the array leaves of the shared arguments.
      static: tree structures, leaves that are no arrays, bounds and JAX settings.
    """

    examples: tuple[Leaf, ...]
    shared: tuple[Leaf, ...]
    static: Hashable

    def __post_init__(self):
        # Every batch looks its program up, and hashing a hundred leaves each time would show.
        object.__setattr__(self, "_hash", hash((self.examples, self.shared, self.static)))

    def __hash__(self) -> int:
        return self._hash  # pyright: ignore[reportAttributeAccessIssue]  # set in `__post_init__`


@dataclasses.dataclass(frozen=True)
class Key:
    """What one compiled program is for.

    Attributes:
      sizes: (name, size) of every ragged dim, and of "rows".
      exact: whether the sizes are an example's own, outside the grid.
    """

    signature: Signature
    sizes: tuple[tuple[str, int], ...]
    exact: bool = False

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes)
        return f"the exact size {sizes}" if self.exact else f"bucket {sizes}"


def differences(old: Key, new: Key) -> list[str]:
    """Return in words what differs between two keys, an entry for each part."""
    found = []
    if old.exact != new.exact:
        found.append(
            "an exact size instead of a bucket" if new.exact else "a bucket instead of an exact size"
        )
    before = dict(old.sizes)
    for name, size in new.sizes:
        if before.get(name) != size:
            used = [f"`{leaf.name}`" for leaf in new.signature.examples if _uses(leaf, name)]
            of = f" of {', '.join(used)}" if used else ""
            found.append(f"size `{name}`{of}: {before.get(name)} -> {size}")
    for leaves, others in zip(_leaves(old), _leaves(new), strict=True):
        if [leaf.name for leaf in leaves] != [leaf.name for leaf in others]:
            found.append("the structure of the arguments")
            continue
        for leaf, other in zip(leaves, others, strict=True):
            found += [
                f"{field} of `{other.name}`: {getattr(leaf, field)} -> {getattr(other, field)}"
                for field in ("shape", "dtype", "weak_type", "sharding")
                if getattr(leaf, field) != getattr(other, field)
            ]
    if old.signature.static != new.signature.static:
        found.append("a static value, tree structure, grid limit or JAX setting")
    return found


def _leaves(key: Key) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    return key.signature.examples, key.signature.shared


def _uses(leaf: Leaf, dim: str) -> bool:
    return any(dim in re.findall(r"[^\W\d]\w*", entry) for entry in leaf.shape if isinstance(entry, str))


# --- one maker for each key ------------------------------------------------------------------------


MAX_EXACT = 256  # programs for exact sizes that a function keeps; nothing else bounds their number


class SingleFlight:
    """A dictionary whose missing values are made once, by the first thread that asks."""

    def __init__(self):
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future] = {}
        self.version = 0  # grows with every change

    def get(self, key: Hashable, make: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the value, and whether this call made it; what `make` raises reaches all who waited."""
        with self._lock:
            future, missed = self._futures.pop(key, None), False
            if future is None:
                future, missed = Future(), True
            self._futures[key] = future  # at the end: the order is that of the latest use
        if missed:
            try:
                future.set_result(make())
                with self._lock:
                    self.version += 1
            except BaseException as error:
                with self._lock:
                    del self._futures[key]
                # Another thread's Ctrl-C is no reason to stop this one.
                ordinary = isinstance(error, Exception)
                future.set_exception(error if ordinary else RuntimeError(f"interrupted elsewhere: {error!r}"))
                raise
        return future.result(), missed

    def evict(self, among: Callable[[Any, Any], bool]) -> int:
        """Drop the least recently used values until `MAX_EXACT` of those `among(key, value)` are left.

        Returns:
          How many were dropped. One that is in use elsewhere lives on there.
        """
        with self._lock:
            done = {k: f.result() for k, f in self._futures.items() if f.done() and not f.exception()}
            members = [key for key, value in done.items() if among(key, value)]
            dropped = members[: max(len(members) - MAX_EXACT, 0)]
            for key in dropped:
                del self._futures[key]
            self.version += len(dropped)
        return len(dropped)

    def items(self) -> list[tuple[Any, Any]]:
        """Return keys and values that exist, least recently used first."""
        with self._lock:
            done = [(key, f) for key, f in self._futures.items() if f.done() and not f.exception()]
        return [(key, future.result()) for key, future in done]

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._futures


# --- programs --------------------------------------------------------------------------------------


class KeyTakenError(ValueError):
    """A user's key stands for another function already."""


class Store(SingleFlight):
    """Programs by `Key`, with the text of the traced function that each signature stood for."""

    def __init__(self):
        super().__init__()
        self._texts: dict[Signature, str] = {}

    def check(self, signature: Signature, text: str) -> None:
        """Raise KeyTakenError if the signature already stands for another function's text."""
        with self._lock:
            known = self._texts.setdefault(signature, text)
        if known != text:
            pairs = zip(known.splitlines(), text.splitlines(), strict=False)
            before, after = next(((a, b) for a, b in pairs if a != b), ("", ""))
            raise KeyTakenError(
                f"another function with the same arguments has this `key` already, and the two differ: "
                f"`{before.strip()}` there, `{after.strip()}` here. Give each function a key of its own. "
                f"(Numbers that a function closes over are part of it; pass them as arguments.)"
            )


_stores: dict[Hashable, Store] = {}
_stores_lock = threading.Lock()


def store_for(key: Hashable) -> Store:
    """Return the store of a user's key, the same in the whole process; a new one for None."""
    if key is None:
        return Store()
    with _stores_lock:
        return _stores.setdefault(key, Store())


@dataclasses.dataclass(frozen=True)
class CompileStatistics:
    """What an `Executables` has done so far.

    Attributes:
      compiles: programs compiled for buckets.
      exact_compiles: programs compiled for exact sizes.
      cached: programs that were found on disk, in `cache_dir` or in JAX's own cache, instead.
      compile_seconds: tracing under batching, lowering and compiling, of programs that were compiled.
      load_seconds: the same for programs that were found on disk.
      hits: requests answered without compiling, waits for another thread's compile included.
      evictions: programs for exact sizes that were dropped for later ones.
    """

    compiles: int = 0
    exact_compiles: int = 0
    cached: int = 0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    hits: int = 0
    evictions: int = 0


class Executables:
    """The programs of one batched function, counted; the store itself may be shared with others.

    Attributes:
      disk: where `build` should look before it compiles; None for nowhere.
    """

    def __init__(self, name: str, store: Store, disk: DiskCache | None = None):
        self.disk = disk
        self._name = name
        self._store = store
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()  # by field of `CompileStatistics`

    def get(self, key: Key, build: Callable[[], Any], *, frozen: bool = False) -> Any:
        """Return the program for `key`; a missing one is compiled by `build`, or refused when frozen.

        What `build` found on disk, and says so by a `Retrieved`, is counted apart.

        Raises:
          CompileMissError: frozen, and the program is missing.
        """
        if frozen and key not in self._store:
            raise CompileMissError(
                f"frozen, and there is no program for {key} ({_describe(key.signature)}). "
                f"{self._nearest(key)} Warm it up with `warm_up`, or do without `frozen`."
            )

        def make() -> Any:
            start, found = time.perf_counter(), _retrievals()
            program = build()
            seconds = time.perf_counter() - start
            if isinstance(program, Retrieved) or _retrievals() > found:
                _log.info("%s: found %s on disk, read in %.2f s.", self._name, key, seconds)
                self._count(cached=1, load_seconds=seconds)
                return program.program if isinstance(program, Retrieved) else program
            _log.info("%s: compiled %s in %.2f s. %s", self._name, key, seconds, self._nearest(key))
            self._count(**{"exact_compiles" if key.exact else "compiles": 1}, compile_seconds=seconds)
            return program

        program, made = self._store.get(key, make)
        if not made:
            self._count(hits=1)
        elif key.exact:
            self._count(evictions=self._store.evict(lambda key, _: key.exact))
        return program

    def __contains__(self, key: Key) -> bool:
        return key in self._store

    def ready(self, signature: Signature) -> dict[tuple[tuple[str, int], ...], Any]:
        """Return the programs for buckets that exist for a signature, by their sizes."""
        found = self._store.items()
        return {k.sizes: program for k, program in found if k.signature == signature and not k.exact}

    def statistics(self) -> CompileStatistics:
        """Return the counts so far; the snapshot does not change."""
        with self._lock:
            return CompileStatistics(**self._counts)

    def _count(self, **more: Any) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _nearest(self, key: Key) -> str:
        """Say what distinguishes a key from the most similar one that has a program."""
        known = [key for key, _ in self._store.items()]
        if not known:
            return "No program exists yet."
        nearest = min(reversed(known), key=lambda other: len(differences(other, key)))
        return f"The nearest program is for {nearest}; what differs: {'; '.join(differences(nearest, key))}."


def _describe(signature: Signature) -> str:
    return ", ".join(
        f"`{leaf.name}` {leaf.dtype}[{', '.join(map(str, leaf.shape))}]" for leaf in signature.examples
    )


def compile_program(
    f: Callable[..., Any],
    *avals: Any,
    disk: DiskCache | None = None,
    known: tuple[str, Sequence[Any]] | None = None,
) -> Any:
    """Compile `f` for arguments like `avals`, ahead of time; calling the result never compiles.

    Args:
      f: the function.
      avals: shapes and dtypes.
      disk: where to look first, and to keep what was compiled.
      known: a digest of the program, and the devices that it runs on, if these are known without tracing
        it. Otherwise it is traced and lowered, and the lowered program itself is looked up: whatever the code
        that made it, equal programs are equal.

    Returns:
      A `jax.stages.Compiled`, or a `Retrieved` around one that was found on disk.
    """
    lowered = None
    if disk is not None and known is None:
        devices = devices_of([getattr(aval, "sharding", None) for aval in jax.tree.leaves(avals)])
        if devices is not None:
            lowered = jax.jit(f).lower(*avals)
            known = program_digest(lowered.as_text(), avals), devices
    if disk is None or known is None:
        return jax.jit(f).lower(*avals).compile()
    program, devices = known
    if (found := disk.load(program, devices)) is not None:
        return Retrieved(found)
    compiled = (lowered or jax.jit(f).lower(*avals)).compile()
    disk.store(program, devices, compiled)
    return compiled


# JAX reports a compile also where its own cache on disk had the program, and tells the thread which it was.
_thread = threading.local()


def _on_event(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _thread.retrievals = _retrievals() + 1


def _retrievals() -> int:
    return getattr(_thread, "retrievals", 0)


jax.monitoring.register_event_listener(_on_event)
