"""Read an artifact: first the manifest, then every part's digest, then whether it can run here.

Weights that are elsewhere, in a checkpoint, come last.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .._costs import Costs
from .._errors import ArtifactError
from .._grid import Grid
from ._archive import Reader
from ._checkpoint import Reference as Checkpoint
from ._parts import Variant, Weight, spec_from_json
from ._save import FORMAT, REFERENCES, WEIGHTS, Reference
from ._stored import Artifact
from ._tensors import read_tensors

_WIDE = {"int64", "uint64", "float64", "complex128"}
_ADVICE = "Save it again with `run.save`"

Shardings = jax.sharding.Sharding | Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding | None]
"""Where weights go: all to one sharding, or each as a function of its name, shape and dtype says."""


def load(path: str | os.PathLike[str], *, runs: bool = True, shardings: Shardings | None = None) -> Artifact:
    """Return a checked artifact.

    Args:
      path: of the file.
      runs: also check that its programs can run here, and bring weights from where they are.
      shardings: where the weights go; None for the default device.

    Raises:
      ArtifactError: it is damaged, foreign, from the future, or not made for this machine; or the checkpoint
        that has its weights is missing or has changed.
      ValueError: a sharding does not divide its array.
      OSError: there is no such file.
    """
    where = os.fspath(path)
    try:
        with Reader(path) as reader:
            artifact, weights = _read(reader, where, runs)
        places = [_place(shardings, weight) for weight in weights]
        if runs:
            _restore(artifact, weights, places)
        return dataclasses.replace(artifact, shardings=places)
    except ArtifactError as error:
        message = str(error.args[0])
        if not message.startswith(where):
            raise ArtifactError(f"{where} {message}") from error.__cause__
        raise


def _read(reader: Reader, where: str, runs: bool) -> tuple[Artifact, list[Weight]]:
    manifest = reader.manifest
    try:
        _check_format(manifest)
        if runs:
            _check_machine(manifest)
        spec, grid = spec_from_json(manifest["spec"]), _grid(manifest["grid"])
        variants = tuple(Variant.from_json(each, grid.dims) for each in manifest["variants"])
        weights = [Weight.from_json(each) for each in manifest["weights"]]
        checkpoints = tuple(map(Checkpoint.from_json, manifest.get("checkpoints", [])))
        costs = Costs.from_json(json.dumps(manifest["costs"]))
        _check_consistent(manifest, spec, grid, variants, len(weights))
        _check_sources(weights, checkpoints)
        kinds = {weight.name: (weight.dtype, weight.shape) for weight in weights if weight.source is None}
        arrays = read_tensors(reader.read(WEIGHTS), kinds)
        names = [program.part for variant in variants for program in _programs(variant)]
        parts = {name: reader.read(name) for name in (*names, REFERENCES)}
        host = [arrays.get(weight.name) for weight in weights]
        found = Artifact(where, manifest, spec, grid, costs, variants, host, parts, checkpoints)
        return found, weights
    except ArtifactError:
        raise
    except Exception as error:  # whatever a hostile manifest makes of it
        raise ArtifactError(
            f"has a manifest that makes no sense: {type(error).__name__}: {str(error)[:200]}. {_ADVICE}."
        ) from error


def _place(shardings: Shardings | None, weight: Weight) -> jax.sharding.Sharding | None:
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        place = shardings
    else:
        place = shardings(weight.name, jax.ShapeDtypeStruct(weight.shape, np.dtype(weight.dtype)))
    if place is not None:
        try:
            place.shard_shape(weight.shape)
        except ValueError as error:
            raise ValueError(f"jaxbatch.load: shardings: `{weight.name}` {weight.shape}: {error}") from None
    return place


def _restore(artifact: Artifact, weights: Sequence[Weight], places: Sequence[Any]) -> None:
    """Bring the weights that are in checkpoints."""
    for number, checkpoint in enumerate(artifact.checkpoints):
        folder = checkpoint.found(artifact.path)
        wanted = {w.source[1]: i for i, w in enumerate(weights) if w.source and w.source[0] == number}
        arrays = checkpoint.restore(folder, {leaf: places[i] for leaf, i in wanted.items()})
        for leaf, i in wanted.items():
            array, weight = arrays[leaf], weights[i]
            if array.shape != weight.shape:
                raise ArtifactError(f"expected `{weight.name}` in {folder} to have the shape {weight.shape}.")
            artifact.weights[i] = array.astype(weight.dtype) if array.dtype.name != weight.dtype else array


def references(artifact: Artifact) -> list[Reference]:
    """Return the stored examples, and what the function itself gave for them.

    Raises:
      ArtifactError: they are damaged.
    """
    try:
        kinds = {
            f"{i}/{side}/{j}": (dtype, shape)
            for i, reference in enumerate(artifact.manifest["references"])
            for side, column in zip(("in", "out"), reference, strict=True)
            for j, (dtype, shape) in enumerate(column)
        }
        arrays = read_tensors(artifact.parts[REFERENCES], kinds)
    except (KeyError, TypeError, ValueError) as error:
        raise artifact.error(f"its reference examples cannot be read: {error}.") from error
    return [
        (
            [arrays[f"{i}/in/{j}"] for j in range(len(inputs))],
            [arrays[f"{i}/out/{j}"] for j in range(len(outputs))],
        )
        for i, (inputs, outputs) in enumerate(artifact.manifest["references"])
    ]


# --- checks ----------------------------------------------------------------------------------------


def _check_format(manifest: Mapping[str, Any]) -> None:
    found = manifest.get("format")
    if found != FORMAT:
        raise ArtifactError(
            f"has format {str(found)[:20]}, and this jaxbatch reads format {FORMAT}. {_writer(manifest)} "
            f"wrote it: use that version, or save it again with this one."
        )


def _check_machine(manifest: Mapping[str, Any]) -> None:
    platform, platforms = jax.export.default_export_platform(), manifest.get("platforms")
    if not isinstance(platforms, list) or platform not in platforms:
        known = ", ".join(map(str, platforms)) if isinstance(platforms, list) else str(platforms)[:40]
        raise ArtifactError(
            f"has programs for {known}, and JAX runs on {platform} here. {_ADVICE}(..., platforms=[..., "
            f"'{platform}']); that needs no such device."
        )
    low = jax.export.minimum_supported_calling_convention_version
    high = jax.export.maximum_supported_calling_convention_version
    convention = manifest.get("calling_convention")
    if not isinstance(convention, int) or not low <= convention <= high:
        age = "newer" if isinstance(convention, int) and convention > high else "older"
        raise ArtifactError(
            f"was written by {_writer(manifest)}, and is {age} than JAX {jax.__version__} can read (calling "
            f"convention {convention}, here {low} to {high}). JAX reads programs for at least six months. "
            f"{_ADVICE} with a JAX nearer to this one."
        )
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    if manifest.get("x64") and not x64 and (wide := _wide_dtypes(manifest)):
        raise ArtifactError(
            f"takes or gives {', '.join(sorted(wide))}, and JAX has no 64-bit types here. Set "
            f"`jax_enable_x64`, or save it again without."
        )


def _writer(manifest: Mapping[str, Any]) -> str:
    writer = manifest.get("written_by")
    if not isinstance(writer, dict):
        return "something else"
    return f"jaxbatch {str(writer.get('jaxbatch'))[:40]} with JAX {str(writer.get('jax'))[:40]}"


def _wide_dtypes(manifest: Mapping[str, Any]) -> set[str]:
    try:
        variants = manifest["variants"]
        names = [name for each in variants for name in (*each["dtypes"], *each["outputs"]["dtypes"])]
        return _WIDE & {*names, *(weight["dtype"] for weight in manifest["weights"])}
    except (KeyError, TypeError):
        return set()  # it is refused when it is read


def _check_consistent(manifest: Any, spec: Any, grid: Grid, variants: Any, num_weights: int) -> None:
    """Raise ValueError if what the parts of a manifest say does not go together."""
    if not variants or set(spec.dims) != set(grid.dims):
        raise ValueError("the dims of spec and grid differ, or there is no program")
    for key, kind in {"name": str, "vjp_order": int, "policies": dict, "metadata": dict}.items():
        if type(manifest[key]) is not kind:
            raise ValueError(f"{key} is a {type(manifest[key]).__name__}")
    if (
        not isinstance(manifest["written_by"], dict)
        or not {"jaxbatch", "jax"} <= manifest["written_by"].keys()
    ):
        raise ValueError("it does not say who wrote it")
    for variant in variants:
        if len(variant.dtypes) != len(spec.leaves) or not variant.programs:
            raise ValueError("a variant has other inputs than the spec, or no program")
        for program in _programs(variant):
            if any(index >= num_weights for index in program.weights):
                raise ValueError("a program takes an array that is missing")
            if not set(program.dims) <= set(grid.dims) or not program.sizes.keys() <= set(grid.dims):
                raise ValueError("a program has other dims than the grid")
        for special in (*variant.failures, *variant.exact):
            if special.bounds.keys() != set(grid.dims):
                raise ValueError("bounds have other dims than the grid")


def _check_sources(weights: Sequence[Weight], checkpoints: Sequence[Checkpoint]) -> None:
    """Raise ValueError if a weight is said to be where nothing is."""
    for weight in weights:
        if weight.source is not None:
            number, leaf = weight.source
            if checkpoints[number].leaves[leaf] is None or weight.key is not None:
                raise ValueError(f"`{weight.name}` is no array of its checkpoint")


def _programs(variant: Variant) -> list[Any]:
    return [*variant.programs, *(each.program for each in variant.exact if each.program)]


def _grid(data: Any) -> Grid:
    dims = {dim: list(ladder) for dim, ladder in data["dims"].items()}
    return Grid(rows=list(data["rows"]), max_cells=data["max_cells"], **dims)
