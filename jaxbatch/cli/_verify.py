"""`jaxbatch verify`: run an artifact's reference examples in every bucket, with poison in the padding."""

import argparse
import functools
from typing import Any

import numpy as np

from .. import _artifact, _closeness
from .._batch import pad_and_stack, unstack
from .._errors import ArtifactError
from .._grid import Bucket, Grid
from .._invariance import padding_value
from .._loaded import Loaded, load
from .._shared import Shared

POISONS = (0.0, 1e30, float("nan"), float("inf"))


def add(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("verify", help="check digests, and every bucket against stored references")
    parser.add_argument("artifact")
    parser.add_argument("--quick", action="store_true", help="one number of rows for each size")
    parser.add_argument("--cache-dir", help="a folder for compiled programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the artifact; print what was checked."""
    loaded = load(args.artifact, frozen=False, cache_dir=args.cache_dir)
    references = _artifact.references(loaded.artifact)
    for checkpoint in loaded.artifact.checkpoints:
        try:
            checkpoint.found(args.artifact, all_digests=True)
        except ArtifactError as error:
            raise ArtifactError(f"{args.artifact} {error}") from None
    print(f"{args.artifact}: all digests are right")
    if not references:
        print("it holds no reference examples, so its programs were not run (save with references=True)")
        return 0
    grid = loaded.artifact.grid
    wrong = checked = 0
    for bucket in _smallest_of_sizes(grid) if args.quick else grid:
        for i, (inputs, outputs) in enumerate(references):
            if not _fits(loaded, inputs, bucket):
                continue
            checked += 1
            try:
                check(loaded, inputs, outputs, bucket)
            except AssertionError as error:
                wrong += 1
                print(f"WRONG: reference {i} in {dict(bucket)}: {error}")
    print(f"{checked - wrong} of {checked} runs of references agree, each with {len(POISONS)} paddings")
    return 1 if wrong else 0


def check(loaded: Loaded, inputs: list[np.ndarray], outputs: list[np.ndarray], bucket: Bucket) -> None:
    """Raise AssertionError unless an example gives its reference in a bucket, whatever the padding holds."""
    engine = loaded.engine
    traced = engine.padded(Shared.of([], []), [leaf.dtype for leaf in inputs], {})
    assert traced is not None
    build = functools.partial(traced.build, bucket, engine.executables.disk)
    program = engine.executables.get(traced.key(bucket), build)
    lengths = np.array([[_lengths(loaded, inputs)[dim] for dim in traced.dims]], np.int32)
    clean: list[np.ndarray] | None = None
    for poison in POISONS:
        with padding_value(poison):
            arrays, residuals = pad_and_stack([inputs], lengths, traced.shapes(bucket), bucket["rows"])
        results = program(traced.counts(residuals), traced.consts(bucket), [], arrays)
        got = unstack([np.asarray(each) for each in results], residuals, traced.out_shapes(residuals))[0]
        for j, (array, expected) in enumerate(zip(got, outputs, strict=True)):
            _closeness.assert_array_like(array, expected, f"output {j}", f"with {poison} in the padding")
        _closeness.assert_same_bits(got, clean or got, f"with {poison} in the padding")
        clean = clean or got


def _smallest_of_sizes(grid: Grid) -> list[Bucket]:
    """Return for each sizes the bucket of fewest rows."""
    by_sizes: dict[tuple[Any, ...], Bucket] = {}
    for bucket in grid:
        by_sizes.setdefault(tuple(bucket.sizes.items()), bucket)
    return list(by_sizes.values())


def _lengths(loaded: Loaded, inputs: list[np.ndarray]) -> dict[str, int]:
    spec = loaded.artifact.spec
    checked = spec.check(tuple(spec.treedef.unflatten(inputs)))
    return dict(zip(spec.dims, checked.lengths, strict=True))


def _fits(loaded: Loaded, inputs: list[np.ndarray], bucket: Bucket) -> bool:
    return all(length <= bucket[dim] for dim, length in _lengths(loaded, inputs).items())
