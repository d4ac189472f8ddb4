"""How an operation joins the table: by a function that draws operands, or by templates of expressions."""

from collections.abc import Callable, Sequence
from typing import Any

from programs import Draw, Op, Value

OPS: dict[str, tuple[float, Op]] = {}


def op(name: str, weight: float = 1.0) -> Callable[[Op], Op]:
    def register(make: Op) -> Op:
        OPS[name] = (weight, make)
        return make

    return register


def tame(code: str) -> str:
    return f"jnp.sin({code})"


def templates(
    name: str, weight: float, codes: Sequence[str], kind: str | None = "f", rank: Any = None
) -> None:
    """Register expressions of one value; `AXIS` stands for one of its axes, `SIZE` for its size there."""

    def make(d: Draw) -> tuple[str, Sequence[Value]]:
        code = d.choice(codes)
        needs_axis = "AXIS" in code or "SIZE" in code
        ranks = [r for r in (range(4) if rank is None else rank) if r > 0 or not needs_axis]
        x = d.pick(ranks, kind)
        axis = d.axis(x) if x.rank else 0
        if "AXIS" in code and "lax." not in code and d.rng.random() < 0.3:  # lax counts from the front
            code = code.replace("AXIS", str(axis - x.rank))
        return code.replace("AXIS", str(axis)).replace("SIZE", f"{{0}}.shape[{axis}]"), [x]

    OPS[name] = (weight, make)


def indexed(code: str, index: str) -> str:
    return code.replace("{1}", "{1}" + index)
