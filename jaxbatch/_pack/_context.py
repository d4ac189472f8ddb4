"""One jaxpr, read for all segments of a row at once.

The promise is that of padding: a cell that belongs to a segment holds what the unpadded program has there;
cells between segments, and pairs of cells of different segments, may hold anything. A rule that reads across
a ragged axis stays inside each segment, by position or by selection, never by multiplication. One thing
cannot be selected away: a dense contraction with weights of 0 for foreign cells turns their NaN and infinity
into NaN. There they are replaced, and the row is flagged.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core

from .. import _compat
from .._mask import _registry as mask_rules
from .._mask._context import Context, Padded, mentions_dims, plain, rebuild, select
from .._program import Dim, Shape, walk
from ._registry import lookup
from ._spaces import Layout, Space
from ._totals import THROUGH, demanded
from ._values import Kind, Value, on_row, ragged_axes


@dataclasses.dataclass(frozen=True)
class Spread:
    """An equation that was run on segments padded to the longest one: which, over what, on which line."""

    primitive: str
    shape: str
    line: str

    def __str__(self) -> str:
        return f"{self.primitive} {self.shape}, {self.line}"


class Row:
    """Everything a packed rule may ask: where segments lie, how values change their layout, flags.

    Attributes:
      layout: the segments of this row.
      name: the user's function, for messages.
      flags: bools, one of which is true if something not finite was replaced.
      spread: what had no packed rule, in order.
    """

    def __init__(self, layout: Layout, name: str, spaces: dict[str, Space] | None = None):
        self.layout = layout
        self.name = name
        self.flags: list[Any] = []
        self.spread: list[Spread] = []
        self._spaces = dict(spaces or {})
        self._zeros: set[Any] = set()  # variables that the program fills with 0
        self._wanted: set[Any] = set()  # variables that are read as totals only
        self._line = ""

    def inner(self) -> "Row":
        """Return a reading for the inside of a loop or a branch; take its flags out with the results."""
        row = Row(self.layout, self.name, self._spaces)
        row.spread, row._line = self.spread, self._line
        return row

    # --- where things are ---

    def space(self, dim: Dim) -> Space:
        """Return the space of a ragged size."""
        key = str(dim)
        if key not in self._spaces:
            self._spaces[key] = self.layout.space(dim)
        return self._spaces[key]

    def size(self, dim: Dim) -> int:
        """Return what an axis of this size has on a row."""
        return self.space(dim).size if _compat.is_symbolic(dim) else int(dim)

    def sizes(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(map(self.size, shape))

    def value(self, dim: Dim) -> Any:
        """Return a size used as a number: an int, or int32 [segments]."""
        if not _compat.is_symbolic(dim):
            return dim
        own = self.layout.value(dim, self.layout.row.lengths)
        return jnp.broadcast_to(jnp.asarray(own, np.int32), (self.layout.num_segments,))

    def valid(self, shape: Shape, axes: Sequence[int] | None = None) -> Any:
        """Return the mask of what may be read in a value on the row; of size 1 along its other axes.

        With two ragged axes these are the pairs within one segment.
        """
        found = ragged_axes(shape) if axes is None else [a for a in axes if _compat.is_symbolic(shape[a])]
        spaces = [self.space(shape[a]) for a in found]
        mask = spaces[0].valid if len(found) == 1 else self.layout.same(*spaces)
        return jnp.reshape(mask, [self.size(d) if a in found else 1 for a, d in enumerate(shape)])

    def fill(self, x: Value, value: Any) -> Any:
        """Return the data of a value on the row, with everything but what may be read replaced."""
        return select(self.valid(x.shape), x.data, value)

    def finite(self, x: Value) -> Any:
        """Return the data filled with zeros, also where it is not finite; that flags the row."""
        valid = jnp.broadcast_to(self.valid(x.shape), x.data.shape)
        if not jnp.issubdtype(x.data.dtype, jnp.inexact):
            return select(valid, x.data, 0)
        good = jnp.isfinite(x.data)
        self.flags.append(jnp.any(valid & ~good))
        return select(valid & good, x.data, 0)

    # --- from one layout to another ---

    def each(self, x: Value) -> Any:
        """Return the data with a leading axis of segments, ragged axes padded behind their lengths."""
        if x.kind != "row":
            own = (self.layout.num_segments, *jnp.shape(x.data))
            return x.data if x.kind == "each" else jnp.broadcast_to(x.data, own)
        data, picks = x.data, []
        for axis in x.ragged:
            space, size = self.space(x.shape[axis]), self._padded.size(x.shape[axis])
            picks.append(space.starts[:, None] + lax.iota(np.int32, size)[None])

        def one(*places: Any) -> Any:
            taken = data
            for axis, place in zip(x.ragged, places, strict=True):
                taken = jnp.take(taken, place, axis=axis, mode="clip")
            return taken

        return jax.vmap(one)(*picks)

    def packed(self, data: Any, shape: Shape) -> Any:
        """Undo `each` for a value with one or two ragged axes."""
        first, *second = ragged_axes(shape)
        cells = self._at(data, first, self.space(shape[first]), self.space(shape[first]).position)
        for axis in second:
            cells = jnp.take(cells, self.space(shape[axis]).position, axis=axis, mode="clip")
        return cells

    def _at(self, data: Any, axis: int, space: Space, position: Any) -> Any:
        """Read `each` data along an axis, for every cell of a space in its own segment."""
        moved = jnp.moveaxis(data, axis + 1, 1)
        flat = moved.reshape(moved.shape[0] * moved.shape[1], *moved.shape[2:])
        if not moved.shape[1]:
            out = jnp.zeros((space.size, *moved.shape[2:]), data.dtype)
        else:
            place = space.segment * moved.shape[1] + jnp.clip(position, 0, moved.shape[1] - 1)
            out = jnp.take(flat, place, axis=0, mode="clip")
        return jnp.moveaxis(out, 0, axis)

    def fetch(self, x: Value, axis: int, space: Space, position: Any) -> Any:
        """Read along one axis: for every cell of a space, the cell at `position` in its own segment.

        Positions outside may read anything. The axis of the result lies in the space.
        """
        if x.kind == "each":
            return self._at(x.data, axis, space, position)
        if _compat.is_symbolic(x.shape[axis]):
            position = self.space(x.shape[axis]).starts[space.segment] + position
        if not x.data.shape[axis]:
            return jnp.zeros(
                [space.size if a == axis else d for a, d in enumerate(x.data.shape)], x.data.dtype
            )
        return jnp.take(x.data, position, axis=axis, mode="clip")

    def lift(self, x: Value, shape: Shape) -> Any:
        """Return a value that broadcasts against data on the row of true shape `shape`.

        A value without ragged axes must be a scalar, or have size 1 wherever `shape` is ragged.
        """
        if x.kind in ("row", "plain", "total"):
            return x.data
        first = ragged_axes(shape)[0]
        cells = x.data[self.space(shape[first]).segment]
        if not x.shape:
            return self.space(shape[first]).along(cells, len(shape), first)
        return jnp.moveaxis(jnp.squeeze(cells, first + 1), 0, first)

    def copied(self, data: Any) -> Any:
        """Return `each` data in which unused slots are copies of the one they follow."""
        return data[self.layout.owner]

    def total(self, x: Value) -> Value:
        """Return the sum over the segments of a value without ragged axes."""
        if x.kind == "total":
            return x
        if x.kind == "plain":
            data = x.data * jnp.sum(self.layout.real, dtype=np.int32).astype(x.data.dtype)
        else:
            real = jnp.reshape(self.layout.real, (-1, *[1] * len(x.shape)))
            data = jnp.sum(select(real, x.data, 0), axis=0, dtype=x.data.dtype)
        return Value(data, "total", x.shape)

    def wants_total(self, eqn: Any) -> bool:
        """Tell whether the first output of an equation is wanted as a sum over the segments alone."""
        return bool(eqn.outvars) and eqn.outvars[0] in self._wanted

    def wants(self, var: Any) -> bool:
        """Tell whether a variable is read as a sum over the segments alone."""
        return var in self._wanted

    # --- running equations ---

    def bind(self, eqn: jex_core.JaxprEqn, *data: Any, **overrides: Any) -> Any:
        """Run an equation's own primitive at the sizes of the row."""
        params = {k: self._substitute(v) for k, v in (eqn.params | overrides).items()}
        return eqn.primitive.bind(*data, **eqn.primitive.get_bind_params(params))

    def _substitute(self, value: Any) -> Any:
        if not mentions_dims(value):
            return value
        return rebuild(value, self._substitute) if isinstance(value, tuple | list) else self.size(value)

    def run(self, jaxpr: Any, args: Sequence[Value], totals: Sequence[bool] | None = None) -> list[Value]:
        """Interpret a jaxpr; outputs named in `totals` are wanted as sums over the segments alone."""
        env: dict[Any, Value] = {}
        for var, value in zip(jaxpr.invars, args, strict=True):
            env[var] = dataclasses.replace(value, shape=getattr(var.aval, "shape", ()))
        zeros, wanted, line = self._zeros, self._wanted, self._line
        self._zeros, self._wanted = set(), demanded(jaxpr, totals or [False] * len(jaxpr.outvars))

        def read(atom: Any) -> Value:
            if not isinstance(atom, jex_core.Literal):
                return env[atom]
            aval: Any = atom.aval
            return Value(np.asarray(atom.val, aval.dtype), "plain", getattr(aval, "shape", ()))

        try:
            for eqn in jaxpr.eqns:
                self._line = line or _compat.source_line(eqn)
                with _compat.user_context(eqn), eqn.ctx.manager:
                    outs = self._apply(eqn, [read(v) for v in eqn.invars])
                for var, out in zip(eqn.outvars, outs, strict=True):
                    value = self._checked(eqn, dataclasses.replace(out, shape=getattr(var.aval, "shape", ())))
                    env[var] = self.total(value) if var in self._wanted else value
                self._note_zeros(eqn)
        finally:
            self._zeros, self._wanted, self._line = zeros, wanted, line
        return [read(v) for v in jaxpr.outvars]

    def _checked(self, eqn: Any, value: Value) -> Value:
        """Return a value after checking that its data have the size that its kind says."""
        if value.kind == "row":
            expected = self.sizes(value.shape)
        elif value.kind == "each":
            expected = (self.layout.num_segments, *self._padded.shape(value.shape))
        else:
            expected = tuple(value.shape)
        if np.shape(value.data) != expected:
            self.refuse(eqn, f"gives the packed shape {np.shape(value.data)}, expected {expected}.")
        return value

    def _note_zeros(self, eqn: Any) -> None:
        """Remember what the program fills with 0, which sums over segments may ignore."""
        if eqn.primitive.name == "broadcast_in_dim":
            (atom, *_) = eqn.invars
            literal = isinstance(atom, jex_core.Literal) and not np.any(atom.val)
            if literal or (not isinstance(atom, jex_core.Literal) and atom in self._zeros):
                self._zeros.add(eqn.outvars[0])

    def is_zero(self, atom: Any) -> bool:
        """Tell whether the program says that an operand is 0 everywhere."""
        if isinstance(atom, jex_core.Literal):
            return not np.any(atom.val)
        return atom in self._zeros

    def _apply(self, eqn: Any, xs: list[Value]) -> Sequence[Value]:
        if self.wants_total(eqn) and eqn.primitive.name in THROUGH and not any(x.ragged for x in xs):
            xs = [self.total(x) for x in xs]
        if all(x.kind in ("plain", "total") for x in xs) and not _depends_on_sizes(eqn):
            outs = eqn.primitive.bind(*(x.data for x in xs), **eqn.primitive.get_bind_params(eqn.params))
            kind: Kind = "total" if any(x.kind == "total" for x in xs) else "plain"
            return [Value(out, kind) for out in _listed(eqn, outs)]
        if any(x.kind == "total" for x in xs):
            self.refuse(eqn, "mixes a sum over the segments of a row with these, in a higher derivative.")
        rule = lookup(eqn.primitive)
        if rule is not None:
            eqn = eqn.replace(params=plain(eqn.params))
            outs = rule(self, eqn, *xs)
            if outs is not None:
                return outs if isinstance(outs, list) else [outs]
        return self.spread_out(eqn, xs)

    def spread_out(self, eqn: Any, xs: Sequence[Value]) -> list[Value]:
        """Run an equation by its rule for padding, one segment under the other."""
        shapes = [x.shape for x in xs] + [getattr(v.aval, "shape", ()) for v in eqn.outvars]
        if any(map(ragged_axes, shapes)):
            text = ", ".join(f"[{', '.join(map(str, shape))}]" for shape in shapes[: len(xs)])
            self.spread.append(Spread(eqn.primitive.name, text, self._line))
        in_axes = [None if x.kind in ("plain", "total") else 0 for x in xs]
        data = [x.data if axis is None else self.each(x) for x, axis in zip(xs, in_axes, strict=True)]

        def one(length: Any, *arrays: Any) -> list[Any]:
            context = self.layout.padded({self.layout.dim: length}, self.name)
            pairs = [Padded(a, x.shape) for a, x in zip(arrays, xs, strict=True)]
            return list(context.apply(eqn, pairs, self._line))

        outs = jax.vmap(one, in_axes=(0, *in_axes))(self.layout.row.lengths, *data)
        return [self.settled(out, v.aval) for out, v in zip(outs, eqn.outvars, strict=True)]

    def settled(self, data: Any, aval: Any) -> Value:
        """Return `each` data as the value that its true shape asks for."""
        shape = getattr(aval, "shape", ())
        return Value(self.packed(data, shape), "row", shape) if on_row(shape) else Value(data, "each", shape)

    def refuse(self, eqn: jex_core.JaxprEqn, reason: str) -> NoReturn:
        """Raise `MaskError` for an equation, naming the primitive, its ragged dims and the user's line."""
        context = self._padded
        context.refuse(eqn, reason)

    @property
    def _padded(self) -> Context:
        return self.layout.padded({}, self.name)


def _depends_on_sizes(eqn: Any) -> bool:
    """Tell whether sizes, or effects, occur anywhere in an equation."""
    for inner in walk(eqn):
        rule = mask_rules.lookup(inner.primitive)
        if rule is not None and rule.always:
            return True
        shapes = [getattr(v.aval, "shape", ()) for v in (*inner.invars, *inner.outvars)]
        if any(map(mentions_dims, shapes)) or any(map(mentions_dims, inner.params.values())):
            return True
    return False


def _listed(eqn: Any, outs: Any) -> Sequence[Any]:
    return outs if eqn.primitive.multiple_results else [outs]


def flagged(flags: Sequence[Any]) -> Any:
    """Return whether any flag is up."""
    out: Any = np.False_
    for flag in flags:
        out = out | flag
    return jnp.asarray(out)
