"""The operations that random programs are made of: each draws operands and writes one expression.

Values are kept tame: what could grow goes through a sine, which is bounded and, unlike tanh, hides nothing
by saturation.
"""

from . import arithmetic, layout, positions, structure  # noqa: F401  (they join the table)
from .registry import OPS as OPS
