"""Weights from where training left them: an Orbax checkpoint, a safetensors file or an NPZ file."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from ._tensors import read_safetensors


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
    try:
        from orbax import checkpoint
    except ImportError:
        raise ImportError(
            f"{source}: Orbax is needed to read a checkpoint: pip install orbax-checkpoint."
        ) from None
    with checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(source.resolve())


def _nested(arrays: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split("/" if "/" in name else ".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return tree
