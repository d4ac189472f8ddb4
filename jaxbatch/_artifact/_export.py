"""A traced function as portable programs: one for all buckets where that is possible, else one for each.

The first attempt has symbolic sizes and a symbolic number of rows, the second one program for each size, the
last one for each bucket. All take flat lists of arrays: lengths, weights, examples. Weights are arguments, so
they are stored once, however many programs there are.
"""

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._batch import Residuals
from .._errors import ArtifactError, MaskError
from .._grid import Grid
from .._mask import Masked
from .._program import Bounds, symbolic_dims
from .._self_masking import SelfMasking
from .._shared import Shared
from .._spec import Spec
from .._traced import Function, PerExample, Traced
from ._parts import Outputs, Program, Special

_MAX_ROWS = 2**31 - 1  # the masked function may be used with more rows than the grid has
_MAX_SIZE = 2**31 - 1  # of an example that is larger than the grid
_MAX_EMPTY_DIMS = 3  # with more dims, examples with empty ones have no programs: there are too many kinds

_log = logging.getLogger("jaxbatch")

Add = Callable[[bytes], str]
"""Adds a part and returns its name."""


class Weights:
    """The arrays that programs take, each once."""

    def __init__(self):
        self.arrays: list[Any] = []
        self.names: list[str] = []
        self._indices: dict[int, int] = {}

    def index(self, array: Any, name: str) -> int:
        """Return the number of an array, which it gets when it is first seen."""
        if id(array) not in self._indices:
            self._indices[id(array)] = len(self.arrays)
            self.arrays.append(array)
            same = sum(known == name or known.startswith(f"{name}#") for known in self.names)
            self.names.append(f"{name}#{same}" if same else name)
        return self._indices[id(array)]


