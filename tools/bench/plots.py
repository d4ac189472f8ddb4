"""The pictures of the report: speeds as bars, and the lengths with the sizes fitted to them."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .ratios import find, thousands
from .rounds import Table

COLORS = {"jaxbatch": "#2a6f97", "JAX": "#8fb8d0", "oracle": "#555555"}


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures and return their paths; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    folder.mkdir(exist_ok=True)
    written = []
    for unit in ("tokens", "pixels"):
        tables = [table for table in results["tables"] if table.unit == unit and table.products == "float32"]
        if tables := [table for table in tables if any(record.seconds for record in table.systems)]:
            written.append(folder / f"benchmark-{unit}.png")
            _bars(pyplot, tables, written[-1])
    if fitted := [table for table in results["tables"] if _ladder(table)]:
        written.append(folder / "benchmark-lengths.png")
        _lengths(pyplot, [table for table in fitted if table.products == fitted[0].products], written[-1])
    return written


def _bars(pyplot: Any, tables: list[Table], file: Path) -> None:
    figure, axes = pyplot.subplots(1, len(tables), figsize=(6 * len(tables), 5), squeeze=False)
    for axis, table in zip(axes[0], tables, strict=True):
        shown = [record for record in table.systems if record.seconds and "probe" not in record.name]
        shown.sort(key=lambda record: thousands(table, record))
        colors = [COLORS.get(record.name.replace(",", " ").split()[0], "#c9a36a") for record in shown]
        axis.barh([record.name for record in shown], [thousands(table, r) for r in shown], color=colors)
        axis.set_title(f"{table.workload}, {table.products}")
        axis.set_xlabel(f"thousand {table.unit} a second")
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def _lengths(pyplot: Any, tables: list[Table], file: Path) -> None:
    figure, axes = pyplot.subplots(1, len(tables), figsize=(6 * len(tables), 3), squeeze=False)
    for axis, table in zip(axes[0], tables, strict=True):
        axis.hist(table.lengths["n"], bins=64, color=COLORS["JAX"])
        for size in _ladder(table):
            axis.axvline(size, color=COLORS["jaxbatch"], linewidth=0.8)
        axis.set_title(f"{table.workload}: tokens a text, and 10 fitted sizes")
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    pyplot.close(figure)


def _ladder(table: Table) -> list[int]:
    record = find(table, "jaxbatch, 10 fitted sizes")
    return record.details.get("sizes", []) if record else []
