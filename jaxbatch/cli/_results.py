"""Results as JSON Lines, Parquet or NPZ: each chunk is a file of its own, and the last step joins them.

A record has the row's id, and either one entry for each output or an `error`. What is written depends on the
records alone, so the same rows give the same bytes.
"""

import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ._rows import ID, _parquet

ERROR = "error"


def record(own: Any, result: Any) -> dict[str, Any]:
    """Return the record of one row; an id that is neither text nor a whole number is kept as JSON text."""
    if isinstance(own, bool) or not isinstance(own, int | str):
        own = json.dumps(own)
    if isinstance(result, Exception):
        words = str(result.args[0]) if isinstance(result, KeyError) and result.args else str(result)
        return {ID: own, ERROR: f"{type(result).__name__}: {words}"}
    return {ID: own, **{_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(result)}}


def _name(path: Any) -> str:
    """Return the name of an output: `result`, `mean`, `boxes.0`."""
    parts = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
    name = ".".join(parts) or "result"
    return f"result.{name}" if name in (ID, ERROR) else name


def write_chunk(path: Path, kind: str, records: Sequence[dict[str, Any]], outputs: Sequence[str]) -> None:
    """Write the records of a chunk, durably, and all at once."""
    data = {"jsonl": _jsonl, "parquet": _parquet_bytes, "npz": _npz}[kind](records, outputs)
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def join(target: Path, kind: str, chunks: Sequence[Path]) -> None:
    """Write all chunks, in order, to one file that appears at once."""
    temporary = target.with_name(f".{target.name}.tmp")
    {"jsonl": _join_jsonl, "parquet": _join_parquet, "npz": _join_npz}[kind](temporary, chunks)
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, target)


# --- JSON Lines ------------------------------------------------------------------------------------


def _jsonl(records: Sequence[dict[str, Any]], outputs: Sequence[str]) -> bytes:
    return b"".join(json.dumps(each, default=_plain).encode() + b"\n" for each in records)


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind == "c":
        return {"real": np.real(array).tolist(), "imag": np.imag(array).tolist()}
    return array.astype(np.float64).tolist() if array.dtype.kind == "V" else array.tolist()


def _join_jsonl(target: Path, chunks: Sequence[Path]) -> None:
    with open(target, "wb") as file:
        for chunk in chunks:
            file.write(chunk.read_bytes())


# --- Parquet ---------------------------------------------------------------------------------------


def _parquet_bytes(records: Sequence[dict[str, Any]], outputs: Sequence[str]) -> bytes:
    import pyarrow as pa

    ids = [each[ID] for each in records]
    if any(isinstance(own, str) for own in ids):
        ids = list(map(str, ids))
    columns = {ID: pa.array(ids)}
    for name in outputs:
        columns[name] = _arrow_column([each.get(name) for each in records])
    columns[ERROR] = pa.array([each.get(ERROR) for each in records], pa.string())
    buffer = io.BytesIO()
    _parquet().write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def _arrow_column(values: Sequence[Any]) -> Any:
    """Return nested lists of the outputs' own type; a chunk without results has nulls, typed when joined."""
    import pyarrow as pa

    first = next((np.asarray(value) for value in values if value is not None), None)
    if first is None:
        return pa.nulls(len(values))
    dtype = np.dtype(np.float32) if first.dtype.kind == "V" else first.dtype
    kind = pa.from_numpy_dtype(dtype)
    if first.ndim == 1 and all(value is not None for value in values):
        offsets = np.cumsum([0, *(len(value) for value in values)])
        flat = np.concatenate(values).astype(dtype, copy=False)
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(flat, kind))
    for _ in range(first.ndim):
        kind = pa.large_list(kind)
    return pa.array([None if v is None else np.asarray(v).astype(dtype).tolist() for v in values], kind)


def _join_parquet(target: Path, chunks: Sequence[Path]) -> None:
    import pyarrow as pa

    schemas = [_parquet().read_schema(chunk) for chunk in chunks]
    if len({each.field(ID).type for each in schemas}) > 1:
        schemas = [each.set(0, pa.field(ID, pa.string())) for each in schemas]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    with _parquet().ParquetWriter(target, schema) as writer:
        for chunk in chunks:
            writer.write_table(_parquet().read_table(chunk).cast(schema))


# --- NPZ -------------------------------------------------------------------------------------------


def _npz(records: Sequence[dict[str, Any]], outputs: Sequence[str]) -> bytes:
    arrays = {
        ID: np.array([each[ID] for each in records]),
        ERROR: np.array([each.get(ERROR, "") for each in records]),
    }
    for name in outputs:
        values = [np.asarray(each[name]) for each in records if name in each]
        lengths = [each[name].size if name in each else 0 for each in records]
        arrays[name] = np.concatenate([v.reshape(-1) for v in values]) if values else np.zeros(0, np.float32)
        arrays[f"{name}_offsets"] = np.cumsum([0, *lengths])
        rank = values[0].ndim if values else 0
        shapes = [each[name].shape if name in each else (0,) * rank for each in records]
        arrays[f"{name}_shapes"] = np.array(shapes, np.int64).reshape(len(records), rank)
    buffer = io.BytesIO()
    write_npz(buffer, arrays)
    return buffer.getvalue()


def write_npz(file: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as `np.savez` does, but with the same bytes each time: without the time of day."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w", force_zip64=True) as part:
                np.lib.format.write_array(part, np.asarray(array), allow_pickle=False)


def _join_npz(target: Path, chunks: Sequence[Path]) -> None:
    columns: dict[str, list[np.ndarray]] = {}
    for chunk in chunks:
        with np.load(chunk, allow_pickle=False) as arrays:
            for name, array in arrays.items():
                columns.setdefault(name, []).append(array)
    joined = {name: _joined(name, parts) for name, parts in columns.items()}
    with open(target, "wb") as file:
        write_npz(file, joined)


def _joined(name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    if name.endswith("_offsets"):
        starts = np.cumsum([0, *(part[-1] for part in parts)])
        return np.concatenate([[0], *(part[1:] + start for part, start in zip(parts, starts, strict=False))])
    if name.endswith("_shapes"):
        rank = max(part.shape[1] for part in parts)
        parts = [part if part.shape[1] == rank else np.zeros((len(part), rank), np.int64) for part in parts]
    if not name.endswith(("_offsets", "_shapes", ERROR, ID)):
        parts = [part for part in parts if part.size] or list(parts[:1])
    return np.concatenate(parts)


def all_outputs(tree: Any) -> list[str]:
    """Return the names of the outputs of a result's structure, in order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))
    return [_name(path) for path, _ in leaves]
