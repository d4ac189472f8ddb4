"""One jaxpr, read with two environments at once.

`sizes` says what the bucket allocates (static) and is used for every shape; `lengths` says what is valid
in this example (traced) and is used for every value. The promise: a padded array equals the unpadded
one on its valid prefix along each ragged axis; elsewhere it may hold anything. A rule that reads
across a ragged axis fills first, by selection, never by multiplication.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from .. import _compat
from .._errors import MaskError
from .._program import Dim, Shape
from ._registry import lookup

_MAX_ENUMERATED = 1 << 20  # lengths tried when a size formula is not known to grow with its dims


@dataclasses.dataclass(frozen=True)
class Padded:
    """A padded array and the formula of its true shape."""

    data: Any
    shape: Shape

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


class Context:
    """Everything a rule may ask: sizes, lengths, fills, and how to run or refuse an equation.

    Attributes:
      lengths: the valid length of each ragged dim, int32 scalars (traced).
      sizes: the allocated size of each ragged dim, ints.
      floors: the smallest length each ragged dim can have, where it is known to be above 1.
      active: None, or a traced bool that is False where the surrounding loop has already ended for this
        example; data-dependent loops must not start there, since what they would read is padding.
      name: the user's function, for messages.
    """

    def __init__(
        self,
        lengths: Mapping[str, Any],
        sizes: Mapping[str, int],
        *,
        name: str = "the function",
        floors: Mapping[str, int] | None = None,
        active: Any = None,
    ):
        self.lengths = lengths
        self.sizes = sizes
        self.name = name
        self.floors = floors or {}
        self.active = active
        self._size = functools.cache(self._compute_size)
        self._producers: dict[Any, Any] = {}
        self._line = ""

    def at(self, lengths: Mapping[str, Any], sizes: Mapping[str, int], active: Any) -> "Context":
        """Return the context of a part that is live only where `active`, at sizes and lengths of its own."""
        both = active if self.active is None else self.active & active
        inner = Context(lengths, sizes, name=self.name, floors=self.floors, active=both)
        inner._line = self._line
        return inner

    def within(self, active: Any) -> "Context":
        """Return the same context inside a loop or branch that is live only where `active`."""
        both = active if self.active is None else self.active & active
        inner = Context(self.lengths, self.sizes, name=self.name, floors=self.floors, active=both)
        inner._size, inner._line = self._size, self._line
        return inner

    # --- sizes and lengths ---

    def size(self, dim: Dim) -> int:
        """Return what to allocate for a dimension: the largest value it takes up to this bucket's sizes."""
        return self._size(dim) if _compat.is_symbolic(dim) else int(dim)

    def shape(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        """Return the allocated shape for a true shape."""
        return tuple(self.size(dim) for dim in shape)

    def length(self, dim: Dim) -> Any:
        """Return a dimension's value for this example: an int, or an int32 scalar."""
        if not _compat.is_symbolic(dim):
            return dim
        return lax.convert_element_type(_compat.evaluate(dim, self.lengths), np.int32)

    def _compute_size(self, dim: Dim) -> int:
        top = _compat.evaluate(dim, self.sizes)
        if grows(dim):
            return top
        names = sorted(_compat.dim_names(dim))
        count = 1
        for name in names:
            if _compat.is_symbolic(self.sizes[name]):
                raise MaskError(
                    f"{self.name}: the size {dim} may shrink as the input grows; no symbolic size bounds it."
                )
            count *= self.sizes[name]
        if count > _MAX_ENUMERATED:
            raise MaskError(
                f"{self.name}: no bound is known for the size {dim} in a bucket as large as {self.sizes}."
            )
        grid = np.meshgrid(*(np.arange(1, self.sizes[name] + 1) for name in names), indexing="ij")
        return int(np.max(_compat.evaluate(dim, dict(zip(names, grid, strict=True)))))

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

    def fill(self, x: Padded, axes: Sequence[int], value: Any) -> Any:
        """Return the data with its padding along `axes` replaced by `value`."""
        mask = self.valid(x.shape, axes)
        return x.data if mask is None else select(mask, x.data, value)

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

    def run(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Interpret a jaxpr on padded arrays and return its padded outputs."""
        env: dict[Any, Any] = {}

        def read(atom: Any) -> Padded:
            data = atom.val if isinstance(atom, jex_core.Literal) else env[atom]
            return Padded(data, getattr(atom.aval, "shape", ()))

        for variables, values in ((jaxpr.constvars, consts), (jaxpr.invars, args)):
            for var, value in zip(variables, values, strict=True):
                env[var] = value
        outer = self._producers, self._line
        self._producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        try:
            for eqn in jaxpr.eqns:
                # JAX caches inner traces, whose lines may be another caller's: the outermost is sure.
                self._line = outer[1] or _compat.source_line(eqn)
                with _compat.user_context(eqn), eqn.ctx.manager:
                    outs = self._apply(eqn, [read(v) for v in eqn.invars])
                for var, out in zip(eqn.outvars, outs, strict=True):
                    expected = self.shape(getattr(var.aval, "shape", ()))
                    if np.shape(out) != expected:
                        self.refuse(
                            eqn, f"gives the padded shape {np.shape(out)} where {expected} is allocated."
                        )
                    env[var] = out
        finally:
            self._producers, self._line = outer
        return [read(v).data for v in jaxpr.outvars]

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
            if self.active is not None and inner.primitive.name == "while":
                return True
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


def walk(eqn: jex_core.JaxprEqn) -> Iterator[jex_core.JaxprEqn]:
    """Yield an equation and every equation inside its own jaxprs."""
    yield eqn
    for jaxpr in jex_core.jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from walk(inner)


def grows(dim: Dim) -> bool:
    """Tell whether a size is known never to shrink when a length grows (so its bucket's value bounds it)."""
    return _direction(dim) >= 0


def _direction(dim: Any) -> int | float:
    """Return 1 for growing, -1 for shrinking, 0 for constant, NaN for unknown."""
    if not _compat.is_symbolic(dim):
        return 0
    signs = {_term_direction(k, factors) for k, factors in _compat.terms(dim)} - {0}
    return signs.pop() if len(signs) == 1 else (0 if not signs else float("nan"))


def _term_direction(coefficient: int, factors: Sequence[tuple[Any, int]]) -> int | float:
    """Direction of a product; every factor is a size or an operation on sizes, none of them negative."""
    signs = set()
    for factor, _ in factors:
        operation, operands = _compat.factor_operands(factor)
        match operation:
            case "var":
                signs.add(1)
            case "floordiv" if _direction(operands[1]) == 0 and _compat.evaluate(operands[1], {}) > 0:
                signs.add(_direction(operands[0]))
            case "max" | "min":
                signs |= {_direction(o) for o in operands} - {0}
            case _:
                return float("nan")
    if not signs:
        return 0
    # A product may shrink where a factor can be negative; sizes themselves never are.
    sizes_only = all(_compat.factor_operands(factor)[0] == "var" for factor, _ in factors)
    single = len(factors) == 1 and factors[0][1] == 1
    if len(signs) > 1 or not (sizes_only or single):
        return float("nan")
    return signs.pop() * (1 if coefficient > 0 else -1)
