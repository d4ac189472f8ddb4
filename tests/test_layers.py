"""Imports point down: every module may use the rows below its own, and nothing above.

The tables are the rules. To add a module, put its name into the row it belongs to; a package directory such
as `_mask` is one unit, whose own modules may import each other. Private JAX, threads, clocks, queues and
files live in the modules named here and nowhere else.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "jaxbatch"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

# From the bottom up. Modules of one row may import each other, as long as that makes no circle.
LAYERS = (
    ("_errors", "_compat"),
    (
        "_fit",
        "_grid",
        "_spec",
        "_costs",
        "_search",
        "_plan",
        "_packer",
        "_packed_plan",
        "_lanes",
        "_estimates",
        "_options",
        "_joining",
        "_joining",
        "_online",
    ),
    ("_tables", "_timing", "_counts", "_waits", "_explanation"),
    ("_batch",),
    ("_branches", "_closed_over", "_program", "_mask", "_pack", "_split", "_padded_batch"),
    ("_disk_cache", "_executables", "_identity"),
    ("_closures", "_shared", "_statistics", "_traced", "_packed_rows", "_outputs", "_self_masking"),
    ("_functions",),
    ("_measure", "_work", "_flights", "_pipeline", "_engine", "_layouts", "_calls", "_ahead"),
    ("_artifact", "_charts", "_report", "_progress", "_dispatch"),
    (
        "_batched",
        "_loaded",
        "_batches",
        "_masking",
        "_packing",
        "_gradients",
        "_packed_gradients",
        "testing",
        "_invariance",
        "_closeness",
        "prometheus",
        "cli",
    ),
    ("__init__", "__main__"),
)

# Import prefix -> the only units that may import it.
ONLY_IN = {
    "jax._src": {"_compat"},
    # `_compat` keeps its JAX hook per thread, and `_statistics` counts for all of them.
    "threading": {"_compat", "_executables", "_engine", "_statistics", "_dispatch"},
    "concurrent": {"_disk_cache", "_executables", "_flights", "_dispatch"},
    "queue": {"_errors", "_dispatch"},  # `_errors` derives from `queue.Full`
    # Compile times, costs and statistics are in seconds, and the dispatcher has a clock.
    "time": {"_disk_cache", "_executables", "_measure", "_dispatch", "_flights", "_pipeline", "cli"},
    "asyncio": {"_dispatch"},
    "multiprocessing": set(),
    "pathlib": {"_disk_cache", "_artifact", "_report", "cli"},
    "shutil": {"_disk_cache", "_artifact", "cli"},
    "tempfile": {"_disk_cache", "_artifact", "cli"},
    "zipfile": {"_artifact", "cli"},
}

# These compute on integers and NumPy arrays, so that they can be tested without a program or a device.
WITHOUT_JAX = {
    *(
        "_errors",
        "_fit",
        "_grid",
        "_costs",
        "_search",
        "_plan",
        "_packer",
        "_packed_plan",
        "_lanes",
        "_estimates",
        "_options",
        "_joining",
        "_joining",
        "_online",
    ),
    *("_tables", "_waits", "_timing", "_counts", "_explanation", "_batch"),
}

ROW = {unit: row for row, units in enumerate(LAYERS) for unit in units}


def module_name(path: Path) -> str:
    """Return the dotted name below the package: `_mask._rules`, `_mask.__init__`, `__init__`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def unit_of(module: str) -> str:
    return module.split(".")[0]


