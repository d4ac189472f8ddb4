"""jaxbatch and the loop by hand in turn within one process: what the library itself costs.

Between processes, memory and whatever ran just before make a difference of several percent, which is more
than is asked about here. Both run the same batches, planned once; a pass is a whole workload.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .systems.base import Settings
from .systems.by_hand import ByHand
from .systems.with_jaxbatch import Jaxbatch
from .workloads import WORKLOADS


def measure(workload: str, num: int, rounds: int, budget: int) -> dict[str, Any]:
    """Compare in a process of its own; return seconds of each pass, jaxbatch's and the loop's."""
    options = [workload, f"--examples={num}", f"--rounds={rounds}", f"--budget={budget}"]
    command = [sys.executable, "-m", "tools.bench.same_process", *options]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def main() -> None:
    """Print the seconds of all passes as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.same_process", description=__doc__)
    parser.add_argument("workload", choices=[name for name in WORKLOADS if name != "pages"])
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--budget", type=int, default=1024)
    options = parser.parse_args()
    workload = WORKLOADS[options.workload](options.examples)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(products="float32", budget=options.budget, folder=Path(folder))
        systems = {"jaxbatch": Jaxbatch(settings, 10), "by hand": ByHand(settings, 10)}
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for system in systems.values():
            system.load(workload)
            system.run(workload)  # compiles; jaxbatch leaves its batches for the loop
        for _ in range(options.rounds):
            for name, system in systems.items():
                start = time.perf_counter()
                system.run(workload)
                seconds[name].append(time.perf_counter() - start)
    print(json.dumps({"workload": options.workload, "examples": options.examples, "seconds": seconds}))


if __name__ == "__main__":
    main()
