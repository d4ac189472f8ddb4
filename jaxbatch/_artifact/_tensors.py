"""Arrays as a safetensors file: a JSON header, then the bytes, with nothing that could be run.

The format is https://github.com/huggingface/safetensors#format. Dtypes that it does not know are written as
their bytes (U8); the manifest has the true dtype and shape of every array.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (it tells NumPy of bfloat16 and its like)
import numpy as np

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def write_tensors(write: Callable[[Any], Any], arrays: Mapping[str, Any]) -> None:
    """Write arrays, piece by piece; device arrays are fetched one at a time."""
    # Wide dtypes first, so that every array begins at a multiple of its item size.
    names = sorted(arrays, key=lambda name: -np.dtype(arrays[name].dtype).itemsize)
    header: dict[str, Any] = {}
    begin = 0
    for name in names:
        dtype, shape = np.dtype(arrays[name].dtype), list(arrays[name].shape)
        end = begin + math.prod(shape) * dtype.itemsize
        known = _NAMES.get(dtype.name)
        header[name] = {
            "dtype": known or "U8",
            "shape": shape if known else [end - begin],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little") + text)
    for name in names:
        array = np.ascontiguousarray(np.asarray(arrays[name]))
        write(array.reshape(-1).view(np.uint8).data)


def read_tensors(data: bytes, expected: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, np.ndarray]:
    """Return the arrays of these names, dtypes and shapes: views of `data`, which are read-only.

    Raises:
      ValueError: the file has others.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("the header of the arrays is longer than their file")
    header, start = json.loads(data[8 : 8 + size]), 8 + size
    arrays = {}
    for name, (dtype_name, shape) in expected.items():
        dtype = np.dtype(dtype_name)
        begin, end = header[name]["data_offsets"]
        known = _NAMES.get(dtype.name)
        nbytes = math.prod(shape) * dtype.itemsize
        entry = header[name]["dtype"], list(header[name]["shape"])
        if entry != (known or "U8", list(shape) if known else [nbytes]) or end - begin != nbytes:
            raise ValueError(f"the array {name!r} is another one than the manifest says")
        if not 0 <= begin <= end <= len(data) - start:
            raise ValueError(f"the array {name!r} lies outside its file")
        flat = np.frombuffer(data, dtype, math.prod(shape), start + begin)
        arrays[name] = flat.reshape(tuple(shape))
    return arrays


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    """Return all arrays of a safetensors file: views of `data`, which are read-only.

    Raises:
      ValueError: it is none, or has a dtype that NumPy and JAX do not know.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("this is no safetensors file")
    dtypes = {short: name for name, short in _NAMES.items()}
    expected = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            if entry["dtype"] not in dtypes:
                raise ValueError(f"the array {name!r} has dtype {entry['dtype']}, which is not known here")
            expected[name] = dtypes[entry["dtype"]], entry["shape"]
    return read_tensors(data, expected)
