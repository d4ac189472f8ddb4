"""The comparisons behind `jaxbatch.testing`: one function, its examples, and what it gives unpadded.

The oracle is the function itself under plain JAX, one example at a time. Everything that is compared with it
runs the code that users run, with a poison in the padding.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from . import _batch
from ._batched import Batched
from ._closeness import assert_array_like, assert_like, assert_same_bits
from ._grid import Grid
from ._spec import Checked


@contextlib.contextmanager
def padding_value(value: int | float) -> Iterator[None]:
    """Fill all padding made inside this context, by any thread, with `value` instead of 0.

    Results must not change; that is for tests to show. Integers take the nearest value they have (NaN is
    their smallest), booleans whether it is not 0.

    Example:
      >>> import numpy as np, jaxbatch as jb
      >>> run = jb.batched(lambda x: x.mean(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=4))
      >>> with jb.testing.padding_value(np.nan):
      ...     print(run([[1, 2, 3]]))
      [array(2., dtype=float32)]
    """
    before, _batch.padding = _batch.padding, value
    try:
        yield
    finally:
        _batch.padding = before


class Case:
    """A function, its examples, and what it returns for each of them unpadded.

    Args:
      run: names the function; it is not called.
      args: what `run` would be called with.
      poisons: what to put into the padding, in turn.
    """

    def __init__(self, run: Batched, args: Sequence[Any], poisons: Sequence[int | float]):
        self._function = run._function
        self._poisons = poisons
        self._shared, columns = run._split(args, "raise")
        self._shared_names = run._shared_names
        self._columns = [list(column) for column in columns.values()]
        spec = self._function.spec
        self._checked = [spec.check(example) for example in zip(*self._columns, strict=True)]
        self._lengths = [dict(zip(spec.dims, each.lengths, strict=True)) for each in self._checked]
        self._reference = [self._unpadded(each) for each in self._checked]

    @property
    def num(self) -> int:
        """How many examples there are."""
        return len(self._checked)

    @property
    def lengths(self) -> dict[str, list[int]]:
        """The lengths of all examples, by dim."""
        return {dim: [own[dim] for own in self._lengths] for dim in self._function.spec.dims}

    # --- values ---

    def compare(self, how: str, run: Batched, indices: Sequence[int]) -> None:
        """Run these examples with every poison, and compare with the reference and among the poisons."""
        columns = [[column[i] for i in indices] for column in self._columns]
        first: list[Any] = []
        for poison in self._poisons:
            with padding_value(poison):
                results = run(*self._arguments(self._shared, columns), errors="return")
            first = first or results
            for i, result, clean in zip(indices, results, first, strict=True):
                where = f"{self._example(i)}, run {how}"
                assert_like(result, self._reference[i], f"{where} with {poison} in the padding")
                assert_same_bits(
                    result, clean, f"{where} with {poison} instead of {self._poisons[0]} in the padding"
                )

    def _unpadded(self, checked: Checked) -> Any:
        """Return what the function gives for one example, or what it raises."""
        try:
            return self._call(
                self._function.alone, self._shared, [jnp.asarray(leaf) for leaf in checked.leaves]
            )
        except Exception as error:
            return error

    def _call(self, f: Callable[..., Any], shared: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Call `f` with shared arguments and the leaves of one example."""
        return f(*self._arguments(shared, self._function.spec.treedef.unflatten(leaves)))

    def _arguments(self, shared: Sequence[Any], per_example: Sequence[Any]) -> list[Any]:
        """Put shared and per-example arguments into the function's order."""
        rest, own = iter(shared), iter(per_example)
        return [next(own) if one else next(rest) for one in self._function.per_example]

    def _example(self, i: int) -> str:
        sizes = ", ".join(f"{dim}={length}" for dim, length in self._lengths[i].items())
        return f"{self._function.name}, example {i} ({sizes or 'no dims'})"

    # --- gradients ---

    def compare_gradients(self, masked: Callable[..., Any], grid: Grid) -> None:
        """Compare gradients in all floating arguments; those of shared ones are summed over the examples.

        Args:
          masked: `jaxbatch.mask` of the function.
          grid: the sizes to pad to.
        """
        weights = _Inexact.of(self._shared)
        total = [jnp.zeros_like(leaf) for leaf in weights.leaves]
        summed = {str(poison): list(total) for poison in self._poisons}
        plain = _differentiate(
            lambda _, shared, leaves: self._call(self._function.f, shared, leaves), weights
        )
        padded = _differentiate(
            lambda lengths, *arguments: self._call(functools.partial(masked, lengths), *arguments), weights
        )
        for i, checked in enumerate(self._checked):
            lengths = {dim: self._lengths[i][dim] for dim in grid.dims}
            if isinstance(self._reference[i], Exception) or not all(lengths.values()):
                continue  # it runs at its exact size, where there is no padding
            cotangents = _cotangents(self._reference[i])
            expected = plain(checked.leaves, lengths, cotangents)
            total = list(map(jnp.add, total, expected[0]))
            for poison in self._poisons:
                leaves = self._padded(checked, {**self._lengths[i], **grid.ceil(lengths).sizes}, poison)
                got = padded(leaves, lengths, cotangents)
                where = f"{self._example(i)}, gradient with {poison} in the padding"
                self._compare_leaves(got[1], expected[1], where)
                summed[str(poison)] = list(map(jnp.add, summed[str(poison)], got[0]))
        named = zip(self._shared_names, self._shared, strict=True)
        pairs = [(name, pair) for name, arg in named for pair in jax.tree_util.tree_leaves_with_path(arg)]
        labels = [f"`{name}{jax.tree_util.keystr(path)}`" for name, (path, _) in pairs]
        for poison, gradients in summed.items():
            where = f"{self._function.name}, gradient summed over the examples with {poison} in the padding"
            for place, a, b in zip(weights.places, gradients, total, strict=True):
                assert_array_like(np.asarray(a), np.asarray(b), labels[place], where)

    def _padded(self, checked: Checked, sizes: Mapping[str, int], poison: int | float) -> list[np.ndarray]:
        with padding_value(poison):
            shapes = self._function.spec.shapes(sizes)
            arrays, _ = _batch.pad_and_stack([checked.leaves], np.zeros((1, 0), np.int64), shapes, 1)
        return [array[0] for array in arrays]

    def _compare_leaves(self, got: Mapping[int, Any], expected: Mapping[int, Any], where: str) -> None:
        for place, gradient in got.items():
            array, path = np.array(gradient), f"`{self._function.spec.paths[place]}`"
            valid = tuple(map(slice, expected[place].shape))
            assert_array_like(array[valid], np.asarray(expected[place]), path, where)
            array[valid] = 0
            if np.any(array != 0):  # NaN differs from 0 as well
                raise AssertionError(f"{where}: {path} is not exactly 0 in its padding.")


