"""Write a batched function to one file: its programs, its weights, and all that is needed to call them."""

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxlib.version import __version__ as jaxlib_version

from .._batch import pad_and_stack, unstack
from .._calls import bound_dims
from .._engine import Engine
from .._errors import ArtifactError, SpecError
from .._grid import Bucket, Grid
from .._shared import Shared
from .._spec import Spec
from .._split import Described
from .._traced import Traced
from ._archive import MANIFEST, Writer, create, manifest_digest
from ._export import Exporter, Weights
from ._parts import Variant, Weight, bound_spec, spec_to_json
from ._sources import Sources
from ._tensors import write_tensors

FORMAT = 1
WEIGHTS = "weights.safetensors"
REFERENCES = "references.safetensors"

_UNMASKABLE = "it runs at exact sizes only, and an artifact cannot hold a program for each size."
_MAX_REFERENCE_BYTES = 1 << 18


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user says about an artifact.

    Attributes:
      platforms: as `jax.export` names them; None for the one in use.
      vjp_order: how often the masked function can be differentiated.
      metadata: JSON data of the user's own.
      references: whether to run the function on made-up examples, for `verify` to compare with.
    """

    platforms: Sequence[str] | None = None
    vjp_order: int = 0
    metadata: Mapping[str, Any] | None = None
    references: bool = True


def save(
    path: str | os.PathLike[str],
    engine: Engine,
    sources: Sources,
    flat: Callable[[Sequence[Any]], Shared],
    policies: Mapping[str, Any],
    options: Options,
) -> None:
    """Write an artifact; see `Batched.save`.

    Args:
      flat: makes shared arguments flat.
    """
    grid = engine.grid
    if grid is None:
        raise ArtifactError("there is no grid yet, so it is not known which programs to save. Pass grid=.")
    if engine.is_unmaskable:
        raise ArtifactError(_UNMASKABLE)
    shared = flat(sources.args)
    known = _known_traces(engine, shared)
    fixed = _fixed(engine, sources.args, known)
    traces = known
    if not traces:
        default = engine.padded(shared, engine.function.spec.dtypes(), fixed)
        if default is None:
            raise ArtifactError(_UNMASKABLE)
        traces = [default]
    dtypes = [[leaf.dtype.name for leaf in traced.signature.examples] for traced in traces]
    spec = bound_spec(engine.function.spec, fixed, list(zip(*dtypes, strict=True)))
    try:
        spec_json = spec_to_json(spec)
    except TypeError as error:
        raise ArtifactError(str(error)) from None
    platforms = tuple(options.platforms or (jax.export.default_export_platform(),))
    with create(path) as archive:
        weights = Weights()
        exporter = Exporter(
            engine.function,
            spec,
            grid,
            shared,
            fixed,
            platforms,
            options.vjp_order,
            weights,
            lambda data: _add_program(archive, data),
        )
        larger = policies["oversize"] == "exact"
        variants = [_variant(exporter, traced, larger).to_json() for traced in traces]
        described = _add_weights(archive, weights)
        references = []
        if options.references:
            values = flat(sources.values()) if sources.checkpoints else shared
            references = _references(engine, spec, values, fixed, traces, grid)
        _add_references(archive, references)
        checkpoints = [opened.reference(path) for opened in sources.checkpoints.values()]
        manifest = {
            "format": FORMAT,
            "name": engine.function.name,
            "written_by": {"jaxbatch": version(), "jax": jax.__version__, "jaxlib": jaxlib_version},
            "calling_convention": jax.export.maximum_supported_calling_convention_version,
            "platforms": list(platforms),
            "x64": bool(jax.config.jax_enable_x64),  # pyright: ignore[reportAttributeAccessIssue]
            "matmul_precision": jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
            "spec": spec_json,
            "grid": {
                "dims": {dim: list(ladder) for dim, ladder in grid.sizes.items()},
                "rows": list(grid.rows),
                "max_cells": grid.max_cells,
            },
            "policies": dict(policies),
            "costs": json.loads(engine.costs.to_json()),
            "vjp_order": options.vjp_order,
            "variants": variants,
            "weights": [dataclasses.asdict(weight) for weight in described],
            "checkpoints": [dataclasses.asdict(checkpoint) for checkpoint in checkpoints],
            "references": [[_kinds(inputs), _kinds(outputs)] for inputs, outputs in references],
            "metadata": _json_data(options.metadata),
            "parts": archive.parts,
        }
        manifest["sha256"] = manifest_digest(json.loads(json.dumps(manifest)))
        text = json.dumps(manifest, indent=1)
        archive.add(MANIFEST, lambda write: write(text.encode()))


def version() -> str:
    """Return the version of this library, as it is installed."""
    try:
        return importlib.metadata.version("jaxbatch")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _json_data(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"metadata must be JSON data: {error}.") from None


# --- what is saved ---------------------------------------------------------------------------------


def _known_traces(engine: Engine, shared: Shared) -> list[Traced]:
    """Return the traces that were made so far for such shared arguments, one for each kind of example."""
    static = engine.signature(shared, [], dict.fromkeys(engine.fixed_dims, 1)).static
    return [
        traced
        for traced in engine.traces()
        if not traced.is_exact
        and traced.signature.shared == shared.signature
        and traced.signature.static == static
    ]


def _fixed(engine: Engine, shared_args: Sequence[Any], known: Sequence[Traced]) -> dict[str, int]:
    """Return the sizes of dims that are not in the grid, from shared arguments or from earlier examples."""
    fixed = bound_dims(engine, shared_args)
    for dim in engine.fixed_dims:
        if dim in fixed:
            continue
        found = {_size_in(engine.function.spec, traced, dim) for traced in known}
        if len(found) != 1:
            seen = f"had the sizes {sorted(found)}" if found else "were none"
            raise SpecError(
                f"the size of `{dim}` must be known to save a program, and earlier examples {seen}. Write "
                f"the number into the spec, or name `{dim}` in the grid."
            )
        fixed[dim] = found.pop()
    return fixed


def _size_in(spec: Spec, traced: Traced, dim: str) -> int:
    for leaf, shape in zip(spec.leaves, traced.shapes(dict.fromkeys(traced.dims, 1)), strict=True):
        for axis, size in zip(leaf.axes, shape, strict=True):
            if axis.dim == dim:
                return axis.solve(size)
    raise AssertionError(f"{dim} is not in the spec")


def _variant(exporter: Exporter, traced: Traced, larger: bool) -> Variant:
    try:
        outputs = exporter.outputs(traced)
        outputs.to_json()
    except TypeError as error:
        raise ArtifactError(str(error)) from None
    programs = exporter.programs(traced)
    return Variant(
        dtypes=tuple(leaf.dtype.name for leaf in traced.signature.examples),
        outputs=outputs,
        programs=programs,
        moves=traced.moves,
        may_not_end=traced.may_not_end,
        rows_apart=not programs[0].takes_num,
        failures=tuple(exporter.failures(traced)),
        exact=(*exporter.empty(traced), *([exporter.oversize(traced)] if larger else [])),
    )


def _add_program(archive: Writer, data: bytes) -> str:
    num = sum(name.startswith("program-") for name in archive.parts)
    name = f"program-{num}.bin"
    archive.add(name, lambda write: write(data))
    return name


def _add_weights(archive: Writer, weights: Weights) -> list[Weight]:
    described, arrays = [], {}
    for name, array in zip(weights.names, weights.arrays, strict=True):
        if isinstance(array, Described):
            described.append(Weight(name, array.dtype.name, array.shape, source=array.source))
            continue
        key = None
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
            key, array = str(jax.random.key_impl(array)), jax.random.key_data(array)
        described.append(Weight(name, np.dtype(array.dtype).name, tuple(array.shape), key))
        arrays[name] = array
    archive.add(WEIGHTS, lambda write: write_tensors(write, arrays))
    return described


# --- reference examples ----------------------------------------------------------------------------

Reference = tuple[list[np.ndarray], list[np.ndarray]]


def _references(
    engine: Engine,
    spec: Spec,
    shared: Shared,
    fixed: Mapping[str, int],
    traces: Sequence[Traced],
    grid: Grid,
) -> list[Reference]:
    """Return made-up examples, unpadded, with what the function gives; fewer where it fails on them."""
    found, rng = [], np.random.default_rng(0)
    smallest = {dim: ladder[0] for dim, ladder in grid.sizes.items()}
    between = {dim: max(ladder[len(ladder) // 2] - 1, 1) for dim, ladder in grid.sizes.items()}
    for traced in traces:
        if traced.may_not_end:
            continue
        dtypes = [leaf.dtype for leaf in traced.signature.examples]
        for sizes in (smallest, between) if between != smallest else (smallest,):
            inputs = [
                _made_up(shape, dtype, rng) for shape, dtype in zip(spec.shapes(sizes), dtypes, strict=True)
            ]
            if sum(array.nbytes for array in inputs) > _MAX_REFERENCE_BYTES:
                continue
            try:
                exact = engine.function.exact(
                    shared, traced.signature, {**grid.sizes, "rows": grid.rows}, {**fixed, **sizes}
                )
                outputs = _run_alone(exact, sizes, inputs, shared)
            except Exception:  # made-up data may be outside what the function is for
                continue
            if sum(array.nbytes for array in outputs) <= _MAX_REFERENCE_BYTES:
                found.append((inputs, outputs))
    return found


def _made_up(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    if jax.numpy.issubdtype(dtype, np.inexact):
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _run_alone(
    exact: Traced, sizes: Mapping[str, int], inputs: list[np.ndarray], shared: Shared
) -> list[np.ndarray]:
    bucket = Bucket(rows=1, **sizes)
    lengths = np.array([[sizes[dim] for dim in exact.dims]], np.int32)
    arrays, residuals = pad_and_stack([inputs], lengths, exact.shapes(bucket), 1)
    program = exact.build(bucket)
    outputs = program(exact.counts(residuals), exact.consts(bucket), list(shared.arrays), arrays)
    return unstack([np.asarray(each) for each in outputs], residuals, exact.out_shapes(residuals))[0]


def _kinds(arrays: Sequence[np.ndarray]) -> list[tuple[str, list[int]]]:
    return [(array.dtype.name, list(array.shape)) for array in arrays]


def _add_references(archive: Writer, references: Sequence[Reference]) -> None:
    arrays = {
        f"{i}/{side}/{j}": array
        for i, reference in enumerate(references)
        for side, column in zip(("in", "out"), reference, strict=True)
        for j, array in enumerate(column)
    }
    archive.add(REFERENCES, lambda write: write_tensors(write, arrays))