@dataclasses.dataclass(frozen=True)
class Exporter:
    """Exports the programs of one function.

    Attributes:
      spec: of one example, without fixed dims.
      shared: the shared arguments, with their values.
      fixed: the fixed sizes that are bound in `spec`.
      add: adds a serialized program to the artifact.
    """

    function: Function
    spec: Spec
    grid: Grid
    shared: Shared
    fixed: Mapping[str, int]
    platforms: Sequence[str]
    vjp_order: int
    weights: Weights
    add: Add

    def programs(self, traced: Traced) -> tuple[Program, ...]:
        """Return programs that serve every bucket of the grid.

        Raises:
          ArtifactError: the function cannot be exported.
        """
        attempts = [self._by_sizes, self._by_bucket]
        if traced.moves:
            attempts.insert(0, self._for_all)
        for attempt in attempts:
            try:
                used = [sizes for sizes in attempt() if not _always_fails(traced, sizes)]
                made = [self._export(traced, sizes, self.vjp_order) for sizes in used]
            except Exception as error:
                if attempt is attempts[-1] or _is_final(error):
                    raise _refusal(error) from error
                _log.info("%s: %s is not possible: %r", traced.name, attempt.__name__, error)
                continue
            return tuple(self._added(*each) for each in made)
        raise AssertionError("the last attempt returns or raises")

    def outputs(self, traced: Traced) -> Outputs:
        """Return what the outputs of a trace are cut to."""
        sizes = {**self.grid.limits, "rows": 1}
        counts, consts, shared, examples = self._avals(traced, sizes)
        avals = jax.eval_shape(traced.run(_Sizes(sizes)), counts, consts, shared, examples)
        return Outputs(traced.out_tree, tuple(traced.formulas), tuple(aval.dtype.name for aval in avals))

    def failures(self, traced: Traced) -> Iterator[Special]:
        """Yield the lengths at which the function raises, with what it raises."""
        for bounds in traced.failures:
            lengths = {dim: low for dim, (low, _) in bounds.items()}
            try:
                self.function.exact(self.shared, traced.signature, self._ladders, {**self.fixed, **lengths})
            except Exception as error:
                yield Special(bounds, error=(type(error).__name__, str(error)))

    def empty(self, traced: Traced) -> Iterator[Special]:
        """Yield a program, or the error, for each set of dims that may be empty in an example."""
        dims = traced.dims
        if len(dims) > _MAX_EMPTY_DIMS:
            return
        for flags in itertools.product((True, False), repeat=len(dims)):
            zero = [dim for dim, flag in zip(dims, flags, strict=True) if flag]
            rest = [dim for dim in dims if dim not in zero]
            if not zero or (rest and isinstance(self.function, SelfMasking)):
                continue
            bounds = {dim: (0, 0) if dim in zero else (1, self.grid.limits[dim]) for dim in dims}
            try:
                yield self._special(traced, bounds)
            except Exception as error:
                yield Special(bounds, error=(type(error).__name__, str(error)))

    def oversize(self, traced: Traced) -> Special:
        """Return a program for examples that are larger than the grid, at their exact sizes.

        Raises:
          ArtifactError: no single program can run all of them.
        """
        try:
            if isinstance(self.function, SelfMasking):
                raise ArtifactError("a function that masks itself is for the sizes of the grid.")
            return self._special(traced, dict.fromkeys(traced.dims, (1, _MAX_SIZE)))
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise ArtifactError(
                f"with oversize='exact' there must be a program for all examples larger than the grid too, "
                f"and none can be made: {first} Save a function of oversize='error', or extend the grid."
            ) from error

    def _special(self, traced: Traced, bounds: Bounds) -> Special:
        """Return a program for the exact sizes within bounds, that of 0 included."""
        zero = [dim for dim, (_, high) in bounds.items() if not high]
        rest = {dim: both for dim, both in bounds.items() if dim not in zero}
        own = self._exact_trace(traced, zero, rest)
        if own.failures or not own.moves:
            raise ArtifactError("it branches on its sizes.")
        tops = {dim: high for dim, (_, high) in rest.items()}
        exported = self._export(own, self._symbols(tops) | dict.fromkeys(zero, 0), 0)
        program = dataclasses.replace(self._added(*exported), sizes=dict.fromkeys(zero, 0))
        avals = exported[0].out_avals
        shapes = tuple(tuple(shape) for shape in own.formulas)
        outputs = Outputs(own.out_tree, shapes, tuple(aval.dtype.name for aval in avals))
        return Special(bounds, program, outputs)

    # --- one program ---

    @property
    def _ladders(self) -> dict[str, Sequence[int]]:
        return {**self.grid.sizes, "rows": self.grid.rows}

    def _symbols(self, tops: Mapping[str, int]) -> "_Sizes":
        """Return symbolic sizes of dims, up to these, and symbolic rows."""
        return _Sizes(_symbols((("rows", _MAX_ROWS), *tops.items())))

    def _for_all(self) -> list["_Sizes"]:
        return [self._symbols(self.grid.limits)]

    def _by_sizes(self) -> list["_Sizes"]:
        each = itertools.product(*self.grid.ladders)
        rows = self._symbols({})
        return [_Sizes({**rows, **dict(zip(self.grid.dims, sizes, strict=True))}) for sizes in each]

    def _by_bucket(self) -> list["_Sizes"]:
        return [_Sizes(bucket) for bucket in self.grid]

    def _exact_trace(self, traced: Traced, zero: Sequence[str], bounds: Bounds) -> Traced:
        """Return the function at sizes of 0, with the other dims symbolic, within bounds."""
        sizes = {**self.fixed, **dict.fromkeys(zero, 0)}
        if not bounds:
            return self.function.exact(self.shared, traced.signature, self._ladders, sizes)
        dims = {**sizes, **symbolic_dims(bounds)}
        program = self.function._trace(self.shared, traced.signature, dims, bounds)
        return PerExample(
            traced.name,
            traced.signature,
            tuple(bounds),
            False,
            self.shared.abstract(),
            program,
            Masked(program),
            self._ladders,
        )

    def _avals(self, traced: Traced, sizes: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
        """Return counts, weights, shared leaves and example leaves of a batch of these sizes."""
        rows = sizes["rows"]
        counts = traced.counts(Residuals(1, np.zeros((1, len(traced.dims)), np.int32)))
        counts = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]) if leaf.ndim else (), leaf.dtype),
            counts,
        )
        shapes = zip(self.spec.shapes(sizes), traced.signature.examples, strict=True)
        examples = [jax.ShapeDtypeStruct((rows, *shape), leaf.dtype) for shape, leaf in shapes]
        consts = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in traced.consts(_Sizes(sizes))]
        return counts, consts, traced.shared.avals(), examples

    def _export(self, traced: Traced, sizes: "_Sizes", vjp_order: int) -> tuple[Any, bytes, Any, Traced, Any]:
        """Export one program; parts are added only once all programs of an attempt have succeeded."""
        counts, consts, shared, examples = self._avals(traced, sizes)
        arrays = [*traced.consts(sizes), *self.shared.arrays]
        keys = [_key_impl(array) for array in arrays]
        leaves, tree = jax.tree.flatten(counts)
        weak = [*([False] * len(consts)), *(aval.weak_type for aval in shared)]
        raw = [
            _raw_aval(array) if key else jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=is_weak)
            for array, key, is_weak in zip(arrays, keys, weak, strict=True)
        ]

        def run(flat: list[Any]) -> Any:
            given = iter(flat)
            own_counts = tree.unflatten([next(given) for _ in leaves])
            own = [jax.random.wrap_key_data(next(given), impl=key) if key else next(given) for key in keys]
            return traced.run(sizes)(own_counts, own[: len(consts)], own[len(consts) :], list(given))

        run.__name__ = re.sub(r"\W", "_", traced.name)
        exported = jax.export.export(jax.jit(run), platforms=self.platforms)([*leaves, *raw, *examples])
        if exported.ordered_effects or exported.unordered_effects:
            raise ArtifactError("it has side effects, which an exported program cannot have. Remove them.")
        return exported, bytes(exported.serialize(vjp_order=vjp_order)), sizes, traced, len(leaves) > 1

    def _added(self, exported: Any, data: bytes, sizes: "_Sizes", traced: Traced, takes_num: bool) -> Program:
        own = [self.weights.index(const, "closed_over") for const in traced.consts(sizes)]
        pairs = zip(self.shared.arrays, self.shared.signature, strict=True)
        own += [self.weights.index(array, leaf.name) for array, leaf in pairs]
        fixed = {name: size for name, size in sizes.items() if isinstance(size, int)}
        rows = fixed.pop("rows", None)
        return Program(self.add(data), fixed, rows, tuple(own), traced.dims, takes_num)


