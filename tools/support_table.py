"""Write docs/support.md: what padding means for every primitive of JAX, from the table of rules.

    python -m tools.support_table            # write it
    python -m tools.support_table --check    # exit 1 if it is stale, or if a primitive is not classified

The document depends on the rules and on the tables below, never on the JAX that happens to run. A primitive
that a new JAX version brings fails the check until it has a rule, or a place in one of these tables.
"""

import argparse
import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

import jax

import jaxbatch  # noqa: F401  (its import order is the one users have)
from jaxbatch import _compat
from jaxbatch._mask import rules
from jaxbatch._mask._registry import Rule

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "support.md"
VERSIONS = ("0.10", "0.12")  # the JAX versions that the tables were checked against, oldest and newest

# What each family's rules do. The order is that of the document.
FAMILIES = {
    "elementwise": "Every output cell depends on the same cell of the operands: padding in, padding out.",
    "layout": "Whole cells move. Where a cell's place depends on the length (after a concatenation, in a "
    "flip, in a merge of axes) it is gathered from where it lies in the padded array.",
    "sizes": "Sizes used as values or positions are the true ones of the example.",
    "reduction": "The padding is replaced by the identity of the operation, by selection.",
    "contraction": "Both operands are filled with zeros along the contracted axes, since 0 * NaN is NaN.",
    "cumulative": "Forward, padding comes after all that counts; in reverse it is filled with the identity.",
    "window": "Padding is filled with what a window passes over, and cells are shifted where the true "
    "padding on the left depends on the length, as with SAME and a stride.",
    "order": "Padding is ordered last by a key of its own, so that infinities and NaN keep their places.",
    "indexing": "Positions are held against the true bounds, in each of JAX's modes, before the padded array "
    "is touched; positions in the padding read or write nothing that counts.",
    "call": "The function inside is masked like any other code.",
    "control flow": "Loops end at the true length, carries are frozen past it, and what lies in the padding "
    "never keeps a loop alive. Every branch of a size test runs at sizes of its own.",
    "linear algebra": "A square matrix is bordered with the identity, another is extended with zeros.",
    "random": "A draw of the padded shape starts with the draw of the true shape; cells then go where the "
    "true shape has them.",
    "spectral": "Every output cell depends on every cell of the axis and on its size.",
    "callback": "Refused even where nothing is ragged.",
    "kernel": "Nothing is known of what they read. `jb.custom_padding` gives the function around one a "
    "padded form of its own.",
}

# Primitives that a function of one example may contain, deliberately without a rule: they are refused where
# a value or a size is ragged, and run as they are where nothing is.
NO_RULE = {
    "a call whose derivative is kept in a function of Python's": "linear_call remat_opt",
    "marks operations for XLA": "xla_metadata_call xla_metadata_value",
    "places or lays out an array on devices": "layout_constraint relayout reshard "
    "with_memory_space_constraint",
    "views a key as its bits, or bits as a key": "from_edtype to_edtype",
    "a part of a factorization, or an update of one": "cholesky_update geqp3 geqrf ormqr symmetric_product",
    "cuDNN's fused attention, a kernel with a mask of its own": "cudnn_fusion dot_product_attention_bwd "
    "dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper "
    "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd "
    "dot_product_attention_fwd_wrapper",
    "cuDNN's matrix product in blocks with scales": "scaled_matmul scaled_matmul_wrapper",
    "a scatter by any function; the gradients of pooling use `select_and_scatter_add`": "select_and_scatter",
    "asks which platform runs; has no operand that could be ragged": "platform_index",
}

