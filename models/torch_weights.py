"""Read weights that PyTorch saved, without PyTorch: its files from before 2020, and the gates of its LSTMs.

Such a file is a pickle, and a pickle can run anything. Here it may only name what plain float32 tensors
need; whatever else it names is refused before it is looked up.

Source: `_legacy_save` in https://github.com/pytorch/pytorch/blob/main/torch/serialization.py
"""

import collections
import dataclasses
import math
import pickle
import struct
from os import PathLike
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]
"""Parameters of a Flax module, float32."""


def read(path: str | PathLike) -> Any:
    """Return what was saved, with NumPy arrays for tensors; dicts, lists and numbers stay as they are.

    Raises:
      ValueError: the file is not whole, or needs more than plain float32 tensors.
    """
    with open(path, "rb") as file:
        try:
            header = [_Unpickler(file).load() for _ in range(2)]
            if header != [_MAGIC, _VERSION]:
                raise ValueError("it does not start as one, or is of the newer kind that is a zip file")
            if not _Unpickler(file).load()["little_endian"]:
                raise ValueError("it was saved on a big-endian machine")
            saved, keys = _Unpickler(file).load(), _Unpickler(file).load()
            storages = {key: _storage(file) for key in keys}
            return _with_arrays(saved, storages)
        except Exception as error:  # a pickle that is not whole raises nearly anything
            raise ValueError(f"{path} is no PyTorch file that this can read: {error}") from error


_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """A tensor whose numbers come later in the file."""

    storage: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    hooks: Any

    def array(self, storages: dict[str, np.ndarray]) -> np.ndarray:
        contiguous = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        numbers = storages[self.storage][self.offset :][: math.prod(self.shape)]
        if self.strides != contiguous or len(numbers) != math.prod(self.shape) or self.offset < 0:
            raise ValueError(
                f"a tensor of shape {self.shape} and strides {self.strides} is not stored in order"
            )
        return numbers.reshape(self.shape)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which plain tensors do not need")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> str:
        kind, numbers, key, *_ = pid
        if (kind, numbers) != ("storage", "float32"):
            raise pickle.UnpicklingError(f"it refers to {kind!r} of {numbers!r}; only float32 is supported")
        return key


_ALLOWED = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _Tensor,
    ("torch", "FloatStorage"): "float32",
}


def _storage(file: BinaryIO) -> np.ndarray:
    (num,) = struct.unpack("<q", file.read(8))
    numbers = np.frombuffer(file.read(4 * num), "<f4")
    if len(numbers) != num:
        raise EOFError("it is cut short")
    return numbers


def _with_arrays(saved: Any, storages: dict[str, np.ndarray]) -> Any:
    if isinstance(saved, _Tensor):
        return saved.array(storages)
    if isinstance(saved, dict):
        return {key: _with_arrays(value, storages) for key, value in saved.items()}
    if isinstance(saved, list | tuple):
        return type(saved)(_with_arrays(value, storages) for value in saved)
    return saved


def lstm_cell(inputs: np.ndarray, hidden: np.ndarray, bias: np.ndarray) -> Params:
    """Return the parameters of a Flax `LSTMCell` from PyTorch's, which stacks the four gates.

    Args:
      inputs: `weight_ih`, [4 * width, in].
      hidden: `weight_hh`, [4 * width, width].
      bias: the sum of `bias_ih` and `bias_hh`, which only ever appear added.
    """
    cell = {}
    for i, gate in enumerate("ifgo"):
        of_gate = slice(i * hidden.shape[1], (i + 1) * hidden.shape[1])
        cell[f"i{gate}"] = {"kernel": jnp.asarray(inputs[of_gate].T)}
        cell[f"h{gate}"] = {"kernel": jnp.asarray(hidden[of_gate].T), "bias": jnp.asarray(bias[of_gate])}
    return cell
