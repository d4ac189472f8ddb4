"""The parser, and what is common to all commands: errors become one line on stderr and an exit code."""

import argparse
import sys
from collections.abc import Sequence

from .._errors import JaxbatchError
from . import _export, _inspect, _plan, _run, _verify

_COMMANDS = (_inspect, _verify, _export, _plan, _run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="jaxbatch", description="Run functions of one example on many of different sizes."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("jaxbatch: interrupted", file=sys.stderr)
        return 130
    except (JaxbatchError, OSError, ValueError, TypeError, ImportError) as error:
        print(f"jaxbatch: {error}", file=sys.stderr)
        return 1
