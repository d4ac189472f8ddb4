"""How a careful user batches by hand: sort by length, cut by count or by tokens, pad with NumPy."""

from collections.abc import Sequence

import numpy as np


def by_count(lengths: np.ndarray, rows: int) -> list[np.ndarray]:
    """Return batches of `rows` places each, longest examples first."""
    order = np.argsort(-lengths, kind="stable")
    return [order[start : start + rows] for start in range(0, len(order), rows)]


def by_tokens(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Return batches whose rows times longest example are within `budget`, longest examples first."""
    order, batches, start = np.argsort(-lengths, kind="stable"), [], 0
    while start < len(order):
        rows = max(1, budget // int(lengths[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def pad(ids: Sequence[np.ndarray], size: int, rows: int, dtype: type = np.int64) -> np.ndarray:
    """Return the examples as the first of `rows` rows of `size`, with zeros after them."""
    padded = np.zeros((rows, size), dtype)
    for row, values in zip(padded, ids, strict=False):
        row[: len(values)] = values
    return padded


def valid(lengths: np.ndarray, size: int, rows: int) -> np.ndarray:
    """Return which places of a padded batch are an example's own; int64 [rows, size], 1 and 0."""
    full = np.concatenate([lengths, np.full(rows - len(lengths), size)])
    return (np.arange(size) < full[:, None]).astype(np.int64)


def pooled(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the unit mean [rows, d] of the valid tokens of `hidden` [rows, n, d]."""
    mean = np.einsum("rnd,rn->rd", hidden, mask.astype(hidden.dtype)) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)
