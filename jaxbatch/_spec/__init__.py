"""Shapes and dtypes of one example: how they are written, read from annotations, and checked.

`_dtypes` has the dtypes and `_casts` the casts that are safe, `_arrays` is one array, `_annotations` reads
jaxtyping, and `_examples` is the whole example with its check.
"""

from jaxbatch._spec._annotations import argument_names as argument_names
from jaxbatch._spec._annotations import shared_dims as shared_dims
from jaxbatch._spec._arrays import ArraySpec as ArraySpec
from jaxbatch._spec._arrays import Axis as Axis
from jaxbatch._spec._arrays import spec as spec
from jaxbatch._spec._dtypes import DtypeFamily as DtypeFamily
from jaxbatch._spec._examples import Checked as Checked
from jaxbatch._spec._examples import Spec as Spec
