"""One whole example: a tree of array specs for each per-example argument.

`Spec.check` is the only door through which an example comes in. Behind it every leaf is a NumPy array of a
known rank and dtype, all fixed sizes are right, and the same name means the same length everywhere, so
nothing further in has to look again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax import tree_util

from .._errors import SpecError
from ._annotations import annotated_specs
from ._arrays import ArraySpec, Axis
from ._casts import convert
from ._dtypes import DtypeFamily, default_dtype

_NO_VALUE = (
    "An absent key and None mean the same, and both are refused unless the spec has None there. "
    "Give it a value, or put None into the spec."
)


class Checked(NamedTuple):
    """An example that matches its spec.

    Attributes:
      leaves: the arrays, in the order of `Spec.leaves`; a leaf that needed no cast is the caller's own array,
        to be read and never written.
      lengths: in the order of `Spec.dims`, in elements.
    """

    leaves: tuple[np.ndarray, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Spec:
    """The shapes and dtypes of one example, over all per-example arguments.

    Attributes:
      names: of the per-example arguments, for messages.
      leaves: the array specs, in tree order.
      treedef: of the tuple that has one tree per argument.
      paths: where each leaf is, as a user would write it: `x['tokens']`.
      dims: all dim names, in the order in which they appear first.

    Example:
      >>> from jaxbatch._spec import spec
      >>> whole = Spec.from_trees(({"ids": spec("n", "int32")}, spec("n, 2", "float32")), ("x", "y"))
      >>> whole, whole.shapes({"n": 5})
      (Spec(x['ids']: int32[n], y: float32[n, 2]), ((5,), (5, 2)))
      >>> whole.check(({"ids": [7, 8, 9]}, [[0, 1]] * 3)).lengths
      (3,)
    """

    names: tuple[str, ...]
    leaves: tuple[ArraySpec, ...]
    treedef: Any
    paths: tuple[str, ...]
    dims: tuple[str, ...] = field(init=False, compare=False)
    # Where the length of each dim is read: (leaf, axis position, axis) of its first appearance.
    _sources: tuple[tuple[int, int, Axis], ...] = field(init=False, compare=False)
    # Every other axis, whose size must follow.
    _followers: tuple[tuple[int, int, Axis], ...] = field(init=False, compare=False)
    # Of each leaf, its rank and the dtypes that an array may have to be taken as it is.
    _plain: tuple[tuple[int, frozenset[np.dtype]], ...] = field(init=False, compare=False)
    # These dtypes where the example is one argument that is one vector of named length; else none.
    _vector: frozenset[np.dtype] = field(init=False, compare=False)

    def __post_init__(self):
        axes = [(i, j, axis) for i, leaf in enumerate(self.leaves) for j, axis in enumerate(leaf.axes)]
        sources: dict[str, tuple[int, int, Axis]] = {}
        for place in axes:
            if place[2].dim is not None:
                sources.setdefault(place[2].dim, place)
        plain = tuple((len(leaf.axes), _stable_dtypes(leaf.dtype)) for leaf in self.leaves)
        one_leaf = self.treedef == tree_util.tree_structure((0,))
        vector = one_leaf and len(axes) == 1 and axes[0][2].plain
        for name, value in {
            "dims": tuple(sources),
            "_sources": tuple(sources.values()),
            "_followers": tuple(place for place in axes if place not in sources.values()),
            "_plain": plain,
            "_vector": plain[0][1] if vector else frozenset(),
        }.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_trees(cls, trees: tuple[Any, ...], names: tuple[str, ...]) -> "Spec":
        """Build the spec of an example whose arguments have these trees of `jaxbatch.spec(...)`.

        Raises:
          SpecError: a leaf is something else.
        """
        pairs, treedef = tree_util.tree_flatten_with_path(trees)
        paths = tuple(names[path[0].idx] + tree_util.keystr(path[1:]) for path, _ in pairs)
        for path, (_, leaf) in zip(paths, pairs, strict=True):
            if not isinstance(leaf, ArraySpec):
                raise SpecError(f'the spec of `{path}` is {leaf!r}. Use jaxbatch.spec("n, 64", "float32").')
        return cls(tuple(names), tuple(leaf for _, leaf in pairs), treedef, paths)

    @classmethod
    def from_annotations(cls, f: Callable[..., Any], per_example: Sequence[bool]) -> "Spec":
        """Build the spec from the jaxtyping annotations of the per-example arguments of `f`.

        Args:
          f: a function, `functools.partial`, method or callable object.
          per_example: for each positional argument, whether it has one value per example.

        Raises:
          SpecError: an annotation is missing, is no jaxtyping array, or leaves a size open.
        """
        specs = annotated_specs(f, per_example)
        return cls.from_trees(tuple(specs.values()), tuple(specs))

    def shapes(self, lengths: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        """Return the shape of each leaf at these lengths, which may be symbolic."""
        return tuple(leaf.shape(lengths) for leaf in self.leaves)

    def dtypes(self) -> tuple[np.dtype, ...]:
        """Return the dtype of each leaf where no example is at hand; a family gives its default."""
        return tuple(default_dtype(leaf.dtype) for leaf in self.leaves)

    def check(self, example: tuple[Any, ...]) -> Checked:
        """Return the example's arrays, cast where that is safe, and its lengths.

        The order of keys never matters. An absent key and None are the same: both are refused where the spec
        has an array, and accepted where it has None or nothing.

        Args:
          example: one value per per-example argument. It is never written to.

        Raises:
          SpecError: it names the path, the axis, what was expected and got, and what to do.
        """
        if self._vector and len(example) == 1:
            array = example[0]
            if type(array) is np.ndarray and array.dtype in self._vector and array.ndim == 1:
                return Checked((array,), array.shape)
        values = self._flatten(example)
        arrays = tuple(
            value
            if type(value) is np.ndarray and value.dtype in dtypes and value.ndim == rank
            else self._convert(index, value)
            for index, (value, (rank, dtypes)) in enumerate(zip(values, self._plain, strict=True))
        )
        lengths = {}
        for leaf, position, axis in self._sources:
            try:
                lengths[axis.dim] = axis.solve(arrays[leaf].shape[position])
            except SpecError as error:
                raise SpecError(f"`{self.paths[leaf]}` axis {position} {error}") from None
        for leaf, position, axis in self._followers:
            if arrays[leaf].shape[position] != axis.size(lengths):
                raise self._wrong_size(leaf, position, arrays, lengths)
        return Checked(arrays, tuple(lengths.values()))

    def are_plain_vectors(self, values: Collection[Any]) -> bool:
        """Tell whether `check` would take each of these values of one argument as it is, a vector all."""
        if not self._vector or set(map(type, values)) != {np.ndarray}:
            return False
        dtype = next(iter(values)).dtype
        return dtype in self._vector and all([x.dtype is dtype and x.ndim == 1 for x in values])

    def __repr__(self) -> str:
        return f"Spec({', '.join(f'{p}: {leaf}' for p, leaf in zip(self.paths, self.leaves, strict=True))})"

    def _flatten(self, example: Any) -> list[Any]:
        example = tuple(example)
        if len(example) != len(self.names):
            raise SpecError(
                f"an example has {len(self.names)} arguments ({', '.join(self.names)}), got {len(example)}."
            )
        try:
            return self.treedef.flatten_up_to(example)
        except (ValueError, TypeError, KeyError):
            trees = tree_util.tree_unflatten(self.treedef, self.leaves)
            aligned = map(_align, trees, example, self.names)
            return [leaf for leaves in aligned for leaf in leaves]

    def _convert(self, index: int, value: Any) -> np.ndarray:
        path, leaf = self.paths[index], self.leaves[index]
        if value is None:
            raise SpecError(f"`{path}` is None. {_NO_VALUE}")
        try:
            array = convert(value, leaf.dtype)
        except SpecError as error:
            raise SpecError(f"`{path}` {error}") from error.__cause__
        if array.ndim != len(leaf.axes):
            raise SpecError(
                f"`{path}` has rank {array.ndim} (shape {array.shape}), expected rank {len(leaf.axes)} "
                f"({leaf}). Pass one example, without a batch axis, or change the spec."
            )
        return array

    def _wrong_size(
        self, leaf: int, position: int, arrays: tuple[np.ndarray, ...], lengths: Mapping[str, int]
    ) -> SpecError:
        axis = self.leaves[leaf].axes[position]
        where = f"`{self.paths[leaf]}` axis {position}"
        got = f"has size {arrays[leaf].shape[position]}, expected {axis.size(lengths)}"
        if axis.dim is None:
            return SpecError(f"{where} {got}. Every example has this size there; fix it, or name the axis.")
        first, first_position, _ = self._sources[self.dims.index(axis.dim)]
        return SpecError(
            f"{where} (dim `{axis.dim}`) {got} for `{axis}`, because `{self.paths[first]}` axis "
            f"{first_position} makes `{axis.dim}` {lengths[axis.dim]}. One name has one length within an "
            "example; make them agree, or rename one in the spec."
        )


# Every dtype of less than 64 bits is JAX's own, whether or not JAX has 64-bit types.
_STABLE = tuple(
    map(np.dtype, ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32"))
)


def _stable_dtypes(dtype: np.dtype | DtypeFamily) -> frozenset[np.dtype]:
    """Return dtypes of arrays that need no second look; that of any other may be right as well."""
    if isinstance(dtype, DtypeFamily):
        return frozenset(each for each in _STABLE if each in dtype)
    return frozenset([dtype] if dtype.itemsize < 8 else [])


def _align(tree: Any, value: Any, path: str) -> list[Any]:
    """Return the values at the leaves of a spec tree, slowly, with mappings matched by key.

    Absent and None are the same, on both sides, and any mapping will do for a dict.
    """
    if isinstance(tree, ArraySpec):
        return [value]
    if tree is None:
        if value is not None:
            raise SpecError(f"`{path}` is {_describe(value)}, but the spec has None there. Leave it out.")
        return []
    if value is None:
        raise SpecError(f"`{path}` is None. {_NO_VALUE}")
    pairs, structure = tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is not tree)
    paths = [path + tree_util.keystr(step) for step, _ in pairs]
    if isinstance(tree, Mapping) and isinstance(value, Mapping):
        for (_, child), place, key in zip(pairs, paths, _keys(pairs), strict=True):
            if child is not None and key not in value:
                raise SpecError(f"`{place}` is missing. {_NO_VALUE}")
        if extra := [key for key, each in value.items() if key not in tree and each is not None]:
            raise SpecError(
                f"`{path}[{extra[0]!r}]` is not in the spec, which has {list(tree)}. Leave it out, or add it "
                "to the spec."
            )
        children = [value.get(key) for key in _keys(pairs)]
    else:
        children, got = tree_util.tree_flatten(value, is_leaf=lambda each: each is not value)
        if got != structure:
            raise SpecError(f"`{path}` is {_describe(value)}, expected {_describe(tree)}, as in the spec.")
    aligned = [
        _align(child, each, place) for (_, child), each, place in zip(pairs, children, paths, strict=True)
    ]
    return [leaf for leaves in aligned for leaf in leaves]


def _keys(pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    return [step[0].key for step, _ in pairs]


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
