"""The command line: which workloads, systems and rounds, and where the report goes."""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import plots, report, same_process, stream
from .machine import machine
from .rounds import Record, Table, measure, reference
from .workloads import WORKLOADS

QUICK = {"wide": 24, "skewed": 40, "pages": 6}


def main() -> int:
    """Run what the options ask for; the exit status is 1 if a system failed or was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description="Compare jaxbatch with others."
    )
    parser.add_argument("--quick", action="store_true", help="a few examples, one round; prints the report")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed passes of each system, 5 by default")
    parser.add_argument("--only", default="", metavar="NAMES", help="only systems with such a name")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), metavar="NAMES", help="default: all")
    parser.add_argument("--products", default="float32,bfloat16", metavar="DTYPES", help="default: both")
    parser.add_argument("--examples", type=int, metavar="N", help="use only N examples of each workload")
    parser.add_argument("--budget", type=int, default=1024, metavar="TOKENS", help="of a JAX batch, at most")
    parser.add_argument("--stream", type=int, metavar="N", help="examples of the endless stream; 0 for none")
    parser.add_argument("--same", default="wide,skewed", metavar="NAMES", help="compared in one process too")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: BENCHMARKS.md, unless --quick")
    parser.add_argument("--data", type=Path, metavar="FILE", help="numbers; default: docs/benchmarks.json")
    parser.add_argument("--render", action="store_true", help="write the report again from the numbers")
    parser.add_argument("--add", action="store_true", help="keep earlier numbers that are not measured anew")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    output = options.output or (None if options.quick else root / "BENCHMARKS.md")
    data = options.data or (None if options.quick else root / "docs" / "benchmarks.json")

    # What `tools.latency` measured is not measured here, and stays.
    online = json.loads(data.read_text()).get("online") if data and data.exists() else None

    def save(results: dict[str, Any]) -> None:
        results["online"] = online
        if data:
            data.write_text(json.dumps(results, default=dataclasses.asdict, indent=1) + "\n")
        if output:
            output.write_text(report.write(results, plots.write(results, output.parent / "docs")))

    earlier = load(data) if (options.render or options.add) and data and data.exists() else None
    if options.render:
        if earlier is None:
            parser.error("--render needs --data, the numbers of an earlier run")
        results = earlier
    else:
        if unknown := set(filter(None, options.workloads.split(","))) - set(WORKLOADS):
            parser.error(f"no workload is called {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
        results = run(options, earlier, save)
    save(results)
    if not output:
        print(report.write(results, []))
    failed = [r.name for table in results["tables"] for r in table.systems if r.skipped.startswith("failed")]
    return 1 if failed else 0


def run(
    options: argparse.Namespace, earlier: dict[str, Any] | None, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the tables, saving after each, and return all numbers; they replace those of `earlier`."""
    results: dict[str, Any] = earlier or {"minutes": 0.0, "tables": [], "stream": None}
    results |= {"date": datetime.date.today().isoformat(), "machine": machine()}
    only = options.only.split(",") if options.only else []
    before, start = results["minutes"], time.perf_counter()

    def keep(**news: Any) -> None:
        results.update(news, minutes=before + (time.perf_counter() - start) / 60)
        save(results)

    for name in options.workloads.split(",") if options.workloads else ():
        workload = WORKLOADS[name](options.examples or (QUICK[name] if options.quick else None))
        expected = reference(workload, say)
        for products in options.products.split(",") if options.products else ():
            if products == "float32" or workload.unit == "tokens":
                rounds = options.rounds or (1 if options.quick else 5)
                table = measure(
                    workload, products, expected, budget=options.budget, rounds=rounds, only=only, say=say
                )
                others = [t for t in results["tables"] if (t.workload, t.products) != (name, products)]
                keep(tables=[*others, table])
    for name in options.same.split(",") if options.same else ():
        say(f"{name}: jaxbatch and the loop by hand in one process")
        found = same_process.measure(
            name, 60 if options.quick else 400, 2 if options.quick else 8, options.budget
        )
        others = [each for each in results.get("same_process", []) if each["workload"] != name]
        keep(same_process=[*others, found])
    num = (2000 if options.quick else 100_000) if options.stream is None else options.stream
    if num:
        say(f"a stream of {num:,} texts")
        keep(stream=stream.measure(num))
    return results


def load(file: Path) -> dict[str, Any]:
    """Read the numbers of an earlier run."""
    results = json.loads(file.read_text())
    tables = []
    for table in results["tables"]:
        systems = []
        for record in table["systems"]:
            by_round = {
                name: {int(number): value for number, value in record[name].items()}
                for name in ("seconds", "cores")
            }
            systems.append(Record(**{**record, **by_round}))
        tables.append(Table(**{**table, "systems": systems}))
    return {**results, "tables": tables}


def say(line: str) -> None:
    """Show progress where it does not mix with the report."""
    print(f"[{datetime.datetime.now():%H:%M:%S}] {line}", file=sys.stderr, flush=True)
