"""Dtypes of a spec, and the casts that change no value.

A cast is safe if it keeps every value (integers that fit, integers a float represents exactly, booleans)
or only rounds a float to a narrower one. Everything else is refused with a short fact, to which the caller
adds where it happened. "JAX's own dtype" below means: 64-bit types become 32-bit ones while
`jax_enable_x64` is off.
"""

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxbatch._errors import SpecError

_KINDS = (
    ("bool", np.bool_),
    ("uint", np.unsignedinteger),
    ("int", np.signedinteger),
    ("float", np.floating),
    ("complex", np.complexfloating),
)
# A cast never goes to a lower rank: it would drop a part of the number, whatever the values are.
_RANKS = {"bool": 0, "uint": 1, "int": 1, "float": 2, "complex": 3}
_LOSSES = {
    "complex": "the imaginary part would be lost; take the real part",
    "float": "fractions would be lost; round and cast it",
    "int": "numbers other than 0 and 1 would be lost; compare it with 0",
    "uint": "numbers other than 0 and 1 would be lost; compare it with 0",
}
_DEFAULTS = tuple(np.dtype(name) for name in ("bool", "int64", "uint64", "float64", "complex128"))


@functools.cache
def kind(dtype: np.dtype) -> str:
    """Return "bool", "uint", "int", "float", "complex", or "" for what JAX cannot compute with."""
    if dtype.itemsize > (16 if dtype.kind == "c" else 8):
        return ""
    return next((name for name, scalar in _KINDS if jnp.issubdtype(dtype, scalar)), "")


def canonical(dtype: np.dtype) -> np.dtype:
    """Return JAX's own dtype for this one, in native byte order, under the current `jax_enable_x64`."""
    return _canonical(dtype, _x64())


def _x64() -> bool:
    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  # JAX adds its flags later


# `x64` of the two functions with a cache is always the current state; it keeps the two answers apart.
@functools.cache
def _canonical(dtype: np.dtype, x64: bool) -> np.dtype:
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")))


@dataclass(frozen=True)
class DtypeFamily:
    """Several dtypes, of which an example keeps its own; what jaxtyping calls `Float`, `Int`, `Shaped`.

    Attributes:
      name: as jaxtyping spells it.
      members: dtype names, or patterns of them; None means every dtype.
    """

    name: str
    members: tuple[str | re.Pattern, ...] | None

    def __contains__(self, dtype: np.dtype) -> bool:
        return self.members is None or any(
            member == dtype.name if isinstance(member, str) else bool(member.match(dtype.name))
            for member in self.members
        )

    def resolve(self, source: np.dtype) -> np.dtype:
        """Return the member that values of `source` take: JAX's own dtype of it, else the family's default.

        The default is the one of lowest rank, so that booleans become integers before they become floats.
        """
        if dtype := _resolve(self, source, _x64()):
            return dtype
        raise SpecError(f"has dtype {source}, expected {self.name}. Cast it yourself, or change the spec.")

    def __str__(self) -> str:
        return self.name


@functools.cache
def _resolve(family: DtypeFamily, source: np.dtype, x64: bool) -> np.dtype | None:
    own = canonical(source)
    if own in family:
        return own
    named = [np.dtype(member) for member in family.members or () if isinstance(member, str)]
    candidates = (canonical(dtype) for dtype in (*_DEFAULTS, *named))
    fitting = (each for each in candidates if each in family and _RANKS[kind(each)] >= _RANKS[kind(source)])
    return next(fitting, None)


def parse_dtype(dtype: Any) -> np.dtype | DtypeFamily:
    """Return the exact dtype (in native byte order) or the family that a user's `dtype` means."""
    if isinstance(dtype, DtypeFamily):
        return dtype
    if hasattr(dtype, "dtypes"):  # a dtype class of jaxtyping, such as Float
        return family(dtype.__name__, dtype.dtypes)
    exact = None
    with contextlib.suppress(TypeError):
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise SpecError(_no_keys(f"dtype {dtype}"))
        exact = np.dtype(dtype)
    if dtype is None or exact is None or not kind(exact):  # to NumPy, None means float64
        raise SpecError(f"{dtype!r} is not a dtype that JAX computes with, such as 'float32' or 'int32'.")
    return exact.newbyteorder("=")


def family(name: str, members: Any) -> np.dtype | DtypeFamily:
    """Return what a jaxtyping dtype class stands for; a class of one dtype is that dtype, exactly.

    Args:
      name: of the class, for messages.
      members: its `dtypes`: names and patterns, or an object of jaxtyping's own that means every dtype.
    """
    if not isinstance(members, Sequence):
        return DtypeFamily(name, None)
    if "prng_key" in members:
        raise SpecError(_no_keys(name))
    # jaxtyping's `Bool` lists the one dtype under the names of old and new NumPy.
    names = tuple(member for member in members if member != "bool_")
    if len(names) == 1 and isinstance(names[0], str):
        return parse_dtype(names[0])
    return DtypeFamily(name, names)


def default_dtype(dtype: np.dtype | DtypeFamily) -> np.dtype:
    """Return the dtype that a program gets where no example is at hand to say it."""
    if not isinstance(dtype, DtypeFamily):
        return canonical(dtype)
    preferred = (canonical(np.dtype("float64")), canonical(np.dtype("int64")))
    return next((each for each in preferred if each in dtype), None) or dtype.resolve(np.dtype("bool"))


