"""For your own tests: does padding reach a result of this function?

`assert_padding_invariant` compares a function, batched in several ways with several poisons in the padding,
with itself on each unpadded example. `padding_value` sets the poison for a test of your own.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._batched import batched
from ._grid import Grid
from ._invariance import Case
from ._invariance import padding_value as padding_value
from ._masking import mask

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
      poisons: what stands in the padding, in turn. A function that masks itself may rely on the zeros that
        calls put there; pass those values that it must stand.

    Raises:
      ValueError: `grad` for a function that masks itself; differentiate it as it is.
      AssertionError: it names the output, the example, the poison and the neighbours.
      MaskError: the function is refused.

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
    with jax.default_matmul_precision("highest"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was made anew")  # tests make functions anew
        case = Case(wrap(grid=grid), args, poisons)
        grid = grid or Grid.infer(case.lengths)
        run = wrap(grid=grid)
        case.compare("together", run, range(case.num))
        for i in range(case.num):
            case.compare("alone", run, [i])
        larger = Grid(**{dim: 2 * top for dim, top in grid.limits.items()}, rows=case.num + 1)
        case.compare("in a larger bucket", wrap(grid=larger), range(case.num))
        if grad:
            case.compare_gradients(mask(f, in_axes, spec=spec, grid=grid), grid)
