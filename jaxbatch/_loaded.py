"""`load`: an artifact becomes the same object as `batched` gives, without the code that it was made from."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import _artifact
from ._batched import Batched
from ._costs import Costs
from ._disk_cache import DiskCache
from ._engine import Engine
from ._errors import ArtifactError


class Loaded(Batched):
    """What `load` returns: a `Batched` whose shared arguments are those that were saved.

    Attributes:
      masked: the function itself, `g(lengths, *padded)`, for use inside jit, vmap and grad.
      artifact: what was read.
    """

    def __init__(
        self, artifact: _artifact.Artifact, *, frozen: bool, costs: Costs | None, disk: DiskCache | None
    ):
        super().__init__(
            _artifact.StoredFunction.of(artifact),
            artifact.grid,
            oversize="exact" if artifact.manifest["policies"].get("oversize") == "exact" else "error",
            on_unmaskable="error",
            frozen=frozen,
            key=None,
            costs=artifact.costs if costs is None else costs,
            disk=disk,
        )
        self.masked = _artifact.StoredMask(artifact)
        self.artifact = artifact

    @property
    def engine(self) -> Engine:
        """What it keeps between calls, for tools."""
        return self._engine

    @property
    def vjp_order(self) -> int:
        """How often `masked` can be differentiated."""
        return self.artifact.vjp_order

    @property
    def platforms(self) -> Sequence[str]:
        """Where its programs can run, as `jax.export` names platforms."""
        return tuple(self.artifact.manifest["platforms"])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user gave to `save`."""
        return self.artifact.manifest["metadata"]

    def save(self, path: str | os.PathLike[str], *shared: Any, **options: Any) -> None:
        """Refuse: what was loaded is a file already."""
        raise ArtifactError(f"{self.artifact.path} is an artifact already; copy the file.")

    def __repr__(self) -> str:
        return f"<jaxbatch.load({self.artifact.path!r}): {self.artifact.spec!r}, {self.grid}>"


def load(
    path: str | os.PathLike[str],
    *,
    frozen: bool | None = None,
    costs: Costs | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    shardings: _artifact.Shardings | None = None,
) -> Loaded:
    """Return what `Batched.save` wrote, ready to be called with examples alone.

    Nothing in the file is run but the computation that it describes: it holds no code and no pickle, and its
    programs may not call anything outside. Every part is compared with its digest.

    Args:
      path: of the file.
      frozen: as in `batched`; None takes what was saved.
      costs: as in `batched`; None takes what was saved.
      cache_dir: as in `batched`: programs that are there are neither traced nor compiled.
      shardings: where the weights go, if not to the default device: one `jax.sharding.Sharding` for all, or
        a function of a weight's name, such as "params['layer']['w']", and its `jax.ShapeDtypeStruct`, which
        returns one or None. What a checkpoint holds is restored so, and no device has all of it.

    Raises:
      ArtifactError: the file is damaged, foreign, from another time, or not made for this machine; or it
        refers to a checkpoint that is missing or has changed. It says what was found, what was needed, and
        what to do.
      ValueError: a sharding does not divide its array.
      OSError: there is no such file.

    Example:
      >>> import jaxbatch as jb, os, tempfile
      >>> run = jb.batched(lambda x: x - x.mean(), spec=jb.spec("n", "float32"), grid=jb.Grid(n=(4, 16)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     run.save(os.path.join(folder, "centre.jbx"))
      ...     loaded = jb.load(os.path.join(folder, "centre.jbx"))
      >>> [y.tolist() for y in loaded([[1.0, 3.0], [5.0]])]
      [[-1.0, 1.0], [0.0]]
    """
    where = "jaxbatch.load"
    try:
        disk = None if cache_dir is None else DiskCache(cache_dir)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    try:
        artifact = _artifact.load(path, shardings=shardings)
    except ArtifactError as error:
        raise error.with_context(where)  # noqa: B904  (it is the same error)
    saved = artifact.manifest["policies"].get("frozen") is True
    return Loaded(artifact, frozen=saved if frozen is None else frozen, costs=costs, disk=disk)
