"""What a user says about a function, put together as a `Function`: its axes, its spec, its masks."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from ._errors import SpecError
from ._grid import Grid
from ._self_masking import SelfMasking, asked_for
from ._spec import Spec, argument_names, function_name
from ._traced import Function


def function_of(
    f: Callable[..., Any],
    in_axes: int | None | Sequence[int | None],
    spec: Any,
    grid: Grid | None,
    mask_arg: str | None,
    *,
    masks_itself: bool,
) -> Function:
    """Read `batched`'s arguments of the same names.

    Raises:
      SpecError: the spec cannot be read, or the grid has a dim that no example has.
      ValueError: `in_axes` holds something else than 0 and None, or `f` has no parameter `mask_arg`.
    """
    axes = tuple(in_axes) if isinstance(in_axes, Sequence) else None
    names = argument_names(f, None if axes is None else len(axes))
    if axes is None and masks_itself:
        given = ("lengths", mask_arg or "mask")
        names = tuple(itertools.takewhile(lambda name: name not in given, names))
    axes = (in_axes,) * len(names) if axes is None else axes
    if any(axis is not None and (isinstance(axis, bool) or axis != 0) for axis in axes) or 0 not in axes:
        raise ValueError(
            f"in_axes={in_axes}; use 0 for one value per example (at least once), None for shared."
        )
    flags = tuple(axis == 0 for axis in axes)
    example = _spec(f, spec, flags, names, masks_itself)
    dims = grid.dims if grid else example.dims
    if unknown := [dim for dim in dims if dim not in example.dims]:
        raise SpecError(
            f"the grid has dim `{unknown[0]}`, but the spec has {', '.join(example.dims) or 'none'}. Use the "
            f"names of the spec in the grid."
        )
    name = function_name(f)
    if not masks_itself:
        return Function(f, example, flags, name)
    plain_mask = mask_arg is not None and len(dims) == 1
    return SelfMasking(f, example, flags, name, dims, plain_mask, **asked_for(f, names, mask_arg))


def _spec(
    f: Callable[..., Any], spec: Any, flags: tuple[bool, ...], names: Sequence[str], masks_itself: bool
) -> Spec:
    if spec is None:
        try:
            return Spec.from_annotations(f, flags)
        except SpecError as error:
            if masks_itself:
                hint = (
                    f"{error} With per_example=False, pass spec=: it says what one example is, without rows."
                )
                raise SpecError(hint) from None
            raise
    own = tuple(name for name, one in zip(names, flags, strict=True) if one)
    trees = (spec,) if len(own) == 1 else spec
    if not isinstance(trees, tuple) or len(trees) != len(own):
        raise SpecError(f"spec must be a tuple with one entry for each of {', '.join(own)}; got {spec!r}.")
    return Spec.from_trees(trees, own)
