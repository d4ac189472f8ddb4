"""`jaxbatch inspect`: what an artifact holds, read from its manifest once all digests are right."""

import argparse
import json
import math
from typing import Any

import numpy as np

from .. import _artifact
from .._errors import ArtifactError
from .._grid import Grid


def add(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("inspect", help="show what an artifact holds")
    parser.add_argument("artifact")
    parser.add_argument("--json", action="store_true", help="print the whole manifest")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    artifact = _artifact.load(args.artifact, runs=False)  # to be looked at, also where it cannot run
    if args.json:
        print(json.dumps(artifact.manifest, indent=1))
        return 0
    manifest = artifact.manifest
    writer = manifest["written_by"]
    lines = {
        "function": manifest["name"],
        "written by": ", ".join(f"{name} {version}" for name, version in writer.items()),
        "platforms": ", ".join(manifest["platforms"]),
        "example": str(artifact.spec).removeprefix("Spec(").removesuffix(")"),
        "grid": f"{artifact.grid}: {_count(len(artifact.grid), 'program')} when compiled",
        "gradients": f"vjp_order={artifact.vjp_order}",
        "weights": _weights(manifest["weights"]),
        "costs": f"{len(artifact.costs.measured)} buckets measured",
        "references": _count(len(manifest["references"]), "example"),
        "metadata": json.dumps(manifest["metadata"]),
    }
    print(f"{args.artifact}: all digests are right")
    for name, value in lines.items():
        print(f"  {name:<12} {value}")
    for checkpoint in artifact.checkpoints:
        print(f"  weights of a checkpoint: {_where(checkpoint, args.artifact)}")
    for variant in artifact.variants:
        print(f"  for ({', '.join(variant.dtypes)}):")
        outputs = zip(variant.outputs.dtypes, variant.outputs.shapes, strict=True)
        print(f"    gives {', '.join(f'{dtype}[{_shape(shape)}]' for dtype, shape in outputs)}")
        for program in variant.programs:
            print(f"    {program.part} {_served(program, artifact.grid)}")
    for name, part in manifest["parts"].items():
        print(f"  {part['size']:>12,} bytes  {part['sha256'][:16]}  {name}")
    return 0


def _where(checkpoint: Any, artifact: str) -> str:
    try:
        return str(checkpoint.found(artifact))
    except ArtifactError as error:
        return f"the artifact {error}"


def _weights(weights: list[dict[str, Any]]) -> str:
    sizes = [math.prod(each["shape"]) * np.dtype(each["dtype"]).itemsize for each in weights]
    return f"{_count(len(weights), 'array')}, {sum(sizes):,} bytes"


def _served(program: Any, grid: Grid) -> str:
    if not program.sizes and program.rows is None and grid.dims:
        return "serves all sizes and rows"
    sizes = ", ".join(f"{dim}={size}" for dim, size in program.sizes.items())
    return f"serves {sizes or 'all sizes'}, {'all rows' if program.rows is None else f'rows={program.rows}'}"


def _shape(shape: Any) -> str:
    return ", ".join(map(str, shape))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
