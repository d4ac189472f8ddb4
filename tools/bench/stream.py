"""A hundred thousand texts from a generator through `run.map`: does memory stay flat?"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import jaxbatch as jb
from models import bert, weights


def measure(num: int) -> dict[str, Any]:
    """Run the stream in a process of its own; return its numbers."""
    command = [sys.executable, "-m", "tools.bench.stream", str(num)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def lengths_of(num: int) -> np.ndarray:
    """Return lengths of 4 to 256 tokens, most of them short."""
    return np.clip(np.random.default_rng(0).lognormal(3, 0.8, num), 4, 256).astype(np.int64)


def main() -> None:
    """Print the seconds, and the memory at each tenth of the stream, as JSON."""
    num = int(sys.argv[1])
    model, params = bert.load(weights.fetch("bert-tiny"))
    run = jb.batched(model.embed, (None, 0), grid=jb.Grid(n=(16, 256), rows=(1, 64), max_cells=2048))
    lengths, random = lengths_of(num), np.random.default_rng(1)

    def texts() -> Iterator[np.ndarray]:
        for length in lengths.tolist():
            yield random.integers(1000, 20000, length, dtype=np.int32)

    marks = {round(num * tenth / 10) - 1 for tenth in range(1, 11)}
    memory, start, total = [], time.perf_counter(), 0.0
    for i, vector in enumerate(run.map(params, texts())):
        total += float(vector[0])
        if i in marks:
            memory.append(resident_bytes())
    seconds = time.perf_counter() - start
    done = run.statistics()
    print(
        json.dumps(
            {
                "examples": num,
                "tokens": int(lengths.sum()),
                "seconds": seconds,
                "resident_bytes": memory,
                "programs": done.compiles,
                "padding_share": done.padding_share,
            }
        )
    )


def resident_bytes() -> int:
    """Return the memory that this process has in use now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
