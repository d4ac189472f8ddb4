"""The casts that change no value: how whatever a user passes becomes an array of the spec's dtype.

A cast is safe if it keeps every value (integers that fit, integers that a float represents exactly, booleans)
or only rounds a float to a narrower one. Everything else is refused with a short fact, which continues the
sentence "`x['tokens']` ..." that the caller begins.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._errors import SpecError
from ._dtypes import RANKS, DtypeFamily, canonical, default_dtype, kind, no_keys

_LOSSES = {
    "complex": "the imaginary part would be lost; take the real part",
    "float": "fractions would be lost; round and cast it",
    "int": "numbers other than 0 and 1 would be lost; compare it with 0",
    "uint": "numbers other than 0 and 1 would be lost; compare it with 0",
}


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
    if isinstance(value, np.ma.MaskedArray):
        raise SpecError("is a NumPy masked array, and its mask would be lost. Pass `.filled(value)`.")
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        raise no_keys(f"has dtype {value.dtype}")
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
    if RANKS[source] > RANKS[target]:
        raise SpecError(
            f"has dtype {array.dtype}, expected {dtype}: {_LOSSES[source]} yourself, or change the spec."
        )
    if source in ("int", "uint") and target in ("int", "uint"):
        _check_range(array, dtype)
        return array.astype(dtype)
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