class _Sizes(dict[str, Any]):
    """Sizes by dim that may be symbolic, and can be a key."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(map(str, self.items()))))

    def __or__(self, other: Mapping[str, Any]) -> "_Sizes":  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Sizes({**self, **other})


@functools.lru_cache(64)  # a masked program remembers its sizes, and two of one name must be the same ones
def _symbols(tops: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    return symbolic_dims({name: (1, top) for name, top in tops})


def _always_fails(traced: Traced, sizes: Mapping[str, Any]) -> bool:
    """Tell whether the function itself raises at all lengths up to these sizes."""
    return any(
        all(
            low <= 1 and isinstance(sizes[dim], int) and sizes[dim] <= high
            for dim, (low, high) in bounds.items()
        )
        for bounds in traced.failures
    )


def _key_impl(array: Any) -> str | None:
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    return str(jax.random.key_impl(array)) if is_key else None


def _raw_aval(key: Any) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(key.shape, key.dtype))


def _is_final(error: Exception) -> bool:
    """Tell whether a smaller program would fail in the same way."""
    text = str(error)
    return isinstance(error, ArtifactError) or "custom call" in text or "callback" in text


def _refusal(error: Exception) -> Exception:
    if isinstance(error, ArtifactError | MaskError):
        return error
    first = (str(error).splitlines() or [""])[0]
    return ArtifactError(f"it cannot be exported. {type(error).__name__}: {first}")
