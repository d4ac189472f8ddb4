"""Lists of examples through the product, next to `f` itself on each of them, alone and unpadded.

Inputs are NumPy and the oracle is jitted, since every eager operation compiles once for each shape.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

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
    expected: Sequence[Any] | None = None,
    layout: Literal["padded", "packed"] = "padded",
) -> jb.Batched:
    """Check that batching `f` gives what `f` does on each example, bit for bit alike under all poisons."""
    expected = unpadded(f, *args, in_axes=in_axes) if expected is None else expected
    run = jb.batched(f, in_axes, spec=spec, grid=grid, layout=layout)
    first: list[Any] = []
    for poison in poisons:
        with padding_value(poison):
            got = run(*args, errors="return")
        for i, (each, want) in enumerate(zip(got, expected, strict=True)):
            where = f"example {i}, {poison} in the padding:"
            assert_close(each, want, where, bound)
            if first and not isinstance(want, Exception):
                jax.tree.map(functools.partial(_assert_same_bits, where), each, first[i])
        first = first or got
    return run


def _assert_same_bits(where: str, a: np.ndarray, b: np.ndarray) -> None:
    if jnp.issubdtype(a.dtype, jnp.inexact):  # all NaN are one; NumPy does not know those of bfloat16
        a, b = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_array_equal(a, b, where)


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


def assert_exact_gradients(
    loss: Callable[..., Any],
    *args: Any,
    argnums: tuple[int, ...],
    in_axes: int | tuple = 0,
    spec: Any = None,
    size: int = 24,
    poisons: Sequence[float] = POISONS,
) -> None:
    """Check the gradients of `loss`, a scalar, in both orders: grad(mask(loss)) and mask(grad(loss)).

    All examples run under all poisons in one batch, padded along their leading axis. Gradients of shared
    arguments are summed over the examples; those of padding must be exactly 0.
    """
    axes = (in_axes,) * len(args) if isinstance(in_axes, int) else in_axes
    want = unpadded(jax.grad(loss, argnums), *args, in_axes=axes)
    own = [arg for arg, axis in zip(args, axes, strict=True) if axis == 0]
    num, turns = len(own[0]), len(poisons)
    (dim,) = jb.mask(loss, axes, spec=spec).dims
    lengths = {dim: np.repeat(np.array([len(x) for x in own[0]], np.int32), turns)}
    rows = [
        arg if axis is None else np.stack([_pad(x, size, p) for x in arg for p in poisons])
        for arg, axis in zip(args, axes, strict=True)
    ]
    masked = jax.vmap(jb.mask(loss, axes, spec=spec), (0, *axes))
    outer = jax.jit(jax.grad(lambda *args: masked(lengths, *args).sum(), argnums))(*rows)
    inner = jax.jit(jax.vmap(jb.mask(jax.grad(loss, argnums), axes, spec=spec), (0, *axes)))(lengths, *rows)
    for order, found in (("grad(mask(f))", outer), ("mask(grad(f))", inner)):
        for k, argnum in enumerate(argnums):
            got = jax.tree.map(np.asarray, found[k])
            wants = [each[k] for each in want]
            if axes[argnum] is None:
                if order == "mask(grad(f))":
                    got = jax.tree.map(lambda g: g.sum(0), got)
                total = jax.tree.map(lambda *each: turns * np.sum(each, axis=0), *wants)
                assert_close(got, total, f"{order}, shared argument {argnum}")
                continue
            for i, poison in ((i, p) for i in range(num) for p in range(turns)):
                where, row = (
                    f"{order}, example {i}, {poisons[poison]} in the padding",
                    got[i * turns + poison],
                )
                assert_close(row[: len(wants[i])], wants[i], where)
                assert not row[len(wants[i]) :].any(), f"{where}: its gradient is not 0"


def _pad(x: np.ndarray, size: int, poison: float) -> np.ndarray:
    out = np.full((size, *x.shape[1:]), poison > 0 if x.dtype == np.bool_ else poison, x.dtype)
    out[: len(x)] = x
    return out
