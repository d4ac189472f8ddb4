"""A batch as a training step sees it: padded arrays, lengths, and which rows are real."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ._grid import Bucket


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Examples padded to one size and stacked; a pytree, with the bucket static, that a jitted step takes.

    All arrays have a leading axis of rows. Rows that only fill the batch up repeat its first one, so that
    they are as harmless as real data; keep them out of sums by selection (`sum` does), not by multiplication.
    After `jax.device_put`, or inside `jit`, the fields are JAX arrays; under `vmap`, those of one row.

    Attributes:
      arrays: the examples' tree, each array of shape [rows, *padded shape].
      lengths: by ragged dim, int32 [rows], what is valid of each row, in elements.
      valid: bool [rows], False for rows that only fill up.
      indices: int64 [rows], the examples' positions in the iterable, -1 for rows that only fill up.
      bucket: the padded sizes and the rows.
    """

    arrays: Any
    lengths: Any
    valid: Any
    indices: Any
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    def count(self, dim: str | None = None) -> Any:
        """Return how many examples are in the batch, or how many elements of `dim` they have together.

        Summed over batches it is the denominator of a mean over all of them; a mean of the batches' means
        would give the elements of short batches more weight.
        """
        return (self.valid if dim is None else self.valid * self.lengths[dim]).sum()

    def sum(self, values: Any) -> Any:
        """Return the sum of an array [rows, ...] over the real rows; it selects, and so do its gradients.

        What rows that only fill up hold does not matter, be it NaN. In the other axes everything is summed,
        padding included, which is exactly zero in what `jaxbatch.mask` returns.
        """
        return jnp.where(self.valid.reshape(-1, *[1] * (values.ndim - 1)), values, 0).sum()

    def without(self, indices: Any) -> "PaddedBatch":
        """Return the batch with rows dropped: of the same shapes, so no new program, filled up as usual.

        For examples that turn out to be bad, such as `batch.indices[~np.isfinite(losses)]`: a NaN in the
        data of a row reaches the gradients of shared weights even where its loss is left out of the sum.

        Args:
          indices: positions in the iterable, as in `indices`; others than this batch's are passed over.

        Raises:
          ValueError: no row would be left; there is nothing to learn from such a batch.
        """
        keep = np.asarray(self.valid) & ~np.isin(self.indices, indices)
        if not keep.any():
            raise ValueError("PaddedBatch.without: no row would be left. Skip the batch.")
        rows = np.where(keep, np.arange(len(keep)), np.argmax(keep))
        arrays, lengths = jax.tree.map(lambda array: array[rows], (self.arrays, self.lengths))
        return PaddedBatch(arrays, lengths, keep, np.where(keep, self.indices, -1), self.bucket)
