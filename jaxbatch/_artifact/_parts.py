"""What an artifact says about its programs, as data: written as JSON, read back with every type checked.

A `Variant` is the function for examples of certain dtypes. It has programs, each for all buckets, for all
numbers of rows at one size, or for one bucket; and it knows which sizes its outputs are cut to.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._program import Bounds, Shape
from .._spec import ArraySpec, Axis, DtypeFamily, Spec
from ._trees import tree_from_json, tree_to_json

# What a function raised at some sizes is raised again by its class; all others become ArtifactError.
_ERRORS = {each.__name__: each for each in (ValueError, TypeError, IndexError, ZeroDivisionError, KeyError)}
_MAX_FORMULA = 1000
_FORMULA = re.compile(r"(?:\w|[ +*(),-])*(?:\^[2-9](?!\d)(?:\w|[ +*(),-])*)*")
_MAX_DIGITS = re.compile(r"\d{19}")


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """The outputs of one example.

    Attributes:
      tree: their structure.
      shapes: of each leaf, formulas in the ragged dims and "rows".
    """

    tree: Any
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "tree": tree_to_json(self.tree, "the function's result"),
            "shapes": [[str(size) for size in shape] for shape in self.shapes],
            "dtypes": list(self.dtypes),
        }

    @classmethod
    def from_json(cls, data: Any, dims: Sequence[str]) -> "Outputs":
        """Return what `to_json` wrote."""
        tree, dtypes = tree_from_json(data["tree"]), tuple(_texts(data["dtypes"]))
        shapes = tuple(_formulas(_texts(shape), (*dims, "rows")) for shape in data["shapes"])
        if not tree.num_leaves == len(shapes) == len(dtypes):
            raise ValueError("outputs differ in number")
        return cls(tree, shapes, dtypes)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """One exported program.

    Attributes:
      part: the name of its part.
      sizes: the sizes that it is for; a dim that is missing has any.
      rows: the number of rows that it is for; None for any.
      weights: which arrays of the artifact it takes, between the lengths and the examples.
      dims: whose lengths it takes, in order.
      takes_num: whether it also takes the number of examples.
    """

    part: str
    sizes: Mapping[str, int]
    rows: int | None
    weights: tuple[int, ...]
    dims: tuple[str, ...]
    takes_num: bool

    def serves(self, bucket: Mapping[str, int]) -> bool:
        """Tell whether it is for a bucket."""
        right = all(bucket[dim] == size for dim, size in self.sizes.items())
        return right and self.rows in (None, bucket["rows"])

    @classmethod
    def from_json(cls, data: Any) -> "Program":
        """Return what `dataclasses.asdict` wrote."""
        sizes = {dim: _int(size) for dim, size in data["sizes"].items()}
        rows = None if data["rows"] is None else _int(data["rows"])
        weights, dims = tuple(map(_int, data["weights"])), tuple(_texts(data["dims"]))
        return cls(_text(data["part"]), sizes, rows, weights, dims, bool(data["takes_num"]))


@dataclasses.dataclass(frozen=True, eq=False)
class Special:
    """Lengths that no bucket serves: with an empty dim, above the grid, or such that the function raises.

    Attributes:
      bounds: the smallest and largest length of each dim, inclusive.
      program: runs them at their own size, or None.
      error: class and message of what the function raises there.
    """

    bounds: Bounds
    program: Program | None = None
    outputs: Outputs | None = None
    error: tuple[str, str] | None = None

    def holds(self, lengths: Mapping[str, int]) -> bool:
        """Tell whether lengths are among these."""
        return all(low <= lengths[dim] <= high for dim, (low, high) in self.bounds.items())

    def raised(self) -> Exception | None:
        """Return the function's own error, made anew."""
        if self.error is None:
            return None
        return _ERRORS[self.error[0]](self.error[1]) if self.error[0] in _ERRORS else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "bounds": {dim: list(both) for dim, both in self.bounds.items()},
            "program": self.program and dataclasses.asdict(self.program),
            "outputs": self.outputs and self.outputs.to_json(),
            "error": self.error and list(self.error),
        }

    @classmethod
    def from_json(cls, data: Any, dims: Sequence[str]) -> "Special":
        """Return what `to_json` wrote."""
        program, outputs, error = data["program"], data["outputs"], data["error"]
        return cls(
            _bounds(data["bounds"]),
            program and Program.from_json(program),
            outputs and Outputs.from_json(outputs, dims),
            error and (_text(error[0]), _text(error[1])),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """The function for examples of certain dtypes.

    Attributes:
      dtypes: of each leaf of an example.
      moves: whether an example may run in a larger bucket than the smallest that holds it.
      may_not_end: whether programs must not run on made-up data.
      rows_apart: whether no example of a batch sees another.
      failures: lengths at which the function raises.
      exact: lengths of examples that run at their own size: with an empty dim, or larger than the grid.
    """

    dtypes: tuple[str, ...]
    outputs: Outputs
    programs: tuple[Program, ...]
    moves: bool
    may_not_end: bool
    rows_apart: bool
    failures: tuple[Special, ...]
    exact: tuple[Special, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "dtypes": list(self.dtypes),
            "outputs": self.outputs.to_json(),
            "programs": [dataclasses.asdict(program) for program in self.programs],
            "moves": self.moves,
            "may_not_end": self.may_not_end,
            "rows_apart": self.rows_apart,
            "failures": [special.to_json() for special in self.failures],
            "exact": [special.to_json() for special in self.exact],
        }

    @classmethod
    def from_json(cls, data: Any, dims: Sequence[str]) -> "Variant":
        """Return what `to_json` wrote."""
        return cls(
            dtypes=tuple(np.dtype(_text(name)).name for name in data["dtypes"]),
            outputs=Outputs.from_json(data["outputs"], dims),
            programs=tuple(map(Program.from_json, data["programs"])),
            moves=bool(data["moves"]),
            may_not_end=bool(data["may_not_end"]),
            rows_apart=bool(data["rows_apart"]),
            failures=tuple(Special.from_json(each, dims) for each in data["failures"]),
            exact=tuple(Special.from_json(each, dims) for each in data["exact"]),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """One array of the artifact, by its name in the file of weights.

    Attributes:
      key: the implementation of a typed PRNG key, whose raw data is stored; else None.
      source: the number of the checkpoint that has it, and its number there; None for the file of weights.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    key: str | None = None
    source: tuple[int, int] | None = None

    @classmethod
    def from_json(cls, data: Any) -> "Weight":
        """Return what `dataclasses.asdict` wrote."""
        key = None if data["key"] is None else _text(data["key"])
        name, dtype, source = _text(data["name"]), np.dtype(_text(data["dtype"])).name, data.get("source")
        if source is not None:
            source = _int(source[0]), _int(source[1])
        return cls(name, dtype, tuple(map(_int, data["shape"])), key, source)


# --- specs -----------------------------------------------------------------------------------------


def bound_spec(spec: Spec, fixed: Mapping[str, int], dtypes: Sequence[Sequence[str]]) -> Spec:
    """Return a spec with numbers for its fixed dims, and no other dtypes than there are programs for.

    Args:
      dtypes: for each leaf, those that it has in some program.
    """
    leaves = []
    for leaf, names in zip(spec.leaves, dtypes, strict=True):
        axes = tuple(Axis(0, None, axis.size(fixed)) if axis.dim in fixed else axis for axis in leaf.axes)
        dtype = leaf.dtype
        if isinstance(dtype, DtypeFamily):
            unique = tuple(dict.fromkeys(names))
            dtype = DtypeFamily(f"{dtype.name} ({' or '.join(unique)} in this artifact)", unique)
        else:
            dtype = np.dtype(names[0])
        leaves.append(ArraySpec(axes, dtype))
    return Spec(spec.names, tuple(leaves), spec.treedef, spec.paths)


def spec_to_json(spec: Spec) -> dict[str, Any]:
    """Return a spec as JSON data."""
    leaves = []
    for leaf in spec.leaves:
        family = leaf.dtype if isinstance(leaf.dtype, DtypeFamily) else None
        dtype = {"name": family.name, "members": list(family.members or ())} if family else leaf.dtype.name
        leaves.append({"shape": [str(axis) for axis in leaf.axes], "dtype": dtype})
    return {
        "names": list(spec.names),
        "tree": tree_to_json(spec.treedef, "the spec of an example"),
        "leaves": leaves,
    }


def spec_from_json(data: Any) -> Spec:
    """Return what `spec_to_json` wrote."""
    leaves = []
    for leaf in data["leaves"]:
        dtype = leaf["dtype"]
        if isinstance(dtype, dict):
            dtype = DtypeFamily(_text(dtype["name"]), tuple(_texts(dtype["members"])))
        else:
            dtype = np.dtype(_text(dtype))
        leaves.append(ArraySpec(tuple(map(Axis.parse, _texts(leaf["shape"]))), dtype))
    trees = tree_from_json(data["tree"]).unflatten(leaves)
    return Spec.from_trees(trees, tuple(_texts(data["names"])))


# --- checked values --------------------------------------------------------------------------------


def _formulas(texts: Sequence[str], dims: Sequence[str]) -> Shape:
    """Read the sizes of a shape; they come from a file, so they must be short and name known dims only."""
    for text in texts:
        if len(text) > _MAX_FORMULA or not _FORMULA.fullmatch(text) or _MAX_DIGITS.search(text):
            raise ValueError(f"{text[:80]!r} is no size")
        for name in re.findall(r"[^\W\d]\w*", text):
            if name not in (*dims, "floordiv", "mod", "max", "min"):
                raise ValueError(f"the size {text[:80]!r} has an unknown name {name!r}")
    return tuple(jax.export.symbolic_shape(",".join(texts))) if texts else ()


def _bounds(data: Any) -> Bounds:
    return {dim: (_int(low), _int(high)) for dim, (low, high) in data.items()}


def _int(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:80]!r} is no size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{str(value)[:80]!r} is no text")
    return value


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list):
        raise ValueError(f"{str(values)[:80]!r} is no list")
    return [_text(value) for value in values]
