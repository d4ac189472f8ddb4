"""One jaxpr, read with two environments at once.

`sizes` says what the bucket allocates (static) and is used for every shape; `lengths` says what is valid
in this example (traced) and is used for every value. The promise: a padded array equals the unpadded
one on its valid prefix along each ragged axis; elsewhere it may hold anything. A rule that reads
across a ragged axis fills first, by selection, never by multiplication.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from .. import _compat
from .._errors import MaskError
from .._program import Dim, Shape, walk
from ._knowledge import QUIET, Facts, deduced, token
from ._registry import lookup
from ._sizes import Allocation


@dataclasses.dataclass(frozen=True)
class Padded:
    """A padded array and the formula of its true shape.

    Attributes:
      var: the variable of the program that it is the value of, if it is one's.
    """

    data: Any
    shape: Shape
    var: Any = None

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    def ragged(self, axes: Sequence[int] | None = None) -> list[int]:
        """Return those of `axes` (default: all) whose true size differs between examples."""
        return [
            a
            for a in (range(len(self.shape)) if axes is None else axes)
            if _compat.is_symbolic(self.shape[a])
        ]


@dataclasses.dataclass(frozen=True)
class Fill:
    """One fill: which primitive asked for it, along which ragged axes, with what, on the user's line.

    `needed` is False where the padding was known to be harmless, so that nothing was done.
    """

    primitive: str
    shape: str
    axes: tuple[int, ...]
    value: str
    line: str
    needed: bool

    def __str__(self) -> str:
        done = f"filled with {self.value}" if self.needed else f"already as good as {self.value}"
        return f"{self.primitive} {self.shape} axes {self.axes}: {done}, {self.line}"


class Context:
    """Everything a rule may ask: sizes, lengths, fills, and how to run or refuse an equation.

    Attributes:
      lengths: the valid length of each ragged dim, int32 scalars (traced).
      sizes: the allocated size of each ragged dim: ints, or symbolic where one program serves all buckets.
      floors: the smallest length each ragged dim can have, where it is known to be above 1.
      active: None, or a traced bool that is False where the surrounding loop has already ended for this
        example; data-dependent loops must not start there, since what they would read is padding.
      name: the user's function, for messages.
      fills: every fill that was asked for, in order.
    """

    def __init__(
        self,
        lengths: Mapping[str, Any],
        sizes: Mapping[str, Dim],
        *,
        name: str = "the function",
        floors: Mapping[str, Dim] | None = None,
        active: Any = None,
    ):
        self.lengths = lengths
        self.sizes = sizes
        self.name = name
        self.floors = floors or {}
        self.active = active
        self.fills: list[Fill] = []
        self._allocation = Allocation(sizes, name)
        self._asking = ""  # the primitive whose rule is at work
        self._producers: dict[Any, Any] = {}
        self._line = ""
        self._env: dict[Any, Any] = {}
        self._known: dict[Any, Facts] = {}
        self._left: list[Facts] = []  # what the outputs of the latest run are known to hold

    def at(self, lengths: Mapping[str, Any], sizes: Mapping[str, Dim], active: Any) -> "Context":
        """Return the context of a part that is live only where `active`, at sizes and lengths of its own."""
        both = active if self.active is None else self.active & active
        inner = Context(lengths, sizes, name=self.name, floors=self.floors, active=both)
        inner._line, inner.fills = self._line, self.fills
        return inner

    def within(self, active: Any) -> "Context":
        """Return the same context inside a loop or branch that is live only where `active`."""
        inner = self.at(self.lengths, self.sizes, active)
        inner._allocation = self._allocation
        return inner

    # --- sizes and lengths ---

    def size(self, dim: Dim) -> Dim:
        """Return what to allocate for a dimension: the largest value it takes up to this bucket's sizes."""
        return self._allocation.size(dim) if _compat.is_symbolic(dim) else int(dim)

    def shape(self, shape: Sequence[Dim]) -> Shape:
        """Return the allocated shape for a true shape."""
        return tuple(self.size(dim) for dim in shape)

    def length(self, dim: Dim) -> Any:
        """Return a dimension's value for this example: an int, or an int32 scalar."""
        if not _compat.is_symbolic(dim):
            return dim
        return lax.convert_element_type(_compat.evaluate(dim, self.lengths), np.int32)

    def always(self, dim: Dim, least: int, most: int | float = math.inf) -> bool:
        """Tell whether a size is known to lie within bounds at all lengths up to this bucket's sizes."""
        return self._allocation.always(dim, least, most)

    # --- validity and fills ---

    def valid(self, shape: Sequence[Dim], axes: Sequence[int]) -> Any:
        """Return a mask of the cells valid along `axes`, of size 1 along all others; None if all are."""
        mask = None
        for axis in axes:
            if _compat.is_symbolic(shape[axis]):
                along = [1] * len(shape)
                along[axis] = self.size(shape[axis])
                part = lax.broadcasted_iota(np.int32, along, axis) < self.length(shape[axis])
                mask = part if mask is None else mask & part
        return mask

    def fill(self, x: Padded, axes: Sequence[int], value: Any, *, quiet: bool = False) -> Any:
        """Return the data with its padding along `axes` replaced by `value`.

        The filled array takes the place of the variable's value, since its padding may hold anything: one
        fill serves all later readers, and a second one with the same value does nothing.

        Args:
          quiet: padding that is `QUIET` will do; for sums and contractions over these very axes.
        """
        enough = {token(value), QUIET} if quiet else {token(value)}
        facts = self._known.get(x.var, set())
        ragged = x.ragged(axes)
        axes = [a for a in ragged if not any((a, known) in facts for known in enough)]
        if ragged:
            shape = f"[{', '.join(map(str, x.shape))}]"
            note = Fill(self._asking, shape, tuple(ragged), str(value), self._line, bool(axes))
            self.fills.append(note)
        data = self._env.get(x.var, x.data)  # another operand of the same equation may have filled it
        mask = self.valid(x.shape, axes)
        if mask is None:
            return data
        filled = select(mask, data, value)
        if x.var in self._env:
            self._env[x.var] = filled
            kept = {fact for fact in facts if fact[1] == token(value)}  # others no longer hold in the corners
            self._known[x.var] = kept | {(a, token(value)) for a in axes}
        return filled

    # --- running equations ---

    def params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return an equation's parameters with allocated sizes in place of symbolic ones."""
        return {k: self._substitute(v) for k, v in params.items()}

    def _substitute(self, value: Any) -> Any:
        if not mentions_dims(value):
            return value
        return rebuild(value, self._substitute) if isinstance(value, tuple | list) else self.size(value)

    def bind(self, eqn: jex_core.JaxprEqn, *data: Any, **overrides: Any) -> Any:
        """Run an equation's own primitive on padded arrays, at allocated sizes."""
        params = eqn.primitive.get_bind_params(self.params(eqn.params | overrides))
        return eqn.primitive.bind(*data, **params)

    def refuse(self, eqn: jex_core.JaxprEqn, reason: str) -> NoReturn:
        """Raise `MaskError` for an equation, naming the primitive, its ragged dims and the user's line."""
        atoms = [*eqn.invars, *eqn.outvars]
        dims = sorted(
            {name for v in atoms for d in getattr(v.aval, "shape", ()) for name in _compat.dim_names(d)}
        )
        over = f" over ragged {', '.join(f'`{d}`' for d in dims)}" if dims else ""
        inner, outer = _compat.source_line(eqn), self._line
        line = f"{inner}, called from {outer}" if inner and outer and inner != outer else inner or outer
        raise MaskError(
            f"{self.name}: `{eqn.primitive.name}`{over}{line and f' at {line},'} {reason} "
            f"Rewrite that line, give it a rule (jb.register), or run such inputs at their exact sizes."
        )

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Interpret a jaxpr on padded arrays and return its padded outputs."""
        return self._run(jaxpr, consts, args, {})

    def call(self, eqn: Any, jaxpr: Any, consts: Sequence[Any], xs: Sequence[Padded]) -> list[Any]:
        """Interpret the jaxpr of a call, and carry what is known of paddings in and out."""
        known = {var: self._known.get(x.var, set()) for var, x in zip(jaxpr.invars, xs, strict=True)}
        outs = self._run(jaxpr, consts, [x.data for x in xs], known)
        self._known.update(zip(eqn.outvars, self._left, strict=True))
        return outs

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], known: dict[Any, Facts]
    ) -> list[Any]:
        env: dict[Any, Any] = {}

        def read(atom: Any) -> Padded:
            if isinstance(atom, jex_core.Literal):
                return Padded(atom.val, ())
            return Padded(env[atom], getattr(atom.aval, "shape", ()), atom)

        for variables, values in ((jaxpr.constvars, consts), (jaxpr.invars, args)):
            for var, value in zip(variables, values, strict=True):
                env[var] = value
        outer = self._producers, self._line, self._env, self._known
        self._env, self._known = env, known
        self._producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        try:
            for eqn in jaxpr.eqns:
                # JAX caches inner traces, whose lines may be another caller's: the outermost is sure.
                self._line = outer[1] or _compat.source_line(eqn)
                self._asking = eqn.primitive.name
                with _compat.user_context(eqn), eqn.ctx.manager:
                    outs = self._apply(eqn, [read(v) for v in eqn.invars])
                for var, out in zip(eqn.outvars, outs, strict=True):
                    expected = self.shape(getattr(var.aval, "shape", ()))
                    if np.shape(out) != expected:
                        self.refuse(
                            eqn, f"gives the padded shape {np.shape(out)} where {expected} is allocated."
                        )
                    env[var] = out
                if facts := deduced(eqn, known, self._producers, lambda dim: self.always(dim, 1)):
                    known[eqn.outvars[0]] = facts
            self._left = [
                set() if isinstance(v, jex_core.Literal) else known.get(v, set()) for v in jaxpr.outvars
            ]
        finally:
            self._producers, self._line, self._env, self._known = outer
        return [read(v).data for v in jaxpr.outvars]

    def apply(self, eqn: jex_core.JaxprEqn, operands: list[Padded], line: str) -> Sequence[Any]:
        """Run one equation alone, of a program's `line`, and return its padded outputs."""
        self._line, self._asking = line, eqn.primitive.name
        return self._apply(eqn, operands)

    def _apply(self, eqn: jex_core.JaxprEqn, operands: list[Padded]) -> Sequence[Any]:
        if not self._needs_rule(eqn):
            outs = self.bind(eqn, *(x.data for x in operands))
        elif (rule := lookup(eqn.primitive)) is not None:
            outs = rule.apply(self, eqn.replace(params=plain(eqn.params)), *operands)
        else:
            self.refuse(eqn, "has no rule that keeps padding out of its result.")
        return outs if isinstance(outs, tuple | list) else [outs]

    def _needs_rule(self, eqn: jex_core.JaxprEqn) -> bool:
        for inner in walk(eqn):
            rule = lookup(inner.primitive)
            if rule is not None and rule.always:
                return True
            loops = inner.primitive.name in ("while", "cond")
            if loops and (self.active is not None or has_inner_loop(inner)):
                return True  # under vmap a branch not taken runs too; its loop must not
            shapes = (getattr(v.aval, "shape", ()) for v in itertools.chain(inner.invars, inner.outvars))
            if any(map(mentions_dims, shapes)) or any(map(mentions_dims, inner.params.values())):
                return True
        return False

    def literal(self, atom: Any) -> int | float | None:
        """Return the scalar that an operand is known to be filled with, if the program itself says so."""
        while not isinstance(atom, jex_core.Literal):
            eqn = self._producers.get(atom)
            if eqn is None or eqn.primitive.name not in (
                "broadcast_in_dim",
                "convert_element_type",
                "reshape",
            ):
                return None
            atom = eqn.invars[0]
        return np.asarray(atom.val).item() if np.ndim(atom.val) == 0 else None


