"""The oracle for masked functions: `f` itself on unpadded inputs, and padding that holds anything."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

import jaxbatch as jb
from jaxbatch.testing import POISONS


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, the specs of its per-example arguments, and what to try it on.

    Attributes:
      f: takes the shared arguments first.
      specs: shape strings; a dtype follows after a colon ("n:int32"), float32 by default.
      shared: arrays, passed first.
      lengths: what each ragged dim is tried at; the padded size is `size`.
      grad: whether gradients are compared too.
      low, high: the range of integer inputs.
    """

    f: Callable[..., Any]
    specs: Sequence[str] = ("n, 4",)
    shared: Sequence[Any] = ()
    lengths: Sequence[int] = (1, 5, 8)
    size: int = 8
    grad: bool = True
    low: int = 0
    high: int = 5
    tolerance: float = 1e-5

    @functools.cached_property
    def arrays(self) -> list[Any]:
        parts = [text.partition(":") for text in self.specs]
        return [jb.spec(shape, dtype or "float32") for shape, _, dtype in parts]

    @functools.cached_property
    def dims(self) -> list[str]:
        return list(dict.fromkeys(axis.dim for spec in self.arrays for axis in spec.axes if axis.dim))

    def example(self, lengths: Mapping[str, int], rng: np.random.Generator) -> list[np.ndarray]:
        return [self._draw(spec, lengths, rng) for spec in self.arrays]

    def _draw(self, spec: Any, lengths: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
        shape = spec.shape(lengths)
        if spec.dtype == np.bool_:
            return rng.integers(0, 2, shape).astype(bool)
        if np.issubdtype(spec.dtype, np.integer):
            return rng.integers(self.low, self.high, shape).astype(spec.dtype)
        return rng.standard_normal(shape).astype(spec.dtype)


def pad(x: Any, shape: tuple[int, ...], poison: float) -> np.ndarray:
    """Pad the end of every axis with a poison, as near to it as the dtype allows."""
    x = np.asarray(x)
    if x.dtype == np.bool_:
        value: Any = poison > 0
    elif np.issubdtype(x.dtype, np.integer):
        info = np.iinfo(x.dtype)
        value = info.min if np.isnan(poison) else int(np.clip(poison, float(info.min), float(info.max) - 1))
    else:
        value = poison
    out = np.full(shape, value, x.dtype)
    out[tuple(slice(0, k) for k in x.shape)] = x
    return out


def crop(x: Any, shape: Sequence[int]) -> np.ndarray:
    return np.asarray(x)[tuple(slice(0, k) for k in shape)]


def assert_close(got: Any, want: Any, tolerance: float, message: str) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{message}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{message}: dtype {got.dtype}, expected {want.dtype}"
    finite = np.abs(want[np.isfinite(want)]).max(initial=1.0) if want.dtype.kind in "fc" else 1.0
    exact = want.dtype.kind not in "fc"
    np.testing.assert_allclose(got, want, rtol=0, atol=0 if exact else tolerance * finite, err_msg=message)


def assert_exact(case: Case) -> None:
    """Check values, and gradients in the order grad(mask(f)), under every poison and length."""
    rng = np.random.default_rng(0)
    in_axes = (None,) * len(case.shared) + (0,) * len(case.specs)
    spec = tuple(case.arrays) if len(case.arrays) > 1 else case.arrays[0]
    masked = jb.mask(case.f, in_axes, spec=spec)
    sizes = dict.fromkeys(case.dims, case.size)
    shapes = [spec.shape(sizes) for spec in case.arrays]
    combinations = [dict.fromkeys(case.dims, n) for n in case.lengths]
    if len(case.dims) > 1:  # and every dim at another length
        turned = zip(case.lengths, (*case.lengths[1:], case.lengths[0]), strict=True)
        combinations += [{d: (a, b)[i % 2] for i, d in enumerate(case.dims)} for a, b in turned]
    examples = [case.example(lengths, rng) for lengths in combinations]

    padded = [
        np.stack([pad(xs[k], shapes[k], p) for xs in examples for p in POISONS]) for k in range(len(shapes))
    ]
    stacked = {d: np.repeat([c[d] for c in combinations], len(POISONS)).astype(np.int32) for d in case.dims}
    batched = jax.jit(jax.vmap(masked, in_axes=(0, *in_axes)))
    outs = jax.tree.leaves(batched(stacked, *case.shared, *padded))
    for i, (lengths, xs) in enumerate(zip(combinations, examples, strict=True)):
        wants = jax.tree.leaves(jax.jit(case.f)(*case.shared, *xs))
        valid = masked.out_lengths(lengths)
        valid = jax.tree.leaves(
            valid, is_leaf=lambda v: isinstance(v, tuple) and all(isinstance(k, int) for k in v)
        )
        for j, want in enumerate(wants):
            assert valid[j] == want.shape, f"formula {valid[j]}, expected {want.shape} at {lengths}"
            for k, poison in enumerate(POISONS):
                got = np.asarray(outs[j][i * len(POISONS) + k])
                assert_close(
                    crop(got, want.shape), want, case.tolerance, f"output {j} at {lengths}, padding {poison}"
                )
                got = got.copy()
                got[tuple(slice(0, size) for size in want.shape)] = 0
                assert not got.any(), f"output {j} at {lengths}, padding {poison}: the padding is not zero"
    if case.grad and any(jnp.issubdtype(spec.dtype, jnp.inexact) for spec in case.arrays):
        assert_gradients(case, masked, combinations[len(combinations) // 2], rng)


def assert_gradients(case: Case, masked: Any, lengths: Mapping[str, int], rng: np.random.Generator) -> None:
    """Check grad(mask(f)) against grad(f), for all arguments and poisoned cotangents; zero in the padding."""
    xs = case.example(lengths, rng)
    args = [*map(jnp.asarray, case.shared), *map(jnp.asarray, xs)]
    inexact = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact)]
    wants = jax.jit(case.f)(*args)
    values = [w for w in jax.tree.leaves(wants) if jnp.issubdtype(w.dtype, jnp.inexact)]
    cotangents = jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32), wants)

    def loss(outs: Any) -> Any:
        pairs = zip(jax.tree.leaves(outs), jax.tree.leaves(cotangents), strict=True)
        cropped = ((o[tuple(slice(0, k) for k in c.shape)], c) for o, c in pairs)
        return sum((o * c).sum() for o, c in cropped if jnp.issubdtype(o.dtype, jnp.inexact))

    want = jax.jit(jax.grad(lambda *a: loss(case.f(*a)), inexact))(*args)
    sizes = dict.fromkeys(case.dims, case.size)
    shapes = [a.shape for a in case.shared] + [spec.shape(sizes) for spec in case.arrays]

    @jax.jit
    def pull_back(cotangents: list[Any], *arrays: Any) -> Any:
        def run(*chosen: Any) -> list[Any]:
            values = dict(zip(inexact, chosen, strict=True))
            outs = jax.tree.leaves(masked(lengths, *(values.get(i, a) for i, a in enumerate(arrays))))
            return [o for o in outs if jnp.issubdtype(o.dtype, jnp.inexact)]

        outs, back = jax.vjp(run, *(arrays[i] for i in inexact))
        return outs, back(cotangents)

    for poison in (0.0, 1e30, np.nan, np.inf):
        padded = [pad(a, shape, poison) for a, shape in zip(args, shapes, strict=True)]
        allocated = jax.tree.leaves(jax.eval_shape(lambda *a: masked(lengths, *a), *padded))
        poisoned = [
            pad(c, o.shape, poison)
            for c, o in zip(jax.tree.leaves(cotangents), allocated, strict=True)
            if jnp.issubdtype(o.dtype, jnp.inexact)
        ]
        outs, got = pull_back(poisoned, *padded)
        for out, value in zip(outs, values, strict=True):
            assert_close(
                crop(out, value.shape), value, case.tolerance, f"values at {lengths}, padding {poison}"
            )
        for i, g, w in zip(inexact, got, want, strict=True):
            message = f"gradient of argument {i} at {lengths}, padding {poison}"
            assert_close(crop(g, w.shape), w, case.tolerance, message)
            rest = np.array(g)
            rest[tuple(slice(0, size) for size in w.shape)] = 0
            assert not rest.any(), f"{message}: not zero in the padding"
