"""The user's function as data: one finished jaxpr over symbolic sizes.

`trace` runs the function once with named unknown sizes. Every use of a size is then explicit: in
shapes, in shape parameters, and as `dim_as_value` where it is used as a number. Promise kept here: what
the trace cannot settle (a Python branch on a size, an equality test that JAX would answer False) is
refused, never guessed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from . import _branches, _compat
from ._branches import Bounds, SizeTestError
from ._closed_over import hoist
from ._errors import MaskError

Dim = Any  # an int, or a symbolic dimension such as 2*n + 1
Shape = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of array leaves, traced once at symbolic sizes.

    Attributes:
      jaxpr: the traced function, over `consts` and then the flat input leaves.
      consts: the arrays that the function closed over; arguments of every compiled program, never baked in.
      dims: the ragged dims, in the order of `bounds`.
      bounds: the smallest and largest length of each dim, inclusive, for which the trace holds.
      out_tree: the function's own output structure.
      name: the function's name, for messages.
      failures: bounds of lengths at which the function itself raises; the program does not hold for them.
    """

    jaxpr: jex_core.Jaxpr
    consts: tuple[Any, ...]
    dims: tuple[str, ...]
    bounds: Bounds
    out_tree: Any
    name: str
    failures: tuple[Bounds, ...] = ()

    @property
    def in_avals(self) -> list[Any]:
        """Shape and dtype of every input leaf; shapes may be symbolic."""
        return [v.aval for v in self.jaxpr.invars[len(self.consts) :]]

    @property
    def out_avals(self) -> list[Any]:
        """Shape and dtype of every output leaf; shapes may be symbolic."""
        return [v.aval for v in self.jaxpr.outvars]

    @property
    def num_pieces(self) -> int:
        """How many traces it is made of: more than one where the function branches on a size."""
        last = self.jaxpr.eqns[-1] if self.jaxpr.eqns else None
        if last is None or last.primitive is not _branches.size_switch_p:
            return 1
        return sum(1 for _ in last.params["jaxprs"])

    @property
    def may_not_end(self) -> bool:
        """Whether it has a loop that its data end, or calls back: not to be run on made-up data."""
        names = (inner.primitive.name for eqn in self.jaxpr.eqns for inner in walk(eqn))
        return bool(self.jaxpr.effects) or any(name == "while" or "callback" in name for name in names)

    def out_shapes(self, lengths: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        """Return the valid shape of every output leaf for an example of these lengths."""
        return tuple(evaluate_shape(aval.shape, lengths) for aval in self.out_avals)


def evaluate_shape(shape: Shape, env: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a shape with every dimension evaluated."""
    return tuple(_compat.evaluate(dim, env) for dim in shape)


def symbolic_dims(bounds: Bounds) -> dict[str, Dim]:
    """Return one symbolic dimension per name, all in one scope, known to lie within `bounds`."""
    if not bounds:
        return {}
    constraints = [f"{name} >= {max(lo, 1)}" for name, (lo, _) in bounds.items()]
    constraints += [f"{name} <= {hi}" for name, (_, hi) in bounds.items()]
    return dict(
        zip(bounds, jax.export.symbolic_shape(", ".join(bounds), constraints=constraints), strict=True)
    )


def trace(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    bounds: Bounds,
    *,
    name: str | None = None,
    derived: bool = False,
    partial: bool = False,
) -> Program:
    """Trace `f(*leaves)` at symbolic sizes.

    Args:
      f: a function of array leaves.
      leaves: one `jax.ShapeDtypeStruct` per leaf; shapes may use dims from `symbolic_dims(bounds)`.
      bounds: the smallest and largest length of each ragged dim.
      name: what messages call the function.
      derived: `f` is the derivative of another program: what JAX cannot trace may exist at fixed sizes.
      partial: let a function that raises at some lengths only (`top_k` of too few) have a program for the
        others; the caller must look at `failures`.

    Raises:
      MaskError: the function branches on a size, or tests a size for equality, so that one program
        cannot stand for all sizes.
    """
    label = name or getattr(f, "__name__", "the function")
    return _trace(f, leaves, bounds, label, derived, partial, _branches.MAX_PIECES)


def _trace(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    bounds: Bounds,
    name: str,
    derived: bool,
    partial: bool,
    pieces: int,
) -> Program:
    """Trace; where a branch on a size cannot be decided, trace at most `pieces` parts of the bounds."""
    try:
        return _trace_once(f, leaves, bounds, name, derived)
    except SizeTestError as error:
        halves = None if error.difference is None else _branches.split(error.difference, bounds)
        if halves is None or pieces < 2:
            raise
        programs, raised = [], []
        for half in halves:
            try:
                programs.append(_trace(f, _within(leaves, half), half, name, derived, partial, pieces - 1))
            except MaskError:
                raise
            except Exception as own:
                if not partial:
                    raise
                raised.append((half, own))
        if not programs:
            raise raised[0][1] from None
        if sum(program.num_pieces for program in programs) > pieces:
            raise
        failures = [half for half, _ in raised] + [each for program in programs for each in program.failures]
        return dataclasses.replace(_joined(programs, leaves, bounds, name), failures=tuple(failures))


def _trace_once(
    f: Callable[..., Any], leaves: Sequence[Any], bounds: Bounds, name: str, derived: bool
) -> Program:
    def decide(test: str, line: str, difference: Any) -> bool:
        if derived and not line:
            return False  # JAX's own test, in a derivative that `_primal` has replaced
        equal = None if difference is None else _branches.is_zero(difference, bounds)
        if equal is not None:
            return equal
        where = line or "a function of JAX's own"
        raise SizeTestError(
            f"{name}: {where} depends on {test}, which differs between examples, so one program cannot serve "
            f"them all. Compute it with jnp.where, or declare the dim as a fixed size.",
            difference,
        )

    try:
        with _compat.watch_size_tests(decide):
            closed, out_shape = jax.make_jaxpr(f, return_shape=True)(*leaves)
    except jex_core.InconclusiveDimensionOperation as error:
        raise SizeTestError(
            f"{name}: {_user_line(error)}the function branches on a size, or needs it to be a constant. "
            f"{_first_sentence(error)} Write it with jnp.where, or declare the dim as a fixed size.",
            _branches.compared(str(error)),
        ) from error
    except MaskError:
        raise
    except Exception as error:
        if not bounds or not derived and not _works_at_fixed_sizes(f, leaves, bounds):
            raise  # the function's own error
        problem = "has no derivative at an unknown size" if derived else "needs a constant size"
        raise MaskError(
            f"{name}: {_user_line(error)}an operation {problem}. {type(error).__name__}: "
            f"{_first_sentence(error)} Rewrite that line, or run such inputs at their exact sizes."
        ) from error
    jaxpr, consts = hoist(closed)
    return Program(
        jaxpr=jaxpr,
        consts=consts,
        dims=tuple(bounds),
        bounds=dict(bounds),
        out_tree=jax.tree.structure(out_shape),
        name=name,
    )


def _within(leaves: Sequence[Any], bounds: Bounds) -> list[Any]:
    """Return the same leaves at dims within narrower bounds; a dim with one length left is that number."""
    dims: dict[str, Any] = {name: lo for name, (lo, hi) in bounds.items() if lo == hi}
    dims |= symbolic_dims({name: b for name, b in bounds.items() if name not in dims})
    return [
        jax.ShapeDtypeStruct(evaluate_shape(leaf.shape, dims), leaf.dtype, weak_type=leaf.weak_type)
        for leaf in leaves
    ]


def _joined(programs: Sequence[Program], leaves: Sequence[Any], bounds: Bounds, name: str) -> Program:
    """Return one program that switches between programs of narrower bounds."""
    if len({program.out_tree for program in programs}) > 1:
        raise MaskError(
            f"{name}: a branch on a size changes the structure of the output. Return the same structure from "
            f"both sides, or declare the dim as a fixed size."
        )
    whole = {d: dim for leaf in leaves for size in leaf.shape for d, dim in _plain_dims(size).items()}
    try:
        outs = _branches.common_outs([(p.bounds, p.out_avals) for p in programs], whole)
    except MaskError as error:
        raise error.with_context(name) from None
    consts = [const for program in programs for const in program.consts]
    jaxprs = []
    for i, program in enumerate(programs):
        begin = sum(len(p.consts) for p in programs[:i])

        def run(*operands: Any, program: Program = program, begin: int = begin) -> Any:
            own = operands[begin : begin + len(program.consts)]
            closed = jex_core.ClosedJaxpr(program.jaxpr, [])
            return jex_core.jaxpr_as_fun(closed)(*own, *operands[len(consts) :])

        structs = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in consts]
        inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in program.in_avals]
        jaxprs.append(jax.make_jaxpr(run)(*structs, *inputs))
    pieces = [program.bounds for program in programs]
    closed = jax.make_jaxpr(lambda *xs: _branches.switch(xs, jaxprs, pieces, outs))(
        *(jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in consts), *leaves
    )
    jaxpr = _compat.consts_as_inputs(closed)
    return Program(jaxpr, tuple(consts), tuple(bounds), dict(bounds), programs[0].out_tree, name)


def _plain_dims(size: Dim) -> dict[str, Dim]:
    """Return the dims that occur in a size, by name, in its own scope."""
    names = _compat.dim_names(size)
    if not names:
        return {}
    return dict(zip(names, jax.export.symbolic_shape(", ".join(names), scope=size.scope), strict=True))


def _works_at_fixed_sizes(f: Callable[..., Any], leaves: Sequence[Any], bounds: Bounds) -> bool:
    """Tell whether the function can be traced at the largest sizes, without any symbol."""
    top = {dim: hi for dim, (_, hi) in bounds.items()}
    structs = [jax.ShapeDtypeStruct(evaluate_shape(leaf.shape, top), leaf.dtype) for leaf in leaves]
    try:
        jax.eval_shape(f, *structs)
    except Exception:
        return False
    return True


def _first_sentence(error: BaseException) -> str:
    """Return the first line of an error's text, with a full stop behind it."""
    first = (str(error).splitlines() or [""])[0].strip()
    return first if first.endswith((".", ":")) else f"{first}."


def _user_line(error: BaseException) -> str:
    """Return `file:line: ` of the innermost frame that is the user's own, if any."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _compat.is_user_frame(traceback.tb_frame):
            found = f"{code.co_filename}:{traceback.tb_lineno} ({code.co_name}): "
        traceback = traceback.tb_next
    return found


def walk(eqn: jex_core.JaxprEqn) -> Iterator[jex_core.JaxprEqn]:
    """Yield an equation and every equation inside its own jaxprs."""
    yield eqn
    for jaxpr in jex_core.jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            yield from walk(inner)