# Primitives that cannot be in a function of one example at all. If one is, it is treated like those above.
ELSEWHERE = {
    "speaks to other devices, inside `shard_map` or `pmap`": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start "
        "all_gather_start all_to_all all_to_all_done all_to_all_start axis_index pbroadcast pbroadcast_done "
        "pbroadcast_dynamic pbroadcast_start pmax pmin ppermute ppermute_done ppermute_start precv preduced "
        "psend psum psum_done psum_invariant psum_invariant_start psum_start pvary ragged_all_to_all "
        "reduce_scatter reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p "
        "unreduced_pmax unreduced_pmin unreduced_psum unreduced_psum_start unreduced_reduce_scatter "
        "unreduced_reduce_scatter_start vary_unreduced_cast vary_unreduced_cast_p"
    ),
    "works on a reference, which is changed in place": "accum_grad_in_ref addupdate empty_ref "
    "free_ref freeze get new_ref run_state swap",
    "a mutable box of JAX's experimental types": "box_get box_set log_extend log_read new_box new_log",
    "a token, a check or a print, which has an effect": "after_all check create_token dce_sink "
    "inspect_sharding",
    "a step of JAX's transformations, gone once a function is traced": "call_hi_primitive_linearized "
    "custom_jvp_call_jaxpr custom_lin jaxpr_call stage unreachable",
    "sizes of a module whose shapes are refined after export": "dimension_size",
    "inside a Pallas kernel": "broadcast_to core_map create_linear delay get_global masked_load masked_swap "
    "mpmd_map multiple_of num_programs pin program_id reciprocal run_scoped semaphore_read semaphore_signal "
    "semaphore_wait unpin",
}

# Primitives that not every JAX version has: `before` is the first without it, `since` the first with it.
BEFORE = {
    "0.10": "copy_p core_call",
    "0.12": "box_get box_set call closed_call core_map jaxpr_call log_extend log_read new_box new_log "
    "pbroadcast_done pbroadcast_start psum_start reduced_vary_cast_p unreduced_psum_start "
    "unreduced_reduce_scatter_start vary_unreduced_cast_p",
}
SINCE = {
    "0.12": "log2 one_minus_square pbroadcast_dynamic polynomial reduced_vary_cast relayout unreduced_pmax "
    "unreduced_pmin vary_unreduced_cast xla_metadata_value",
}
UNSEEN = ("size_switch", "xla_metadata_call")  # ours, and one that JAX 0.10 defines outside `jax._src`
LAZY = ("jax.experimental.pallas", "jax.experimental.xla_metadata")  # define primitives when imported

IDENTITIES = {"zero": "0", "one": "1", "lowest": "-inf", "highest": "inf", "all_ones": "every bit set"}
STATUSES = {
    "exact": "exact",
    "conditional": "exact under the condition stated",
    "refused": "refused, with the reason stated",
}


def shipped() -> dict[str, Rule]:
    """Return the library's own rules, without those that a user has registered."""
    return {name: rule for name, rule in rules().items() if rule.family != "user"}


def names(table: dict[str, str]) -> list[str]:
    return [name for words in table.values() for name in words.split()]


def running() -> set[str]:
    """Return the names of all primitives of the JAX that runs."""
    for module in LAZY:
        importlib.import_module(module)
    return set(_compat.all_primitives())


# --- what is wrong ---------------------------------------------------------------------------------


def problems() -> list[str]:
    """Return one sentence for each thing that the tables and the running JAX disagree on."""
    classified = [*shipped(), *names(NO_RULE), *names(ELSEWHERE)]
    found = [
        f"`{name}` is classified twice."
        for name in sorted({n for n in classified if classified.count(n) > 1})
    ]
    present = running()
    found += [
        f"`{name}` has no rule and no place: give it a rule in jaxbatch/_mask, or name it in NO_RULE or "
        f"ELSEWHERE of tools/support_table.py with the reason."
        for name in sorted(present - set(classified))
    ]
    found += [
        f"family {family!r} has no sentence: add it to FAMILIES of tools/support_table.py."
        for family in sorted({rule.family for rule in shipped().values()} - set(FAMILIES))
    ]
    found += [
        f"`{name}` is {rule.status} and has no note that says why or when."
        for name, rule in shipped().items()
        if rule.status != "exact" and not rule.note
    ]
    if of_these_versions():
        version = _number(jax.__version__)
        expected = [name for name in classified if _exists(name, version) and name not in UNSEEN]
        found += [
            f"`{name}` is in the tables and not in JAX {jax.__version__}: remove it, or name it in BEFORE or "
            f"SINCE of tools/support_table.py."
            for name in sorted(set(expected) - present)
        ]
    return found


