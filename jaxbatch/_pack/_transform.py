"""The packed function: a program on the segments of a row, with a differentiation rule of its own.

As for padding, the backward pass is the packed reading of `f`'s vjp, traced at symbolic sizes, and not what
JAX would derive from the packed program. The gradient of a shared input is the sum over the segments.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from .. import _compat
from .._errors import MaskError
from .._mask._context import select
from .._mask._primal import evaluate
from .._mask._transform import _clean, _computed, _is_inexact, _merge, _pick, _struct
from .._program import Program, Shape, trace
from ._context import Row, Spread, flagged
from ._spaces import Layout
from ._values import Kind, Value, on_row, ragged_axes

Place = tuple[Any, Any, Any]  # ids of the cells, starts and lengths of the segments
Wanted = tuple[Kind | None, ...]  # for each output; None leaves it as it is


def form(shape: Shape, dim: str) -> Kind:
    """Return how an argument or a result is laid out for the caller: on the row, or one for each segment."""
    ragged = ragged_axes(shape)
    return "row" if len(ragged) == 1 and str(shape[ragged[0]]) == dim else "each"


class Packed:
    """A program that runs on packed segments and answers as on each alone.

    The call `packed(place, longest, values)` takes the arrays that say where segments lie, the longest length
    that occurs, and the inputs as `Value`s: `plain` for shared ones, laid out by `form` for the others.
    Outputs are laid out by `form`, with zeros where no segment is, and a bool says whether something not
    finite had to be replaced, so that the answers of this row do not count. It can be traced by jit, vmap
    and grad.

    Raises:
      MaskError: the program has more than one ragged dim, or none.
    """

    def __init__(self, program: Program):
        if len(program.dims) != 1:
            raise MaskError(
                f"{program.name}: packed rows need one ragged dim, this function has "
                f"{', '.join(f'`{d}`' for d in program.dims) or 'none'}. It can be padded."
            )
        self.program = program
        (self._dim,) = program.dims

    def __call__(
        self,
        place: Place,
        longest: int,
        values: Sequence[Value],
        consts: Sequence[Any] | None = None,
        wanted: Wanted | None = None,
    ) -> tuple[list[Value], Any]:
        """Run the program.

        Args:
          place: int32 [cells], [segments] and [segments].
          longest: no segment is longer.
          values: inputs.
          consts: take the place of the arrays that the function closed over.
          wanted: how to lay out each output; default: by `form`.
        """
        given = self.program.consts if consts is None else consts
        every = [*(Value(_compat.on_device(c), "plain") for c in given), *values]
        if wanted is None:
            wanted = tuple(form(aval.shape, self._dim) for aval in self.program.out_avals)
        return self._differentiable(longest, wanted)(place, every)

    def spread(self, place: Place, longest: int, values: Sequence[Value]) -> list[Spread]:
        """Return what has no packed rule, given shapes and dtypes alone; runs and compiles nothing."""
        return self._reading(place, longest, values).spread

    def may_flag(self, place: Place, longest: int, values: Sequence[Value]) -> bool:
        """Tell whether a row can ever be flagged, given shapes and dtypes alone; compiles nothing."""
        return bool(self._reading(place, longest, values).flags)

    def _reading(self, place: Place, longest: int, values: Sequence[Value]) -> Row:
        rows: list[Row] = []
        consts = [Value(jax.typeof(c), "plain") for c in self.program.consts]
        as_it_is = tuple(None for _ in self.program.out_avals)
        run = functools.partial(self._run, longest, as_it_is, rows=rows)
        jax.eval_shape(run, place, [*consts, *values])
        return rows[-1]

    def _run(
        self,
        longest: int,
        wanted: Wanted,
        place: Place,
        values: Sequence[Value],
        rows: list[Row] | None = None,
    ) -> tuple[list[Value], Any]:
        program = self.program
        row = Row(Layout.of(self._dim, *place, longest), program.name)
        if rows is not None:
            rows.append(row)
        avals = [v.aval for v in program.jaxpr.invars]
        args = [_entered(row, value, aval) for value, aval in zip(values, avals, strict=True)]
        outs = row.run(program.jaxpr, args, [kind == "total" for kind in wanted])
        left = [_left(row, *each) for each in zip(outs, wanted, program.out_avals, strict=True)]
        return left, flagged(row.flags)

    @functools.cache  # noqa: B019  (a program has few buckets, and they live as long as it does)
    def _differentiable(self, longest: int, wanted: Wanted) -> Any:
        @jax.custom_vjp
        def call(place: Place, values: list[Value]) -> tuple[list[Value], Any]:
            return self._run(longest, wanted, place, values)

        def forward(place: Place, values: list[Value]) -> Any:
            outs, flag, residuals = self._derivative.forward(place, longest, values, wanted)
            return (outs, flag), (place, residuals, [Value(None, v.kind) for v in values])

        def backward(saved: Any, cotangents: Any) -> Any:
            place, residuals, kinds = saved
            outs, _ = cotangents
            return None, self._derivative.pull_back(
                place, longest, residuals, outs, [value.kind for value in kinds]
            )

        call.defvjp(forward, backward, **_compat.DEFVJP_OPTIONS)
        return call

    @functools.cached_property
    def _derivative(self) -> "_Derivative":
        return _Derivative(self.program)


class _Derivative:
    """The forward and backward programs of a program's vjp, both packed.

    Only inexact inputs and outputs take part; the others get no cotangent.
    """

    def __init__(self, program: Program):
        avals = [v.aval for v in program.jaxpr.invars]
        self._in_inexact = [_is_inexact(aval) for aval in avals]
        self._out_inexact = [_is_inexact(aval) for aval in program.out_avals]
        self._sources: list[int | None] = []  # for each residual, the input that it is, if it is one
        tree = None

        def forward(*values: Any) -> list[Any]:
            nonlocal tree

            def run(*inexact: Any) -> Any:
                args = _merge(self._in_inexact, inexact, _pick(values, self._in_inexact, False))
                outs = evaluate(program.jaxpr, (), args)
                return _pick(outs, self._out_inexact), _pick(outs, self._out_inexact, False)

            outs, pull_back, others = jax.vjp(run, *_pick(values, self._in_inexact), has_aux=True)
            residuals, tree = jax.tree.flatten(pull_back)
            self._sources = [next((i for i, v in enumerate(values) if v is r), None) for r in residuals]
            return _merge(self._out_inexact, outs, others) + _computed(residuals, self._sources)

        structs = [_struct(a) for a in avals]
        self._num_outs = len(program.out_avals)
        name = f"the gradient of {program.name}"
        self._forward = Packed(trace(forward, structs, program.bounds, name=name, derived=True))
        residual_avals = self._residuals(avals, self._forward.program.out_avals[self._num_outs :])
        cotangent_avals = _pick(program.out_avals, self._out_inexact)
        num_residuals = len(residual_avals)

        def backward(*values: Any) -> list[Any]:
            pull_back = jax.tree.unflatten(tree, values[:num_residuals])
            return list(pull_back(list(values[num_residuals:])))

        structs = [_struct(a) for a in (*residual_avals, *cotangent_avals)]
        self._backward = Packed(trace(backward, structs, program.bounds, name=name, derived=True))

    def forward(
        self, place: Place, longest: int, values: Sequence[Value], wanted: Wanted
    ) -> tuple[list[Value], Any, list[Value]]:
        """Return the outputs, the flag, and the residuals that `pull_back` needs."""
        num_computed = len(self._forward.program.out_avals) - self._num_outs
        outs, flag = self._forward(place, longest, values, wanted=(*wanted, *[None] * num_computed))
        return outs[: self._num_outs], flag, self._residuals(values, outs[self._num_outs :])

    def _residuals(self, values: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
        """Put residuals that are inputs and those that were computed in order."""
        rest = iter(computed)
        return [next(rest) if source is None else values[source] for source in self._sources]

    def pull_back(
        self,
        place: Place,
        longest: int,
        residuals: Sequence[Value],
        cotangents: Sequence[Value],
        kinds: Sequence[Kind],
    ) -> list[Any]:
        """Return one cotangent per input, zero where no segment is, and None for inputs without one.

        Something not finite that had to be replaced would make them finite and wrong, so then they are NaN.
        """
        given = [Value(ct.data, _dual(ct.kind)) for ct in _pick(cotangents, self._out_inexact)]
        wanted = tuple(_dual(kind) for kind in _pick(kinds, self._in_inexact))
        grads, flag = self._backward(place, longest, [*residuals, *given], wanted=wanted)
        marked = [Value(_nan_where(flag, g.data), _dual(g.kind)) for g in grads]
        return _merge(self._in_inexact, marked, [None] * self._in_inexact.count(False))


# --- values at the border of a program -------------------------------------------------------------


def _dual(kind: Any) -> Any:
    """Return the kind of the cotangent of a value: of what all segments share, it is the sum over them."""
    return {"plain": "total", "total": "plain"}.get(kind, kind)


def _nan_where(flag: Any, data: Any) -> Any:
    return select(~flag, data, np.nan)


def _entered(row: Row, value: Value, aval: Any) -> Value:
    """Return an input in the layout that its shape asks for inside."""
    shape = aval.shape
    if value.kind != "each":
        return value
    data = row.copied(value.data)
    return Value(row.packed(data, shape), "row") if on_row(shape) else Value(data, "each")


def _left(row: Row, value: Value, kind: Kind | None, aval: Any) -> Value:
    """Return an output in the layout that is wanted, with zeros where no segment is."""
    if kind is None:
        return value
    if kind == "total":
        return row.total(value)
    if kind == "plain":
        return value
    extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    data = value.data if extended else jax.lax.convert_element_type(value.data, aval.dtype)
    value = Value(data, value.kind, aval.shape)
    if kind == "row":
        return Value(data if extended else row.fill(value, 0), "row")
    data = row.each(value)
    if extended:
        return Value(data, "each")

    def clean(length: Any, one: Any) -> Any:
        return _clean(row.layout.padded({row.layout.dim: length}, row.name), one, aval)

    data = jax.vmap(clean)(row.layout.row.lengths, data)
    real = jnp.reshape(row.layout.real, (-1, *[1] * (data.ndim - 1)))
    return Value(select(real, data, 0), "each")
