"""Random programs for the property test of `jb.mask`: data that prints as runnable code.

A program is a list of steps over named values; each step is one Python expression. The generator keeps the
symbolic shape of every value (JAX itself computes it), so that operations can be chosen to fit. A failing
program is made smaller by leaving out steps and by turning values into inputs.
"""

import dataclasses
import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import jaxbatch as jb
from jaxbatch._compat import evaluate

MAX_CELLS = 600  # of one value at the largest sizes
MAX_RANK = 3

# What the expressions of steps may use. Part of every printed program.
PRELUDE = '''\
import jax, numpy as np
from jax import lax, numpy as jnp

def K(seed, *shape):
    """A constant array of floats."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), F)

def I(seed, *shape, low=0, high=5):
    """A constant array of integers."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), np.int32)

@jax.custom_vjp
def clipped_gradient(x):
    return jnp.sin(x)

clipped_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))
'''


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program: per example, or shared by all examples."""

    name: str
    shape: str  # as in jb.spec
    dtype: str
    shared: bool = False

    def draw(self, lengths: Mapping[str, int], rng: np.random.Generator, float_dtype: Any) -> np.ndarray:
        shape = jb.spec(self.shape, self.dtype).shape(lengths)
        dtype = np.dtype(self.dtype)
        if dtype.kind == "f":
            return rng.standard_normal(shape).astype(float_dtype)
        low, high = {"b": (0, 2), "u": (0, 9)}.get(dtype.kind, (-3, 9))
        return rng.integers(low, high, shape).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: `target = code`, with `{0}`, `{1}` ... in the code standing for operands."""

    target: str
    op: str
    code: str
    operands: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.code.format(*self.operands)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function as data.

    Attributes:
      sizes: the padded size of each ragged dim; lengths lie between 1 and these.
      seed: also seeds the inputs and the poisons.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]
    seed: int

    @property
    def dims(self) -> list[str]:
        """The ragged dims of the inputs."""
        axes = [axis for i in self.inputs if not i.shared for axis in jb.spec(i.shape, i.dtype).axes]
        return [dim for dim in self.sizes if any(axis.dim == dim for axis in axes)]

    @property
    def source(self) -> str:
        """The function as Python code."""
        lines = [f"def f({', '.join(i.name for i in self.inputs)}):"]
        lines += [f"    {step.target} = {step.text}" for step in self.steps]
        return "\n".join([*lines, f"    return ({', '.join(self.outputs)},)"])

    def listing(self) -> str:
        """The function with its specs, as a script would have them."""
        axes = ", ".join("None" if i.shared else "0" for i in self.inputs)
        specs = ", ".join(f'jb.spec("{i.shape}", "{i.dtype}")' for i in self.inputs if not i.shared)
        shared = "".join(f"\n# shared {i.name}: {i.dtype}[{i.shape}]" for i in self.inputs if i.shared)
        return (
            f"# seed {self.seed}, padded sizes {dict(self.sizes)}\n{self.source}{shared}\n"
            f"masked = jb.mask(f, ({axes},), spec=({specs},))"
        )

    def function(self, float_dtype: Any = np.float32) -> Callable[..., tuple[Any, ...]]:
        """Return the function, its floats of the given dtype."""
        scope = dict(_prelude(np.dtype(float_dtype).name))
        exec(compile(self.source, f"<program {self.seed}>", "exec"), scope)
        return scope["f"]

    def pruned(self) -> "Program":
        """Return the program without steps and inputs that no output needs."""
        needed, steps = set(self.outputs), []
        for step in reversed(self.steps):
            if step.target in needed:
                needed |= set(step.operands)
                steps.append(step)
        inputs = tuple(i for i in self.inputs if i.name in needed)
        if all(i.shared for i in inputs):  # something must be ragged
            inputs = (self.inputs[0], *inputs)
        return dataclasses.replace(self, inputs=inputs, steps=tuple(reversed(steps)))


