"""BENCHMARKS.md: what was measured, on what, what follows from it, and every number behind it."""

import statistics
from pathlib import Path
from typing import Any

from . import online
from .claims import breakdown, claims
from .ratios import faster, find, thousands, valid_share
from .rounds import Record, Table

BASELINE = {"tokens": "jaxbatch, 20 fitted sizes", "pixels": "jaxbatch, 16 fitted sizes"}


def write(results: dict[str, Any], charts: list[Path]) -> str:
    """Return the report as Markdown."""
    parts = [_head(results), _how(results["tables"])]
    if found := claims(results) + online.claims(results.get("online") or {}):
        parts.append(_claims(found))
    parts += [f"![{chart.stem.replace('-', ' ')}](docs/{chart.name})" for chart in charts]
    for table in results["tables"]:
        parts.append(_table(table))
        if lines := breakdown(table):
            parts.append("\n".join(["Where the time of jaxbatch with 20 fitted sizes goes:", "", *lines]))
    if results["stream"]:
        parts.append(_stream(results["stream"]))
    if results.get("online"):
        parts.append(online.section(results["online"]))
    return "\n\n".join(parts) + "\n"


def _head(results: dict[str, Any]) -> str:
    facts = "\n".join(f"| {name} | {value} |" for name, value in results["machine"].items())
    return (
        f"# Benchmarks\n\nWritten by `python -m tools.bench` on {results['date']}, after "
        f"{results['minutes']:.0f} minutes of measuring.\n\n| | |\n|---|---|\n{facts}"
    )


def _how(tables: list[Table]) -> str:
    lines = [
        "## How it was measured",
        "",
        "MiniLM (all-MiniLM-L6-v2, real weights), from token ids to unit vectors, and a text detector with "
        "two ragged dims, from images to maps. Every system runs in a process of its own and gets the same "
        "examples in the same random order. Before anything is timed, each of its answers is compared "
        "with a float32 call of that example alone; a system that is wrong is not timed. Then all systems "
        "take turns, one pass each, for several rounds. Speeds are medians over the rounds and count the "
        "examples' own cells only. Ratios are taken within a round: the median [lowest, highest] of them. "
        "All systems that are written in JAX use the same form of the encoder (`late` attention).",
    ]
    busy = [table.others for table in tables if table.others is not None]
    if busy and max(busy) > 0.1:
        lines += [
            "",
            f"**Other processes kept up to {max(busy):.1f} cores busy meanwhile**: speeds are too low, and "
            f"ratios are more reliable than speeds.",
        ]
    return "\n".join(lines)


def _claims(found: list[tuple[str, str, str, bool | None]]) -> str:
    rows = [
        f"| {what} | {aim} | {measured} | {'' if met is None else 'yes' if met else 'no'} |"
        for what, aim, measured, met in found
    ]
    return "\n".join(["## What it shows", "", "| | aim | measured | met |", "|---|---|---|---|", *rows])


def _table(table: Table) -> str:
    base = find(table, BASELINE[table.unit])
    cells = f"{table.examples:,} examples, {table.valid_cells:,} {table.unit}"
    budget = f", at most {table.budget:,} padded tokens in a JAX batch" if table.unit == "tokens" else ""
    lines = [
        f"## {table.workload}, {table.products}",
        "",
        f"{table.about[0].upper()}{table.about[1:]}: {cells}; rounds: {table.rounds}{budget}. Ratios are to "
        f"{BASELINE[table.unit]}, above 1 where the system is faster.",
        "",
        f"| system | thousand {table.unit}/s | ratio | largest difference | padding | programs | compile s "
        "| first result s | first pass s | peak MB | cores |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    timed = [record for record in table.systems if record.seconds]
    for record in sorted(timed, key=lambda record: -thousands(table, record)):
        share = valid_share(table, record)
        values = (
            record.name,
            f"{thousands(table, record):.1f}",
            str(faster(record, base) or ""),
            "" if record.difference is None else f"{record.difference:.0e}",
            "" if share is None else f"{1 - share:.1%}",
            "" if record.programs is None else record.programs,
            "" if record.compile_seconds is None else f"{record.compile_seconds:.1f}",
            f"{record.cold_start or 0:.1f}",
            f"{record.first_pass or 0:.1f}",
            "" if record.peak_bytes is None else f"{record.peak_bytes / 1e6:.0f}",
            f"{statistics.median(record.cores.values()):.1f}",
        )
        lines.append("| " + " | ".join(map(str, values)) + " |")
    lines += ["", *[_left_out(record) for record in table.systems if record.skipped]]
    return "\n".join(lines).rstrip()


def _left_out(record: Record) -> str:
    return f"- Not timed: {record.name}; {record.skipped}."


def _stream(found: dict[str, Any]) -> str:
    memory = [f"{each / 1e6:.0f}" for each in found["resident_bytes"]]
    return (
        f"## A stream\n\n{found['examples']:,} texts ({found['tokens']:,} tokens) from a generator, through "
        f"`run.map` and a BERT of two layers, in {found['seconds']:.0f} s with {found['programs']} programs. "
        f"Memory in use after each tenth, MB: {', '.join(memory)}."
    )
