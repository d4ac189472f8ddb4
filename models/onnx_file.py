"""Read the weights out of an ONNX file, with no ONNX library: NumPy arrays and the nodes that use them.

Only what a loader of pretrained weights needs is read: the nodes' types and inputs, the float32 tensors and
the metadata. Nothing here runs a graph; the architecture is written as a model, and this fills it in.

Source: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto and https://protobuf.dev/programming-guides/encoding
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Node:
    """One operation of the graph, without its attributes."""

    op: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OnnxFile:
    """The part of an ONNX model that holds what was learned.

    Attributes:
      nodes: in the order in which they run.
      tensors: the float32 initializers, by name; those of other types are shapes and indices.
      metadata: what the exporter noted, such as the characters that a recogniser knows.
    """

    nodes: tuple[Node, ...]
    tensors: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]

    def in_order(self) -> list[tuple[str, np.ndarray]]:
        """Return the weights, by name, in the order in which the nodes read them.

        Exporters that number their tensors leave no other trace of which weight is which. A scalar, and a
        single number that multiplies, is arithmetic (the 0.5 of gelu, attention's 1/sqrt(d)): no weight.
        """
        found: dict[str, np.ndarray] = {}
        for node in self.nodes:
            for name in node.inputs if node.op in _WITH_WEIGHTS else ():
                tensor = self.tensors.get(name)
                if tensor is not None and tensor.ndim and (node.op != "Mul" or tensor.size > 1):
                    found[name] = tensor
        return list(found.items())


_WITH_WEIGHTS = {"Conv", "ConvTranspose", "MatMul", "Add", "Mul", "BatchNormalization"}


def read(path: str | PathLike) -> OnnxFile:
    """Read an ONNX file whose tensors lie inside it.

    Raises:
      ValueError: the file is cut short, or is not ONNX.
    """
    try:
        model = _fields(memoryview(Path(path).read_bytes()))
        (graph,) = (_fields(value) for value in model[_MODEL_GRAPH])
        nodes = tuple(_node(_fields(value)) for value in graph[_GRAPH_NODE])
        tensors = dict(filter(None, (_tensor(_fields(value)) for value in graph[_GRAPH_INITIALIZER])))
        metadata = dict(_entry(_fields(value)) for value in model.get(_MODEL_METADATA, []))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole ONNX model: {type(error).__name__}: {error}") from error
    return OnnxFile(nodes, tensors, metadata)


def _node(fields: "Fields") -> Node:
    return Node(_text(fields[_NODE_OP][0]), tuple(_text(name) for name in fields.get(_NODE_INPUT, [])))


def _tensor(fields: "Fields") -> tuple[str, np.ndarray] | None:
    if fields[_TENSOR_TYPE] != [_FLOAT32]:
        return None
    name, shape = _text(fields[_TENSOR_NAME][0]), tuple(_integers(fields.get(_TENSOR_DIMS, [])))
    data = b"".join(fields.get(_TENSOR_RAW) or fields.get(_TENSOR_FLOATS, []))
    if len(data) != 4 * math.prod(shape):
        raise ValueError(f"tensor `{name}` of shape {shape} has {len(data)} bytes of float32")
    return name, np.frombuffer(data, "<f4").reshape(shape)


def _entry(fields: "Fields") -> tuple[str, str]:
    return _text(fields[1][0]), _text(fields[2][0])


_MODEL_GRAPH, _MODEL_METADATA = 7, 14
_GRAPH_NODE, _GRAPH_INITIALIZER = 1, 5
_NODE_INPUT, _NODE_OP = 1, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_FLOATS, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 4, 8, 9
_FLOAT32 = 1


# -- Protocol buffers ---------------------------------------------------------------------------------------

Fields = dict[int, list]
"""The fields of a message by number: an int for a varint, a memoryview for anything else."""


def _fields(message: memoryview) -> Fields:
    fields: Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
        elif wire in _FIXED or wire == 2:
            size, at = (_FIXED[wire], at) if wire in _FIXED else _varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at > len(message):
            raise ValueError(f"field {number} ends {at - len(message)} bytes after its message")
        fields.setdefault(number, []).append(value)
    return fields


_FIXED = {1: 8, 5: 4}


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _integers(values: list) -> Iterator[int]:
    # A repeated integer is written one by one or packed into one field; readers accept both.
    for value in values:
        if isinstance(value, int):
            yield value
        else:
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                yield number


def _text(value: memoryview) -> str:
    return bytes(value).decode()