@functools.cache
def _prelude(float_name: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"F": np.dtype(float_name).type}
    exec(PRELUDE, scope)
    return scope


# --- drawing programs ------------------------------------------------------------------------------


class NoFit(Exception):
    """No value in the pool suits the operation."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value in the pool: its name and its true shape, ragged entries symbolic."""

    name: str
    shape: tuple[Any, ...]
    dtype: Any

    @property
    def kind(self) -> str:
        """Return "f", "i" or "b"."""
        return "i" if self.dtype.kind == "u" else self.dtype.kind

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def ragged(self) -> list[int]:
        return [a for a, dim in enumerate(self.shape) if jax.export.is_symbolic_dim(dim)]


class Draw:
    """The state of one drawing: a random generator and the pool of values so far."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.values: list[Value] = []

    def pick(
        self, rank: int | Sequence[int] | None = None, kind: str | None = "f", where: Any = None
    ) -> Value:
        """Return a value of the pool; late and ragged ones are likelier."""
        ranks = range(MAX_RANK + 1) if rank is None else (rank,) if isinstance(rank, int) else rank
        fits = [
            v
            for v in self.values
            if v.rank in ranks and (kind is None or v.kind in kind) and (where is None or where(v))
        ]
        if not fits:
            raise NoFit
        weights = [(1 + i) * (3 if v.ragged else 1) for i, v in enumerate(fits)]
        return self.rng.choices(fits, weights)[0]

    def mate(self, a: Value, kind: str | None = "f") -> tuple[Value, str]:
        """Return a value that broadcasts against `a` and the index that puts its axes in place."""
        b = self.pick(kind=kind, where=lambda v: _placed(v.shape, a.shape) is not None)
        places = _placed(b.shape, a.shape) or []
        if places == list(range(a.rank - b.rank, a.rank)):
            return b, ""
        return b, "[" + ", ".join(":" if k in places else "None" for k in range(a.rank)) + "]"

    def axis(self, v: Value, ragged: float = 0.8) -> int:
        """Return an axis of a value, a ragged one with that probability if there is one."""
        if v.rank == 0:
            raise NoFit
        return self.choice(v.ragged if v.ragged and self.rng.random() < ragged else list(range(v.rank)))

    def axes(self, v: Value) -> tuple[int, ...]:
        """Return some axes of a value, at least one."""
        if v.rank == 0:
            raise NoFit
        return tuple(sorted(self.rng.sample(range(v.rank), self.rng.randint(1, v.rank))))

    def choice(self, options: Sequence[Any]) -> Any:
        return self.rng.choice(options)

    def number(self) -> int:
        """Return a seed for a constant array."""
        return self.rng.randrange(100)


def same(a: Any, b: Any) -> bool:
    """Tell whether two dimensions are known to be equal."""
    return bool(a == b)


def _placed(shape: Sequence[Any], onto: Sequence[Any]) -> list[int] | None:
    """Return increasing axes of `onto` that `shape` can be broadcast along, the last ones if possible."""
    places, at = [], len(onto)
    for dim in reversed(shape):
        at -= 1
        while at >= 0 and not (same(dim, onto[at]) or same(dim, 1)):
            at -= 1
        if at < 0:
            return None
        places.append(at)
    return places[::-1]


Op = Callable[[Draw], tuple[str, Sequence[Value]]]


def generate(
    seed: int,
    ops: Mapping[str, tuple[float, Op]],
    refused: Counter[str] | None = None,
    *,
    most_dims: int = 2,
) -> Program:
    """Draw a program.

    Args:
      seed: the same seed, operations and JAX version give the same program.
      ops: weight and maker of each operation.
      refused: counts, by operation, what JAX could not trace at symbolic sizes.
      most_dims: of the ragged dims `n` and `m`.
    """
    draw = Draw(seed)
    rng = draw.rng
    dims = (["n", "m"] if rng.random() < 0.5 else ["n"])[:most_dims]
    sizes = {"n": rng.choice([6, 7, 8]), "m": rng.choice([4, 5])}
    sizes = {dim: sizes[dim] for dim in dims}
    constraints = [c for d, k in sizes.items() for c in (f"{d} >= 1", f"{d} <= {k}")]
    symbols = dict(
        zip(dims, jax.export.symbolic_shape(", ".join(dims), constraints=constraints), strict=True)
    )
    inputs = _inputs(rng, dims)
    for one in inputs:
        shape = () if one.shared else jb.spec(one.shape, one.dtype).shape(symbols)
        shape = jb.spec(one.shape, one.dtype).shape({}) if one.shared else shape
        draw.values.append(Value(one.name, tuple(shape), np.dtype(one.dtype)))
    steps: list[Step] = []
    num_steps = rng.randint(3, 9)
    names, weights = list(ops), [weight for weight, _ in ops.values()]
    for _ in range(num_steps * 5):
        name = rng.choices(names, weights)[0]
        try:
            code, operands = ops[name][1](draw)
        except NoFit:
            continue
        step = Step(f"v{len(steps)}", name, code, tuple(v.name for v in operands))
        value = _traced(step, operands, sizes, refused)
        if value is not None:
            draw.values.append(value)
            steps.append(step)
        if len(steps) == num_steps:
            break
    used = {name for step in steps for name in step.operands}
    outputs = [s.target for s in steps if s.target not in used] or [inputs[0].name]
    return Program(inputs, tuple(steps), tuple(outputs[-5:]), sizes, seed).pruned()


def _inputs(rng: random.Random, dims: list[str]) -> tuple[Input, ...]:
    shapes = {
        "n": [
            "n",
            "n, 4",
            "n, 2",
            "n, 3",
            "4, n",
            "n, n",
            "2, n, 3",
            "n, 2, 2",
            "n, 1",
            "2*n",
            "3, 2*n",
            "n+1, 2",
        ],
        "m": ["m", "m, 4", "3, m", "n, m", "m, n", "n, m, 2", "m, 2, n", "m, m", "n, 2, m"],
    }
    chosen = [
        rng.choice(shapes["n"][:8] if i == 0 else shapes[rng.choice(dims)]) for i in range(rng.randint(1, 2))
    ]
    if "m" in dims and not any("m" in c for c in chosen):
        chosen.append(rng.choice(shapes["m"]))
    if not any("n" in c for c in chosen):
        chosen.append("n, 4")
    inputs = [Input(f"x{i}", shape, "float32") for i, shape in enumerate(chosen)]
    if rng.random() < 0.7:
        shape = rng.choice([*shapes[rng.choice(dims)][:3], "3", "2, 2", ""])
        inputs.append(
            Input(f"x{len(inputs)}", shape, rng.choice(["int32", "int32", "bool", "int8", "uint8"]))
        )
    if rng.random() < 0.4:
        inputs.append(
            Input("w", rng.choice(["4", "4, 4", "4, 3", "2, 3", "8, 2", "8", "3, 4, 2"]), "float32", True)
        )
    return tuple(inputs)


def _traced(
    step: Step, operands: Sequence[Value], sizes: Mapping[str, int], refused: Counter[str] | None
) -> Value | None:
    """Return what a step makes, or None if JAX cannot trace it at symbolic sizes or it is too large."""
    known = {v.name: jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands}
    inputs = tuple(Input(name, "", "float32") for name in known)
    function = Program(inputs, (step,), (step.target,), sizes, 0).function()
    try:
        (out,) = jax.eval_shape(function, *known.values())
    except Exception as error:  # whatever JAX raises on a symbolic size
        if refused is not None:
            refused[f"{step.op}: {type(error).__name__}"] += 1
        return None
    if len(out.shape) > MAX_RANK or np.dtype(out.dtype).kind not in "fiub":
        return None
    if math.prod(evaluate(dim, sizes) for dim in out.shape) > MAX_CELLS:
        return None
    return Value(step.target, tuple(out.shape), np.dtype(out.dtype))
