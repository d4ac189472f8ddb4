"""The mask transform: a function of one example at its exact size, run padded, with the same answer.

Reading order: `_registry` (what a rule is), `_context` (how a jaxpr is interpreted, with `_sizes` for what to
allocate and `_knowledge` for which fills cannot matter), the rules by family, `_transform` (the function that
comes out, with its own differentiation rule, for which `_primal` makes a program differentiable).
"""

from . import (  # noqa: F401
    _control,
    _custom,
    _elementwise,
    _index,
    _layout,
    _linalg,
    _random,
    _reduce,
    _refused,
    _sort,
    _window,
)
from ._context import Fill as Fill
from ._custom import CustomPadding as CustomPadding
from ._custom import custom_padding as custom_padding
from ._registry import register as register
from ._registry import rules as rules
from ._transform import Masked as Masked
