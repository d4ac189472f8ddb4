"""Numbers as text: aligned columns, and units that people read."""

from collections.abc import Mapping, Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str | None]]) -> list[str]:
    """Return lines of aligned columns: the first to the left, numbers to the right, "-" for None.

    Example:
      >>> for line in table(["bucket", "batches"], [["n=16", "5"], ["n=512", None]]):
      ...     print(line)
      bucket  batches
      n=16          5
      n=512         -
    """
    cells = [list(headers), *[["-" if each is None else each for each in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            each.rjust(width) if i else each.ljust(width)
            for i, (each, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def seconds(value: float | None) -> str | None:
    """Write a time with the unit that suits it.

    Example:
      >>> [seconds(each) for each in (0.0, 2.5e-5, 0.0123, 75.0)]
      ['0 s', '25.0 us', '12.3 ms', '75.00 s']
    """
    if value is None:
        return None
    if value == 0:
        return "0 s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def memory(value: int | None) -> str | None:
    """Write bytes with the unit that suits them.

    Example:
      >>> [memory(each) for each in (512, 3_000_000)]
      ['512 B', '2.9 MiB']
    """
    if value is None:
        return None
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def shares(by_dim: Mapping[str, float]) -> str:
    """Write a share for each dim: "n 12.5%, h 3.0%"."""
    return ", ".join(f"{dim} {share:.1%}" for dim, share in by_dim.items())
