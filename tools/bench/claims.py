"""What the numbers must show, each computed from the tables; and where the time goes."""

import statistics
from typing import Any

from .ratios import Ratio, faster, find, valid_share
from .rounds import Record, Table

Claim = tuple[str, str, str, bool | None]
"""What, the aim, what was measured, and whether it was met."""

FITTED = "jaxbatch, 20 fitted sizes"
FASTEST = f"{FITTED}, two at a time"
PACKED = (
    "jaxbatch, packed rows of 256",
    "jaxbatch, packed rows of 256 and 512",
    "jaxbatch, padded or packed",
)
LADDERS = {
    "powers of two": "jaxbatch, powers of two",
    "10 fitted sizes": "jaxbatch, 10 fitted sizes",
    "20 fitted sizes": FITTED,
}


def claims(results: dict[str, Any]) -> list[Claim]:
    """Return what can be said from the float32 tables and the stream."""
    found: list[Claim] = []
    for table in results["tables"]:
        if table.products == "float32":
            found += _of_texts(table) if table.unit == "tokens" else _of_pages(table)
    for each in results.get("same_process", ()):
        seconds = each["seconds"]
        ratios = sorted(a / b for a, b in zip(seconds["jaxbatch"], seconds["by hand"], strict=True))
        ratio = Ratio(statistics.median(ratios), ratios[0], ratios[-1])
        what = f"{each['workload']}: time of jaxbatch against the loop by hand, in one process"
        found.append((what, "at most 1.03", str(ratio), ratio.median <= 1.03))
    if results["stream"]:
        memory = results["stream"]["resident_bytes"]
        growth = memory[-1] / memory[len(memory) // 2] - 1
        what = f"{results['stream']['examples']:,} examples through `run.map`: memory in its second half"
        found.append((what, "flat", f"{growth:+.1%}", growth < 0.02))
    return found


def _of_texts(table: Table) -> list[Claim]:
    found, where, fitted = [], table.workload, find(table, FITTED)
    for label, name in LADDERS.items():
        record = find(table, name)
        ratio = faster(record, find(table, "oracle"))
        share = record and valid_share(table, record)
        if ratio and share:
            what = f"{where}: {label} against the oracle (valid share {share:.2f})"
            aim = f"{0.97 * share:.2f}"
            found.append((what, aim, str(ratio), ratio.median >= 0.97 * share))
        by_hand = find(table, name.replace("jaxbatch", "JAX by hand"))
        if ratio := faster(record, by_hand):
            what = f"{where}: {label} against the loop by hand, same batches, another process"
            found.append((what, "0.97", str(ratio), ratio.median >= 0.97))
    found += _of_packed(table)
    for name, aim in (
        ("JAX, pad to max", 1.5),
        ("sentence-transformers", 1.4),
        ("torch, batches of 32", 1.1),
        ("torch, token budget", 0.97),
        ("ONNX Runtime, token budget", 0.97),
        ("CTranslate2, token batches", 1 / 1.2),
    ):
        if ratio := faster(find(table, FASTEST), find(table, name)):
            what = f"{where}: 20 fitted sizes, two at a time, against {name}"
            found.append((what, f"{aim:.2f}", str(ratio), ratio.median >= aim))
    if ratio := faster(fitted, find(table, "JAX, one by one")):
        what = f"{where}: 20 fitted sizes against one by one, in every round"
        found.append((what, "above 1", str(ratio), ratio.low > 1))
    exact = find(table, "JAX, jit at every exact shape")
    if fitted and exact and fitted.programs and exact.programs:
        fewer = exact.programs / fitted.programs
        found.append((f"{where}: fewer programs than every exact shape", "10x", f"{fewer:.1f}x", fewer >= 10))
        first = _first(exact) / _first(fitted)
        found.append(
            (f"{where}: first pass, compiles included, against it", "many", f"{first:.1f}x", first > 2)
        )
    return found


def _of_packed(table: Table) -> list[Claim]:
    """Return how packed rows compare; there is no aim but to be ahead where "auto" picks them."""
    found, where = [], table.workload
    for name in PACKED:
        if (record := find(table, name)) is None:
            continue
        share, label = valid_share(table, record) or 0.0, name.removeprefix("jaxbatch, ")
        for other in (*LADDERS.values(), "oracle"):
            if ratio := faster(record, find(table, other)):
                what = (
                    f"{where}: {label} (valid share {share:.2f}, {record.programs} programs) against {other}"
                )
                found.append((what, "", str(ratio), None))
    return found


def _of_pages(table: Table) -> list[Claim]:
    found, fitted = [], find(table, "jaxbatch, 16 fitted sizes")
    exact = find(table, "JAX, jit at every exact shape")
    for other in ("JAX, jit at every exact shape", "jaxbatch, pad to max"):
        if ratio := faster(fitted, find(table, other)):
            found.append((f"pages: 16 fitted sizes against {other}", "above 1", str(ratio), ratio.median > 1))
    if fitted and exact and fitted.programs and exact.programs:
        first = _first(exact) / _first(fitted)
        found.append(("pages: first pass, compiles included, against it", "", f"{first:.1f}x", None))
    return found


def _first(record: Record) -> float:
    return (record.cold_start or 0) + (record.first_pass or 0)


def breakdown(table: Table) -> list[str]:
    """Return a list of what makes jaxbatch slower than the oracle, each factor from one pair of systems."""
    fitted, oracle = find(table, FITTED), find(table, "oracle")
    probe, by_hand = (
        find(table, "probe: no mask, 20 fitted sizes"),
        find(table, "JAX by hand, 20 fitted sizes"),
    )
    lines = []
    share = valid_share(table, fitted) if fitted else None
    if share:
        lines.append(f"- padding: {1 / share:.3f} x the cells, which cost more or less time than that:")
    for what, slow, fast in (
        ("padding, and batches smaller than the oracle's (no mask / oracle)", probe, oracle),
        ("masks (by hand / no mask)", by_hand, probe),
        ("the library: planning, checks, cutting results (jaxbatch / by hand)", fitted, by_hand),
        ("all of it (jaxbatch / oracle)", fitted, oracle),
    ):
        if ratio := faster(fast, slow):
            lines.append(f"- {what}: {ratio} x the time")
    if fitted and (time := fitted.details.get("time")):
        host = ", ".join(f"{name} {time[name] / time['wall']:.1%}" for name in _HOST if time["wall"])
        lines.append(f"- device busy {time['device'] / time['wall']:.1%} of the wall time; host: {host}")
    return lines


_HOST = ("padding", "starting", "waiting", "cutting")
