"""Dtypes of a spec: exact ones, and families of which an example keeps its own.

"JAX's own dtype" below means: 64-bit types become 32-bit ones while `jax_enable_x64` is off.
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

from .._errors import SpecError

_KINDS = (
    ("bool", np.bool_),
    ("uint", np.unsignedinteger),
    ("int", np.signedinteger),
    ("float", np.floating),
    ("complex", np.complexfloating),
)
# A cast never goes to a lower rank: it would drop a part of the number, whatever its value.
RANKS = {"bool": 0, "uint": 1, "int": 1, "float": 2, "complex": 3}
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
    fitting = (each for each in candidates if each in family and RANKS[kind(each)] >= RANKS[kind(source)])
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
            raise no_keys(f"dtype {dtype}")
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
        raise no_keys(f"is annotated {name}")
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


def no_keys(what: str) -> SpecError:
    """Return the refusal of typed PRNG keys, which says what to pass instead."""
    return SpecError(
        f"{what}: typed PRNG keys cannot be padded. Pass raw key data, jax.random.key_data(key), with "
        'spec "2", "uint32".'
    )
