"""Delete one fill, clamp, shift or refusal of the mask rules at a time, and see whether a test notices.

    python -m tools.mutate_rules                      # every mutant of every rule file; prints the survivors
    python -m tools.mutate_rules --list               # what would be changed; runs nothing
    python -m tools.mutate_rules --only _sort.py      # one file; `_sort.py:34` for one line

A rule is right only if padding cannot reach the answer, and a test is right only if it fails without the
rule. A mutant is the rules with one such protection taken out. It is run, in a copy of the repository, on
the tests that reach the changed line (measured once, at the start) until one fails. What survives is
either a protection that no test needs, so a test is missing, or one that nothing needs, so it can go.
"""

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RULES = "jaxbatch/_mask"
TESTS = ("tests/test_mask_rules.py", "tests/test_mask_rules_more.py", "tests/test_custom_padding.py")
COPIED = ("jaxbatch", "models", "tests", "tools", "pyproject.toml")
SKIPPED = ("__init__.py", "_registry.py")
QUIET = ("-q", "-n", "0", "-p", "no:cacheprovider")
WRONG_COPY = 99

# A call that protects, and the argument that remains when the protection is taken out. An operand that is
# a `Padded` remains as its `.data`.
PROTECTIONS = {
    "ctx.fill": ("fill", 0, True),
    "bordered": ("fill", 1, True),
    "_zeros": ("fill", 1, True),
    "select": ("fill", 1, False),
    "lax.select": ("fill", 1, False),
    "lax.clamp": ("clamp", 1, False),
    "jnp.clip": ("clamp", 0, False),
    "jnp.maximum": ("clamp", 0, False),
    "_clamp": ("clamp", 1, False),
    "_bounded": ("clamp", 0, False),
    "take": ("shift", 0, False),
    "fit": ("fit", 0, False),
}
IDENTITIES = ("identity", "one", "lowest", "highest", "all_ones", "_last_in_order")
SWAPPED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
DECIDING = (
    "is_symbolic",
    "ragged",
    "active",
    "reverse",
    "mode",
    "partial",
    "mask ",
    "live",
    "always",
    "mentions_dims",
)
FREE = ("defelementwise", "deffree")  # their rule is to do nothing


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one rule file: what stands at `start:end` becomes `after`.

    Attributes:
      primitive: for a rule taken out as a whole, whose it was.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str
    primitive: str = ""

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        short = [" ".join(text.split()) for text in (self.before, self.after)]
        short = [text if len(text) < 60 else f"{text[:57]}..." for text in short]
        return f"{self.file}:{self.line:<4} {self.kind:<9} {short[0]}  ->  {short[1].strip()}"


# --- what to change --------------------------------------------------------------------------------


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of one rule file, in the order of the file."""
    tree = ast.parse(source)
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def text(node: ast.AST) -> str:
        return ast.get_source_segment(source, node) or ""

    def change(kind: str, node: Any, after: str) -> Mutant:
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        return Mutant(file, node.lineno, kind, start, end, text(node), after)

    found: list[Mutant] = []
    for node in ast.walk(tree):
        found += [change(kind, part, after) for kind, part, after in _changes(node, text)]
        for primitive in _registered(node):
            end = len(source.encode())
            rule = "lambda ctx, eqn, *xs: ctx.bind(eqn, *(x.data for x in xs))"
            after = f'\n\ndefine("{primitive}", "mutant")({rule})\n'
            found.append(Mutant(file, node.lineno, "rule", end, end, primitive, after, primitive))  # pyright: ignore[reportAttributeAccessIssue]
    yield from sorted(dict.fromkeys(found), key=lambda m: (m.line, m.start, m.kind, m.after))


def _changes(node: ast.AST, text: Any) -> Iterator[tuple[str, ast.AST, str]]:
    match node:
        case ast.Call(func=func, args=args):
            yield from _call_changes(node, text(func), args, text)
        case ast.If(test=test, body=[ast.Expr(value=ast.Call(func=func)), *_]) if text(func) == "ctx.refuse":
            yield "refusal", test, "False"
            yield from _operands("refusal", test, text)
        case ast.If(test=test) if _decides(text(test)):
            yield "branch", test, "False"
        case ast.IfExp(test=test, body=body, orelse=orelse) if _decides(text(test)):
            yield "branch", node, f"({text(body)})"
            yield "branch", node, f"({text(orelse)})"
        case ast.keyword(value=ast.BoolOp() as value):
            yield from _operands("branch", value, text)
        case ast.BinOp(op=ast.BitAnd(), left=left, right=right):
            yield "condition", node, f"({text(left)})"
            yield "condition", node, f"({text(right)})"
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPPED:
            yield "boundary", node, f"{text(left)} {SWAPPED[type(op)]} {text(right)}"


def _decides(test: str) -> bool:
    """Tell whether a test is about padding, rather than about how JAX writes things down."""
    return any(word in test for word in DECIDING)


def _call_changes(
    node: ast.Call, name: str, args: list[Any], text: Any
) -> Iterator[tuple[str, ast.AST, str]]:
    starred = any(isinstance(arg, ast.Starred) for arg in args)
    if name in PROTECTIONS:
        kind, position, padded = PROTECTIONS[name]
        kept = f"[{', '.join(map(text, args))}][{position}]" if starred else f"({text(args[position])})"
        yield kind, node, f"{kept}.data" if padded else kept
    if name == "ctx.fill" and isinstance(args[1], ast.List) and len(args[1].elts) > 1:
        for axis in args[1].elts:
            yield (
                "axis",
                args[1],
                f"[{', '.join(text(other) for other in args[1].elts if other is not axis)}]",
            )
    if name == "jnp.where":
        yield "shift", node, f"({text(args[1])})"
        yield "shift", node, f"({text(args[2])})"
    if name == "ctx.length":
        yield "length", node, f"ctx.size({text(args[0])})"
    if name == "ctx.within":
        yield "branch", node, "ctx"
    if name == "_room":
        yield "fit", node, "0"
    if name in IDENTITIES:
        yield "identity", node, f"np.zeros((), {text(args[-1])})"


def _operands(kind: str, test: ast.AST, text: Any) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield `and` and `or` without each of their operands."""
    if isinstance(test, ast.BoolOp):
        word = " and " if isinstance(test.op, ast.And) else " or "
        for value in test.values:
            rest = word.join(f"({text(other)})" for other in test.values if other is not value)
            yield kind, test, f"({rest})"