def of_these_versions() -> bool:
    """Tell whether the JAX that runs is one that the tables were checked against."""
    return _number(VERSIONS[0]) <= _number(jax.__version__) <= _number(VERSIONS[-1])


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _exists(name: str, version: tuple[int, ...]) -> bool:
    before = all(version < _number(v) for v, words in BEFORE.items() if name in words.split())
    since = all(version >= _number(v) for v, words in SINCE.items() if name in words.split())
    return before and since


# --- the document ----------------------------------------------------------------------------------


def document() -> str:
    """Return docs/support.md."""
    table = shipped()
    counts = {status: sum(rule.status == status for rule in table.values()) for status in STATUSES}
    lines = [
        "# What is exact under padding",
        "",
        "<!-- Written by `python -m tools.support_table` from the table of rules; do not edit. -->",
        "",
        "A masked function answers as the function itself does at the exact size, whatever its padding",
        "holds. Each of JAX's primitives has a rule that keeps this promise, or is refused where it meets a",
        "ragged size. A refusal is a `MaskError` that names the primitive, the dims and your line; it comes",
        "before anything is compiled. Where nothing is ragged, every primitive except a callback runs as it",
        "is.",
        "",
        f"For JAX {VERSIONS[0]} to {VERSIONS[-1]}; what not all of these versions have is marked.",
        "",
        "| primitives | status |",
        "|---:|---|",
        *(f"| {counts[status]} | {text} |" for status, text in STATUSES.items()),
        f"| {len(names(NO_RULE))} | no rule: refused where ragged, as it is where nothing is |",
        f"| {len(names(ELSEWHERE))} | not in a function of one example |",
        "",
    ]
    for family, sentence in FAMILIES.items():
        members = {name: rule for name, rule in table.items() if rule.family == family}
        if members:
            lines += [f"## {family.capitalize()}", "", sentence, "", *_family(members), ""]
    lines += [
        "## No rule",
        "",
        "Refused where a value or a size is ragged; as they are where nothing is.",
        "",
    ]
    lines += _reasons(NO_RULE)
    lines += ["", "## Not in a function of one example", "", "Treated like those without a rule.", ""]
    lines += _reasons(ELSEWHERE)
    return "\n".join(lines) + "\n"


def _family(members: dict[str, Rule]) -> list[str]:
    """Return the table of one family, one row for all primitives that it says the same of."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, rule in members.items():
        identity = IDENTITIES[rule.identity.__name__] if rule.identity else ""
        rows.setdefault((rule.status, rule.note, identity), []).append(name)
    ordered = sorted(rows.items(), key=lambda row: (list(STATUSES).index(row[0][0]), min(row[1])))
    if len(ordered) == 1 and ordered[0][0] == ("exact", "", ""):
        return [f"Exact: {_listed(ordered[0][1])}."]
    lines = ["| primitives | status | filled with | condition or reason |", "|---|---|---|---|"]
    for (status, note, identity), found in ordered:
        lines.append(f"| {_listed(found)} | {status} | {identity} | {note.rstrip('.')} |")
    return lines


def _reasons(table: dict[str, str]) -> list[str]:
    rows = [f"| {_listed(words.split())} | {reason} |" for reason, words in table.items()]
    return ["| primitives | what they are |", "|---|---|", *rows]


def _listed(found: Iterable[str]) -> str:
    return ", ".join(f"`{name}`{_mark(name)}" for name in sorted(found))


def _mark(name: str) -> str:
    marks = [f"before {v}" for v, words in BEFORE.items() if name in words.split()]
    marks += [f"since {v}" for v, words in SINCE.items() if name in words.split()]
    return f" (*{marks[0]}*)" if marks else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is wrong")
    args = parser.parse_args()
    found = problems()
    if args.check:
        if not DOCUMENT.exists() or DOCUMENT.read_text() != document():
            found.append(f"{DOCUMENT.name} is stale: run `python -m tools.support_table`.")
    else:
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(document())
    print(*found, sep="\n", file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
