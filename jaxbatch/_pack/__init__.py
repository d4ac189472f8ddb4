"""The packed reading of a program: several examples in one row, and nothing of one in another.

Reading order: `_spaces` (where segments lie), `_values` (what a value is), `_context` (how a jaxpr is
interpreted), the rules by family, `_transform` (the function that comes out, with its differentiation rule).
"""

from . import (  # noqa: F401
    _custom,
    _elementwise,
    _index,
    _loops,
    _positions,
    _reduce,
    _scan,
    _shapes,
    _sort,
    _window,
)
from ._context import Spread as Spread
from ._registry import names as names
from ._spaces import Layout as Layout
from ._transform import Packed as Packed
from ._transform import form as form
from ._values import Value as Value
