"""Shapes and dtypes of one example: how they are written, read from annotations, and checked.

`_dtypes` has the dtypes and `_casts` the casts that are safe, `_arrays` is one array, `_annotations` reads
jaxtyping, and `_examples` is the whole example with its check.
"""

from ._annotations import argument_names as argument_names
from ._annotations import function_name as function_name
from ._annotations import shared_dims as shared_dims
from ._arrays import ArraySpec as ArraySpec
from ._arrays import Axis as Axis
from ._arrays import spec as spec
from ._dtypes import DtypeFamily as DtypeFamily
from ._examples import Checked as Checked
from ._examples import Spec as Spec
