"""Which examples share a row: bin packing over integers, best fit in decreasing order.

Examples are placed from the longest to the shortest, each into the fullest row that still has room for it.
On lengths that real data have, with many short ones to fill the gaps, this stays within a row or two of the
least number possible. Rows that are alike are filled together, so that time goes with the number of different
lengths and not with that of examples.
"""

import dataclasses

import numpy as np

ROOM = 2
"""A row is to hold at least this many examples of its longest one, since attention costs cells x cells."""


@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Examples that share a row, in the order in which they lie there.

    Attributes:
      size: cells of the row.
      indices: the examples' places in the lengths that were packed.
      starts: the first cell of each.
    """

    size: int
    indices: tuple[int, ...]
    starts: tuple[int, ...]


def pack_rows(lengths: np.ndarray, size: int, segments: int) -> list[PackedRow]:
    """Return rows of one size that hold examples of these lengths, each example once.

    Args:
      lengths: integers [num], from 1 to `size`.
      size: cells of a row.
      segments: the most examples in a row.

    Example:
      >>> for row in pack_rows(np.array([3, 5, 2, 6]), 8, 4):
      ...     print(row)
      PackedRow(size=8, indices=(3, 2), starts=(0, 6))
      PackedRow(size=8, indices=(1, 0), starts=(0, 5))
    """
    lengths = np.asarray(lengths, np.int64)
    if not len(lengths):
        return []
    if lengths.min() < 1 or lengths.max() > size:
        raise AssertionError("pack_rows: an example does not fit; the caller sorts those out.")
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    members: list[list[int]] = []
    spare: dict[int, list[int]] = {}  # rows by the cells that are left in them
    taken = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        own = order[taken : taken + count].tolist()
        taken += count
        while own:
            room = min((left for left in spare if left >= length), default=None)
            if room is None:
                each = min(size // length, segments)
                for start in range(0, len(own), each):
                    part = own[start : start + each]
                    members.append(part)
                    _offer(spare, size - length * len(part), len(members) - 1, len(part) < segments)
                break
            rows = spare.pop(room)
            most = room // length
            left_over = []
            for k, row in enumerate(rows):
                if not own:
                    left_over = rows[k:]
                    break
                part = [own.pop() for _ in range(min(most, segments - len(members[row]), len(own)))]
                members[row] += part
                _offer(spare, room - length * len(part), row, len(members[row]) < segments)
            if left_over:
                spare.setdefault(room, []).extend(left_over)
    return [_laid_out(size, row, lengths) for row in members]


def _offer(spare: dict[int, list[int]], left: int, row: int, more: bool) -> None:
    """Note what is left in a row, if anything may still go there."""
    if left > 0 and more:
        spare.setdefault(left, []).append(row)


def _laid_out(size: int, members: list[int], lengths: np.ndarray) -> PackedRow:
    own = lengths[members]
    return PackedRow(size, tuple(members), tuple((np.cumsum(own) - own).tolist()))


def row_sizes(lengths: np.ndarray, ladder: tuple[int, ...], room: int = ROOM) -> np.ndarray:
    """Return for each example the size of the row that it goes to: the smallest with room for some like it.

    Args:
      lengths: integers [num], none above the largest size.
      ladder: the sizes of rows, ascending.
      room: how many examples of this length the row shall hold.

    Example:
      >>> row_sizes(np.array([3, 20, 100]), (64, 128)).tolist()
      [64, 64, 128]
    """
    sizes = np.array(ladder, np.int64)
    places = np.searchsorted(sizes, np.asarray(lengths) * room)
    return sizes[np.minimum(places, len(sizes) - 1)]


def pack(
    lengths: np.ndarray, ladder: tuple[int, ...], segments: tuple[int, ...], room: int = ROOM
) -> dict[int, list[PackedRow]]:
    """Return rows of several sizes, the largest first; indices are places in `lengths`.

    `segments` has the most examples in a row for each size of `ladder`. What would leave a last row of a size
    mostly empty goes to the rows of the next size, if there are any.
    """
    lengths = np.asarray(lengths, np.int64)
    sizes = row_sizes(lengths, ladder, room)
    packed: dict[int, list[PackedRow]] = {}
    waiting = np.empty(0, np.int64)
    for size, most in zip(ladder, segments, strict=True):
        own = np.concatenate([waiting, np.flatnonzero(sizes == size)])
        waiting = np.empty(0, np.int64)
        rows = [
            PackedRow(size, tuple(own[list(row.indices)].tolist()), row.starts)
            for row in pack_rows(lengths[own], size, most)
        ]
        if rows and size != ladder[-1] and np.any(sizes > size):
            last = min(rows, key=lambda row: lengths[list(row.indices)].sum())
            if 2 * lengths[list(last.indices)].sum() < size:
                rows.remove(last)
                waiting = np.array(last.indices, np.int64)
        if rows:
            packed[size] = rows
    return dict(sorted(packed.items(), reverse=True))
