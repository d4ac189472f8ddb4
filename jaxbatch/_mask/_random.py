"""Rules for random draws of a ragged shape.

With JAX's default generator each draw depends on its row-major index alone, so a draw of the padded
shape holds the unpadded one as its prefix; cells are then put where the true shape has them.
"""

from typing import Any

import jax

from .. import _compat
from ._context import Context, Padded
from ._layout import reshape
from ._registry import define


@define(
    "random_bits random_split",
    "random",
    status="conditional",
    note="the default generator (threefry, partitionable) and a single key",
)
def _draw(ctx: Context, eqn: Any, key: Padded) -> Any:
    shape = eqn.params["shape"]
    if not any(map(_compat.is_symbolic, shape)):
        return ctx.bind(eqn, key.data)
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if str(key.dtype) != "key<fry>" or not partitionable:
        ctx.refuse(eqn, "draws a ragged shape from a generator whose draws depend on the whole shape.")
    if key.shape:
        ctx.refuse(eqn, "draws a ragged shape for many keys at once.")
    total = 1
    for dim in shape:
        total = total * dim
    flat = eqn.primitive.bind(key.data, **(eqn.params | {"shape": (ctx.size(total),)}))
    return reshape(ctx, Padded(flat, (total,)), shape)
