"""The command; see `tools.latency`."""

import argparse
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from tools.bench import cli, online, report
from tools.replay.live import compare_with_live

from . import measures
from .models import minilm, tiny

PARTS = ("overhead", "throughput", "poisson", "ticker", "simulation")
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.latency", description="Measure the dispatcher.")
    parser.add_argument("--minilm", action="store_true", help="use real MiniLM")
    parser.add_argument("--quick", action="store_true", help="few of everything: does it run?")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; repeatable")
    parser.add_argument("--seconds", type=float, help="of arrivals, for each load and way; 20, or 5 if tiny")
    parser.add_argument("--write", action="store_true", help="put the tables into BENCHMARKS.md")
    options = parser.parse_args()
    found = measure(options)
    print(online.section(found))
    if options.write:
        write(found)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that were asked for, and return their numbers."""
    parts, quick = options.only or PARTS, options.quick
    found: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    found["model"] = "MiniLM" if options.minilm else "a tiny model"
    if "overhead" in parts:
        say("overhead")
        found["overhead"] = list(measures.overhead(each=200 if quick else 2000))
    if "ticker" in parts:
        say("an event loop")
        found["ticker"] = measures.ticker(4 if quick else 20)
    if "simulation" in parts:
        say("simulated and live")
        comparisons = compare_with_live(1.0 if quick else 8.0)
        found["simulation"] = [dataclasses.asdict(each) for each in comparisons]
    if "throughput" in parts or "poisson" in parts:
        say("warming up")
        served = minilm() if options.minilm else tiny()
        served[0].warm_up(*served[1])
        say("throughput")
        found["throughput"] = measures.throughput(served, 1 if quick else 3)
        if "poisson" in parts:
            say("arrivals at random")
            seconds = options.seconds or (1.0 if quick else 20.0 if options.minilm else 5.0)
            # A tiny model is bounded by the producer, not by the device.
            capacity = found["throughput"]["run"] if options.minilm else 5000.0
            found["poisson"] = list(measures.poisson(served, capacity, seconds))
    return found


def write(found: dict[str, Any]) -> None:
    """Keep the numbers with those of the benchmark, and write its report again."""
    data, output = ROOT / "docs" / "benchmarks.json", ROOT / "BENCHMARKS.md"
    results = cli.load(data)
    results["online"] = {**(results.get("online") or {}), **found}
    data.write_text(json.dumps(results, default=dataclasses.asdict, indent=1) + "\n")
    output.write_text(report.write(results, sorted((ROOT / "docs").glob("benchmark-*.png"), reverse=True)))
    say(f"written to {output.name}")


def say(line: str) -> None:
    """Show progress where it does not mix with the report."""
    print(f"[{datetime.datetime.now():%H:%M:%S}] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
