"""The only module that touches private JAX, and the only one that knows of JAX's versions.

It evaluates symbolic dimensions, lists all primitives, opens jaxprs of every version, finds the user's line
for an equation, and notices equality tests on symbolic sizes. It changes three things in JAX itself: what a
strided convolution's padding may be, how often the bounds of a size are worked out, and, from the first trace
on, what such an equality test does.
Everything is written for JAX 0.10 to 0.12; a name that disappears should break here, loudly.
"""

import contextlib
import inspect
import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import core
from jax._src import config as _config
from jax._src import source_info_util as _source_info
from jax._src.export import _export
from jax._src.export import shape_poly as _shape_poly
from jax._src.export import shape_poly_decision as _decision
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import convolution as _convolution
from jax.extend import core as jex_core

is_symbolic = jax.export.is_symbolic_dim

_source_info.register_exclusion(os.path.dirname(__file__) + os.sep)  # our own frames are nobody's line


# --- symbolic dimensions ---------------------------------------------------------------------------


def evaluate(dim: Any, env: Mapping[str, Any]) -> Any:
    """Return a dimension at `env`'s values for its names: ints, NumPy arrays, traced or symbolic."""
    if not is_symbolic(dim):
        return dim
    total: Any = 0
    for coefficient, factors in terms(dim):
        product: Any = coefficient
        for factor, power in factors:
            for _ in range(power):
                product = _evaluate_factor(factor, env) * product
        total = product + total
    return total


def _evaluate_factor(factor: Any, env: Mapping[str, Any]) -> Any:
    operation, operands = factor_operands(factor)
    if operation == "var":
        return env[operands[0]]
    a, b = (evaluate(operand, env) for operand in operands)
    match operation:
        case "floordiv":
            return a // b
        case "mod":
            return a % b
        case "max":
            return _extreme(a, b, max)
        case "min":
            return _extreme(a, b, min)
    raise NotImplementedError(
        f"This JAX version has a size operation {operation!r} that jaxbatch does not know."
    )


def _extreme(a: Any, b: Any, builtin: Callable[..., Any]) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return builtin(a, b)
    if is_symbolic(a) or is_symbolic(b):
        return (core.max_dim if builtin is max else core.min_dim)(a, b)
    if isinstance(a, core.Tracer) or isinstance(b, core.Tracer):
        return (jax.numpy.maximum if builtin is max else jax.numpy.minimum)(a, b)
    return (np.maximum if builtin is max else np.minimum)(a, b)


def dim_names(dim: Any) -> frozenset[str]:
    """Return the names that occur in a dimension; none for an int."""
    return frozenset(dim._get_vars()) if is_symbolic(dim) else frozenset()


def upper_bound(dim: Any) -> int | float:
    """Return the largest value that the constraints on its names allow a dimension; inf if there is none."""
    if not is_symbolic(dim):
        return dim
    return _shape_poly._bounds_decision(dim, _shape_poly.BoundsPrecision.BEST)[1]


def terms(dim: Any) -> list[tuple[int, list[tuple[Any, int]]]]:
    """Split a symbolic dimension into `coefficient, [(factor, power), ...]`; a constant has no factors."""
    return [(int(k), list(term._factors)) for term, k in dim._sorted_terms]


def factor_operands(factor: Any) -> tuple[str, tuple[Any, ...]]:
    """Return a factor's operation ("var", "floordiv", "mod", "max", "min") and its operands."""
    if factor.var is not None:
        return "var", (factor.var,)
    return factor.operation, tuple(factor.operands)


# --- primitives and equations ----------------------------------------------------------------------


def all_primitives() -> dict[str, jex_core.Primitive]:
    """Return every primitive that this JAX version defines, by its name."""
    found: dict[str, jex_core.Primitive] = {}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("jax._src."):
            for value in list(vars(module).values()):
                if isinstance(value, jex_core.Primitive):
                    found.setdefault(value.name, value)
    return found


def consts_as_inputs(closed: Any) -> Any:
    """Return a closed jaxpr as an open one whose closed-over arrays are its leading inputs."""
    # From JAX 0.12 on there is one Jaxpr class, which carries its constants itself.
    unified = isinstance(closed.jaxpr, type(closed))
    return _partial_eval.convert_constvars_jaxpr(closed if unified else closed.jaxpr)


