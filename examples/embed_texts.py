"""Embed thousands of real texts of very different lengths, search them, and show what the padding cost.

    python -m examples.embed_texts
    python -m examples.embed_texts --texts lines.txt --output vectors.parquet

The model is all-MiniLM-L6-v2, written for one text at its exact size (`models/bert.py`). Unless you bring
your own, the texts are what the docstrings of the installed numpy, jax and flax say before their first
section, read from the source files: nothing is imported for it.
"""

import argparse
import ast
import contextlib
import importlib.util
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress, track

import jaxbatch as jb
from models import bert, weights
from models.tokenizer import Tokenizer, truncate

MAX_TOKENS = 256  # as sentence-transformers uses this model; longer texts are cut, and counted
SEARCHES = (
    "solve a linear system",
    "random numbers from a normal distribution",
    "drop units at random to prevent overfitting",
    "sort an array and return the indices",
    "save the state of training to disk",
)
SECTION = re.compile(
    r"^\s*(Parameters|Returns|Yields|Raises|Examples?|See Also|Notes|References|Attributes|Methods)\n\s*---"
    r"|^\s*(Args|Arguments|Returns|Yields|Raises|Examples?|Attributes|References|See also)\s*::?\s*$",
    re.MULTILINE,
)


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yield the name and description of all that is public in a package's source files, in a fixed order."""
    spec = importlib.util.find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(root).rglob("*.py")):
            path = file.relative_to(root).with_suffix("")
            if not {"tests", "testing", "_testing"} & set(path.parts):
                module = ".".join([package, *path.parts]).removesuffix(".__init__")
                yield from described(ast.parse(file.read_bytes()), module)


def described(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            name = f"{prefix}.{child.name}"
            if text := SECTION.split(ast.get_docstring(child) or "", maxsplit=1)[0].strip():
                yield name, text
            if isinstance(child, ast.ClassDef):
                yield from described(child, name)


def collect(file: Path | None, limit: int | None) -> tuple[list[str], list[str]]:
    """Return names and texts: the lines of `file`, all of them, or docstrings, each text once."""
    if file:
        texts = file.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        names = [f"line {number}" for number in range(1, len(texts) + 1)]
    else:
        found: dict[str, str] = {}
        for package in ("numpy", "jax", "flax"):
            for name, text in docstrings(package):
                found.setdefault(text, name)
        texts, names = list(found), list(found.values())
    keep = range(len(texts))
    if limit and limit < len(texts):
        keep = [i * len(texts) // limit for i in keep[:limit]]  # spread evenly
    return [names[i] for i in keep], [texts[i] for i in keep]


@contextlib.contextmanager
def progress(label: str, total: int, count: Callable[[], int]) -> Iterator[None]:
    """Show `count()` out of `total` while the block runs."""
    done = threading.Event()
    with Progress() as bar:
        task = bar.add_task(label, total=total)

        def watch() -> None:
            while not done.wait(0.1):
                bar.update(task, completed=count())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            bar.update(task, completed=count())


def max_difference(single, vectors: np.ndarray, tokens: Sequence[np.ndarray]) -> float:
    """Return how far the vectors of 50 random texts are from unpadded calls of one text each."""
    sample = np.random.default_rng(0).permutation(len(tokens))[:50].tolist()
    steps = track(sample, "comparing with single calls")
    return max(float(np.abs(vectors[i] - single(jnp.asarray(tokens[i]))).max()) for i in steps)


def write_parquet(file: Path, names: list[str], texts: list[str], vectors: np.ndarray) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    pq.write_table(pa.table({"name": names, "text": texts, "vector": column}), file)
    print(f"wrote {len(texts)} rows to {file}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.embed_texts", description="Embed and search texts."
    )
    parser.add_argument("--texts", type=Path, metavar="FILE", help="embed the lines of this file instead")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write texts and vectors as Parquet")
    parser.add_argument("--limit", type=int, metavar="N", help="embed only N of the texts, evenly spread")
    parser.add_argument("--search", action="append", metavar="WORDS", help="search for this; repeatable")
    options = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")

    folder = weights.fetch("minilm")
    model, params = bert.load(folder)
    tokenizer = Tokenizer(folder)
    names, texts = collect(options.texts, options.limit)
    if not texts:
        parser.error("there are no texts to embed")
    whole = tokenizer(texts)
    tokens = [truncate(ids, MAX_TOKENS) for ids in whole]

    # The ragged vmap: a function of one text, and the padded sizes that it may be compiled for.
    grid = jb.Grid(n=(16, MAX_TOKENS), rows=(1, 32), max_cells=4096)
    run = jb.batched(model.embed, in_axes=(None, 0), grid=grid)
    start = time.perf_counter()
    with progress("embedding", sum(map(len, tokens)), lambda: run.statistics().valid_cells):
        vectors = np.stack(run(params, tokens))
    seconds = time.perf_counter() - start
    done = run.statistics()
    single = jax.jit(model.embed)
    difference = max_difference(lambda ids: single(params, ids), vectors, tokens)

    queries = options.search or SEARCHES
    for query, vector in zip(queries, run(params, tokenizer(queries, MAX_TOKENS)), strict=True):
        print(f"\n{query}")
        similarity = vectors @ vector
        for i in np.argsort(-similarity)[:3]:
            print(f"  {similarity[i]:.2f}  {names[i]}: {' '.join(texts[i].split())[:70]}")

    num_tokens, num_cut = sum(map(len, tokens)), sum(len(ids) > MAX_TOKENS for ids in whole)
    print(f"""
texts               {len(texts):,}, of {min(map(len, tokens))} to {max(map(len, tokens))} tokens
cut                 {num_cut:,} longer texts, to their first {MAX_TOKENS} tokens
seconds             {seconds:.1f}, compiling included
speed               {len(texts) / seconds:,.0f} texts/s, {num_tokens / seconds:,.0f} tokens/s
programs compiled   {done.compiles} of at most {len(grid)}, in {done.compile_seconds:.1f} s
padding share       {done.padding_share:.1%}
maximum difference  {difference:.1e} to unpadded single calls, on {min(50, len(texts))} random texts""")
    if options.output:
        write_parquet(options.output, names, texts, vectors)


if __name__ == "__main__":
    main()
