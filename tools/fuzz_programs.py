"""Compare `jb.mask` with the unpadded function on random programs, for as long as you like.

    python -m tools.fuzz_programs --num 10000 --grads 2000            # seeds 0 to 9999
    python -m tools.fuzz_programs --seed 4200 --num 1 --show          # one program, printed
    python -m tools.fuzz_programs --packed --num 10000                # `jb.pack` instead, of one ragged dim

A seed is a program, so a run is resumed by starting at a later seed. Programs run in worker processes, which
are replaced now and then (compiled programs are never freed entirely) and when a program hangs or kills
them. The exit status is 1 if there was a wrong number, a crash or a hang; each is printed as a smaller
program that still fails. What `jb.mask` refuses is counted by primitive and reason, and is no failure.
"""

import argparse
import faulthandler
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SEEDS_PER_WORKER = 400
SEEDS_PER_CACHE = 40  # programs between two times of forgetting what is compiled
HANG = 300.0  # seconds that one program may take, on a machine with other work; and then its shrinking


# --- a worker: seeds in, one JSON line each out ------------------------------------------------------


def work(first: int, num: int, share: float, show: bool, packed: bool) -> None:
    """Check programs one after another; print a line before and after each."""
    sys.path.insert(0, str(ROOT / "tests"))
    import jax
    import pack_check  # pyright: ignore[reportMissingImports]
    import program_check  # pyright: ignore[reportMissingImports]  (a helper of the tests, put on the path above)
    import program_ops  # pyright: ignore[reportMissingImports]
    import program_shrink  # pyright: ignore[reportMissingImports]
    import programs  # pyright: ignore[reportMissingImports]

    check = pack_check.check if packed else program_check.check
    jax.config.update("jax_default_matmul_precision", "highest")
    for seed in range(first, first + num):
        _say({"begin": seed})
        faulthandler.dump_traceback_later(HANG, exit=True)
        untraceable: Counter[str] = Counter()
        program = programs.generate(seed, program_ops.OPS, untraceable, most_dims=1 if packed else 2)
        gradients = int(seed * share) != int((seed + 1) * share)  # spread evenly over the seeds
        verdict = check(program, gradients=gradients)
        common = {
            "gradients": gradients,
            "untraceable": untraceable,
            "ops": Counter(step.op for step in program.steps),
        }
        if verdict.failed:
            _say({"failed": seed, **common, "listing": program.listing(), **vars(verdict)})
            faulthandler.dump_traceback_later(HANG, exit=True)
            program = program_shrink.shrink(program, program_check.same_failure(verdict, gradients, check))
            verdict = check(program, gradients=gradients)
        faulthandler.cancel_dump_traceback_later()
        reported = verdict.failed or verdict.status == "unsure" or show
        _say({"end": seed, **common, "listing": program.listing() if reported else "", **vars(verdict)})
        if seed % SEEDS_PER_CACHE == 0:
            jax.clear_caches()


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# --- the parent: workers, a tally, a summary ---------------------------------------------------------


class Tally:
    """What became of all programs so far."""

    def __init__(self, num: int):
        self.num = num
        self.start = time.monotonic()
        self.counts: dict[str, Counter[str]] = {
            name: Counter()
            for name in ("status", "refusals", "untraceable", "ops", "primitives", "gradients")
        }
        self.reports: list[dict[str, Any]] = []

    def add(self, result: dict[str, Any]) -> None:
        status = result["status"]
        self.counts["status"][status] += 1
        for name in ("untraceable", "ops", "primitives"):
            self.counts[name].update(result[name])
        if result["gradients"]:
            self.counts["gradients"][status] += 1
        if status == "refused":
            self.counts["refusals"][f"{result['stage']}: {result['detail']}"] += 1
        if result["listing"]:
            self.reports.append(result)
            print(f"\n{report(result)}", flush=True)

    @property
    def failed(self) -> bool:
        return any(self.counts["status"][s] for s in ("wrong", "crashed", "hung"))

    def progress(self) -> str:
        done, seconds = self.counts["status"].total(), time.monotonic() - self.start
        states = ", ".join(f"{count} {status}" for status, count in self.counts["status"].most_common())
        return f"{done}/{self.num} programs, {done / max(seconds, 1e-9):.1f}/s: {states}"

    def summary(self) -> str:
        parts = [self.progress(), f"with gradients: {dict(self.counts['gradients'])}"]
        for name in ("ops", "primitives", "untraceable", "refusals"):
            rows = self.counts[name].most_common()
            parts.append(f"\n{name} ({len(rows)} kinds)")
            parts += [f"  {count:6}  {what}" for what, count in rows]
        failures = [r for r in self.reports if r["status"] != "exact"]
        parts.append(f"\nfailed or unsure: {len(failures)}")
        parts += [f"  seed {r['end']}: {r['status']}, {r['stage']}, {r['detail'][:150]}" for r in failures]
        return "\n".join(parts)