# --- helpers ---------------------------------------------------------------------------------------


def select(mask: Any, data: Any, value: Any) -> Any:
    """Return `data` where `mask` (broadcast against it) and `value` elsewhere, in `data`'s dtype."""
    other = (
        lax.broadcast(lax.convert_element_type(value, data.dtype), data.shape)
        if np.ndim(value) == 0
        else value
    )
    return lax.select(jax.numpy.broadcast_to(mask, data.shape), data, other)


def mentions_dims(value: Any) -> bool:
    """Tell whether a parameter contains a symbolic size, at any depth of tuples."""
    if isinstance(value, tuple | list):
        return any(map(mentions_dims, value))
    return _compat.is_symbolic(value)


def rebuild(value: Any, f: Any) -> Any:
    """Apply `f` to the entries of a tuple, a named tuple or a list."""
    return type(value)(*map(f, value)) if hasattr(value, "_fields") else type(value)(map(f, value))


def plain(value: Any) -> Any:
    """Return parameters with Python ints for NumPy ones, which gradients leave in them."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return rebuild(value, plain)
    return int(value) if isinstance(value, np.integer) else value


def has_inner_loop(eqn: jex_core.JaxprEqn) -> bool:
    """Tell whether a loop on data lies inside an equation."""
    return any(inner is not eqn and inner.primitive.name == "while" for inner in walk(eqn))
