"""One table: start every system, compare its answers, then time them in turn."""

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .systems import REFERENCES, Entry, Settings, entries
from .workloads import Workload

TOLERANCE = {"float32": 2e-5, "pixels": 1e-4, "bfloat16": 1e-2, "int8": 1e-1}
"""How far an answer may be from a float32 single call: numbers of unit vectors, or probabilities."""

PAUSE = 0.2
"""Seconds before each pass, for threads of the system before to stop spinning."""


@dataclasses.dataclass
class Record:
    """What is known of one system.

    Attributes:
      skipped: why it was not timed, or empty.
      difference: the largest difference of an answer from a float32 single call.
      seconds: of each timed pass, by round.
      cores: the processor time of each timed pass over its wall time.
    """

    name: str
    skipped: str = ""
    difference: float | None = None
    cold_start: float | None = None
    first_pass: float | None = None
    compile_seconds: float | None = None
    programs: int | None = None
    padded_cells: int | None = None
    peak_bytes: int | None = None
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)
    cores: dict[int, float] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Table:
    """All systems on one workload with one dtype of products.

    Attributes:
      others: cores that other processes kept busy during the timed rounds.
    """

    workload: str
    about: str
    unit: str
    products: str
    budget: int
    examples: int
    valid_cells: int
    lengths: dict[str, list[int]]
    rounds: int
    others: float | None
    systems: list[Record]


class Process:
    """A system in a process of its own; see `worker`."""

    def __init__(self, entry: Entry, settings: Settings, workload: Workload):
        self.entry, self._folder = entry, settings.folder
        self._file = f"{len(list(settings.folder.iterdir()))}.pickle"
        (self._folder / self._file).write_bytes(pickle.dumps((entry, settings, workload)))
        command = [sys.executable, "-m", "tools.bench.worker", str(self._folder), self._file]
        with open(self._folder / "log.txt", "a") as log:
            self._process = subprocess.Popen(
                [*command, str(time.time())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
            )

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command and wait for its reply; raises RuntimeError if the system failed."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply = json.loads(line) if line else {"error": f"ended with status {self._process.wait()}"}
        if "error" in reply:
            tail = (self._folder / "log.txt").read_text(errors="replace").splitlines()[-3:]
            raise RuntimeError(reply["error"] if line else " ".join([reply["error"], *tail])[:500])
        return reply

    def answers(self) -> list[np.ndarray]:
        """Return what `first` computed."""
        file = self._folder / f"{self._file}.answers"
        found = pickle.loads(file.read_bytes())
        file.unlink()
        return found

    def close(self) -> None:
        """End the process."""
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()


def reference(workload: Workload, say: Callable[[str], None]) -> list[np.ndarray]:
    """Return the answers of float32 single calls, each example at its exact shape."""
    say(f"{workload.name}: single calls of {len(workload.items)} examples, to compare with")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        process = Process(REFERENCES[workload.unit], Settings("float32", 0, Path(folder)), workload)
        try:
            process.ask("start")
            process.ask("first")
            return process.answers()
        finally:
            process.close()


def measure(
    workload: Workload,
    products: str,
    expected: Sequence[np.ndarray],
    *,
    budget: int,
    rounds: int,
    only: Sequence[str],
    say: Callable[[str], None],
) -> Table:
    """Run all systems of one table; those that cannot be timed are in it with the reason."""
    records, running = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        settings = Settings(products, budget, Path(folder))
        for entry in entries(workload.unit, products):
            if only and not any(part in entry.name for part in only):
                continue
            records.append(Record(entry.name))
            if missing := entry.missing():
                records[-1].skipped = f"not installed: {', '.join(missing)}"
                continue
            if not all(file.exists() for file in entry.kind().files()):
                say(f"{entry.name}: converting the model, once")
                _convert(Process(entry, settings, workload))
            process = Process(entry, settings, workload)
            stack.callback(process.close)
            kind = "int8" if "int8" in entry.name else "pixels" if workload.unit == "pixels" else products
            try:
                _begin(process, records[-1], expected, TOLERANCE[kind])
            except RuntimeError as error:
                records[-1].skipped = f"failed: {error}"
            if records[-1].skipped:
                process.close()
            else:
                running.append((entry, process, records[-1]))
            say(f"{workload.name} {products}: {_sign_of_life(records[-1])}")
        before, start, own = _busy_seconds(), time.perf_counter(), 0.0
        for number in range(rounds):
            for entry, process, record in running:
                if number % entry.every == 0:
                    time.sleep(PAUSE)
                    reply = process.ask("round")
                    record.seconds[number], record.cores[number] = reply["seconds"], reply["cores"]
                    own += reply["seconds"] * reply["cores"]
            say(f"{workload.name} {products}: round {number + 1} of {rounds}")
        after, wall = _busy_seconds(), time.perf_counter() - start
        for _, process, record in running:
            for name, value in process.ask("finish").items():
                setattr(record, name, value)
    return Table(
        workload=workload.name,
        about=workload.about,
        unit=workload.unit,
        products=products,
        budget=budget,
        examples=len(workload.items),
        valid_cells=int(workload.cells.sum()),
        lengths={dim: values.tolist() for dim, values in workload.lengths.items()},
        rounds=rounds,
        others=None if before is None or after is None else max(after - before - own, 0.0) / wall,
        systems=records,
    )


def _convert(process: Process) -> None:
    """Let a process make its files and end; if it fails, the next one says why."""
    with contextlib.suppress(RuntimeError):
        process.ask("start")
    process.close()


def _begin(process: Process, record: Record, expected: Sequence[np.ndarray], allowed: float) -> None:
    """Start a system, let it answer everything once, and compare."""
    for command in ("start", "first"):
        for name, value in process.ask(command).items():
            setattr(record, name, value)
    answers = process.answers()
    if process.entry.is_probe:
        return
    record.difference = difference(answers, expected)
    if record.difference is not None and not record.difference <= allowed:
        record.skipped = f"wrong: an answer is {record.difference:.1e} from a single call"


def difference(answers: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float | None:
    """Return the largest difference; None if nothing can be compared.

    An answer that is nan in all places was not given; one that is nan in some is infinitely wrong.
    """
    if len(answers) != len(expected):
        return float("inf")
    worst = None
    for answer, right in zip(answers, expected, strict=True):
        if np.shape(answer) != np.shape(right):
            return float("inf")
        missing = np.isnan(answer)
        if missing.all():
            continue
        own = float("inf") if missing.any() else float(np.max(np.abs(answer - right)))
        worst = max(worst or 0.0, own)
    return worst


def _sign_of_life(record: Record) -> str:
    if record.skipped:
        return f"{record.name} is not timed, {record.skipped}"
    found = "not compared" if record.difference is None else f"difference {record.difference:.1e}"
    return f"{record.name}: {found}, first pass {record.first_pass or 0:.1f} s"


def _busy_seconds() -> float | None:
    """Return how long all processors of this machine have worked so far, for anybody."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
