"""Lists of examples through the product, next to `f` itself on each of them, alone and unpadded.

Inputs are NumPy and the oracle is jitted, since every eager operation compiles once for each shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jaxbatch as jb
from jaxbatch.testing import POISONS, padding_value

LENGTHS = (1, 2, 3, 17, 63, 64, 65)
GRID = jb.Grid(n=(4, 128), rows=[1, 4])
BOUNDS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}


def normals(lengths: Sequence[int] = LENGTHS, *, width: int | None = None, seed: int = 0) -> list[np.ndarray]:
    """Return a float32 example of shape [n] or [n, width] for each length n."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n if width is None else (n, width)).astype(np.float32) for n in lengths]


def weights(*shape: int, seed: int = 1) -> np.ndarray:
    """Return float32 weights of a size that keeps activations near 1."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else 1
    return (rng.normal(size=shape) / scale).astype(np.float32)


def unpadded(f: Callable[..., Any], *args: Any, in_axes: int | tuple = 0) -> list[Any]:
    """Return `f` of each example, by plain JAX, as NumPy arrays; an exception stands for what it raised."""
    axes = (in_axes,) * len(args) if isinstance(in_axes, int) else in_axes
    num = next(len(arg) for arg, axis in zip(args, axes, strict=True) if axis == 0)
    call, results = jax.jit(lambda *each: f(*each)), []
    for i in range(num):
        own = [arg if axis is None else arg[i] for arg, axis in zip(args, axes, strict=True)]
        try:
            results.append(jax.tree.map(np.asarray, call(*own)))
        except Exception as error:
            results.append(error)
    return results


def assert_close(got: Any, expected: Any, where: str = "", bound: float | None = None) -> None:
    """Check tree, shapes, dtypes and values: within 1e-5 x max(1, largest magnitude) in float32."""
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{where}: got {got!r}, expected {expected!r}"
        return
    assert jax.tree.structure(got) == jax.tree.structure(expected), f"{where}: got {got!r}"
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        b, message = np.asarray(b), f"{where} {jax.tree_util.keystr(path)}"
        assert a.shape == b.shape, f"{message}: shape {a.shape}, expected {b.shape}"
        assert a.dtype == b.dtype, f"{message}: {a.dtype}, expected {b.dtype}"
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=message)
            continue
        limit = BOUNDS[b.dtype.name] if bound is None else bound
        a, b = a.astype(np.float64), b.astype(np.float64)
        scale = max(1.0, float(np.max(np.abs(b), initial=0, where=np.isfinite(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=limit * scale, err_msg=message)


def assert_exact(
    f: Callable[..., Any],
    *args: Any,
    in_axes: int | tuple = 0,
    spec: Any = None,
    grid: jb.Grid = GRID,
    poisons: Sequence[float] = POISONS,
    bound: float | None = None,
) -> jb.Batched:
    """Check that batching `f` gives what `f` does on each example, bit for bit alike under all poisons."""
    expected = unpadded(f, *args, in_axes=in_axes)
    run = jb.batched(f, in_axes, spec=spec, grid=grid)
    first: list[Any] = []
    for poison in poisons:
        with padding_value(poison):
            got = run(*args, errors="return")
        for i, (each, want) in enumerate(zip(got, expected, strict=True)):
            where = f"example {i}, {poison} in the padding:"
            assert_close(each, want, where, bound)
            if first and not isinstance(want, Exception):
                jax.tree.map(lambda a, b, w=where: np.testing.assert_array_equal(a, b, w), each, first[i])
        first = first or got
    return run


def assert_exact_or_refused(f: Callable[..., Any], *args: Any, match: str, **options: Any) -> None:
    """Check that `f` is exact, or else refused before anything compiles, with a message that says `match`."""
    try:
        assert_exact(f, *args, **options)
    except jb.MaskError as error:
        message = str(error)
    else:
        return
    for part in (match, ".py:"):
        assert part in message, f"the refusal does not say {part!r}: {message}"
