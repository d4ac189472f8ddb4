"""The masked function: a program at padded sizes, with a differentiation rule of its own.

`grad(mask(f))` must not be derived from the masked program: the backward pass of `x @ w` contracts the
ragged axis without a fill, and 0 * NaN is NaN. So a masked function's backward pass is the *masked*
vjp of `f`: forward and backward are traced from `f` at symbolic sizes, and each is interpreted like any
other program. Both are masked functions again, so derivatives of any order work in reverse mode.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from .. import _compat
from .._program import Dim, Program, trace
from ._context import Context, Fill, Padded
from ._primal import evaluate

Lengths = Mapping[str, Any]
Sizes = Mapping[str, Dim]


class Masked:
    """A program that runs at padded sizes and answers as at exact ones.

    Args:
      program: the function, traced at symbolic sizes.
      num_clean: how many of the first outputs get zeros in their padding (default: all).

    The call `masked(lengths, sizes, leaves)` takes the valid length of every ragged dim (int32 scalars),
    the allocated sizes (ints) and the input leaves at allocated shapes, and returns the output leaves at
    allocated shapes, with zeros in their padding. It can be traced by jit, vmap and grad. Closed-over
    arrays may be given as `consts=` so that they are arguments of the compiled program.
    """

    def __init__(self, program: Program, num_clean: int | None = None):
        self.program = program
        self._num_clean = len(program.out_avals) if num_clean is None else num_clean

    def __call__(
        self,
        lengths: Lengths,
        sizes: Sizes,
        leaves: Sequence[Any],
        consts: Sequence[Any] | None = None,
        floors: Sizes | None = None,
    ) -> list[Any]:
        """Run the program.

        Args:
          lengths: int32 scalars.
          sizes: of the bucket.
          leaves: inputs at those sizes.
          consts: take the place of the arrays that the function closed over.
          floors: the smallest lengths that can occur here; pieces of a branch below them are left out.

        Raises:
          MaskError: while tracing, when an operation's answer would depend on the padding.
        """
        lengths = {d: _compat.on_device(jnp.asarray(lengths[d], np.int32)) for d in self.program.dims}
        given = [*(self.program.consts if consts is None else consts), *leaves]
        values = [_compat.on_device(value) for value in given]
        named = {name: sizes[name] for name in self.program.dims}
        call = self._differentiable(tuple(named.items()), tuple((floors or {}).items()))
        return call(lengths, values)

    def fills(self, sizes: Sizes) -> list[Fill]:
        """Return every fill that the program does at these sizes; runs and compiles nothing."""
        ctxs: list[Context] = []

        def run(lengths: Lengths, values: Sequence[Any]) -> None:
            ctxs.append(Context(lengths, sizes, name=self.program.name))
            ctxs[-1].run(self.program.jaxpr, (), values)

        shape = Context({}, sizes).shape
        avals: list[Any] = [v.aval for v in self.program.jaxpr.invars]
        structs = [jax.ShapeDtypeStruct(shape(a.shape), a.dtype, weak_type=a.weak_type) for a in avals]
        jax.eval_shape(run, {d: jax.ShapeDtypeStruct((), np.int32) for d in self.program.dims}, structs)
        return ctxs[-1].fills

    def _run(self, sizes: Sizes, floors: Sizes, lengths: Lengths, values: Sequence[Any]) -> list[Any]:
        """Interpret the program and put zeros into the padding of its outputs."""
        program = self.program
        ctx = Context(lengths, sizes, name=program.name, floors=floors)
        outs = ctx.run(program.jaxpr, (), values)
        clean = [_clean(ctx, out, aval) for out, aval in zip(outs, program.out_avals, strict=True)]
        return clean[: self._num_clean] + outs[self._num_clean :]

    @functools.cache  # noqa: B019  (a program has few buckets, and they live as long as it does)
    def _differentiable(self, sizes: tuple[tuple[str, Dim], ...], floors: tuple[tuple[str, Dim], ...]) -> Any:
        """Return the run at fixed sizes as a function with the masked vjp as its differentiation rule."""
        named, least = dict(sizes), dict(floors)

        @jax.custom_vjp
        def call(lengths: Lengths, values: list[Any]) -> list[Any]:
            return self._run(named, least, lengths, values)

        def forward(lengths: Lengths, values: list[Any]) -> tuple[list[Any], Any]:
            outs, residuals = self._derivative.forward(lengths, named, values)
            return outs, (lengths, residuals)

        def backward(saved: Any, cotangents: list[Any]) -> tuple[None, list[Any]]:
            lengths, residuals = saved
            return None, self._derivative.pull_back(lengths, named, residuals, cotangents)

        call.defvjp(forward, backward, **_compat.DEFVJP_OPTIONS)
        return call

    @functools.cached_property
    def _derivative(self) -> "_Derivative":
        return _Derivative(self.program)


class _Derivative:
    """The forward and backward programs of a program's vjp, both masked.

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
        self._forward = Masked(
            trace(forward, structs, program.bounds, name=name, derived=True), self._num_outs
        )
        residual_avals = self._residuals(avals, self._forward.program.out_avals[self._num_outs :])
        cotangent_avals = _pick(program.out_avals, self._out_inexact)
        num_residuals = len(residual_avals)

        def backward(*values: Any) -> list[Any]:
            pull_back = jax.tree.unflatten(tree, values[:num_residuals])
            return list(pull_back(list(values[num_residuals:])))

        structs = [_struct(a) for a in (*residual_avals, *cotangent_avals)]
        self._backward = Masked(trace(backward, structs, program.bounds, name=name, derived=True))

    def forward(self, lengths: Lengths, sizes: Sizes, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and the residuals that `pull_back` needs."""
        outs = self._forward(lengths, sizes, values)
        return outs[: self._num_outs], self._residuals(values, outs[self._num_outs :])

    def _residuals(self, values: Sequence[Any], computed: Sequence[Any]) -> list[Any]:
        """Put residuals that are inputs and those that were computed in order."""
        rest = iter(computed)
        return [next(rest) if source is None else values[source] for source in self._sources]

    def pull_back(
        self, lengths: Lengths, sizes: Sizes, residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Return one cotangent per input, zero in its padding, and None for inputs without one."""
        grads = self._backward(lengths, sizes, [*residuals, *_pick(cotangents, self._out_inexact)])
        return _merge(self._in_inexact, grads, [None] * self._in_inexact.count(False))


def _clean(ctx: Context, out: Any, aval: Any) -> Any:
    """Return an output as an array of the traced dtype with zeros in its padding."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return out
    data = jax.lax.convert_element_type(out, aval.dtype)
    return ctx.fill(Padded(data, aval.shape), range(data.ndim), 0)


def _is_inexact(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _computed(residuals: Sequence[Any], sources: Sequence[int | None]) -> list[Any]:
    """Return the residuals that are not inputs themselves."""
    return [r for r, source in zip(residuals, sources, strict=True) if source is None]


def _pick(values: Sequence[Any], flags: Sequence[bool], wanted: bool = True) -> list[Any]:
    """Return the values whose flag is `wanted`."""
    return [v for v, flag in zip(values, flags, strict=True) if flag is wanted]


def _merge(flags: Sequence[bool], flagged: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Undo `_pick`: interleave the flagged values and the others."""
    a, b = iter(flagged), iter(others)
    return [next(a) if flag else next(b) for flag in flags]
