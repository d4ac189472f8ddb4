"""The part of the report about the dispatcher, from the numbers of `tools.latency`."""

from typing import Any

from .claims import Claim

OVERHEAD, SHARE, GAP, LONGEST_GAP, OFF = 60e-6, 0.9, 10e-3, 100e-3, 0.15
"""The aims: seconds a request, of a call's throughput, seconds of gaps, and the simulation's error."""


def claims(found: dict[str, Any]) -> list[Claim]:
    """Return what can be said from these numbers."""
    said: list[Claim] = []
    for row in found.get("overhead", ()):
        what = f"dispatcher: overhead a request of a tiny model, {row['producers']} producers, {row['how']}"
        measured = f"{row['seconds'] * 1e6:.0f} us"
        said.append((what, f"under {OVERHEAD * 1e6:.0f} us", measured, row["seconds"] < OVERHEAD))
    if row := found.get("throughput"):
        middle, low, high = row["ratio"]
        what = f"dispatcher: throughput at saturation against a call, {found['model']}"
        said.append((what, f"{SHARE:.2f}", f"{middle:.2f} [{low:.2f}, {high:.2f}]", middle >= SHARE))
    by_load: dict[float, dict[str, Any]] = {}
    for row in found.get("poisson", ()):
        by_load.setdefault(row["load"], {})[row["way"]] = row
    for load, ways in by_load.items():
        own, usual = ways["jaxbatch"]["p99"], ways["pad to longest"]["p99"]
        what = f"dispatcher: p99 against padding to the longest of a batch, {load:.0%} load, {found['model']}"
        said.append((what, "below 1", f"{own / usual:.2f}", own < usual))
    if row := found.get("ticker"):
        what = "dispatcher: gaps of a 2 ms ticker while programs compile"
        measured = f"p99 {_ms(row['p99'])}, longest {_ms(row['max'])}"
        aim = f"p99 under {GAP * 1e3:.0f} ms, none over {LONGEST_GAP * 1e3:.0f} ms"
        said.append((what, aim, measured, row["p99"] < GAP and row["max"] <= LONGEST_GAP))
    if rows := found.get("simulation"):
        errors = [row["mean"][1] / row["mean"][0] - 1 for row in rows]
        what = "dispatcher: mean latency in the simulation against a live run"
        measured = ", ".join(f"{error:+.0%}" for error in errors)
        said.append((what, f"within {OFF:.0%}", measured, max(map(abs, errors)) <= OFF))
    return said


def section(found: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    parts = [
        "## Online",
        f"Single requests through a dispatcher, by `python -m tools.latency` on {found['date']}.",
    ]
    if rows := found.get("poisson"):
        parts.append(_poisson(rows, found["model"]))
    if row := found.get("throughput"):
        middle, low, high = row["ratio"]
        parts.append(
            f"At saturation ({row['examples']:,} requests of {found['model']} at once): "
            f"{row['dispatcher']:.0f} a second, and {row['run']:.0f} in one call of `run`; {middle:.2f} "
            f"[{low:.2f}, {high:.2f}] of it within a round, with {row['fill']:.0%} of rows filled and "
            f"{row['padding']:.0%} padding."
        )
    if rows := found.get("overhead"):
        parts.append(_overhead(rows))
    if row := found.get("ticker"):
        parts.append(
            f"A ticker of 2 ms on an event loop while {row['compiles']} programs compile, for "
            f"{row['compile_seconds']:.1f} s, and steps run: {row['ticks']:,} gaps beyond the 2 ms; median "
            f"{_ms(row['p50'])}, p99 {_ms(row['p99'])}, longest {_ms(row['max'])}."
        )
    if rows := found.get("simulation"):
        parts.append(_simulation(rows))
    return "\n\n".join(parts)


def _poisson(rows: list[dict[str, Any]], model: str) -> str:
    lines = [
        f"{model[0].upper()}{model[1:]} under Poisson arrivals, at shares of what one call of `run` does a "
        "second. To pad to the longest, a thread collects up to 16 requests for 5 ms. What cannot keep up "
        "has a queue that grows for as long as this lasted.",
        "",
        "| load | way | requests | p50 ms | p99 ms | examples/batch |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        times = f"{row['p50'] * 1e3:.1f} | {row['p99'] * 1e3:.1f} | {row['examples_per_batch']:.2f}"
        lines.append(f"| {row['load']:.0%} | {row['way']} | {row['requests']:,} | {times} |")
    return "\n".join(lines)


def _overhead(rows: list[dict[str, Any]]) -> str:
    lines = [
        "What a request costs with a model that costs next to nothing:",
        "",
        "| producers | how | us a request | us of a core | examples/batch |",
        "|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        times = f"{row['seconds'] * 1e6:.0f} | {row['core_seconds'] * 1e6:.0f}"
        mates = f"{row['examples_per_batch']:.1f}"
        lines.append(f"| {row['producers']} | {row['how']} | {times} | {mates} |")
    return "\n".join(lines)


def _simulation(rows: list[dict[str, Any]]) -> str:
    lines = [
        "A function that sleeps as a cost table says, live and in the simulated time of `tools.replay`, "
        "which is given the live arrivals and what the host took beyond the sleep:",
        "",
        "| load | mean ms, live | simulated | error | p99 ms, live | simulated | batches, live | simulated |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        (mean, its_mean), (p99, its_p99), batches = row["mean"], row["p99"], row["batches"]
        cells = [
            f"{row['load']:.0%}",
            f"{mean * 1e3:.1f}",
            f"{its_mean * 1e3:.1f}",
            f"{its_mean / mean - 1:+.1%}",
        ]
        cells += [f"{p99 * 1e3:.1f}", f"{its_p99 * 1e3:.1f}", *map(str, batches)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
