"""What to do about a batch that failed: the example at fault alone is to get the error.

XLA has no exception of its own for a lack of memory: all its errors are one class, whose text begins with the
status.
"""

from collections.abc import Sequence
from typing import Literal

from .._errors import CompileMissError, MaskError
from .._executables import KeyTakenError
from .._grid import Bucket
from ._request import Request

Remedy = Literal["smaller", "halves", "fail"]


def remedy(error: Exception, bucket: Bucket, requests: Sequence[Request], fewest_rows: int) -> Remedy:
    """Return what is to become of the requests of a batch that failed.

    Args:
      fewest_rows: of the batches that the grid has at the bucket's sizes.

    Returns:
      "smaller": the bucket did not fit into memory, and there is one that takes less; "halves": run them
      again in halves, until the one at fault is alone; "fail": the error is that of all of them.
    """
    if is_exhausted(error):
        sizes = tuple(bucket.sizes.values())
        could_be_smaller = bucket["rows"] > fewest_rows or any(each.sizes != sizes for each in requests)
        return "smaller" if could_be_smaller else "fail"
    return "fail" if len(requests) == 1 or is_final(error) else "halves"


def is_final(error: Exception) -> bool:
    """Tell whether an error concerns every example that needs the program, so that splitting cannot help."""
    return isinstance(error, MaskError | KeyTakenError | CompileMissError)


def is_exhausted(error: BaseException) -> bool:
    """Tell whether a batch did not fit into memory."""
    try:
        return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    except Exception:  # a user's error may raise when it is shown
        return False
