"""`jaxbatch plan`: what a run over examples of given lengths would do, and which grid would fit them."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from .. import _artifact
from .._explanation import explain
from .._grid import Grid
from .._plan import Means, plan
from ._grids import parse_grid


def add(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "plan", help="explain a run from the lengths of its examples, and fit a grid"
    )
    parser.add_argument(
        "--lengths",
        required=True,
        help="a text file with one length a line, or one JSON object of them by dim; or .npy; or .npz by dim",
    )
    parser.add_argument("--artifact", help="explain with its grid and costs")
    parser.add_argument("--grid", help='explain with this grid, such as "n=16:512 rows=1:64"')
    parser.add_argument("--max-sizes", type=int, default=8, help="of the grid that is fitted")
    parser.add_argument("--multiple-of", type=int, default=8, help="of the sizes that are fitted")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print explanations."""
    lengths = read_lengths(args.lengths)
    means, max_cells = Means(), None
    rows: Any = (1, 64)
    grids: dict[str, Grid] = {}
    if args.artifact:
        artifact = _artifact.load(args.artifact, runs=False)
        means, grid = Means(artifact.costs), artifact.grid
        rows, max_cells = list(grid.rows), grid.max_cells
        grids["the artifact's grid"] = grid
    if args.grid:
        grids["the grid given"] = parse_grid(args.grid)
    dims = next(iter(grids.values())).dims if grids else tuple(lengths)
    if len(dims) == len(lengths) == 1:  # a file of bare numbers does not name its dim
        lengths = dict(zip(dims, lengths.values(), strict=True))
    if not grids:
        grids["powers of two"] = Grid.infer(lengths)
    grids["a fitted grid"] = Grid.fit(
        lengths, args.max_sizes, args.multiple_of, rows=rows, max_cells=max_cells
    )
    for name, grid in grids.items():
        columns = np.stack([lengths[dim] for dim in grid.dims], axis=1)
        over = (columns > np.array([grid.limits[dim] for dim in grid.dims])).any(axis=1)
        inside = columns[~over & (columns > 0).all(axis=1)]
        jobs = plan(inside, grid, means)
        print(f"{name}: {grid}")
        if over.any():
            print(f"{int(over.sum())} examples are larger than it and would be refused")
        explanation = explain(
            jobs,
            inside,
            missing=len({job.bucket for job in jobs}),
            num_exact=len(columns) - len(inside) - int(over.sum()),
            cost=means.costs.seconds,
            memory=lambda _: None,
        )
        print(explanation, end="\n\n")
    return 0


def read_lengths(path: str) -> dict[str, np.ndarray]:
    """Return lengths by dim; those of a file that names none are of `n`."""
    source = Path(path)
    if source.suffix == ".npz":
        with np.load(source, allow_pickle=False) as arrays:
            found = dict(arrays)
    elif source.suffix == ".npy":
        found = {"n": np.load(source, allow_pickle=False)}
    else:
        text = source.read_text(encoding="utf-8").strip()
        data = json.loads(text) if text.startswith(("{", "[")) else [int(line) for line in text.split()]
        found = data if isinstance(data, dict) else {"n": data}
    arrays = {dim: np.asarray(values) for dim, values in found.items()}
    if any(a.ndim != 1 or a.dtype.kind not in "iu" or (a < 0).any() for a in arrays.values()) or not arrays:
        raise ValueError(f"{path}: lengths are integers of at least 0, one for each example.")
    return {dim: array.astype(np.int64) for dim, array in arrays.items()}
