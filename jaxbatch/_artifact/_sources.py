"""Weights from where training left them: an Orbax checkpoint, a safetensors file or an NPZ file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._checkpoint import Opened
from ._tensors import read_safetensors


class Sources:
    """Shared arguments to save, with what stands at the paths among them.

    Args:
      shared: the arguments; a `pathlib.Path` among them is read.
      copy: whether arrays of checkpoints are read too; otherwise they are referred to.

    Attributes:
      args: the arguments; an array that is referred to has no value here (`Described`).
      checkpoints: those that are referred to, by the number of their argument.

    Raises:
      ValueError: a path is something else, or cannot be referred to.
      ImportError: Orbax is needed and not installed.
    """

    def __init__(self, shared: Sequence[Any], *, copy: bool):
        self.checkpoints: dict[int, Opened] = {}
        for i, arg in enumerate(shared):
            if isinstance(arg, os.PathLike) and not copy:
                if not Path(arg).is_dir():
                    raise ValueError(
                        f"{os.fspath(arg)}: only an Orbax checkpoint, a folder, can be referred to."
                    )
                self.checkpoints[i] = Opened(arg)
        if not copy and not self.checkpoints:
            raise ValueError("copy=False, and no shared argument is the pathlib.Path of a checkpoint.")
        self.args = [
            self.checkpoints[i].described(list(self.checkpoints).index(i))
            if i in self.checkpoints
            else read_weights(arg)
            if isinstance(arg, os.PathLike)
            else arg
            for i, arg in enumerate(shared)
        ]

    def values(self) -> list[Any]:
        """Return the arguments with all arrays."""
        given = enumerate(self.args)
        return [self.checkpoints[i].values() if i in self.checkpoints else arg for i, arg in given]


def read_weights(path: str | os.PathLike[str]) -> Any:
    """Return the weights of a file, or of an Orbax checkpoint (a folder): a tree of arrays.

    Names such as `encoder/layer_0/kernel` or `encoder.layer_0.kernel` become nested dicts.

    Raises:
      ValueError: the path is something else.
      ImportError: Orbax is needed and not installed.
    """
    source = Path(path)
    if source.suffix == ".npz":
        with np.load(source, allow_pickle=False) as arrays:
            return _nested(dict(arrays))
    if source.suffix == ".safetensors":
        return _nested(read_safetensors(source.read_bytes()))
    if not source.is_dir():
        raise ValueError(
            f"{source}: weights are an Orbax checkpoint (a folder), a .safetensors or an .npz file."
        )
    return Opened(source).values()


def _nested(arrays: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/" if "/" in name else ".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return tree
