"""The benchmark: what a user would pick instead of jaxbatch, side by side on the same inputs.

    python -m tools.bench --quick      # a few texts, one round: does everything run?
    python -m tools.bench              # all of it; writes BENCHMARKS.md

Every system runs in a process of its own, so that its start and its memory are its own. The parent first
compares all answers with float32 single calls and drops a system that is wrong; then it asks one system after
another for a timed pass, A B C ... A B C ..., so that whatever slows the machine down meets all of them.
Ratios are taken within a round.
"""