def open_jaxpr(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an equation's inner jaxpr and its constants, whether it is closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def source_line(eqn: jex_core.JaxprEqn) -> str:
    """Return `file:line (function)` of the user's code that made an equation."""
    return _source_info.summarize(eqn.source_info)


@contextlib.contextmanager
def user_context(eqn: jex_core.JaxprEqn) -> Iterator[None]:
    """Give what is traced inside the source line and the name stack of `eqn`."""
    name_stack = _source_info.current_name_stack() + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=name_stack):
        yield


def interpret(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    apply: Callable[[jex_core.JaxprEqn, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Run a jaxpr, each equation by `apply(eqn, values)` under its own line, and return its outputs."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        with user_context(eqn), eqn.ctx.manager:
            outs = apply(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(eqn: jex_core.JaxprEqn, values: Sequence[Any], **overrides: Any) -> Sequence[Any]:
    """Run an equation as it is, but for some parameters, and return its outputs."""
    params = eqn.primitive.get_bind_params(eqn.params) | overrides
    outs = eqn.primitive.bind(*values, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def trace_context() -> Hashable:
    """Return the JAX settings that a trace or a compile depends on, those of the current thread included."""
    return _config.trace_context(), jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]


def thread_settings() -> Callable[[], None]:
    """Return a function that gives the JAX settings of this thread alone to the thread that calls it."""
    own = [
        (state, state.get_local())
        for state in vars(_config).values()
        if isinstance(state, _config.State) and state.get_local() is not _config.config_ext.unset
    ]

    def apply() -> None:
        for state, value in own:
            state(value).__enter__()  # for as long as the thread lives

    return apply


# Under vmap an output may be shared by all examples (a residual that depends on weights alone). From JAX 0.12
# on its cotangent is refused unless this option says how to sum it.
_GENERIC = "generic_batching" in inspect.signature(jax.custom_vjp.defvjp).parameters
DEFVJP_OPTIONS: dict[str, Any] = {"generic_batching": True} if _GENERIC else {}


def on_device(value: Any) -> Any:
    """Return a value that is a JAX array, also inside a batched tracer.

    JAX 0.10 lets NumPy arrays through `vmap` as they are, and fails on one that becomes a constant behind two
    custom differentiation rules ("non-canonical constant").
    """
    if isinstance(value, core.Tracer) and isinstance(getattr(value, "val", None), np.ndarray):
        return jax.lax.optimization_barrier(value)
    return value


class _SymbolicIndex:
    """The operator module, with an `index` that lets symbolic sizes pass."""

    def __getattr__(self, name: str) -> Any:
        return getattr(operator, name)

    @staticmethod
    def index(value: Any) -> Any:
        return value if is_symbolic(value) else operator.index(value)


# The gradient of a strided convolution pads by a symbolic amount, which the primitive takes and the check
# in front of it, `operator.index(padding)`, does not (JAX 0.10 to 0.12).
_convolution.operator = _SymbolicIndex()  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]


_MAX_BOUNDS = 5_000  # about a second


def _remember_bounds() -> None:
    """Work out the bounds of each part of a size once for the constraints at hand, and of not too many parts.

    JAX eliminates the terms of a size in every order, so that a few strided windows with `SAME` padding in a
    row take minutes to trace. Bounds that were given up are infinite, which is never wrong.
    """
    cls = _decision._DecisionByElimination
    work_out, add = cls._bounds_for_sorted_terms, cls.add_to_state

    def bounds(self: Any, scope: Any, e: Sequence[Any], i: int, prec: Any) -> Any:
        known = self.__dict__.setdefault("_jaxbatch_bounds", {})
        key = (tuple(e[i:]), prec)
        if key not in known:
            if len(known) > _MAX_BOUNDS:
                return -np.inf, np.inf
            known[key] = work_out(self, scope, e, i, prec)
        return known[key]

    def add_to_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.pop("_jaxbatch_bounds", None)
        return add(self, *args, **kwargs)

    cls._bounds_for_sorted_terms, cls.add_to_state = bounds, add_to_state


_remember_bounds()


# --- exported programs -----------------------------------------------------------------------------


def unstable_calls(exported: Any) -> set[str]:
    """Return what an exported program calls that JAX does not promise to keep, such as Python callbacks."""
    text = exported.mlir_module()
    targets = re.findall(r"custom_call @([\w.$]+|\"[^\"]*\")", text)
    targets += re.findall(r'call_target_name = "([^"]*)"', text)
    return {target.strip('"') for target in targets} - _export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE


# --- equality tests on symbolic sizes --------------------------------------------------------------

_MACHINERY = {
    "jax",
    "jaxlib",
    "jaxbatch",
    "numpy",
    "functools",
    "contextlib",
    "dataclasses",
    "weakref",
    "opt_einsum",
    "jaxtyping",
    "beartype",
}
_watch = threading.local()
_patch_lock = threading.Lock()


@contextlib.contextmanager
def watch_size_tests(on_test: Callable[[str, str, Any], bool]) -> Iterator[None]:
    """Call `on_test(expression, user_line, difference)` to decide an equality test on a symbolic size.

    JAX answers `n == 37` and a dict look-up by `n` with False when it cannot decide (its comment in
    `_DimExpr.__eq__` calls this unsound), and to Python any `n % 2` is true. Only tests made from the user's
    frames, in this thread, while this context is open, are reported, and those of JAX's own that change an
    answer, with "" for the line. `on_test` returns whether the sizes are equal, or raises.
    """
    _install_watch()
    previous = getattr(_watch, "on_test", None)
    _watch.on_test = on_test
    try:
        yield
    finally:
        _watch.on_test = previous


def _install_watch() -> None:
    """Wrap equality, hash and truth of symbolic dimensions, once a process; inert without a watcher."""
    cls = _shape_poly._DimExpr
    with _patch_lock:
        if hasattr(cls, "_jaxbatch_watched"):
            return
        plain_eq, plain_hash = cls.__eq__, cls.__hash__

        # Lambdas, so that the caller is the frame above: a type-checking import hook wraps other functions.
        frame = sys._getframe
        equal = lambda self, other: plain_eq(self, other) or _is_equal(self, other, "==", frame(1))  # noqa: E731
        unequal = lambda self, other: not (plain_eq(self, other) or _is_equal(self, other, "!=", frame(1)))  # noqa: E731
        hashed = lambda self: plain_hash(self) + _is_equal(self, None, "hash", frame(1))  # noqa: E731
        true = lambda self: not _is_equal(self, 0, "!=", frame(1))  # noqa: E731
        cls.__eq__, cls.__ne__, cls.__hash__ = equal, unequal, hashed  # pyright: ignore[reportAttributeAccessIssue]
        cls.__bool__ = true  # pyright: ignore[reportAttributeAccessIssue]
        cls._jaxbatch_watched = True  # pyright: ignore[reportAttributeAccessIssue]


# Functions of JAX's own whose answer depends on such a test: the derivative of `det` at size 1, padding to
# whole bytes, and the places of what is not zero in an array of no cell (0, whatever the fill value).
# Elsewhere JAX's own tests on sizes only save work.
_SPECIAL_CASES = ("_cofactor_solve", "packbits", "nonzero", "_nonzero_impl")


def _is_equal(dim: Any, other: Any, operation: str, frame: Any) -> bool:
    """Answer a test that JAX took for one of different sizes; report it if it matters and is undecided."""
    on_test = getattr(_watch, "on_test", None)
    if on_test is None:
        return False
    while frame.f_back is not None and _package(frame) == "numpy":
        frame = frame.f_back  # who called np.isin, np.array_equal
    by_user = is_user_frame(frame)
    if not (by_user or frame.f_code.co_name in _SPECIAL_CASES):
        return False
    _watch.on_test = None  # what follows compares sizes itself
    try:
        line = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if by_user else ""
        if operation == "hash":
            return on_test(f"a look-up by the size {dim}", line, None)
        other = _whole(other)
        return _may_be_equal(dim, other) and on_test(f"{dim} {operation} {other}", line, dim - other)
    finally:
        _watch.on_test = on_test


def is_user_frame(frame: Any) -> bool:
    """Tell whether a Python frame runs the user's code or a model library's, not JAX or jaxbatch."""
    return _package(frame) not in _MACHINERY and _source_info.is_user_filename(frame.f_code.co_filename)


def _package(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").split(".")[0]


def _whole(number: Any) -> Any:
    """Return a number of any type as the int that it equals; whatever else as it is."""
    if isinstance(number, (np.generic, np.ndarray, jax.Array)) and not isinstance(number, core.Tracer):
        number = np.asarray(number)[()]  # a number, if it has no axis
    if isinstance(number, (float, np.integer, np.floating)) and float(number).is_integer():
        return int(number)
    return number


def _may_be_equal(dim: Any, other: Any) -> bool:
    if not (is_symbolic(other) or isinstance(other, int)):
        return False  # a size never equals a string, None or 2.5
    try:
        return not (dim > other or dim < other)
    except jex_core.InconclusiveDimensionOperation:
        return True
