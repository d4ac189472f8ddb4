"""Orbax checkpoints as the source of weights: read when an artifact is saved, or each time it is loaded.

A checkpoint that an artifact refers to is known by where it was, which arrays it had, and the size and
SHA-256 of each of its files. Loading compares all sizes, and the digests of small files: those that say which
arrays there are and where. Comparing all digests means reading all weights, which `jaxbatch verify` does.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._errors import ArtifactError
from .._split import Described
from ._parts import _int, _text
from ._trees import tree_to_json

SMALL = 1 << 20
"""Files of up to this many bytes have their digest compared at every load."""

_METADATA = "_METADATA"
_NOTES = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # when it was written, and nothing of the weights
_PYTHON = ("int64", "float64", "bool")  # dtypes under which Orbax keeps Python numbers


class Opened:
    """An Orbax checkpoint whose weights an artifact is saved with.

    Args:
      path: a folder; of one item, or such that it holds one item only.

    Raises:
      ValueError: it is something else.
      ImportError: Orbax is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.folder = _item(Path(path))
        self._metadata = _orbax_metadata(self.folder)

    def values(self) -> Any:
        """Return the tree with its arrays, on the host; typed PRNG keys are on the device."""
        return jax.tree.map(_on_host, _restored(self.folder, self._metadata, lambda _: _here()))

    def described(self, number: int) -> Any:
        """Return the tree with shapes and dtypes in the place of arrays, and all else as it is.

        Args:
          number: of this checkpoint in the artifact; an array's `source` is this, and its number in the tree.
        """
        keys = _keys(self.folder)
        small = lambda leaf: _here() if not _is_array(leaf) or leaf.name in keys else ...  # noqa: E731
        leaves, tree = jax.tree.flatten(self._metadata)
        values = tree.flatten_up_to(_restored(self.folder, self._metadata, small))
        return tree.unflatten(
            [
                Described(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), source=(number, i))
                if value is ...
                else _on_host(value)
                for i, (leaf, value) in enumerate(zip(leaves, values, strict=True))
            ]
        )

    def reference(self, artifact: str | os.PathLike[str]) -> "Reference":
        """Return what an artifact at this path has to know of the checkpoint; it reads every file once."""
        leaves, tree = jax.tree.flatten(self._metadata)
        return Reference(
            os.path.relpath(self.folder, Path(artifact).resolve().parent).replace(os.sep, "/"),
            str(self.folder),
            tree_to_json(tree, str(self.folder)),
            tuple((np.dtype(leaf.dtype).name, leaf.shape) if _is_array(leaf) else None for leaf in leaves),
            tuple(File.of(self.folder, path) for path in _files(self.folder)),
        )


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a checkpoint, by its name below the checkpoint's folder."""

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, folder: Path, path: Path) -> "File":
        """Describe a file."""
        return cls(path.relative_to(folder).as_posix(), path.stat().st_size, _digest(path))

    def difference(self, folder: Path, *, all_digests: bool) -> str | None:
        """Say how what is there now differs from this file."""
        path, where = folder / self.name, f"its file {self.name[:100]}"
        try:
            if not path.is_file():
                return f"{where} is missing"
            if (size := path.stat().st_size) != self.size:
                return f"{where} has {size} bytes, expected {self.size}"
            if (all_digests or size <= SMALL) and (found := _digest(path)) != self.sha256:
                return f"{where} has SHA-256 {found}, expected {self.sha256}"
        except (OSError, ValueError) as error:
            return f"{where} cannot be read: {error}"
        return None


@dataclasses.dataclass(frozen=True)
class Reference:
    """A checkpoint that an artifact takes weights from.

    Attributes:
      relative: its folder from that of the artifact, tried first, with slashes.
      absolute: its folder.
      tree: the structure, as JSON data.
      leaves: dtype and shape of each array; None for what is no array and part of the programs.
    """

    relative: str
    absolute: str
    tree: Any
    leaves: tuple[tuple[str, tuple[int, ...]] | None, ...]
    files: tuple[File, ...]

    @classmethod
    def from_json(cls, data: Any) -> "Reference":
        """Return what `dataclasses.asdict` wrote."""
        leaves = [
            leaf and (np.dtype(_text(leaf[0])).name, tuple(map(_int, leaf[1]))) for leaf in data["leaves"]
        ]
        files = [File(_text(f["name"]), _int(f["size"]), _text(f["sha256"])) for f in data["files"]]
        if any(Path(file.name).is_absolute() or ".." in Path(file.name).parts for file in files):
            raise ValueError("a checkpoint has a file outside its folder")
        return cls(
            _text(data["relative"]), _text(data["absolute"]), data["tree"], tuple(leaves), tuple(files)
        )

    def found(self, artifact: str, *, all_digests: bool = False) -> Path:
        """Return where the checkpoint is, once it is seen to be the one that was saved.

        Raises:
          ArtifactError: it is missing, or has changed.
        """
        places = [Path(artifact).resolve().parent / self.relative, Path(self.absolute)]
        differences = {}
        for place in map(Path, dict.fromkeys(os.path.normpath(place) for place in places)):
            if os.path.isdir(place):  # False also for what can be no path
                found = [file.difference(place, all_digests=all_digests) for file in self.files]
                differences[place] = next(filter(None, found), None)
                if differences[place] is None:
                    return place
        if not differences:
            raise ArtifactError(
                f"takes its weights from an Orbax checkpoint, which is missing: expected the folder "
                f"{places[0]} or {places[1]}. Bring it back, or save the artifact with copies of the weights."
            )
        changed = "; ".join(f"{place}: {difference}" for place, difference in differences.items())
        raise ArtifactError(
            f"takes its weights from an Orbax checkpoint, which is not the one it was saved with. {changed}. "
            f"Bring the old one back, or save the artifact again."
        )

    def restore(self, folder: Path, shardings: Mapping[int, Any]) -> dict[int, Any]:
        """Return arrays by their number in the tree: on the host, or where their sharding puts them.

        Raises:
          ArtifactError: Orbax is missing, cannot read the checkpoint, or finds other arrays in it.
        """
        try:
            metadata = _orbax_metadata(folder)
            leaves, tree = jax.tree.flatten(metadata)
            seen = [(np.dtype(leaf.dtype).name, leaf.shape) if _is_array(leaf) else None for leaf in leaves]
            if tree_to_json(tree, "") != self.tree or len(seen) != len(self.leaves):
                raise ArtifactError(f"expected other arrays in {folder}: the structure differs.")
            for leaf, found, expected in zip(leaves, seen, self.leaves, strict=True):
                if found != expected:
                    raise ArtifactError(f"expected {leaf.name} in {folder} to be {expected}, found {found}.")
            numbers = {id(leaf): i for i, leaf in enumerate(leaves)}
            where = lambda leaf: shardings.get(numbers[id(leaf)], ...)  # noqa: E731
            arrays = tree.flatten_up_to(_restored(folder, metadata, where))
        except ArtifactError:
            raise
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise ArtifactError(
                f"takes its weights from the Orbax checkpoint {folder}, which cannot be restored. "
                f"{type(error).__name__}: {first}"
            ) from error
        return {i: arrays[i] for i in shardings}


