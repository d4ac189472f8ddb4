"""`python -m jaxbatch` is the command `jaxbatch`."""

import sys

from .cli import main

sys.exit(main())