def convert(value: Any, dtype: np.dtype | DtypeFamily) -> np.ndarray:
    """Return `value` as an array of this dtype: the caller's own array where nothing has to change.

    Raises:
      SpecError: a short fact that continues the sentence "`x['tokens']` ...".
    """
    array = _as_array(value)
    if not kind(array.dtype):
        reason = f"has dtype {array.dtype}, which JAX cannot compute with"
        if array.dtype == object and array.size and all(isinstance(each, int) for each in array.flat):
            reason = "holds a Python integer that does not fit 64 bits"
        raise SpecError(f"{reason}. Pass numbers of one shape and type.")
    if not array.size and not hasattr(value, "dtype"):
        # NumPy calls an empty list float64, but it says nothing about its dtype.
        array = array.astype(default_dtype(dtype))
    target = dtype.resolve(array.dtype) if isinstance(dtype, DtypeFamily) else canonical(dtype)
    return array if array.dtype == target else _cast(array, target)


def _as_array(value: Any) -> np.ndarray:
    if type(value) is np.ndarray:
        return value
    if isinstance(value, Tracer):
        raise SpecError(
            "is traced by a JAX transformation, and only concrete arrays can be padded on the host. "
            "Inside `jit`, `vmap` or `grad` use `jaxbatch.mask`."
        )
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise SpecError(_no_keys(f"has dtype {value.dtype}"))
    try:
        array = np.asarray(value)
    except Exception as error:
        if isinstance(value, list | tuple):
            raise SpecError("is a nested list whose parts differ in shape or are no numbers.") from error
        raise SpecError(f"of type {type(value).__name__} cannot become a NumPy array: {error}") from error
    if isinstance(value, list | tuple) and array.dtype == np.float64 and np.any(np.abs(array) >= 2.0**63):
        # NumPy turns a list that needs both int64 and uint64 into float64, and rounds it.
        flat = np.asarray(value, dtype=object).flat
        if all(isinstance(each, int) for each in flat):
            raise SpecError("holds Python integers that do not fit one 64-bit integer type.")
    return array


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return a cast copy, or refuse if a value would change by more than a float's rounding."""
    source, target = kind(array.dtype), kind(dtype)
    if _RANKS[source] > _RANKS[target]:
        raise SpecError(
            f"has dtype {array.dtype}, expected {dtype}: {_LOSSES[source]} yourself, or change the spec."
        )
    if source in ("int", "uint") and target in ("int", "uint"):
        _check_range(array, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if source in ("int", "uint") and target in ("float", "complex"):
        _check_integers_kept(array, cast)
    elif source in ("float", "complex") and not np.can_cast(array.dtype, dtype, "safe"):
        _check_no_overflow(array, cast)
    return cast


@functools.cache
def _range(dtype: np.dtype) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def _check_range(array: np.ndarray, dtype: np.dtype) -> None:
    (lo, hi), (source_lo, source_hi) = _range(dtype), _range(array.dtype)
    if not array.size or (lo <= source_lo and source_hi <= hi):
        return
    for value in (int(array.min()), int(array.max())):
        if not lo <= value <= hi:
            raise SpecError(
                f"holds {value}, which does not fit {dtype} ({lo} to {hi}). Check the values, or change the "
                "spec; JAX has 64-bit types only with `jax_enable_x64`."
            )


def _check_integers_kept(array: np.ndarray, cast: np.ndarray) -> None:
    lost = array[np.real(cast).astype(np.float64) != array.astype(np.float64)].tolist()
    if array.dtype.itemsize == 8:
        # Above 2**53 the comparison itself has rounded; Python compares an int and a float exactly.
        large = array[(array > 2**53) | (array < -(2**53))].tolist()
        lost += [each for each in large if float(each) != each]
    if lost:
        raise SpecError(
            f"holds {int(lost[0])}, which {cast.dtype} cannot represent exactly. Pass floats if rounding is "
            "meant, or change the spec."
        )


def _check_no_overflow(array: np.ndarray, cast: np.ndarray) -> None:
    if kind(cast.dtype) == "complex":
        parts = [(np.real(array), np.real(cast)), (np.imag(array), np.imag(cast))]
    else:
        parts = [(array, cast)]
    for before, after in parts:
        if np.isfinite(after).all() and not _saturates(after.dtype):
            continue
        largest = float(jnp.finfo(after.dtype).max)
        changed = (np.isfinite(before) != np.isfinite(after)) | (np.isnan(before) != np.isnan(after))
        if _saturates(after.dtype):
            changed |= np.abs(before) > largest
        if changed.any():
            raise SpecError(
                f"holds {before[changed].flat[0]}, which {cast.dtype} (up to {largest:g}) cannot hold. "
                "Check the values, or change the spec."
            )


@functools.cache
def _saturates(dtype: np.dtype) -> bool:
    """Say whether too large values become the largest one instead of inf or NaN."""
    return bool(np.isfinite(np.array(np.inf).astype(dtype)))


def _no_keys(what: str) -> str:
    return (
        f"{what} is a typed PRNG key, which cannot be padded. "
        'Pass raw key data: jax.random.key_data(key), with spec "2", "uint32".'
    )
