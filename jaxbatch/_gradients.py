"""Gradients of a random weighting of a function's outputs, which `_invariance` compares."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp


@dataclasses.dataclass(frozen=True, eq=False)
class Inexact:
    """A tree taken apart: its floating and complex leaves, and the rest.

    Attributes:
      leaves: the inexact ones, as JAX arrays.
      places: where each of `leaves` stands among all.
    """

    leaves: list[Any]
    places: list[int]
    _all: list[Any]
    _tree: Any

    @classmethod
    def of(cls, tree: Any) -> "Inexact":
        flat, structure = jax.tree.flatten(tree)
        places = [k for k, leaf in enumerate(flat) if is_inexact(leaf)]
        return cls([jnp.asarray(flat[k]) for k in places], places, flat, structure)

    def put(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with other inexact leaves; arrays of numbers become JAX's."""
        found = dict(zip(self.places, leaves, strict=True))
        rest = (jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in self._all)
        return self._tree.unflatten([found.get(k, leaf) for k, leaf in enumerate(rest)])


def differentiate(f: Callable[..., Any], weights: Inexact) -> Callable[..., Any]:
    """Return the gradient of `f`'s weighted outputs, compiled once for each size.

    Args:
      f: called with lengths, shared arguments, and the leaves of one example.
    """

    def total(shared: list[Any], inexact: dict, rest: dict, lengths: dict, cotangents: list[Any]) -> Any:
        own = inexact | rest
        outs = f(lengths, weights.put(shared), [own[place] for place in range(len(own))])
        weighted = map(_weighted, filter(is_inexact, jax.tree.leaves(outs)), cotangents)
        return sum(weighted, jnp.float32(0))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))

    def of(leaves: Sequence[np.ndarray], lengths: Mapping[str, int], cotangents: list[Any]) -> Any:
        """Return the gradients of the shared leaves, and those of the example's leaves by place."""
        inexact = {place: leaf for place, leaf in enumerate(leaves) if is_inexact(leaf)}
        rest = {place: leaf for place, leaf in enumerate(leaves) if not is_inexact(leaf)}
        return gradient(weights.leaves, inexact, rest, dict(lengths), cotangents)

    return of


def _weighted(out: Any, cotangent: Any) -> Any:
    """Return the weighted sum of an output, padded or not; what stands in its padding has weight 1."""
    pads = [(0, size - valid) for size, valid in zip(jnp.shape(out), cotangent.shape, strict=True)]
    weights = jnp.pad(cotangent, pads, constant_values=1) if pads else cotangent  # pad refuses scalars
    return jnp.sum(jnp.real(out) * weights).astype(np.float32)


def cotangents_for(reference: Any) -> list[np.ndarray]:
    """Return random weights for each inexact output."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(reference) if is_inexact(leaf)]
    return [np.asarray(np.random.default_rng(k).normal(size=s), np.float32) for k, s in enumerate(shapes)]


def is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
