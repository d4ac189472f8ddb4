"""The oracle for random programs: the unpadded function, for values and for gradients in both orders.

Wrong in compiled float32 alone is not yet wrong: a comparison or a rounding may turn one reassociation into a
large difference, and XLA itself miscompiles some programs (JAX 0.10.2 loses the body of a one-step loop in
front of a dot product with one row). So a mismatch is judged again in float64, not compiled as a whole.
"""

import dataclasses
import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.extend import core as jex_core
from programs import Input, Program

import jaxbatch as jb

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # relative to max(1, max|reference|)

# One row per kind of padding; the last mixes them cell by cell.
POISONS = (np.nan, np.inf, -1e30, 0.0, "mixed")
_MIXED = (np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, 1.0, -1.0)

Prepare = Callable[[Callable[..., Any]], Callable[..., Any]]  # how a function is run: compiled or not
Status = Literal["exact", "refused", "skipped", "wrong", "crashed", "unsure"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one program.

    Attributes:
      status: exact; refused by `MaskError`; skipped, since the function itself fails on these sizes; wrong;
        crashed, with another error; unsure: wrong when compiled in float32 and right in float64 step by step,
        or the function's own answer turns on its rounding.
      detail: the primitive and the reason of a refusal, the error, or where the number differs.
      stage: "values", "grad(mask)" or "mask(grad)".
      primitives: those of the traced program.
    """

    status: Status
    detail: str = ""
    stage: str = "values"
    primitives: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def failed(self) -> bool:
        return self.status in ("wrong", "crashed")


@functools.cache
def compiler_options() -> dict[str, Any]:
    """Return options that make XLA compile small CPU programs several times faster, those this JAX has."""
    wanted = {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return {name: value for name, value in wanted.items() if _accepted({name: value})}


def _accepted(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(f, compiler_options=compiler_options())


def step_by_step(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: f(*jax.tree.map(jnp.asarray, args))


# --- one program -----------------------------------------------------------------------------------


class Mismatch(Exception):
    """A number that differs from the unpadded function's."""


class Skip(Exception):
    """The unpadded function itself cannot run at any of the lengths."""


def check(program: Program, *, gradients: bool = False) -> Verdict:
    """Compare a program under `jb.mask` with the program itself."""
    verdict = _check(program, gradients, np.float32, compiled, compiled)
    if verdict.status != "wrong":
        return verdict
    with jax.enable_x64(True):
        again = _check(program, gradients, np.float64, compiled, step_by_step)
        if again.failed:
            again = _check(program, gradients, np.float64, step_by_step, step_by_step)
        if again.status == "wrong" and _turns_on_rounding(program):
            return dataclasses.replace(again, status="unsure")
    return again if again.failed else dataclasses.replace(verdict, status="unsure")


def _turns_on_rounding(program: Program) -> bool:
    """Tell whether inputs that differ in their last bits change the unpadded answer: a tie, a floor of 2."""
    trial = Trial(program, np.float64, step_by_step, step_by_step)
    if not trial.examples:
        return False
    wants = trial._reference
    for xs in trial.examples:
        for k in trial.inexact:
            xs[k] = xs[k] * (1 + 1e-14 * trial.rng.standard_normal(np.shape(xs[k])))
    moved = [trial.f(*map(jnp.asarray, xs)) for xs in trial.examples]
    pairs = zip(jax.tree.leaves(wants), jax.tree.leaves(moved), strict=True)
    return not all(np.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True) for a, b in pairs)


def same_failure(
    verdict: Verdict, gradients: bool, check: Callable[..., Verdict] = check
) -> Callable[[Program], bool]:
    """Return a test whether another program fails in the same way, for shrinking."""

    def kind(v: Verdict) -> tuple[str, str, str]:
        return v.status, v.stage, v.detail.split(":")[0] if v.status == "crashed" else ""

    return lambda program: kind(check(program, gradients=gradients)) == kind(verdict)


def _check(
    program: Program, gradients: bool, float_dtype: Any, prepare: Prepare, prepare_reference: Prepare
) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of 64-bit sizes in symbolic traces
        warnings.filterwarnings("error", module="jaxbatch")
        return _run_stages(Trial(program, float_dtype, prepare, prepare_reference), gradients)


def _run_stages(trial: "Trial", gradients: bool) -> Verdict:
    stages = {"values": trial.check_values}
    if gradients:
        stages |= {"grad(mask)": trial.check_grad_of_mask, "mask(grad)": trial.check_mask_of_grad}
    refusals = []
    for stage, run in stages.items():
        try:
            run()
        except jb.MaskError as error:
            refusals.append(Verdict("refused", _reason(str(error)), stage, trial.primitives))
            if stage == "values":
                break
        except Skip as error:
            return Verdict("skipped", str(error), stage, trial.primitives)
        except Mismatch as error:
            return Verdict("wrong", str(error), stage, trial.primitives)
        except Exception as error:
            text = _first_line(error)
            status = "skipped" if text in trial.own_failures else "crashed"
            return Verdict(status, text, stage, trial.primitives)
    return refusals[0] if refusals else Verdict("exact", primitives=trial.primitives)


def _first_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def _reason(message: str) -> str:
    """Return `primitive: reason` of a refusal, without dims and lines, so that equal ones can be counted."""
    found = re.search(
        r"`([\w-]+)`(?: over ragged .*?)? at <program \d+>:\S+(?: \(.*?\))?,? (.*?\.)(?: |$)", message
    )
    if found:
        return f"{found[1]}: {found[2]}"
    return (
        "trace: " + re.sub(r"\S*<program \d+>\S*( \(.*?\))?:?|'.*?'|[\d*+]*\b[nm]\b\S*", "..", message)[:160]
    )


class Trial:
    """One program at one float dtype: its inputs, padded and not, and the three comparisons."""

    def __init__(self, program: Program, float_dtype: Any, prepare: Prepare, prepare_reference: Prepare):
        self.program = program
        self.prepare, self.prepare_reference = prepare, prepare_reference
        self.dtype = np.dtype(float_dtype)
        self.f = program.function(self.dtype)
        self.rng = np.random.default_rng(program.seed)
        self.in_axes = tuple(None if i.shared else 0 for i in program.inputs)
        self.specs = tuple(jb.spec(i.shape, self._dtype(i)) for i in program.inputs)
        self.primitives: Counter[str] = Counter()
        self.lengths = [c for c in self._combinations()]
        self.examples = [self._example(c) for c in self.lengths]
        self._leave_out_what_fails()
        self.inexact = [k for k, i in enumerate(program.inputs) if i.dtype == "float32"]

    def _dtype(self, one: Input) -> str:
        return self.dtype.name if one.dtype == "float32" else one.dtype

    def _combinations(self) -> list[dict[str, int]]:
        """Return lengths to try: a full one, one of 1, and any, each dim by itself."""
        sizes, rng = self.program.sizes, self.rng
        dims = self.program.dims
        rows = []
        for k in range(3):
            kinds = [(k + i) % 3 for i in range(len(dims))]
            rows.append(
                {
                    d: (sizes[d], 1, int(rng.integers(2, sizes[d])))[kind]
                    for d, kind in zip(dims, kinds, strict=True)
                }
            )
        return rows

    def _example(self, lengths: Mapping[str, int]) -> list[np.ndarray]:
        return [i.draw({} if i.shared else lengths, self.rng, self.dtype) for i in self.program.inputs]

    def _leave_out_what_fails(self) -> None:
        """Keep the lengths at which the unpadded function runs, with the first one's shared arguments."""
        for xs in self.examples:
            for k, one in enumerate(self.program.inputs):
                if one.shared:
                    xs[k] = self.examples[0][k]
        kept, self.own_failures = [], []
        for lengths, xs in zip(self.lengths, self.examples, strict=True):
            try:
                jax.eval_shape(self.f, *xs)
            except Exception as error:  # such as the maximum of nothing
                self.own_failures.append(_first_line(error))
            else:
                kept.append((lengths, xs))
        self.lengths, self.examples = [c for c, _ in kept], [xs for _, xs in kept]

    # --- padding ---

    def _rows(self) -> Iterator[tuple[int, Any]]:
        """Yield the example and the poison of every row."""
        return ((i, poison) for i in range(len(self.examples)) for poison in POISONS)

    def _padded(self, arrays: Sequence[Sequence[Any]], shapes: Sequence[Any]) -> list[np.ndarray]:
        """Stack each argument's arrays, one a row, padded with the row's poison to its shape."""
        rng = np.random.default_rng(self.program.seed + 1)
        return [
            np.stack([pad(np.asarray(arrays[i][k]), shape, poison, rng) for i, poison in self._rows()])
            for k, shape in enumerate(shapes)
        ]

    @functools.cached_property
    def _arguments(self) -> list[Any]:
        """The arguments of the vmapped masked function."""
        shapes = [spec.shape(self.program.sizes) for spec in self.specs]
        padded = self._padded(self.examples, shapes)
        return [self.examples[0][k] if one.shared else padded[k] for k, one in enumerate(self.program.inputs)]

    @functools.cached_property
    def _stacked_lengths(self) -> dict[str, np.ndarray]:
        return {
            d: np.array([self.lengths[i][d] for i, _ in self._rows()], np.int32) for d in self.program.dims
        }

    def _masked(self, f: Callable[..., Any]) -> Any:
        own = tuple(s for s, one in zip(self.specs, self.program.inputs, strict=True) if not one.shared)
        return jb.mask(f, self.in_axes, spec=own[0] if len(own) == 1 else own)

    # --- the comparisons ---

    @functools.cached_property
    def _reference(self) -> list[Any]:
        try:
            return self.prepare_reference(lambda examples: [self.f(*xs) for xs in examples])(self.examples)
        except Exception as error:  # what JAX traces but cannot lower
            raise Skip(_first_line(error)) from error

    def check_values(self) -> None:
        if not self.examples:
            raise Skip(self.own_failures[0])
        wants = self._reference
        masked = self._masked(self.f)
        run = self.prepare(jax.vmap(masked, in_axes=(0, *self.in_axes)))
        try:
            outs = run(self._stacked_lengths, *self._arguments)
        finally:
            if masked._latest is not None:
                self.primitives.update(primitives(masked._latest.program.jaxpr))
        for lengths, want in zip(self.lengths, wants, strict=True):
            shapes = masked.out_lengths(lengths)
            for name, shape, w in zip(self.program.outputs, shapes, want, strict=True):
                if tuple(shape) != w.shape:
                    raise Mismatch(
                        f"{name} at {lengths}: the formula gives {tuple(shape)}, expected {w.shape}"
                    )
        self.allocated = [out.shape[1:] for out in outs]
        self._compare(self.program.outputs, outs, wants)

    def check_grad_of_mask(self) -> None:
        """Pull cotangents back through the masked function; their padding is poisoned as well."""
        wants = self._reference
        float_outs = [k for k, w in enumerate(wants[0]) if w.dtype == self.dtype]
        if not float_outs or not self.inexact or self._reference_gradients is None:
            return
        masked = self._masked(self.f)

        def pull_back(lengths: Any, cotangents: Any, *args: Any) -> Any:
            def run(*chosen: Any) -> Any:
                outs = masked(lengths, *_put(args, self.inexact, chosen))
                return [outs[k] for k in float_outs]

            return jax.vjp(run, *(args[k] for k in self.inexact))[1](cotangents)

        weights = [[constant_weight(w[k].shape, self.dtype) for k in float_outs] for w in wants]
        cotangents = self._padded(weights, [self.allocated[k] for k in float_outs])
        got = self.prepare(jax.vmap(pull_back, in_axes=(0, 0, *self.in_axes)))(
            self._stacked_lengths, cotangents, *self._arguments
        )
        self._compare_gradients(got)

    def check_mask_of_grad(self) -> None:
        if not self.inexact or self._reference_gradients is None:
            return
        masked = self._masked(self._gradient)
        got = self.prepare(jax.vmap(masked, in_axes=(0, *self.in_axes)))(
            self._stacked_lengths, *self._arguments
        )
        self._compare_gradients(got)

    @functools.cached_property
    def _gradient(self) -> Callable[..., Any]:
        def loss(*xs: Any) -> Any:
            terms = [(o * weight(o.shape, self.dtype)).sum() for o in self.f(*xs) if o.dtype == self.dtype]
            return sum(terms, jnp.zeros((), self.dtype))

        # jax.grad would call an argument `lengths`-like names; the masked function wants positional ones.
        gradient = jax.grad(loss, tuple(self.inexact))
        names = ", ".join(i.name for i in self.program.inputs)
        return eval(f"lambda {names}: gradient({names})", {"gradient": gradient})

    @functools.cached_property
    def _reference_gradients(self) -> list[Any] | None:
        """The gradients of the unpadded function, or None if it has none."""
        try:
            return self.prepare_reference(lambda examples: [self._gradient(*xs) for xs in examples])(
                self.examples
            )
        except Exception:  # such as reverse mode through a loop on data
            return None

    def _compare_gradients(self, got: Sequence[Any]) -> None:
        names = [f"gradient of {self.program.inputs[k].name}" for k in self.inexact]
        self._compare(names, got, self._reference_gradients or [])

    def _compare(self, names: Sequence[str], outs: Sequence[Any], wants: Sequence[Sequence[Any]]) -> None:
        """Compare the valid part of every row with the reference, and the rest with zero."""
        arrays = [np.asarray(out) for out in outs]
        for row, (i, poison) in enumerate(self._rows()):
            for name, out, want in zip(names, arrays, wants[i], strict=True):
                where = f"{name} at {self.lengths[i]}, padding {poison}"
                compare(out[row], np.asarray(want), TOLERANCE[self.dtype.name], where)