# --- Orbax -----------------------------------------------------------------------------------------


def _item(path: Path) -> Path:
    """Return the folder of the tree itself: the path, or the only item in it, as training loops write it."""
    folder = path.resolve()
    if (folder / _METADATA).is_file():
        return folder
    inner = sorted(folder.glob(f"*/{_METADATA}"))
    if len(inner) == 1:
        return inner[0].parent
    if inner:
        names = ", ".join(each.parent.name for each in inner)
        raise ValueError(f"{path}: this checkpoint has several items: {names}. Give the path of one of them.")
    steps = sorted({each.parent.parent.name for each in folder.glob(f"*/*/{_METADATA}")})
    hint = f" It has the steps {', '.join(steps)}: give the path of one of them." if steps else ""
    raise ValueError(f"{path}: this folder is no Orbax checkpoint.{hint}")


def _orbax_metadata(folder: Path) -> Any:
    with _checkpointer(folder) as checkpointer:
        found = checkpointer.metadata(folder).item_metadata
    if found is None:
        raise ValueError(f"{folder}: Orbax finds no tree of arrays in this checkpoint.")
    return getattr(found, "tree", found)


def _restored(folder: Path, metadata: Any, where: Callable[[Any], Any]) -> Any:
    """Restore a tree.

    Args:
      where: for each leaf's metadata a sharding, None for an array on the host, `...` to leave `...` there.
    """
    from orbax import checkpoint

    def how(leaf: Any) -> Any:
        place = where(leaf)
        if place is ... or not _is_array(leaf):
            return checkpoint.RestoreArgs()
        if place is None or isinstance(leaf, checkpoint.metadata.ScalarMetadata):
            return checkpoint.RestoreArgs(restore_type=np.ndarray)
        return checkpoint.ArrayRestoreArgs(sharding=place)

    item = jax.tree.map(lambda leaf: ... if where(leaf) is ... else 0, metadata)
    with _checkpointer(folder) as checkpointer:
        return checkpointer.restore(folder, item=item, restore_args=jax.tree.map(how, metadata))


def _checkpointer(folder: Path) -> Any:
    try:
        from orbax import checkpoint
    except ImportError:
        raise ImportError(
            f"{folder}: Orbax is needed to read a checkpoint: pip install orbax-checkpoint."
        ) from None
    return checkpoint.PyTreeCheckpointer()


def _is_array(leaf: Any) -> bool:
    """Tell arrays from numbers and text that a function may branch on."""
    from orbax import checkpoint

    if isinstance(leaf, checkpoint.metadata.ScalarMetadata):
        return np.dtype(leaf.dtype).name not in _PYTHON
    return isinstance(leaf, checkpoint.metadata.ArrayMetadata)


def _keys(folder: Path) -> set[str]:
    """Return the names of typed PRNG keys, which Orbax describes as their raw data."""
    names = set()
    for path in folder.glob("array_metadatas/*"):
        for entry in json.loads(path.read_text(encoding="utf-8"))["array_metadatas"]:
            if (entry["array_metadata"].get("ext_metadata") or {}).get("random_key_impl"):
                names.add(entry["array_metadata"]["param_name"])
    return names


def _here() -> Any:
    device = jax.config.jax_default_device or jax.local_devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    return jax.sharding.SingleDeviceSharding(device)


def _on_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = jax.numpy.asarray(np.asarray(jax.random.key_data(leaf)))  # bound to no device
        return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(leaf)))
    return np.asarray(leaf)


# --- files -----------------------------------------------------------------------------------------


def _files(folder: Path) -> Sequence[Path]:
    return sorted(
        p for p in folder.rglob("*") if p.is_file() and p.relative_to(folder).as_posix() not in _NOTES
    )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
