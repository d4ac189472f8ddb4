"""The comparisons behind `jaxbatch.testing`: one function, its examples, and what it gives unpadded.

The oracle is the function itself under plain JAX, one example at a time. Everything that is compared with it
runs the code that users run, with a poison in the padding.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from . import _batch
from ._batched import Batched
from ._closeness import assert_array_like, assert_like, assert_same_bits
from ._gradients import Inexact, cotangents_for, differentiate, is_inexact
from ._grid import Grid
from ._packed_gradients import OneRow, weighted
from ._packing import PackedFunction
from ._program import symbolic_dims
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
        weights = Inexact.of(self._shared)
        total = [jnp.zeros_like(leaf) for leaf in weights.leaves]
        summed = {str(poison): list(total) for poison in self._poisons}
        plain = differentiate(lambda _, shared, leaves: self._call(self._function.f, shared, leaves), weights)
        padded = differentiate(
            lambda lengths, *arguments: self._call(functools.partial(masked, lengths), *arguments), weights
        )
        for i, checked in enumerate(self._checked):
            lengths = {dim: self._lengths[i][dim] for dim in grid.dims}
            if isinstance(self._reference[i], Exception) or not all(lengths.values()):
                continue  # it runs at its exact size, where there is no padding
            cotangents = cotangents_for(self._reference[i])
            expected = plain(checked.leaves, lengths, cotangents)
            total = list(map(jnp.add, total, expected[0]))
            for poison in self._poisons:
                leaves = self._padded(checked, {**self._lengths[i], **grid.ceil(lengths).sizes}, poison)
                got = padded(leaves, lengths, cotangents)
                where = f"{self._example(i)}, gradient with {poison} in the padding"
                self._compare_leaves(got[1], expected[1], where)
                summed[str(poison)] = list(map(jnp.add, summed[str(poison)], got[0]))
        for poison, gradients in summed.items():
            where = f"{self._function.name}, gradient summed over the examples with {poison} in the padding"
            self._compare_shared(gradients, total, where)

    def compare_packed_gradients(self, packed: PackedFunction, longest: int) -> None:
        """Compare gradients in all floating arguments, with all examples in one row.

        Args:
          packed: `jaxbatch.pack` of the function.
          longest: as it was given to it.
        """
        fail = [isinstance(each, Exception) for each in self._reference]
        here = [i for i in range(self.num) if not fail[i] and self._lengths[i][packed.dim]]
        row = OneRow(packed, tuple(self._lengths[i][packed.dim] for i in here), longest)
        if not here:
            return
        weights, spec = Inexact.of(self._shared), self._function.spec
        symbol = symbolic_dims({packed.dim: (1, longest)})
        shapes = spec.shapes({**self._lengths[here[0]], **symbol})
        cotangents = [cotangents_for(self._reference[i]) for i in here]
        plain = differentiate(lambda _, shared, leaves: self._call(self._function.f, shared, leaves), weights)
        pairs = zip(here, cotangents, strict=True)
        expected = [plain(self._checked[i].leaves, self._lengths[i], each) for i, each in pairs]

        def total(shared: list[Any], inexact: dict, rest: dict, cotangents: list[Any]) -> Any:
            own = inexact | rest
            leaves = [own[place] for place in range(len(own))]
            outs, flag = self._call(functools.partial(packed, *row.place), weights.put(shared), leaves)
            return weighted(list(filter(is_inexact, jax.tree.leaves(outs))), cotangents), flag

        gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
        for poison in self._poisons:
            with padding_value(poison):
                columns = zip(*(self._checked[i].leaves for i in here), strict=True)
                leaves = [row.put(each, shape) for each, shape in zip(columns, shapes, strict=True)]
            inexact = {place: leaf for place, leaf in enumerate(leaves) if is_inexact(leaf)}
            rest = {place: leaf for place, leaf in enumerate(leaves) if not is_inexact(leaf)}
            example = spec.treedef.unflatten(leaves)
            outs = row.out_shapes(*self._arguments(self._shared, example))
            kept = [
                s
                for s, leaf in zip(outs, jax.tree.leaves(self._reference[here[0]]), strict=True)
                if is_inexact(leaf)
            ]
            spread = [
                row.put(each, shape, 1)
                for each, shape in zip(zip(*cotangents, strict=True), kept, strict=True)
            ]
            (shared, own), flag = gradient(weights.leaves, inexact, rest, spread)
            if flag:
                continue  # something is not finite, and such a row does not count
            where = f"{self._function.name}, gradient packed with {poison} around"
            self._compare_shared(
                shared, [sum(each) for each in zip(*(e[0] for e in expected), strict=True)], where
            )
            for place, grad in own.items():
                self._compare_packed(
                    row, shapes[place], np.array(grad), [e[1][place] for e in expected], place, where
                )

    def _compare_packed(
        self, row: OneRow, shape: Any, grad: np.ndarray, expected: Sequence[Any], place: int, where: str
    ) -> None:
        path = f"`{self._function.spec.paths[place]}`"
        for k, want in enumerate(expected):
            cells = row.cells(k, shape, np.shape(want))
            assert_array_like(np.asarray(grad[cells]), np.asarray(want), path, f"{where}, segment {k}")
            grad[cells] = 0
        if np.any(grad != 0):
            raise AssertionError(f"{where}: {path} is not exactly 0 where no segment is.")

    def _compare_shared(self, got: Sequence[Any], expected: Sequence[Any], where: str) -> None:
        named = zip(self._shared_names, self._shared, strict=True)
        pairs = [(name, pair) for name, arg in named for pair in jax.tree_util.tree_leaves_with_path(arg)]
        labels = [f"`{name}{jax.tree_util.keystr(path)}`" for name, (path, _) in pairs]
        for place, a, b in zip(Inexact.of(self._shared).places, got, expected, strict=True):
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
