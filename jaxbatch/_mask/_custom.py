"""`custom_padding`: attach to a function the padded version to use, in the manner of `jax.custom_vjp`.

For kernels that take lengths, and for functions whose padded form the rules do not know or do slowly.
Called at fixed sizes the function is itself. In a symbolic trace it becomes one equation, and the rule of
that equation calls the padded version, or the one for packed rows. Derivatives are those of the function
itself, masked by rule.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from .. import _compat
from ._context import Context, Padded, mentions_dims
from ._registry import define

custom_padding_p = jex_core.Primitive("custom_padding")
custom_padding_p.multiple_results = True


class CustomPadding:
    """What `custom_padding` returns: the function itself, until it is masked."""

    def __init__(self, f: Callable[..., Any], fill: int | float | None):
        functools.update_wrapper(self, f)
        self._f = f
        self._fill = fill
        self._padded: Callable[..., Any] | None = None
        self._packed: Callable[..., Any] | None = None

    def defpadded(self, padded: Callable[..., Any]) -> Callable[..., Any]:
        """Set the padded version, `padded(lengths, *args)`; usable as a decorator.

        `lengths` has the structure of `args` with a tuple in the place of each array: its valid size along
        every axis, an int or, where it is ragged, an int32 scalar. The arrays are padded at the end of each
        ragged axis. The result must have padded shapes and equal that of the function on the valid part,
        whatever the padding holds; it may hold anything elsewhere.
        """
        self._padded = padded
        return padded

    def defpacked(self, packed: Callable[..., Any]) -> Callable[..., Any]:
        """Set the version for packed rows, `packed(segments, *args)`; usable as a decorator.

        `segments` has the structure of `args` with a tuple in the place of each array: along every ragged
        axis the segment of each cell, int32 [cells] with -1 where there is none, and None along the others.
        So an attention kernel that skips foreign blocks gets what it needs. The cells of a segment are
        adjacent. Each output must have one or two ragged axes, with as many cells as the row has for its
        size, and equal the function on each segment; it may hold anything elsewhere. Numbers that are not
        finite arrive as zeros, and the examples of such a row run again, padded.

        It is used where every argument is ragged or shared by all examples; else, and without it, segments
        are padded and the padded version runs.
        """
        self._packed = packed
        return packed

    def __call__(self, *args: Any) -> Any:
        """Call the function; keyword arguments go through `functools.partial`."""
        leaves, tree = jax.tree.flatten(args)
        has_versions = self._padded is not None or self._packed is not None
        if not has_versions or not any(mentions_dims(jnp.shape(leaf)) for leaf in leaves):
            return self._f(*args)
        closed, out = jax.make_jaxpr(lambda *xs: self._f(*tree.unflatten(xs)), return_shape=True)(*leaves)
        jaxpr = jex_core.ClosedJaxpr(_compat.consts_as_inputs(closed), [])
        outs = custom_padding_p.bind(
            *closed.consts,
            *leaves,
            jaxpr=jaxpr,
            padded=self._padded and _Version(self._padded, tree, len(closed.consts)),
            packed=self._packed and _Version(self._packed, tree, len(closed.consts)),
            fill=self._fill,
        )
        return jax.tree.unflatten(jax.tree.structure(out), outs)


def custom_padding(f: Callable[..., Any] | None = None, *, fill: int | float | None = 0) -> Any:
    """Let a function have a padded version of its own.

    Args:
      f: a function of arrays at their exact sizes.
      fill: what the padding of the arguments holds when the padded version gets them, along every ragged
        axis; None leaves it as it is, which may be NaN.

    Example:
      >>> import jax, numpy as np, jaxbatch as jb
      >>> @jb.custom_padding
      ... def mean(x):
      ...     return x.mean(axis=0)
      >>> @mean.defpadded
      ... def _(lengths, x):
      ...     ((n, _),) = lengths
      ...     return x.sum(axis=0) / n
      >>> g = jb.mask(mean, spec=jb.spec("n, 2", "float32"))
      >>> print(g({"n": 2}, np.array([[1, 2], [3, 4], [np.nan, 0]], np.float32)))
      [2. 3.]
    """
    if f is None:
        return lambda f: CustomPadding(f, fill)
    return CustomPadding(f, fill)


class _Version:
    """A version over flat leaves, of which the first `num_consts` are not its arguments.

    It is called with what it is told of each axis of each leaf, and the leaves.
    """

    def __init__(self, f: Callable[..., Any], tree: Any, num_consts: int):
        self._f, self._tree, self._num_consts = f, tree, num_consts

    def __call__(self, axes: Sequence[tuple[Any, ...]], leaves: Sequence[Any]) -> list[Any]:
        own = [part[self._num_consts :] for part in (axes, leaves)]
        return jax.tree.leaves(self._f(self._tree.unflatten(own[0]), *self._tree.unflatten(own[1])))


# --- the equation ----------------------------------------------------------------------------------


def _inline(*operands: Any, jaxpr: Any, **_: Any) -> Any:
    return jex_core.jaxpr_as_fun(jaxpr)(*operands)


@custom_padding_p.def_abstract_eval
def _abstract(*operands: Any, jaxpr: Any, **_: Any) -> Any:
    return jaxpr.out_avals


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    zeros = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_inline, **params), tuple(primals), tuple(zeros))


def _batch(args: Any, dims: Any, *, jaxpr: Any, padded: Any, packed: Any, fill: Any) -> Any:
    """Under `vmap`, all versions are batched; they are told nothing of the batch axis."""
    axes = list(dims)  # None where an operand is not batched
    batched = jax.vmap(jex_core.jaxpr_as_fun(jaxpr), in_axes=tuple(axes))
    closed = jax.make_jaxpr(batched)(*(jax.ShapeDtypeStruct(jnp.shape(a), a.dtype) for a in args))

    def rows(version: Any, known: Sequence[tuple[Any, ...]], leaves: Sequence[Any]) -> list[Any]:
        own = [
            tuple(each for a, each in enumerate(part) if a != axis)
            for part, axis in zip(known, axes, strict=True)
        ]
        return jax.vmap(lambda *xs: version(own, xs), in_axes=tuple(axes))(*leaves)

    versions = [version and functools.partial(rows, version) for version in (padded, packed)]
    outs = custom_padding_p.bind(*args, jaxpr=closed, padded=versions[0], packed=versions[1], fill=fill)
    return outs, [0] * len(outs)


custom_padding_p.def_impl(_inline)
ad.primitive_jvps[custom_padding_p] = _jvp
batching.primitive_batchers[custom_padding_p] = _batch
mlir.register_lowering(custom_padding_p, mlir.lower_fun(_inline, multiple_results=True))


@define("custom_padding", "user", note="the user's own padded version")
def _custom_padding(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    fill = eqn.params["fill"]
    if eqn.params["padded"] is None:
        return ctx.call(eqn, *_compat.open_jaxpr(eqn.params["jaxpr"]), xs)
    data = [
        x.data if fill is None else ctx.fill(x, range(len(x.shape)), np.asarray(fill, x.dtype)) for x in xs
    ]
    outs = eqn.params["padded"]([tuple(map(ctx.length, x.shape)) for x in xs], data)
    for out, var in zip(outs, eqn.outvars, strict=True):
        expected = ctx.shape(var.aval.shape)
        if jnp.shape(out) != expected or out.dtype != var.aval.dtype:
            ctx.refuse(
                eqn,
                f"has a padded version that returns {out.dtype}{list(jnp.shape(out))}, "
                f"expected {var.aval.dtype}{list(expected)}.",
            )
    return outs