def report(result: dict[str, Any]) -> str:
    return f"{result['listing']}\n# {result['status']}, {result['stage']}: {result['detail']}"


def lost(seed: int, trace: str) -> dict[str, Any]:
    """Return the result of a program that took its worker with it."""
    ours = [line.strip() for line in trace.splitlines() if str(ROOT / "jaxbatch") in line]
    return {
        "end": seed,
        "status": "hung",
        "stage": "values",
        "detail": f"no answer in {HANG:.0f} s, or the process died: {'; '.join(ours[:3]) or trace[-300:]}",
        "gradients": False,
        "untraceable": {},
        "ops": {},
        "primitives": {},
        "listing": f"# seed {seed}",
    }


def supervise(
    todo: "queue.Queue[tuple[int, int]]", results: "queue.Queue[Any]", options: Sequence[str]
) -> None:
    """Run workers over ranges of seeds until none is left; `options` are passed on to them."""
    while True:
        try:
            first, num = todo.get_nowait()
        except queue.Empty:
            return results.put(None)
        while num > 0:
            done = _run_worker(first, num, options, results)
            first, num = first + done, num - done


def _run_worker(first: int, num: int, options: Sequence[str], results: "queue.Queue[Any]") -> int:
    """Run one worker and return how many seeds it dealt with, one that it died of included."""
    command = [sys.executable, "-m", "tools.fuzz_programs", "--worker", f"--seed={first}", f"--num={num}"]
    command += options
    env = {"JAX_PLATFORMS": "cpu", **os.environ}
    worker = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    errors: list[str] = []
    assert worker.stdout is not None and worker.stderr is not None
    reader = threading.Thread(target=lambda: errors.extend(worker.stderr or ()), name="stderr", daemon=True)
    reader.start()
    done, begun, failed = 0, None, None
    for line in worker.stdout:
        message = json.loads(line)
        if "begin" in message:
            begun, failed = message["begin"], None
        elif "failed" in message:
            failed = message | {"end": message["failed"]}  # should making it smaller take too long
        else:
            done, begun = done + 1, None
            results.put(message)
    worker.wait()
    reader.join()
    if worker.returncode == 0:
        return num
    trace = "".join(errors)
    if begun is None or (worker.returncode > 0 and "Timeout (" not in trace):
        results.put(RuntimeError(f"a worker failed at seed {begun}:\n{trace[-3000:]}"))
        return num
    results.put(failed or lost(begun, trace))
    return done + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument(
        "--grads", type=int, default=0, help="for how many of them gradients are compared too"
    )
    parser.add_argument(
        "--packed", action="store_true", help="compare `jb.pack` on programs of one ragged dim"
    )
    parser.add_argument("--jobs", type=int, default=1, help="worker processes at a time")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    share = args.share if args.share is not None else min(args.grads / max(args.num, 1), 1)
    if args.worker:
        work(args.seed, args.num, share, args.show, args.packed)
        return 0

    todo: queue.Queue[tuple[int, int]] = queue.Queue()
    results: queue.Queue[Any] = queue.Queue()
    for first in range(args.seed, args.seed + args.num, SEEDS_PER_WORKER):
        todo.put((first, min(SEEDS_PER_WORKER, args.seed + args.num - first)))
    for k in range(args.jobs):
        options = [f"--share={share}", *[f"--{name}" for name in ("show", "packed") if vars(args)[name]]]
        arguments = (todo, results, options)
        threading.Thread(target=supervise, args=arguments, name=f"worker {k}", daemon=True).start()
    tally, running, shown = Tally(args.num), args.jobs, 0.0
    while running:
        result = results.get()
        if result is None:
            running -= 1
            continue
        if isinstance(result, Exception):
            raise result  # this tool's own mistake
        tally.add(result)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(tally.progress(), flush=True)
    print(f"\n{tally.summary()}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
