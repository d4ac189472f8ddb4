"""A ragged `vmap` for JAX: a function of one example at its exact size, run on many of different sizes."""

from . import testing as testing
from ._batched import Batched as Batched
from ._batched import batched as batched
from ._batches import Batches as Batches
from ._batches import batches as batches
from ._costs import Costs as Costs
from ._errors import ArtifactError as ArtifactError
from ._errors import CompileMissError as CompileMissError
from ._errors import DeadlineError as DeadlineError
from ._errors import DispatcherClosedError as DispatcherClosedError
from ._errors import JaxbatchError as JaxbatchError
from ._errors import MaskError as MaskError
from ._errors import OversizeError as OversizeError
from ._errors import QueueFullError as QueueFullError
from ._errors import SpecError as SpecError
from ._explanation import Explanation as Explanation
from ._grid import Bucket as Bucket
from ._grid import Grid as Grid
from ._mask import CustomPadding as CustomPadding
from ._mask import custom_padding as custom_padding
from ._mask import register as register
from ._masking import MaskedFunction as MaskedFunction
from ._masking import mask as mask
from ._padded_batch import PaddedBatch as PaddedBatch
from ._spec import spec as spec
from ._statistics import Statistics as Statistics
