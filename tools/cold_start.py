"""Time from the start of a process to its first result and its last, with programs from four places.

    python -m tools.cold_start --model minilm

Each way runs in processes of its own: one to fill what it keeps, then one that is measured. `import` is the
time to import, `weights` to read them (or the artifact), `programs` the time that calls wait for programs of
the ladder (tracing, lowering, compiling or loading), `first` from the start to the first result. At the end,
how many times as long compiling took, and the first result beside import and weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
WAYS = ("no cache", "JAX's cache", "cache_dir", "artifact")


def worker(way: str, model: str, folder: Path) -> dict[str, float]:
    """Run one process's work and return its times in seconds."""
    begin = time.perf_counter()
    import jax
    import numpy as np

    import jaxbatch as jb

    if way == "JAX's cache":
        jax.config.update("jax_compilation_cache_dir", str(folder / "jax"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    xs = [np.random.default_rng(n).integers(1000, 2000, n).astype(np.int32) for n in SIZES]
    if way == "artifact":
        imported = time.perf_counter()
        run, shared = jb.load(folder / "model.jbx", cache_dir=folder / "artifact"), ()
    else:
        from models import bert, weights

        imported = time.perf_counter()
        net, params = bert.load(weights.fetch(model))
        shared = (jax.device_put(params),)
        cache = folder / "ours" if way == "cache_dir" else None
        run = jb.batched(net.embed, (None, 0), grid=jb.Grid(n=list(SIZES), rows=1), cache_dir=cache)
        if way == "no cache" and not (folder / "model.jbx").exists():
            run.save(folder / "model.jbx", *shared, references=False)
    loaded = time.perf_counter()
    np.asarray(run(*shared, xs[:1])[0])
    first = time.perf_counter()
    run(*shared, xs)
    counts = run.statistics()
    return {
        "import": imported - begin,
        "weights": loaded - imported,
        "programs": counts.compile_seconds + counts.load_seconds,
        "first": first - begin,
        "all": time.perf_counter() - begin,
        "compiled": counts.compiles,
        "from disk": counts.cached,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="minilm", choices=("minilm", "bert-tiny"))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(worker(args.worker[0], args.model, Path(args.worker[1]))))
        return
    print(f"{args.model}, {len(SIZES)} programs, one row each; seconds")
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            command = [
                sys.executable,
                "-m",
                "tools.cold_start",
                "--model",
                args.model,
                "--worker",
                way,
                folder,
            ]
            for _ in range(2):
                found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
            times = results[way] = json.loads(found.stdout)
            print(
                f"{way:<12}", "  ".join(f"{name} {value:6.2f}" for name, value in times.items()), flush=True
            )
    for way, times in results.items():
        faster = results["no cache"]["programs"] / times["programs"]
        late = times["first"] / (times["import"] + times["weights"])
        print(f"{way:<12} programs {faster:.1f} times as fast as compiled; first result at {late:.2f}")


if __name__ == "__main__":
    main()
