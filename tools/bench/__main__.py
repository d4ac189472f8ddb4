"""Run the benchmark; see `tools.bench`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
