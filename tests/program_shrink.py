"""Make a failing program smaller: fewer outputs and steps, values turned into inputs, simpler expressions."""

import dataclasses
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from programs import Input, Program, Step

import jaxbatch as jb


def shrink(program: Program, fails: Callable[[Program], bool], *, budget: int = 80) -> Program:
    """Return a smaller program that still fails.

    Args:
      program: one for which `fails` is true.
      fails: tells whether a program still shows the same failure; it must not raise.
      budget: how many programs to try at most.
    """
    improved = True
    while improved:
        improved = False
        for candidate in _smaller(program):
            if budget == 0:
                return program
            budget -= 1
            if fails(candidate):
                program, improved = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with something left out, the boldest changes first."""
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield dataclasses.replace(program, outputs=(name,)).pruned()
    shapes = _shapes(program)
    for k, step in reversed(list(enumerate(program.steps))):
        rest = program.steps[:k] + program.steps[k + 1 :]
        as_input = _as_input(step, shapes)
        if as_input is not None and step.target not in program.outputs:
            yield dataclasses.replace(program, inputs=(*program.inputs, as_input), steps=rest).pruned()
    for k, step in reversed(list(enumerate(program.steps))):
        rest = program.steps[:k] + program.steps[k + 1 :]
        for name in dict.fromkeys(
            [*(i.name for i in program.inputs), *(s.target for s in program.steps[:k])]
        ):
            if shapes.get(name) == shapes.get(step.target):
                swapped = [_renamed(s, step.target, name) for s in rest]
                outputs = tuple(name if o == step.target else o for o in program.outputs)
                if name not in program.outputs:
                    yield dataclasses.replace(program, steps=tuple(swapped), outputs=outputs).pruned()
    for k, step in enumerate(program.steps):
        for code in _simpler(step.code):
            steps = (*program.steps[:k], dataclasses.replace(step, code=code), *program.steps[k + 1 :])
            yield dataclasses.replace(program, steps=steps).pruned()


def _renamed(step: Step, old: str, new: str) -> Step:
    return dataclasses.replace(step, operands=tuple(new if o == old else o for o in step.operands))


def _simpler(code: str) -> Iterator[str]:
    """Yield an expression without the bounded function around it or a factor in front."""
    for pattern in (
        r"jnp\.sin\((.*)\)",
        r"0\.\d \* (.*)",
        r"jnp\.clip\((.*), -3, 3\)",
        r"(.*) \* jnp\.cos\(\{0\}\.mean\(\)\)(.*)",
    ):
        found = re.fullmatch(pattern, code)
        if found and found[1].count("(") == found[1].count(")"):
            yield "".join(found.groups())


def _shapes(program: Program) -> dict[str, tuple[str, str]]:
    """Return the true shape and the dtype of every value as text; nothing if they cannot be traced."""
    own = [jb.spec(i.shape, i.dtype) for i in program.inputs]
    constraints = [c for d, k in program.sizes.items() for c in (f"{d} >= 1", f"{d} <= {k}")]
    symbols = jax.export.symbolic_shape(", ".join(program.sizes), constraints=constraints)
    env = dict(zip(program.sizes, symbols, strict=True))
    names = [*(i.name for i in program.inputs), *(s.target for s in program.steps)]
    everything = dataclasses.replace(program, outputs=tuple(names))
    try:
        structs = [jax.ShapeDtypeStruct(s.shape(env), s.dtype) for s in own]
        outs = jax.eval_shape(everything.function(), *structs)
    except Exception:  # a candidate may be no program at all
        return {}
    return {
        name: (", ".join(str(d).replace(" ", "") for d in out.shape), np.dtype(out.dtype).name)
        for name, out in zip(names, outs, strict=True)
    }


def _as_input(step: Step, shapes: dict[str, tuple[str, str]]) -> Input | None:
    """Return an input that takes a step's place, if a spec can express its shape."""
    if step.target not in shapes:
        return None
    shape, dtype = shapes[step.target]
    try:
        jb.spec(shape, dtype)
    except ValueError:
        return None
    return Input(step.target, shape, dtype)
