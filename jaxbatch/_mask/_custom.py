"""`custom_padding`: attach to a function the padded version to use, in the manner of `jax.custom_vjp`.

For kernels that take lengths, and for functions whose padded form the rules do not know or do slowly.
Called at fixed sizes the function is itself. In a symbolic trace it becomes one equation, and the rule of
that equation calls the padded version. Derivatives are those of the function itself, masked by rule.
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

    def defpadded(self, padded: Callable[..., Any]) -> Callable[..., Any]:
        """Set the padded version, `padded(lengths, *args)`; usable as a decorator.

        `lengths` has the structure of `args` with a tuple in the place of each array: its valid size along
        every axis, an int or, where it is ragged, an int32 scalar. The arrays are padded at the end of each
        ragged axis. The result must have padded shapes and equal that of the function on the valid part,
        whatever the padding holds; it may hold anything elsewhere.
        """
        self._padded = padded
        return padded

    def __call__(self, *args: Any) -> Any:
        """Call the function; keyword arguments go through `functools.partial`."""
        leaves, tree = jax.tree.flatten(args)
        if self._padded is None or not any(mentions_dims(jnp.shape(leaf)) for leaf in leaves):
            return self._f(*args)
        closed, out = jax.make_jaxpr(lambda *xs: self._f(*tree.unflatten(xs)), return_shape=True)(*leaves)
        jaxpr = jex_core.ClosedJaxpr(_compat.consts_as_inputs(closed), [])
        outs = custom_padding_p.bind(
            *closed.consts,
            *leaves,
            jaxpr=jaxpr,
            padded=_Padded(self._padded, tree, len(closed.consts)),
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


class _Padded:
    """A padded version over flat leaves, of which the first `num_consts` are not its arguments."""

    def __init__(self, f: Callable[..., Any], tree: Any, num_consts: int):
        self._f, self._tree, self._num_consts = f, tree, num_consts

    def __call__(self, lengths: Sequence[tuple[Any, ...]], leaves: Sequence[Any]) -> list[Any]:
        own = [part[self._num_consts :] for part in (lengths, leaves)]
        return jax.tree.leaves(self._f(self._tree.unflatten(own[0]), *self._tree.unflatten(own[1])))


# --- the equation ----------------------------------------------------------------------------------


def _inline(*operands: Any, jaxpr: Any, padded: Any, fill: Any) -> Any:
    return jex_core.jaxpr_as_fun(jaxpr)(*operands)


@custom_padding_p.def_abstract_eval
def _abstract(*_: Any, jaxpr: Any, padded: Any, fill: Any) -> Any:
    return jaxpr.out_avals


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    zeros = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_inline, **params), tuple(primals), tuple(zeros))


def _batch(args: Any, dims: Any, *, jaxpr: Any, padded: Any, fill: Any) -> Any:
    """Under `vmap`, both versions are batched; the batch axis has no length of its own."""
    axes = list(dims)  # None where an operand is not batched
    batched = jax.vmap(jex_core.jaxpr_as_fun(jaxpr), in_axes=tuple(axes))
    closed = jax.make_jaxpr(batched)(*(jax.ShapeDtypeStruct(jnp.shape(a), a.dtype) for a in args))

    def padded_rows(lengths: Sequence[tuple[Any, ...]], leaves: Sequence[Any]) -> list[Any]:
        own = [
            tuple(size for a, size in enumerate(part) if a != axis)
            for part, axis in zip(lengths, axes, strict=True)
        ]
        return jax.vmap(lambda *xs: padded(own, xs), in_axes=tuple(axes))(*leaves)

    outs = custom_padding_p.bind(*args, jaxpr=closed, padded=padded_rows, fill=fill)
    return outs, [0] * len(outs)


custom_padding_p.def_impl(_inline)
ad.primitive_jvps[custom_padding_p] = _jvp
batching.primitive_batchers[custom_padding_p] = _batch
mlir.register_lowering(custom_padding_p, mlir.lower_fun(_inline, multiple_results=True))


@define("custom_padding", "user", note="the user's own padded version")
def _custom_padding(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    fill = eqn.params["fill"]
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