def imports(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) for each import, wherever it stands, and each use of `jax._src`."""
    package = [PACKAGE, *module.split(".")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            yield node.lineno, "jax._src"


def target_unit(name: str) -> str | None:
    """Return the unit of ours that an imported name lives in, or None if it is somebody else's."""
    head, *rest = name.split(".")
    if head != PACKAGE:
        return None
    # `from jaxbatch import batched` and `import jaxbatch` reach the public names in `__init__`.
    return rest[0] if rest and rest[0] in ROW else "__init__"


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(module: str, source: str) -> list[str]:
    """Return one sentence for each rule that this source breaks as `module`."""
    unit = unit_of(module)
    if unit not in ROW:
        return [f"{module}: not in a layer; add {unit!r} to its row of LAYERS in tests/test_layers.py"]
    found = []
    for line, name in imports(module, source):
        where = f"{module}:{line}: imports {name}"
        target = target_unit(name)
        if target not in (None, unit) and ROW[target] > ROW[unit]:
            found.append(f"{where}, but {target} lies above {unit}; imports point down")
        for prefix, allowed in ONLY_IN.items():
            if within(name, prefix) and unit not in allowed:
                found.append(f"{where}, which only {', '.join(sorted(allowed)) or 'nobody'} may")
        if within(name, "jax") and unit in WITHOUT_JAX:
            found.append(f"{where}, but {unit} works without JAX")
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return the units of one import circle, or an empty list."""
    remaining = {unit: set(targets) for unit, targets in edges.items()}
    while leaves := {unit for unit, targets in remaining.items() if not targets & remaining.keys()}:
        remaining = {unit: targets for unit, targets in remaining.items() if unit not in leaves}
    return sorted(remaining)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_what_its_layer_may(module):
    assert violations(module, SOURCES[module]) == []


def test_no_units_import_each_other_in_a_circle():
    edges: dict[str, set[str]] = {}
    for module, source in SOURCES.items():
        targets = {target_unit(name) for _, name in imports(module, source)}
        edges.setdefault(unit_of(module), set()).update(t for t in targets if t and t != unit_of(module))
    assert circle(edges) == []


# (module, source, a part of the message)
BAD = (
    ("_plan", "from ._batched import Batched", "_batched lies above _plan"),
    ("_plan", "def f():\n    import jaxbatch._dispatch", "_plan:2: imports jaxbatch._dispatch"),
    ("_plan", "from . import _batch", "_batch lies above _plan"),
    ("_plan", "from jaxbatch import batched", "__init__ lies above _plan"),
    ("_mask._rules", "from .._executables import key", "_executables lies above _mask"),
    ("_mask._rules", "from jax._src import core", "only _compat may"),
    ("_program", "from jax import _src", "only _compat may"),
    ("_program", "import jax\nx = jax._src.core.Jaxpr", "_program:2: imports jax._src, which only _compat"),
    ("_batch", "import jax.numpy as jnp", "_batch works without JAX"),
    ("_grid", "from jax import Array", "_grid works without JAX"),
    (
        "_spec",
        "import time",
        "which only _disk_cache, _dispatch, _executables, _flights, _measure, _pipeline, cli may",
    ),
    ("_batched", "import threading", "which only _compat, _dispatch, _engine, _executables, _statistics may"),
    (
        "_batched",
        "from concurrent.futures import Future",
        "which only _disk_cache, _dispatch, _executables, _flights may",
    ),
    ("_engine", "import asyncio", "which only _dispatch may"),
    ("_new", "import math", "add '_new' to its row of LAYERS in tests/test_layers.py"),
)

GOOD = (
    ("_mask._rules", "from ._registry import register\nfrom .._errors import MaskError"),
    ("_mask.__init__", "from . import _registry\nfrom .._compat import Dim"),
    ("__init__", "from ._batched import batched as batched\nfrom . import testing as testing"),
    ("_compat", "from jax._src.core import Jaxpr"),
    ("_batch", "import numpy as np\nfrom ._grid import Bucket"),
    ("_spec", "import jax\nimport timeit"),
    ("_errors", "import queue"),
)


@pytest.mark.parametrize(("module", "source", "message"), BAD)
def test_a_violation_is_named_with_its_line_and_rule(module, source, message):
    assert message in "\n".join(violations(module, source))


@pytest.mark.parametrize(("module", "source"), GOOD)
def test_imports_that_point_down_pass(module, source):
    assert violations(module, source) == []


def test_a_circle_of_imports_is_found():
    assert circle({"_spec": {"_grid"}, "_grid": {"_annotations"}, "_annotations": {"_spec"}, "_plan": set()})
    assert circle({"_batched": {"_plan", "_grid"}, "_plan": {"_grid"}}) == []
