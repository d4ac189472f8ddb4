"""What compiled programs are known by on disk, so that a warm start need not trace and lower each of them.

All programs of a function come from one: the masked, batched function at symbolic sizes, with which `save`
fills an artifact as well. If its StableHLO is equal in two processes, and so are this library, the grid and
the bucket, then so is the bucket's program, and only the symbolic one has to be lowered. That holds for code
that does the same at symbolic sizes and at those of a bucket, which is known of JAX and of this library. A
user's own rules may do anything at certain sizes; with these, each program is lowered and looked up itself.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._mask import rules
from ._program import Program, evaluate_shape, symbolic_dims, walk

_MAX_ROWS = 2**31 - 1
_LOCATION = re.compile(r"^#loc.*$| loc\(#loc\d*\)", re.MULTILINE)  # where the user's lines were
_OPEN = {"custom_padding", "custom_vmap_call"}  # these call code of the user's at the sizes of a bucket


def symbolic_text(
    program: Program,
    make: Callable[[Mapping[str, Any]], Callable[..., Any]],
    dims: Sequence[str],
    shared: Sequence[Any],
) -> str | None:
    """Return the programs of all buckets as one text, or None if that cannot say what each of them is.

    Args:
      program: what was traced.
      make: returns the function that a program is compiled from, for certain sizes.
      dims: the ragged dims, in the order of the columns of lengths.
      shared: shapes and dtypes of the shared leaves.
    """
    if not _is_closed(program):
        return None
    bounds = {"rows": (1, _MAX_ROWS), **{dim: program.bounds[dim] for dim in dims}}
    sizes = symbolic_dims(bounds)
    rows = sizes["rows"]
    avals = program.in_avals[len(shared) :]
    examples = [
        jax.ShapeDtypeStruct((rows, *evaluate_shape(aval.shape, sizes)), aval.dtype) for aval in avals
    ]
    lengths = jax.ShapeDtypeStruct((rows, len(dims)), np.int32)
    consts = [jax.ShapeDtypeStruct(const.shape, const.dtype) for const in program.consts]
    run = make(sizes)
    run.__name__ = "buckets"
    try:
        exported = jax.export.export(jax.jit(run))(lengths, consts, list(shared), examples)
    except Exception:  # some operations have no symbolic form, and some effects cannot be exported
        return None
    return _LOCATION.sub("", exported.mlir_module())


def _is_closed(program: Program) -> bool:
    """Tell whether nothing but JAX and this library decides how the program looks at some size."""
    known = {name for name, rule in rules().items() if rule.family != "user"} - _OPEN
    primitives = {inner.primitive for eqn in program.jaxpr.eqns for inner in walk(eqn)}
    return all(primitive.name in known for primitive in primitives)
