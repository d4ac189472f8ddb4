"""Specs read from a function's jaxtyping annotations.

Only named, numbered and linear axes are read; whatever else jaxtyping allows would leave the size of an axis
open, so it is refused with the advice to pass `spec=`. Annotations of shared arguments are documentation:
they may bind a fixed size, and never fail.
"""

import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from .._errors import SpecError
from ._arrays import ArraySpec, Axis
from ._dtypes import family

_ADVICE = 'pass spec=, for instance spec=jaxbatch.spec("n, 64", "float32")'


def function_name(f: Any) -> str:
    """Return what messages call a function."""
    while isinstance(f, functools.partial):
        f = f.func
    return getattr(f, "__name__", type(f).__name__)


def argument_names(f: Callable[..., Any], num: int | None = None) -> tuple[str, ...]:
    """Return a name for each of the first `num` positional arguments of `f`, for messages and paths.

    Args:
      f: any callable; where it has no signature the names are `args[0]`, `args[1]`, ...
      num: how many arguments the caller will pass; None means those that `f` requires.

    Raises:
      SpecError: `f` cannot take that many, or `num` is None and `f` does not say how many it requires.

    Example:
      >>> argument_names(lambda params, x, scale=1.0: x)
      ('params', 'x')
    """
    return tuple(name for name, _ in _parameters(f, num))


def annotated_specs(f: Callable[..., Any], per_example: Sequence[bool]) -> dict[str, ArraySpec]:
    """Return, by name and in order, the spec of each per-example argument of `f`.

    Args:
      f: a function, `functools.partial`, method or callable object.
      per_example: for each positional argument, whether it has one value per example.

    Raises:
      SpecError: an annotation is missing, is no jaxtyping array, or leaves a size open.
    """
    specs = {}
    for (name, parameter), wanted in zip(_parameters(f, len(per_example)), per_example, strict=True):
        if wanted:
            try:
                specs[name] = _array_spec(_annotation(f, parameter))
            except SpecError as error:
                raise error.with_context(f"argument `{name}` of `{function_name(f)}`") from None
    return specs


def shared_dims(f: Callable[..., Any], positions: Sequence[int], args: Sequence[Any]) -> dict[str, int]:
    """Return the sizes that shared arguments give to named axes of their annotations.

    Whatever cannot be read is passed over, and so is a dim to which two arguments give different sizes:
    these annotations are documentation.

    Args:
      f: the function; its signature is read as in `annotated_specs`.
      positions: which positional arguments of `f` are shared.
      args: their values, in the order of `positions`.
    """
    found: dict[str, set[int]] = {}
    try:
        parameters = _parameters(f, max(positions, default=-1) + 1)
    except SpecError:
        return {}
    for position, arg in zip(positions, args, strict=True):
        shape = getattr(arg, "shape", None)
        try:
            axes = _array_spec(_annotation(f, parameters[position][1])).axes
        except SpecError:
            continue
        if isinstance(shape, tuple) and len(shape) == len(axes):
            for axis, size in zip(axes, shape, strict=True):
                if axis.plain and isinstance(size, int):
                    found.setdefault(str(axis.dim), set()).add(size)
    return {dim: sizes.pop() for dim, sizes in found.items() if len(sizes) == 1}


def _parameters(f: Callable[..., Any], num: int | None) -> list[tuple[str, inspect.Parameter | None]]:
    """Return (name, parameter) of the first `num` positional arguments; what a partial has bound is gone."""
    called = function_name(f)
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        if num is None:
            raise SpecError(f"`{called}` has no signature to read; give in_axes one entry each.") from None
        return [(f"args[{position}]", None) for position in range(num)]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional: list[tuple[str, inspect.Parameter | None]] = [
        (each.name, each) for each in parameters if each.kind in plain
    ]
    rest = next((each for each in parameters if each.kind == inspect.Parameter.VAR_POSITIONAL), None)
    if num is None:
        if rest is not None:
            raise SpecError(f"`{called}` takes any number of arguments; give in_axes one entry each.")
        return [each for each in positional if each[1] and each[1].default is inspect.Parameter.empty]
    if rest is not None:
        positional += [(f"{rest.name}[{i}]", rest) for i in range(num - len(positional))]
    if len(positional) < num:
        raise SpecError(
            f"`{called}` takes {len(positional)} positional arguments, and in_axes has {num} entries."
        )
    return positional[:num]


def _annotation(f: Callable[..., Any], parameter: inspect.Parameter | None) -> Any:
    """Return the parameter's annotation with strings (PEP 563) evaluated, or None if it has none.

    Evaluated one by one, so that a name that exists only for type checkers spoils its own parameter alone.
    """
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return None
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    function = _function(f)
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    local: dict[str, Any] = {}
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            local[name] = cell.cell_contents
    try:
        hints = typing.get_type_hints(holder, globalns=getattr(function, "__globals__", {}), localns=local)
    except Exception as error:
        raise SpecError(f"has annotation {parameter.annotation!r}, but {error}; {_ADVICE}.") from None
    return hints["it"]


def _function(f: Any) -> Any:
    """Return the plain function inside partials, methods, wrappers and callable objects."""
    while True:
        if isinstance(f, functools.partial):
            f = f.func
        elif hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        elif inspect.ismethod(f):
            f = f.__func__
        elif not inspect.isroutine(f) and not isinstance(f, type) and inspect.isroutine(type(f).__call__):
            f = type(f).__call__
        else:
            return f


def _array_spec(annotation: Any) -> ArraySpec:
    if annotation is None or annotation is inspect.Parameter.empty:
        raise SpecError(f"has no annotation. Annotate it with jaxtyping, or {_ADVICE}.")
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        # jaxtyping turns Float[Array | np.ndarray, "n"] into a union; alike members mean one thing.
        members = typing.get_args(annotation)
        if all(_is_array(each) for each in members) and len({(m.dim_str, m.dtypes) for m in members}) == 1:
            annotation = members[0]
    if not _is_array(annotation):
        raise SpecError(f"is annotated {_show(annotation)}, which is not one jaxtyping array; {_ADVICE}.")
    axes = []
    for entry in annotation.dim_str.split():
        if entry.startswith(("#", "*", "_", "?")) or "..." in entry or "{" in entry:
            raise SpecError(f"is annotated {_show(annotation)}: `{entry}` leaves a size open; {_ADVICE}.")
        try:
            axes.append(Axis.parse(entry.partition("=")[2] or entry))  # jaxtyping reads `width=3` as 3
        except SpecError as error:
            raise SpecError(f"is annotated {_show(annotation)}, but {error} Or {_ADVICE}.") from None
    return ArraySpec(tuple(axes), family(annotation.dtype.__name__, annotation.dtypes))


def _is_array(annotation: Any) -> bool:
    return isinstance(annotation, type) and all(hasattr(annotation, name) for name in ("dim_str", "dtypes"))


def _show(annotation: Any) -> str:
    """Write an annotation as its author did, without the modules that names come from."""
    plain = isinstance(annotation, type) and not typing.get_args(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", annotation.__name__ if plain else str(annotation))
