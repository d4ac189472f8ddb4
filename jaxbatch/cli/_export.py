"""`jaxbatch export`: a function and its weights become an artifact."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from .._batched import Batched, batched
from .._spec import spec
from ._grids import parse_grid


def add(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("export", help="write an artifact of a function and its weights")
    parser.add_argument("function", help="module:function, or module:run where `run` is made by `batched`")
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument(
        "--params", help="weights, the first argument: an Orbax checkpoint, a .safetensors or an .npz file"
    )
    parser.add_argument(
        "--refer", action="store_true", help="leave the weights in the checkpoint, which `load` then reads"
    )
    parser.add_argument("--grid", help='"n=16:512 rows=1:64"; not for what `batched` made')
    parser.add_argument("--spec", help='"n, 64: float32" for the example, if it has no annotations')
    parser.add_argument("--platforms", help="cpu,cuda,tpu; default: where JAX runs now")
    parser.add_argument("--vjp-order", type=int, default=0, help="how often it can be differentiated")
    parser.add_argument("--metadata", type=json.loads, default={}, help="a JSON object of your own")
    parser.add_argument("--no-references", action="store_true", help="store no examples for `verify`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the artifact."""
    function = find(args.function)
    shared = [] if args.params is None else [Path(args.params)]
    if not isinstance(function, Batched):
        if args.grid is None:
            raise ValueError(
                f"{args.function} is a function, so --grid is needed, such as 'n=16:512 rows=1:64'."
            )
        own = None
        if args.spec is not None:
            shape, _, dtype = args.spec.rpartition(":")
            own = spec(shape.strip(), dtype.strip())
        in_axes = (*(None for _ in shared), 0)
        function = batched(function, in_axes, spec=own, grid=parse_grid(args.grid))
    function.save(
        args.output,
        *shared,
        platforms=args.platforms and args.platforms.split(","),
        vjp_order=args.vjp_order,
        metadata=args.metadata,
        references=not args.no_references,
        copy=not args.refer,
    )
    print(f"wrote {args.output}, {os.path.getsize(args.output):,} bytes")
    return 0


def find(path: str) -> Any:
    """Return what `module:name.of.it` stands for; modules of the working directory are found too."""
    module, colon, names = path.partition(":")
    if not colon or not names:
        raise ValueError(f"{path!r} names no function; write module:function.")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = importlib.import_module(module)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ValueError(f"{path!r}: there is no {name!r} in {module}.") from None
    return found
