"""How a grid is written on a command line: `n=16:512 rows=1:64 max_cells=65536`, lists as `n=16,100,512`."""

import re
from typing import Any

from .._grid import Grid


def parse_grid(text: str) -> Grid:
    """Return the grid that a text stands for.

    Example:
      >>> parse_grid("n=16:512 rows=1,8")
      Grid(n=(16, 512), rows=[1, 8])
    """
    dims: dict[str, Any] = {}
    for entry in re.split(r"[\s;]+", text.strip()):
        name, equals, sizes = entry.partition("=")
        if not equals or not re.fullmatch(r"\d+(:\d+|(,\d+)*)", sizes):
            raise ValueError(
                f"{entry!r} does not describe sizes. Write n=16:512 for powers of two, n=16,100 for a list, "
                f"n=16 for one size; several with blanks between."
            )
        numbers = [int(number) for number in re.split("[:,]", sizes)]
        if ":" in sizes:
            dims[name] = tuple(numbers)
        else:
            dims[name] = numbers if "," in sizes else numbers[0]
    return Grid(**dims)
