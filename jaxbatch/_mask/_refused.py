"""What is refused on purpose, each with its reason.

A primitive that is not in the table at all is refused too, where it meets a ragged value.
"""

from typing import Any, NoReturn

from ._context import Context, Padded
from ._registry import define


def defrefused(names: str, family: str, reason: str, *, always: bool = False) -> None:
    """Refuse primitives with a reason: where a value is ragged, or `always`."""

    def refuse(ctx: Context, eqn: Any, *xs: Padded) -> NoReturn:
        ctx.refuse(eqn, reason)

    define(names, family, status="refused", note=reason, always=always)(refuse)


defrefused(
    "pure_callback io_callback debug_callback debug_print",
    "callback",
    "calls back to Python, which would see padding, filler rows and a batch.",
    always=True,
)


def defrefused_behind(names: str, family: str, num_axes: int | None, reason: str) -> None:
    """Refuse primitives where one of their last `num_axes` axes is ragged; None asks the equation."""

    def refuse(ctx: Context, eqn: Any, x: Padded) -> Any:
        num = len(eqn.params["fft_lengths"]) if num_axes is None else num_axes
        if x.ragged(range(len(x.shape) - num, len(x.shape))):
            ctx.refuse(eqn, reason)
        return ctx.bind(eqn, x.data)

    define(names, family, status="conditional", note=f"fixed sizes along its own axes; else it {reason}")(
        refuse
    )


defrefused_behind(
    "fft", "spectral", None, "mixes every cell of a ragged axis at frequencies that depend on its size."
)
defrefused_behind(
    "eigh eig schur hessenberg tridiagonal",
    "linear algebra",
    2,
    "sorts or mixes what belongs to the matrix with what would belong to its padding.",
)
defrefused(
    "householder_product",
    "linear algebra",
    "is what a QR factorisation is made of; use `jnp.linalg.qr` itself.",
)
defrefused(
    "approx_top_k rng_uniform rng_bit_generator random_gamma iota_2x32_shape",
    "random",
    "gives results that depend on the whole padded shape.",
)
defrefused(
    "ragged_dot_general scaled_dot call_exported pallas_call ffi_call custom_partitioning shard_map",
    "kernel",
    "is a kernel or a call that cannot be looked into; give the function around it a padded form of its own.",
)
