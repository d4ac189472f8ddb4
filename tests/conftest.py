"""What every test relies on: the CPU by default, full precision, checked types, counted compiles."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import beartype  # noqa: E402  (JAX reads the platform when it is imported)
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from beartype.roar import BeartypeDecorHintPep673Exception  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")


def check_types(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check annotations on every call; leave those with `Self` alone.

    jaxtyping's hook decorates methods one by one, and beartype understands `Self` only in a whole class.
    """
    try:
        return beartype.beartype(function)
    except BeartypeDecorHintPep673Exception:
        return function


# Types are checked in tests and cost nothing outside them. The hook sees only modules imported after it, so
# nothing above may import jaxbatch.
jaxtyping.install_import_hook("jaxbatch", "conftest.check_types")

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compiles:
    """The programs XLA compiled while a `count_compiles` block ran, on any thread.

    Small eager operations such as `jnp.ones` compile programs too: build inputs with NumPy, or
    outside the block.
    """

    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.names)


CountCompiles = Callable[[], contextlib.AbstractContextManager[Compiles]]

_open_counters: list[Compiles] = []


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == COMPILE_EVENT:
        for counter in _open_counters:
            counter.names.append(str(kwargs.get("fun_name", "")))


# JAX keeps listeners for the life of the process, so one listener serves all counters.
jax.monitoring.register_event_duration_secs_listener(_on_event)


@contextlib.contextmanager
def _count() -> Iterator[Compiles]:
    counter = Compiles()
    _open_counters.append(counter)
    try:
        yield counter
    finally:
        # By identity: two counters with the same names are equal.
        _open_counters[:] = [other for other in _open_counters if other is not counter]


@pytest.fixture
def count_compiles() -> CountCompiles:
    """Count what XLA compiles: `with count_compiles() as compiles: ...`, then `compiles.count`."""
    return _count


@pytest.fixture(autouse=True)
def forget_functions() -> None:
    """Let each test, and each of its parameters, make functions anew without the warning about compiles."""
    from jaxbatch import _closures

    _closures.forget()
