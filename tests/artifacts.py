"""Saving and loading in tests: the same examples through the function, its batched form and its artifact."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ragged import assert_close, normals, unpadded

import jaxbatch as jb

ROOT = Path(__file__).resolve().parent.parent
GRID = jb.Grid(n=(4, 32), rows=[1, 4])
LENGTHS = (1, 2, 3, 8, 17, 31, 32)


def round_trip(
    folder: Path,
    f: Callable[..., Any],
    *shared: Any,
    spec: Any = None,
    grid: jb.Grid = GRID,
    loading: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **saving: Any,
) -> jb.Loaded:
    """Save a function of shared arguments and one example, and return what is loaded."""
    spec = jb.spec("n", "float32") if spec is None else spec
    run = jb.batched(f, (*(None,) * len(shared), 0), spec=spec, grid=grid, **(options or {}))
    path = folder / "f.jbx"
    run.save(path, *shared, **{"references": False, **saving})
    return jb.load(path, **(loading or {}))


def assert_same(loaded: jb.Loaded, f: Callable[..., Any], examples: Sequence[Any], *shared: Any) -> None:
    """Check that an artifact gives for each example what the function gives, exceptions included."""
    want = unpadded(f, *shared, examples, in_axes=(*(None,) * len(shared), 0))
    for i, (got, expected) in enumerate(zip(loaded(examples, errors="return"), want, strict=True)):
        assert_close(got, expected, f"example {i}:")


def examples(lengths: Sequence[int] = LENGTHS) -> list[np.ndarray]:
    return normals(lengths)


BLOCKED = """
    import sys
    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked!r}:
                raise ImportError(f"{{name}} is blocked")
    sys.meta_path.insert(0, Block())
"""


def clean_python(script: str, *args: Any, blocked: Sequence[str] = (), **env: str) -> str:
    """Run a script in a new process in which some packages cannot be imported, and return what it prints."""
    text = textwrap.dedent(BLOCKED.format(blocked=tuple(blocked))) + textwrap.dedent(script)
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", text, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env},
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout
