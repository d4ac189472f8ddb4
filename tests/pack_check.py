"""The oracle for packed random programs: the unpadded function on every segment, poison around.

As for `jb.mask`, a mismatch in compiled float32 is judged again in float64, not compiled as a whole.
"""

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
from masking import Case
from packing import assert_packed
from program_check import TOLERANCE, Prepare, Verdict, _first_line, _reason, compiled, step_by_step
from programs import Program

import jaxbatch as jb


def check(program: Program, *, gradients: bool = False) -> Verdict:
    """Compare a program of one ragged dim under `jb.pack` with the program itself."""
    verdict = _check(program, gradients, np.float32, compiled, compiled)
    if verdict.status != "wrong":
        return verdict
    with jax.enable_x64(True):
        again = _check(program, gradients, np.float64, compiled, step_by_step)
        if again.failed:
            again = _check(program, gradients, np.float64, step_by_step, step_by_step)
    return again if again.failed else dataclasses.replace(verdict, status="unsure")


def as_case(program: Program, gradients: bool, float_dtype: Any) -> Case | None:
    """Return the program as a case, at the lengths at which it runs; None if there is none, or other dims."""
    if program.dims != ["n"]:
        return None
    dtype = np.dtype(float_dtype)
    function = program.function(dtype)
    shared = [i for i in program.inputs if i.shared]
    own = [i for i in program.inputs if not i.shared]
    order = [[*shared, *own].index(i) for i in program.inputs]
    rng = np.random.default_rng(program.seed)
    size = program.sizes["n"]

    def f(*args: Any) -> Any:
        return function(*(args[k] for k in order))

    def runs(length: int) -> bool:
        xs = [i.draw({} if i.shared else {"n": length}, rng, dtype) for i in [*shared, *own]]
        try:
            jax.eval_shape(f, *xs)
        except Exception:  # such as the maximum of nothing
            return False
        return True

    names = {"float32": dtype.name}
    lengths = [n for n in (1, int(rng.integers(2, size)), size) if runs(n)]
    if not lengths:
        return None
    return Case(
        f,
        [f"{i.shape}:{names.get(i.dtype, i.dtype)}" for i in own],
        [i.draw({}, rng, dtype) for i in shared],
        lengths=lengths,
        size=size,
        grad=gradients,
        low=0 if any(i.dtype == "uint8" for i in own) else -3,
        high=9,
        tolerance=TOLERANCE[dtype.name],
    )


def _check(
    program: Program, gradients: bool, float_dtype: Any, prepare: Prepare, reference: Prepare
) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of 64-bit sizes in symbolic traces
        warnings.filterwarnings("error", module="jaxbatch")
        case = as_case(program, gradients, float_dtype)
        if case is None:
            return Verdict("skipped", "another dim, or no length at which it runs")
        try:
            jax.tree.map(
                np.asarray,
                reference(case.f)(
                    *map(jax.numpy.asarray, case.shared),
                    *case.example({"n": case.size}, np.random.default_rng(0)),
                ),
            )
        except Exception as error:  # what JAX traces but cannot lower
            return Verdict("skipped", _first_line(error))
        try:
            assert_packed(
                case,
                strict=False,
                neighbours="while_loop" not in program.source,
                prepare=prepare,
                reference=reference,
            )
        except AssertionError as error:
            return Verdict("wrong", " ".join(str(error).split())[:400])
        except jb.MaskError as error:
            return Verdict("refused", _reason(str(error)))
        except Exception as error:
            return Verdict("crashed", _first_line(error))
    return Verdict("exact")
