"""Rows of JSON Lines, Parquet and NPZ files: read one after another, and written chunk by chunk.

A row has an id (its `id`, else its number from 0) and one value for each argument. A row that cannot be read
is an error in its place, with its id, and never the end of the file.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ID = "id"
FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".npz": "npz"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of an input.

    Attributes:
      example: one value for each argument; or the error that the row has instead.
    """

    id: Any
    example: tuple[Any, ...] | Exception


def format_of(path: str, given: str | None) -> str:
    """Return the format of a file: as given, else by its name."""
    found = given or FORMATS.get(Path(path).suffix)
    if found is None:
        raise ValueError(
            f"{path}: its name does not say its format; use .jsonl, .parquet or .npz, or --format."
        )
    return found


def read_rows(path: str, kind: str, names: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a file, which is never held as a whole (but for NPZ)."""
    readers = {"jsonl": _read_jsonl, "parquet": _read_parquet, "npz": _read_npz}
    return readers[kind](path, names)


def count_rows(path: str, kind: str) -> int | None:
    """Return the number of rows where the file says it, else None."""
    if kind != "parquet":
        return None
    return _parquet().ParquetFile(path).metadata.num_rows


def _read_jsonl(path: str, names: Sequence[str]) -> Iterator[Row]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines):
            try:
                value = json.loads(line)
            except ValueError as error:
                yield Row(number, ValueError(f"line {number + 1} is no JSON: {error}"))
                continue
            own = value.get(ID, number) if isinstance(value, dict) else number
            yield Row(own, _example(value, names))


def _example(value: Any, names: Sequence[str]) -> tuple[Any, ...] | Exception:
    if isinstance(value, dict) and all(name in value for name in names):
        return tuple(value[name] for name in names)
    if len(names) == 1 and not isinstance(value, dict):
        return (value,)
    if not isinstance(value, dict):
        return TypeError(f"the row is a {type(value).__name__}, expected an object with {', '.join(names)}")
    missing = [name for name in names if name not in value]
    return KeyError(f"the row has no {', '.join(missing)}")


def _read_parquet(path: str, names: Sequence[str]) -> Iterator[Row]:
    file, number = _parquet().ParquetFile(path), 0
    known = file.schema_arrow.names
    columns = [name for name in (ID, *names) if name in known]
    for batch in file.iter_batches(columns=columns):
        values = {name: batch.column(name) for name in columns}
        arrays = {name: _arrow_rows(values[name]) for name in columns}
        for i in range(batch.num_rows):
            value = {name: arrays[name][i] for name in columns}
            own = value.get(ID, number)
            if isinstance(own, np.generic):
                own = own.item()
            yield Row(own, _example(value, names))
            number += 1


def _arrow_rows(column: Any) -> Sequence[Any]:
    """Return one value a row; lists of numbers without gaps become NumPy views."""
    import pyarrow as pa

    plain = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if plain and not column.null_count:
        inner = column.type.value_type
        if pa.types.is_integer(inner) or pa.types.is_floating(inner):
            values = column.values
            if not values.null_count:
                flat, offsets = values.to_numpy(), column.offsets.to_numpy()
                return [flat[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
    return column.to_pylist()


def _read_npz(path: str, names: Sequence[str]) -> Iterator[Row]:
    with np.load(path, allow_pickle=False) as arrays:
        stored = dict(arrays)
    columns = {name: npz_column(stored, name) for name in names if name in stored}
    if not columns:
        raise ValueError(f"{path}: has none of the arrays {', '.join(names)}.")
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ValueError(f"{path}: its arrays have different numbers of rows, {sorted(lengths)}.")
    ids = stored.get(ID)
    for i in range(lengths.pop()):
        own = i if ids is None else ids[i].item()
        yield Row(own, _example({name: column[i] for name, column in columns.items()}, names))


def npz_column(stored: Mapping[str, np.ndarray], name: str) -> Sequence[Any]:
    """Return one array a row: cut at `name_offsets` if there are any, which begin with 0, else the rows."""
    offsets = stored.get(f"{name}_offsets")
    if offsets is None:
        return list(stored[name])
    values = stored[name]
    if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] > len(values):
        raise ValueError(f"{name}_offsets do not ascend from 0 to at most {len(values)}.")
    return [values[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError("Parquet needs the package pyarrow: pip install pyarrow.") from None
    return parquet
