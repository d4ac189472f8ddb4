"""Rules for operations that never read across an axis: padding in, padding out, nothing to do."""

from typing import Any

from ._context import Context, Padded
from ._registry import define


def _bind(ctx: Context, eqn: Any, *xs: Padded) -> Any:
    """Run the primitive on the padded arrays as they are."""
    return ctx.bind(eqn, *(x.data for x in xs))


def defelementwise(names: str) -> None:
    """Register primitives whose every output cell depends on the same cell of each operand."""
    define(names, "elementwise")(_bind)


def deffree(names: str) -> None:
    """Register primitives that move whole cells along fixed axes and never look past a length."""
    define(names, "layout")(_bind)


defelementwise(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh "
    "device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a "
    "igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul "
    "mulhi name ne neg nextafter not one_minus_square optimization_barrier or polygamma polynomial "
    "population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n "
    "sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh tie xor zeros_like zeta"
)
defelementwise("threefry2x32 threefry4x32 philox2x32 philox4x32")
defelementwise("random_clone random_fold_in random_seed random_unwrap random_wrap")
deffree("broadcast_in_dim empty empty2 squeeze stack transpose unstack")
