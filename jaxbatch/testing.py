"""For your own tests: does padding reach a result of this function?

`assert_padding_invariant` compares a function, batched in several ways with several poisons in the padding,
with itself on each unpadded example. `padding_value` sets the poison for a test of your own.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from ._batched import Batched, batched
from ._errors import MaskError
from ._grid import Grid
from ._invariance import Case
from ._invariance import padding_value as padding_value
from ._masking import mask
from ._packing import pack

POISONS = (0.0, 1.0, -1e30, 1e30, math.nan, math.inf)
"""What stands in the padding, in turn; integers take the nearest value they have."""


def assert_padding_invariant(
    f: Callable[..., Any],
    *args: Any,
    in_axes: int | None | Sequence[int | None] = 0,
    spec: Any = None,
    grid: Grid | None = None,
    grad: bool = False,
    per_example: bool = True,
    mask_arg: str | None = None,
    poisons: Sequence[int | float] = POISONS,
    layouts: Sequence[Literal["padded", "packed"]] = ("padded",),
) -> None:
    """Raise unless batching and padding change nothing about `f` on these examples.

    The examples are run together, each alone, and in a bucket twice as large as they need, with every poison
    of `poisons` in the padding. Shapes, dtypes and trees must be those of `f` on each unpadded example;
    values must be close (within 1e-5 x max(1, largest magnitude) in float32, at matmul precision "highest"),
    and equal bit for bit under all poisons. Where `f` raises, the batch must raise the same class.

    Args:
      f: the function of one example.
      args: as in a call of `batched(f, in_axes, ...)`: lists in the place of per-example arguments.
      in_axes: as in `batched`.
      spec: as in `batched`.
      grid: as in `batched`; None takes powers of two that hold the examples.
      grad: also compare the gradients of a random weighting of all outputs, through `jaxbatch.mask`, in all
        floating arguments (shared ones summed over the examples); those of padding must be exactly 0.
      per_example: as in `batched`. What `f` gives for one example is then what it gives for a batch of that
        example alone, unpadded and with a mask that is True everywhere.
      mask_arg: as in `batched`.
      layouts: how the examples lie in rows: as in `batched`, each of these in turn. With "packed" they are
        neighbours of each other, and the poisons stand between and behind them.
      poisons: what stands in the padding, in turn. A function that masks itself may rely on the zeros that
        calls put there; pass those values that it must stand.

    Raises:
      ValueError: `grad` for a function that masks itself; differentiate it as it is.
      AssertionError: it names the output, the example, the poison and the neighbours.
      MaskError: the function is refused, or cannot be packed and is to be.

    Example:
      >>> import numpy as np, jaxbatch as jb
      >>> xs = [np.ones(3, np.float32), np.ones(5, np.float32)]
      >>> def normalise(x):
      ...     return x / x.sum()
      >>> jb.testing.assert_padding_invariant(normalise, xs, spec=jb.spec("n", "float32"), grad=True)
    """
    if grad and not per_example:
        raise ValueError(
            "assert_padding_invariant: grad=True is for functions of one example. Differentiate one that "
            "masks itself as it is."
        )
    wrap = functools.partial(batched, f, in_axes, spec=spec, per_example=per_example, mask_arg=mask_arg)
    if not layouts or set(layouts) - {"padded", "packed"}:
        raise ValueError(
            f"assert_padding_invariant: layouts={layouts!r}; name one or both of 'padded' and 'packed'."
        )
    wrap = functools.partial(batched, f, in_axes, spec=spec, per_example=per_example, mask_arg=mask_arg)
    with jax.default_matmul_precision("highest"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was made anew")  # tests make functions anew
        case = Case(wrap(grid=grid), args, poisons)
        if "padded" in layouts:
            own = grid or Grid.infer(case.lengths)
            larger = Grid(**{dim: 2 * top for dim, top in own.limits.items()}, rows=case.num + 1)
            _compare_values(case, "", wrap(grid=own), "in a larger bucket", wrap(grid=larger))
            if grad:
                case.compare_gradients(mask(f, in_axes, spec=spec, grid=own), own)
        if "packed" in layouts:
            tops = (grid or Grid.infer(case.lengths)).limits
            rows = {dim: (top, 2 * top) for dim, top in tops.items()}
            own = grid or Grid((1, 2), None, None, **rows)
            larger = Grid(2, None, case.num, **{dim: 4 * top for dim, top in tops.items()})
            packed = functools.partial(wrap, layout="packed")
            _compare_values(case, "packed ", packed(grid=own), "in a larger row", packed(grid=larger))
            if grad:
                (longest,) = tops.values()
                case.compare_packed_gradients(pack(f, in_axes, spec=spec, grid=own, longest=longest), longest)


def _compare_values(case: Case, how: str, run: Batched, where: str, larger: Batched) -> None:
    case.compare(f"{how}together", run, range(case.num))
    if refusal := next((note for note in run.statistics().notes if note.startswith("padded only")), None):
        raise MaskError(f"assert_padding_invariant: layouts has 'packed', and this function is {refusal}")
    for i in range(case.num):
        case.compare(f"{how}alone", run, [i])
    case.compare(f"{how}{where}", larger, range(case.num))
