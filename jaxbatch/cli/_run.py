"""`jaxbatch run`: a file of rows through an artifact, in order, resumable at any moment.

Rows are taken in chunks of a fixed number, counted from the start of the input, and planned by cells within
each chunk. So which rows run together does not depend on where a run was interrupted, nor on measured times,
and a rerun gives the same bytes. A chunk's results become a file in a folder beside the output, durably, and
the output is made of these at the end. A rerun skips the chunks that are there, if input, artifact and
options are the same. The folder is locked while its run is alive, so that no two write to it.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import _progress
from .._calls import Call, Policy
from .._costs import Costs
from .._loaded import Loaded, load
from ._results import ERROR, all_outputs, join, record, write_chunk
from ._rows import FORMATS, Row, count_rows, format_of, read_rows

try:
    import fcntl
except ImportError:  # not on Windows, where two runs of one output are the user's to avoid
    fcntl = None

_LOCK = "lock"

SOME_FAILED = 3
"""The exit code where every row has its record and some of these are errors."""


def add(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser("run", help="run a file of rows through an artifact")
    parser.add_argument("artifact")
    parser.add_argument("input", help="JSON Lines, Parquet, or NPZ with ragged columns (`x` and `x_offsets`)")
    parser.add_argument("-o", "--output", required=True, help="its name says its format, as the input's does")
    kinds = sorted(set(FORMATS.values()))
    parser.add_argument("--input-format", choices=kinds)
    parser.add_argument("--output-format", choices=kinds)
    parser.add_argument(
        "--chunk", type=int, default=2048, help="rows that are planned together (default 2048)"
    )
    parser.add_argument("--cache-dir", help="a folder for compiled programs")
    parser.add_argument("--no-progress", action="store_true")
    parser.add_argument("--summary", help="a file for the summary, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the rows; print a summary on stderr."""
    if args.chunk < 1:
        raise ValueError(f"--chunk {args.chunk}: at least 1 row.")
    reading = format_of(args.input, args.input_format)
    writing = format_of(args.output, args.output_format)
    begin = time.perf_counter()
    loaded = load(args.artifact, frozen=False, costs=Costs(), cache_dir=args.cache_dir)
    folder = Path(f"{args.output}.parts")
    with _locked(folder, args.output):
        _prepare(folder, _job(args, loaded, reading, writing))
        rows = read_rows(args.input, reading, loaded.artifact.spec.names)
        wanted = not args.no_progress and sys.stderr.isatty()
        bar = _progress.progress_bar(wanted, loaded.engine.where, count_rows(args.input, reading))
        counts = _run_chunks(loaded, rows, folder, writing, args.chunk, bar)
        chunks = sorted(folder.glob("chunk-*.part"))
        join(Path(args.output), writing, chunks[: counts["chunks"]])
        shutil.rmtree(folder)
    summary = {**counts, "batches": _batch_sizes(loaded), "seconds": round(time.perf_counter() - begin, 3)}
    if args.summary:
        Path(args.summary).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(_in_words(args.output, summary), file=sys.stderr)
    return SOME_FAILED if counts["errors"] else 0


# --- chunks ----------------------------------------------------------------------------------------


def _run_chunks(
    loaded: Loaded, rows: Iterator[Row], folder: Path, writing: str, size: int, bar: Any
) -> dict[str, int]:
    """Run all chunks whose files are missing, and count all rows."""
    counts = {"rows": 0, "errors": 0, "resumed": 0, "chunks": 0}
    outputs = all_outputs(loaded.artifact.variants[0].outputs.tree)
    with bar or contextlib.nullcontext():
        for number in itertools.count():
            chunk = list(itertools.islice(rows, size))
            if not chunk and number:
                return counts
            path, note = folder / f"chunk-{number:09}.part", folder / f"chunk-{number:09}.json"
            if path.exists() and note.exists():
                failed = json.loads(note.read_text(encoding="utf-8"))["errors"]
                counts["resumed"] += len(chunk)
            else:
                records = _records(loaded, chunk, counts["rows"], bar)
                failed = sum(ERROR in each for each in records)
                _write_note(note, {"errors": failed})
                write_chunk(path, writing, records, outputs)
            counts["rows"] += len(chunk)
            counts["errors"] += failed
            counts["chunks"] += 1
            if not chunk:
                return counts
    raise AssertionError("chunks end with the rows")


def _records(loaded: Loaded, chunk: Sequence[Row], start: int, bar: Any) -> list[dict[str, Any]]:
    """Return the records of a chunk, whose first row has this number in the file."""
    policy = Policy(raises=False, lazy=False, oversize="error", frozen=False)
    call = Call(loaded.engine, [], [], policy, bar and bar.advance)
    checked = [
        call.check(row.example, start + i)
        for i, row in enumerate(chunk)
        if not isinstance(row.example, Exception)
    ]
    results = iter(call.finish(call.submit(call.gather(checked), start)) if checked else [])
    return [
        record(row.id, row.example if isinstance(row.example, Exception) else next(results)) for row in chunk
    ]


# --- resuming --------------------------------------------------------------------------------------


def _job(args: argparse.Namespace, loaded: Loaded, reading: str, writing: str) -> dict[str, Any]:
    """Return all that the bytes of the output depend on."""
    return {
        "artifact": loaded.artifact.manifest["sha256"],
        "input": _digest(args.input),
        "formats": [reading, writing],
        "chunk": args.chunk,
    }


def _prepare(folder: Path, job: dict[str, Any]) -> None:
    """Keep the chunks of an earlier run of the same job, and of no other."""
    note = folder / "job.json"
    try:
        same = json.loads(note.read_text(encoding="utf-8")) == job
    except (OSError, ValueError):
        same = False
    if not same:
        for path in folder.iterdir():
            if path.name != _LOCK:
                path.unlink()
        _write_note(note, job)


@contextlib.contextmanager
def _locked(folder: Path, output: str) -> Iterator[None]:
    """Make the folder, and hold it for this process alone, until the block or the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "w", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{output}: another run is writing it. Wait for it, or end it.") from None
        yield


def _write_note(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data), encoding="utf-8")
    os.replace(temporary, path)


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the summary -----------------------------------------------------------------------------------


def _batch_sizes(loaded: Loaded) -> dict[str, int]:
    """Return how many batches there were of each number of rows."""
    sizes: Counter[str] = Counter()
    for bucket, counted in loaded.statistics().buckets.items():
        sizes[str(bucket["rows"])] += counted.batches
    return dict(sizes)


def _in_words(output: str, summary: dict[str, Any]) -> str:
    sizes = ", ".join(f"{number} of {rows} rows" for rows, number in summary["batches"].items())
    return (
        f"{output}: {summary['rows']} rows, {summary['errors']} errors, {summary['resumed']} done before; "
        f"batches: {sizes or 'none'}; {summary['seconds']:.1f} s"
    )