@dataclasses.dataclass(frozen=True, eq=False)
class _Inexact:
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
    def of(cls, tree: Any) -> "_Inexact":
        flat, structure = jax.tree.flatten(tree)
        places = [k for k, leaf in enumerate(flat) if _is_inexact(leaf)]
        return cls([jnp.asarray(flat[k]) for k in places], places, flat, structure)

    def put(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with other inexact leaves; arrays of numbers become JAX's."""
        found = dict(zip(self.places, leaves, strict=True))
        rest = (jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in self._all)
        return self._tree.unflatten([found.get(k, leaf) for k, leaf in enumerate(rest)])


def _differentiate(f: Callable[..., Any], weights: _Inexact) -> Callable[..., Any]:
    """Return the gradient of `f`'s weighted outputs, compiled once for each size.

    Args:
      f: called with lengths, shared arguments, and the leaves of one example.
    """

    def total(shared: list[Any], inexact: dict, rest: dict, lengths: dict, cotangents: list[Any]) -> Any:
        own = inexact | rest
        outs = f(lengths, weights.put(shared), [own[place] for place in range(len(own))])
        weighted = map(_weighted, filter(_is_inexact, jax.tree.leaves(outs)), cotangents)
        return sum(weighted, jnp.float32(0))

    gradient = jax.jit(jax.grad(total, argnums=(0, 1)))

    def of(leaves: Sequence[np.ndarray], lengths: Mapping[str, int], cotangents: list[Any]) -> Any:
        """Return the gradients of the shared leaves, and those of the example's leaves by place."""
        inexact = {place: leaf for place, leaf in enumerate(leaves) if _is_inexact(leaf)}
        rest = {place: leaf for place, leaf in enumerate(leaves) if not _is_inexact(leaf)}
        return gradient(weights.leaves, inexact, rest, dict(lengths), cotangents)

    return of


def _weighted(out: Any, cotangent: Any) -> Any:
    """Return the weighted sum of an output, padded or not; what stands in its padding has weight 1."""
    pads = [(0, size - valid) for size, valid in zip(jnp.shape(out), cotangent.shape, strict=True)]
    weights = jnp.pad(cotangent, pads, constant_values=1) if pads else cotangent  # pad refuses scalars
    return jnp.sum(jnp.real(out) * weights).astype(np.float32)


def _cotangents(reference: Any) -> list[np.ndarray]:
    """Return random weights for each inexact output."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(reference) if _is_inexact(leaf)]
    return [np.asarray(np.random.default_rng(k).normal(size=s), np.float32) for k, s in enumerate(shapes)]


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
