"""Run every check a change must pass: lint, format, types, tests, in this order.

    python tools/check.py          # all of them
    python tools/check.py --fast   # without the tests

All checks run even if an early one fails; the exit status is 0 only if every one passed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PYTHON = sys.executable
CHECKS = {
    "ruff check": [PYTHON, "-m", "ruff", "check", "."],
    "ruff format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "pyright": [PYTHON, "-m", "pyright", "--pythonpath", PYTHON],
    "pytest": [PYTHON, "-m", "pytest", "-q"],
}
SLOW = ("pytest",)


def run(name: str, command: list[str]) -> tuple[bool, float]:
    """Run one check with its output shown; return whether it passed and how many seconds it took."""
    print(f"\n== {name}", flush=True)
    start = time.perf_counter()
    passed = subprocess.run(command, cwd=ROOT).returncode == 0
    return passed, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="Run lint, format, type and test checks.")
    parser.add_argument("--fast", action="store_true", help="skip the tests")
    args = parser.parse_args()

    chosen = {name: command for name, command in CHECKS.items() if not (args.fast and name in SLOW)}
    results = {name: run(name, command) for name, command in chosen.items()}

    print("\n== summary")
    for name, (passed, seconds) in results.items():
        print(f"{name:<12} {'passed' if passed else 'FAILED'}  {seconds:6.1f} s")
    return 0 if all(passed for passed, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
