"""The process of one system: it reads a workload from a file, and commands from its standard input.

Commands and replies are lines of JSON. What libraries print goes to the standard error, so it cannot mix with
the replies.
"""

import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from .systems.base import System
from .workloads import Workload


def main() -> None:
    """Serve one system until its input ends: `worker FOLDER ENTRY STARTED`, made by `rounds.Process`."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    folder, started = Path(sys.argv[1]), float(sys.argv[3])
    try:
        system = workload = compiled = None
        for line in sys.stdin:
            command = json.loads(line)
            if command == "start":
                entry, settings, workload = pickle.loads((folder / sys.argv[2]).read_bytes())
                system = entry.make(settings)
                compiled = _count_compiles()
                reply = _start(system, workload, started)
            elif system is None or workload is None:
                raise RuntimeError(f"{command} before start")
            elif command == "first":
                reply = _first(system, workload, compiled, folder / f"{sys.argv[2]}.answers")
            elif command == "round":
                reply = _round(system, workload)
            else:
                reply = _finish(system, workload)
            print(json.dumps(reply), file=replies)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=replies)


def _start(system: System, workload: Workload, started: float) -> dict[str, Any]:
    """Load, and answer one example; the time counts from when the parent started this process."""
    system.load(workload)
    one = Workload(workload.name, workload.about, workload.items[:1], workload.texts[:1], workload.unit)
    system.run(one)
    return {"cold_start": time.time() - started}


def _first(system: System, workload: Workload, compiled: list[float] | None, file: Path) -> dict[str, Any]:
    """Answer everything for the first time, compiling what is needed, and leave the answers in a file."""
    start = time.perf_counter()
    answers = system.run(workload)
    seconds = time.perf_counter() - start
    file.write_bytes(pickle.dumps(list(answers)))
    return {
        "first_pass": seconds,
        "compile_seconds": None if compiled is None else sum(compiled),
        "padded_cells": system.padded_cells,
    }


def _round(system: System, workload: Workload) -> dict[str, Any]:
    before = time.process_time()
    wall = time.perf_counter()
    seconds = system.timed(workload)
    wall = time.perf_counter() - wall
    return {"seconds": seconds, "cores": (time.process_time() - before) / wall}


def _finish(system: System, workload: Workload) -> dict[str, Any]:
    system.finish(workload)
    return {"details": system.details, "programs": system.programs, "peak_bytes": _peak_bytes()}


def _count_compiles() -> list[float] | None:
    """Return a list that grows with the seconds of every XLA compile; None in a process without JAX."""
    if "jax" not in sys.modules:
        return None
    import jax

    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


def _peak_bytes() -> int | None:
    """Return the most memory that this process had in use; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


if __name__ == "__main__":
    main()
