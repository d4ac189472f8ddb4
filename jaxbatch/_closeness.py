"""When a batched result counts as equal to the function's own, and what to say when it does not."""

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

# The largest difference that the order of sums may make, relative to max(1, largest magnitude of the
# reference). Integers and booleans must be equal.
_BOUNDS = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 6e-2}
_COMPONENTS = {"complex64": "float32", "complex128": "float64"}


def assert_like(result: Any, reference: Any, where: str) -> None:
    """Raise AssertionError unless a result has the tree, shapes, dtypes and values of the reference.

    Either may be an exception, that stands for what a function raised; then both must be of one class.
    """
    if isinstance(result, Exception) or isinstance(reference, Exception):
        if type(result) is not type(reference):
            who, error = (
                ("the batch", result) if isinstance(result, Exception) else ("the function", reference)
            )
            raise AssertionError(f"{where}: only {who} raises {error!r}.") from error
        return
    if jax.tree.structure(result) != jax.tree.structure(reference):
        got, expected = jax.tree.structure(result), jax.tree.structure(reference)
        raise AssertionError(f"{where}: the result is a {got}, expected {expected}.")
    for (path, a), b in zip(leaves(result), jax.tree.leaves(reference), strict=True):
        assert_array_like(a, np.asarray(jnp.asarray(b)), path, where)


def assert_array_like(got: np.ndarray, expected: np.ndarray, path: str, where: str) -> None:
    """Raise AssertionError unless two arrays have one shape, one dtype, and close values."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        described = f"{got.dtype}{list(got.shape)}, expected {expected.dtype}{list(expected.shape)}"
        raise AssertionError(f"{where}: {path} is {described}.")
    wrong = _differs(got, expected)
    if wrong.any():
        index = tuple(int(each) for each in np.argwhere(wrong)[0]) if got.ndim else ()
        raise AssertionError(
            f"{where}: {path} is wrong at {int(wrong.sum())} of {got.size} places, first at {list(index)}: "
            f"got {got[index]}, expected {expected[index]}. An operation reads padding, or other examples."
        )


def assert_same_bits(got: Any, clean: Any, where: str) -> None:
    """Raise AssertionError unless two results, of one program, are equal; NaN equals NaN."""
    for (path, a), b in zip(leaves(got), jax.tree.leaves(clean), strict=True):
        if not isinstance(a, Exception) and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fcV"):
            raise AssertionError(f"{where}: {path} changes in its last bits. An operation reads the padding.")


def leaves(result: Any) -> list[tuple[str, Any]]:
    """Return the leaves with the words for where they are: "output `result['out'][0]`"."""
    pairs = jax.tree_util.tree_leaves_with_path(result)
    return [(f"output `result{jax.tree_util.keystr(path)}`", leaf) for path, leaf in pairs]


def _differs(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return where the values are not close; infinities must be equal, and NaN where NaN is expected."""
    if got.dtype.kind in "iub":
        return np.asarray(got != expected)
    name = expected.dtype.name
    bound = _BOUNDS.get(_COMPONENTS.get(name, name), 0.0)
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), expected.astype(wide)
    finite = np.isfinite(b)
    scale = max(1.0, float(np.max(np.abs(b), initial=0, where=finite)))
    with np.errstate(invalid="ignore"):
        close = np.where(finite, np.abs(a - b) <= bound * scale, (a == b) | (np.isnan(a) & np.isnan(b)))
    return np.asarray(~close)