def compare(got: np.ndarray, want: np.ndarray, tolerance: float, where: str) -> None:
    """Raise `Mismatch` unless `got` equals `want` on its shape and is zero elsewhere."""
    if got.dtype != want.dtype:
        raise Mismatch(f"{where}: dtype {got.dtype}, expected {want.dtype}")
    valid = tuple(slice(0, k) for k in want.shape)
    cropped = got[valid]
    if cropped.shape != want.shape:
        raise Mismatch(f"{where}: allocated {got.shape} cannot hold {want.shape}")
    if want.dtype.kind == "f":
        scale = np.abs(want[np.isfinite(want)]).max(initial=1.0)
        close = np.isclose(cropped, want, rtol=0, atol=tolerance * scale, equal_nan=True)
    else:
        close = cropped == want
    if not np.all(close):
        at = tuple(int(k) for k in np.argwhere(~np.atleast_1d(close))[0])
        pair = np.atleast_1d(cropped)[at], np.atleast_1d(want)[at]
        count = f"{int((~close).sum())} of {want.size} cells differ"
        raise Mismatch(f"{where}: {count}, {pair[0]} at {at}, expected {pair[1]}")
    rest = np.array(got)
    rest[valid] = 0
    if np.any(rest != 0):
        raise Mismatch(f"{where}: the padding is not zero")


def pad(x: np.ndarray, shape: Sequence[int], poison: Any, rng: np.random.Generator) -> np.ndarray:
    """Pad the end of every axis with a poison, as near to it as the dtype allows."""
    if poison == "mixed":
        out = np.array([_as_dtype(p, x.dtype) for p in _MIXED], x.dtype)[
            rng.integers(0, len(_MIXED), tuple(shape))
        ]
    else:
        out = np.full(tuple(shape), _as_dtype(poison, x.dtype), x.dtype)
    out = np.array(out, x.dtype)
    out[tuple(slice(0, k) for k in x.shape)] = x
    return out


def _as_dtype(poison: float, dtype: np.dtype) -> Any:
    if dtype.kind == "f":
        return poison
    if dtype.kind == "b":
        return poison > 0
    info = np.iinfo(dtype)
    return info.min if np.isnan(poison) else int(np.clip(poison, float(info.min), float(info.max) - 1))


def weight(shape: Sequence[Any], dtype: Any) -> Any:
    """Return a cotangent that differs from cell to cell and does not depend on the size (maybe symbolic)."""
    phase = sum(((k + 1.3) * lax.broadcasted_iota(dtype, tuple(shape), k) for k in range(len(shape))), 0.4)
    return jnp.cos(jnp.asarray(phase, dtype))


def constant_weight(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return `weight` as a NumPy array, without compiling anything."""
    phase = 0.4 + sum(((k + 1.3) * axis for k, axis in enumerate(np.indices(shape))), np.zeros(shape))
    return np.cos(phase.astype(dtype))


def _put(args: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    out = list(args)
    for k, value in zip(places, values, strict=True):
        out[k] = value
    return out


def primitives(jaxpr: Any) -> Counter[str]:
    """Count the primitives of a jaxpr and of every jaxpr in it."""
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        found[eqn.primitive.name] += 1
        for inner in jex_core.jaxprs_in_params(eqn.params):
            found += primitives(inner)
    return found
