"""Notice functions that are made anew for each call: nothing compiled for one is found by the next.

Two closures from one line of code are different functions to every cache. Whoever writes
`batched(lambda x: x * scale)` in a loop compiles in every turn, and is told so once.
"""

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import Any

_compiled: dict[Hashable, weakref.ref] = {}
_warned: set[Hashable] = set()


def note_compile(f: Callable[..., Any]) -> None:
    """Remember that programs were compiled for this function."""
    if (identity := _identity(f)) is not None:
        _compiled.setdefault(identity, weakref.ref(f))


def warn_if_made_anew(f: Callable[..., Any], *, stacklevel: int) -> None:
    """Warn, once for each piece of code, if programs were compiled for another function made from it."""
    identity = _identity(f)
    if identity is None or identity in _warned:
        return
    first = _compiled.get(identity)
    if first is not None and first() is not f:
        _warned.add(identity)
        code = identity[0]
        warnings.warn(
            f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) was made anew, and programs were "
            f"compiled for an earlier function made from the same code; they cannot be reused, so each new "
            f"one compiles again. Pass key=... so that they share programs, or make the function once and "
            f"pass what it closes over as shared arguments.",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def forget() -> None:
    """Forget all functions, so that the next one made from any code is the first."""
    _compiled.clear()
    _warned.clear()


def _identity(f: Any, depth: int = 4) -> tuple | None:
    """Return what is the same for functions made anew from the same code; None if `f` is no plain function.

    The functions in its closure count too, so that a decorator's wrappers of different functions differ;
    `depth` ends the search where closures hold each other.
    """
    while isinstance(f, functools.partial):
        f = f.func
    f = inspect.unwrap(f) if isinstance(f, types.FunctionType) else f
    if not isinstance(f, types.FunctionType) or not depth:
        return None
    held = filter(callable, map(_contents, f.__closure__ or ()))
    return f.__code__, *(_identity(value, depth - 1) or id(value) for value in held)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