def _registered(node: ast.AST) -> list[str]:
    """Return the primitives that a `define("a b", ...)` or a family's one line gives a rule with a fill."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(names)), *_]) if (
            name == "define" or (name.startswith("def") and name not in FREE)
        ):
            return names.split()
    return []


# --- which tests reach what (this module is also the pytest plugin that records it) ------------------


class Recorder:
    """Record, for each test, the lines of the rule files it runs and the primitives whose rules it uses."""

    def __init__(self, rules: Path):
        self.rules = f"{rules}{os.sep}"
        self.reached: dict[str, dict[str, Any]] = {}
        self._lines: set[str] = set()
        self._used: set[str] = set()

    def _trace(self, frame: Any, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self.rules):
            return None
        self._lines.add(f"{file[len(self.rules) :]}:{frame.f_lineno}")
        return self._trace

    def pytest_collection_finish(self) -> None:
        from jaxbatch._mask import _registry

        for key, rule in list(_registry._rules.items()):
            _registry._rules[key] = dataclasses.replace(rule, apply=self._noting(str(key), rule.apply))

    def _noting(self, name: str, apply: Any) -> Any:
        def noted(*args: Any) -> Any:
            self._used.add(name)
            return apply(*args)

        return noted

    def pytest_runtest_setup(self) -> None:
        self._lines, self._used = set(), set()
        sys.settrace(self._trace)

    def pytest_runtest_teardown(self) -> None:
        sys.settrace(None)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            self.reached[report.nodeid] = {
                "passed": report.passed,
                "seconds": report.duration,
                "lines": sorted(self._lines),
                "used": sorted(self._used),
            }

    def pytest_sessionfinish(self) -> None:
        Path(os.environ["MUTATE_RULES_REACHED"]).write_text(json.dumps(self.reached))


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(Path(config.rootpath) / RULES))


# --- running ---------------------------------------------------------------------------------------


class Runner:
    """Runs tests in a copy of the repository that holds one mutant at a time."""

    def __init__(self, work: Path, timeout: float):
        self._work, self.copy, self.timeout = work, work / "copy", timeout
        shutil.rmtree(self.copy, ignore_errors=True)
        for name in COPIED:
            source, target = ROOT / name, self.copy / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        # Processes are forked from one that has imported what is slow to import, and has run nothing.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["jax", "flax.linen"])
        # Most programs of a mutant are those of the rules as they are: they are compiled once for all.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def record(self, tests: list[str]) -> dict[str, dict[str, Any]]:
        """Run the tests on the rules as they are; return what each that passes reaches.

        The tests of the first file come first, and in each file those that are fast.
        """
        paths = [*sorted((self.copy / "jaxbatch").rglob("*.py")), *(self.copy / test for test in tests)]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
        known = self._work / f"reached-{digest}.json"
        if not known.exists():
            command = [sys.executable, "-m", "pytest", *QUIET, "-p", "tools.mutate_rules", *tests]
            written = self._work / "reached.json"
            result = subprocess.run(
                command,
                cwd=self.copy,
                env=os.environ | {"MUTATE_RULES_REACHED": str(written)},
                capture_output=True,
                text=True,
            )
            if not written.exists():
                raise SystemExit(f"pytest failed:\n{result.stdout}\n{result.stderr}")
            written.rename(known)
        reached = json.loads(known.read_text())
        for test in [test for test, what in reached.items() if not what["passed"]]:
            print(f"left out, since it fails without a mutant: {test}", flush=True)
            del reached[test]
        files = [name for name, _, _ in (test.partition("::") for test in tests)]

        def order(item: tuple[str, dict[str, Any]]) -> tuple[int, float]:
            return files.index(item[0].partition("::")[0]), item[1]["seconds"]

        return dict(sorted(reached.items(), key=order))

    def try_one(self, mutant: Mutant, reached: dict[str, dict[str, Any]]) -> tuple[bool, str]:
        """Return whether a test fails under the mutant, and which, or why none does."""
        path = self.copy / RULES / mutant.file
        source = path.read_text()
        lines = {f"{mutant.file}:{mutant.line + i}" for i in range(mutant.before.count("\n") + 1)}
        if mutant.primitive:
            tests = [test for test, what in reached.items() if mutant.primitive in what["used"]]
        else:
            tests = [test for test, what in reached.items() if lines & set(what["lines"])]
        if not tests:
            return False, "no test reaches it"
        failed = self._work / "failed"
        failed.unlink(missing_ok=True)
        run = self._processes.Process(target=_run_tests, args=(str(self.copy), tests, failed))
        try:
            path.write_text(mutant.apply(source))
            run.start()
            run.join(self.timeout)
            if run.exitcode is None:
                run.kill()
                run.join()
                return True, "it does not end"
        finally:
            path.write_text(source)
        if run.exitcode == pytest.ExitCode.OK:
            return False, f"{len(tests)} tests pass"
        if run.exitcode not in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            raise SystemExit(f"The tests could not run: exit status {run.exitcode}, 99 for another jaxbatch.")
        return True, failed.read_text() if failed.exists() else "import"


class _Failed:
    """Notes the first test that fails."""

    def __init__(self, note: Path):
        self.note = note

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid.split("::")[-1])


def _run_tests(copy: str, tests: list[str], failed: Path) -> None:
    """Run tests until one fails; the process ends with pytest's status."""
    os.chdir(copy)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        status = int(pytest.main([*QUIET, "-x", *tests], plugins=[_Failed(failed)]))
    imported = sys.modules.get("jaxbatch")
    wrong = imported is not None and not str(imported.__file__).startswith(copy)
    os._exit(WRONG_COPY if wrong else status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", metavar="FILE[:LINE]", help="mutants of this file or line")
    parser.add_argument("--kind", action="append", help="mutants of this kind (fill, clamp, refusal, ...)")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--tests", action="append", help="test files instead of those of the rules")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one mutant's tests")
    parser.add_argument("--work", type=Path, help="keep compiled programs and what tests reach here")
    args = parser.parse_args()

    chosen = []
    for path in sorted((ROOT / RULES).glob("*.py")):
        if path.name not in SKIPPED:
            chosen += mutants(path.name, path.read_text())
    if args.only:
        chosen = [m for m in chosen if m.file in args.only or f"{m.file}:{m.line}" in args.only]
    if args.kind:
        chosen = [m for m in chosen if m.kind in args.kind]
    if args.list:
        print(*chosen, f"{len(chosen)} mutants", sep="\n")
        return 0

    with tempfile.TemporaryDirectory() as temporary:
        runner = Runner(args.work or Path(temporary), args.timeout)
        tests = args.tests or [test for test in TESTS if (ROOT / test).exists()]
        reached = runner.record(tests)
        survivors = []
        for i, mutant in enumerate(chosen, 1):
            start = time.perf_counter()
            killed, why = runner.try_one(mutant, reached)
            survivors += [] if killed else [(mutant, why)]
            seconds = time.perf_counter() - start
            word = "killed by" if killed else "SURVIVES:"
            print(f"{i:>3}/{len(chosen)} {seconds:5.1f} s  {mutant}  {word} {why}", flush=True)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} mutants killed; survivors:")
    for mutant, why in survivors:
        print(f"  {mutant}  ({why})")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
