"""The oracle for packed functions: `f` itself on each segment alone, and anything between and around them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from masking import Case, assert_close, pad

import jaxbatch as jb
from jaxbatch._mask._context import Context
from jaxbatch._pack import form
from jaxbatch.testing import POISONS

SPARE = 2  # slots of the segment axis that no segment uses


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the segments of one row lie: their lengths, and the gap in front of each."""

    lengths: tuple[int, ...]
    gaps: tuple[int, ...]

    def arrays(self, cells: int, slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        segments = np.full(cells, -1, np.int32)
        starts, lengths = np.full(slots, cells - 1, np.int32), np.zeros(slots, np.int32)
        at = 0
        for k, (length, gap) in enumerate(zip(self.lengths, self.gaps, strict=True)):
            at += gap
            segments[at : at + length] = k
            starts[k], lengths[k] = at, length
            at += length
        return segments, starts, lengths


def places(case: Case) -> list[Place]:
    """Return layouts of a row: adjacent, with gaps, one segment alone, and the longest ones to the end."""
    lengths = tuple(case.lengths)
    num = len(lengths)
    return [
        Place(lengths, (0,) * num),
        Place(lengths[::-1], tuple(1 + k % 3 for k in range(num))),
        Place(lengths[-1:], (3,)),
        Place((lengths[0], *lengths[1:][::-1]), (sum(1 + k % 3 for k in range(num)), *(0,) * (num - 1))),
    ]


class Trial:
    """One case packed: rows of several layouts, each under every poison."""

    def __init__(self, case: Case, prepare: Any, reference: Any):
        self.case, self.prepare, self.reference = case, prepare, reference
        self.rng = np.random.default_rng(0)
        (self.dim,) = case.dims
        self.places = places(case)
        num = max(len(p.lengths) for p in self.places)
        self.cells = max(sum(p.lengths) + sum(p.gaps) for p in self.places)
        self.slots = num + SPARE
        self.longest = case.size
        in_axes = (None,) * len(case.shared) + (0,) * len(case.specs)
        spec = tuple(case.arrays) if len(case.arrays) > 1 else case.arrays[0]
        self.packed = jb.pack(case.f, in_axes, spec=spec, longest=self.longest)
        self.masked = jb.mask(case.f, in_axes, spec=spec)
        self.in_axes = (0, 0, 0, *in_axes)
        self.symbol = jax.export.symbolic_shape(self.dim)[0]
        self.examples = [
            [case.example({self.dim: n}, self.rng) for n in place.lengths] for place in self.places
        ]

    def where(self) -> list[np.ndarray]:
        """Return segments, starts and lengths of all layouts."""
        arrays = [place.arrays(self.cells, self.slots) for place in self.places]
        return [np.stack(each) for each in zip(*arrays, strict=True)]

    def pack(self, index: int, arrays: Sequence[Any], shape: Any, poison: float) -> np.ndarray:
        """Pack one array of each segment, of true shape `shape` (symbolic), around a poison."""
        on_row = form(shape, self.dim) == "row"
        sizes = Context({}, {self.dim: self.longest}).shape(shape)
        if on_row:
            sizes = tuple(self.cells if jax.export.is_symbolic_dim(d) else d for d in shape)
        out = pad(
            np.zeros((0,), arrays[0].dtype), (math.prod(sizes if on_row else (self.slots, *sizes)),), poison
        )
        out = out.reshape(sizes if on_row else (self.slots, *sizes))
        for k, x in enumerate(arrays):
            out[self.cells_of(index, k, shape, x)] = x
        return out

    def cells_of(self, index: int, k: int, shape: Any, want: Any) -> tuple[Any, ...]:
        """Return the index of the valid part of segment `k` in a packed array of true shape `shape`."""
        _, starts, lengths = self.places[index].arrays(self.cells, self.slots)
        if form(shape, self.dim) == "row":
            inside = slice(starts[k], starts[k] + lengths[k])
            return tuple(inside if jax.export.is_symbolic_dim(d) else slice(None) for d in shape)
        return (k, *(slice(0, size) for size in np.shape(want)))

    def unpack(self, index: int, k: int, out: np.ndarray, shape: Any, want: Any) -> np.ndarray:
        return np.asarray(out[self.cells_of(index, k, shape, want)])

    def clear(self, index: int, k: int, out: np.ndarray, shape: Any, want: Any) -> None:
        out[self.cells_of(index, k, shape, want)] = 0

    def spoilt(self, value: float) -> tuple[list[Any], list[int]]:
        """Return the examples with one segment of each row full of `value`, and which one that is."""
        examples, bad = [], []
        for i, each in enumerate(self.examples):
            k = i % len(each)
            full = [np.full_like(x, value) if np.issubdtype(x.dtype, np.floating) else x for x in each[k]]
            examples.append([*each[:k], full, *each[k + 1 :]])
            bad.append(k)
        return examples, bad

    def inputs(self, groups: Sequence[tuple[Any, float]]) -> list[Any]:
        """Return the packed arguments of all rows: every layout for each of several examples and poisons."""
        args: list[Any] = list(self.case.shared)
        for j, spec in enumerate(self.case.arrays):
            shape = spec.shape({self.dim: self.symbol})
            rows = [
                self.pack(i, [xs[j] for xs in examples[i]], shape, poison)
                for examples, poison in groups
                for i in range(len(self.places))
            ]
            args.append(np.stack(rows))
        return args


def assert_packed(
    case: Case,
    *,
    strict: bool = True,
    neighbours: bool = True,
    prepare: Any = jax.jit,
    reference: Any = jax.jit,
) -> Any:
    """Check values under every layout and poison, neighbours that are not finite, and gradients.

    Args:
      case: with one ragged dim.
      strict: no row may be flagged, and no gradient be NaN for one; else such rows are passed over.
      neighbours: also try rows in which a segment is not finite; a loop on data might never end there.
      prepare: how the packed function is run.
      reference: how the unpadded one is.
    """
    trial = Trial(case, prepare, reference)
    call = prepare(jax.vmap(trial.packed, in_axes=trial.in_axes))
    groups = [(poison, trial.examples, (None,) * len(trial.places)) for poison in POISONS]
    if neighbours:
        groups += [(0.0, *trial.spoilt(value)) for value in (np.nan, np.inf, 1e30)]
    where = [np.concatenate([x] * len(groups)) for x in trial.where()]
    outs, flags = call(*where, *trial.inputs([(examples, poison) for poison, examples, _ in groups]))
    flags, outs = np.asarray(flags), [np.array(out) for out in jax.tree.leaves(outs)]
    wants, shapes = _references(trial), _out_shapes(trial)
    for g, (poison, _, bad) in enumerate(groups):
        for i, place in enumerate(trial.places):
            row = g * len(trial.places) + i
            message = f"layout {i} of {place.lengths}, {poison} around, segment {bad[i]} not finite"
            if flags[row]:
                assert not strict or bad[i] is not None, f"{message}: flagged though all examples are finite"
                continue
            for j, out in enumerate(outs):
                for k in range(len(place.lengths)):
                    if k != bad[i]:
                        got = trial.unpack(i, k, out[row], shapes[j], wants[i][k][j])
                        assert_close(
                            got, wants[i][k][j], case.tolerance, f"output {j}, segment {k}, {message}"
                        )
                    trial.clear(i, k, out[row], shapes[j], wants[i][k][j])
                assert not out[row].any(), f"output {j}, {message}: not zero where no segment is"
    if case.grad and any(jnp.issubdtype(spec.dtype, jnp.inexact) for spec in case.arrays):
        _assert_gradients(trial, wants, shapes, strict)
    return trial.packed


def _references(trial: Trial) -> list[list[list[np.ndarray]]]:
    run = trial.reference(
        lambda every: [
            [trial.case.f(*map(jnp.asarray, trial.case.shared), *xs) for xs in each] for each in every
        ]
    )
    return [[[np.asarray(o) for o in jax.tree.leaves(out)] for out in each] for each in run(trial.examples)]


def _out_shapes(trial: Trial) -> list[Any]:
    assert trial.packed._latest is not None
    packed, _ = trial.packed._latest  # the latest call's program
    return [aval.shape for aval in packed.program.out_avals]


def _assert_gradients(trial: Trial, wants: Any, shapes: Any, strict: bool) -> None:
    """Pull cotangents back, poisoned where no segment is; shared arguments get the sum over the segments."""
    case = trial.case
    inexact_outs = [j for j, w in enumerate(wants[0][0]) if np.issubdtype(w.dtype, np.floating)]
    args = [*case.shared, *trial.examples[0][0]]
    inexact = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact)]
    num_shared = len(case.shared)
    if not inexact_outs:
        return

    def put(args: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
        out = list(args)
        for i, x in zip(inexact, chosen, strict=True):
            out[i] = x
        return out

    def reference(every: Any, weights: Any) -> Any:
        def one(xs: Any, cotangents: Any) -> Any:
            args = [*map(jnp.asarray, case.shared), *xs]

            def run(*chosen: Any) -> Any:
                outs = jax.tree.leaves(case.f(*put(args, chosen)))
                return [outs[j] for j in inexact_outs]

            return jax.vjp(run, *(args[i] for i in inexact))[1](cotangents)

        return [[one(*pair) for pair in zip(*each, strict=True)] for each in zip(every, weights, strict=True)]

    def pull_back(place: Any, args: Any, cotangents: Any) -> Any:
        def run(*chosen: Any) -> Any:
            outs = jax.tree.leaves(trial.packed(*place, *put(args, chosen))[0])
            return [outs[j] for j in inexact_outs]

        return jax.vjp(run, *(args[i] for i in inexact))[1](cotangents)

    weights = [
        [[trial.rng.standard_normal(w[j].shape).astype(w[j].dtype) for j in inexact_outs] for w in each]
        for each in wants
    ]
    try:
        want = jax.tree.map(np.asarray, trial.reference(reference)(trial.examples, weights))
    except Exception:
        if strict:
            raise
        return  # such as reverse mode through a loop on data
    poisons = (0.0, np.nan, np.inf)
    where = [np.concatenate([x] * len(poisons)) for x in trial.where()]
    cotangents = [
        np.stack(
            [
                trial.pack(i, [ws[c] for ws in weights[i]], shapes[j], poison)
                for poison in poisons
                for i in range(len(trial.places))
            ]
        )
        for c, j in enumerate(inexact_outs)
    ]
    axes = trial.in_axes[3:]
    got = trial.prepare(jax.vmap(pull_back, in_axes=(0, list(axes), 0)))(
        tuple(where), trial.inputs([(trial.examples, poison) for poison in poisons]), cotangents
    )
    marked = np.all([np.isnan(g).reshape(len(g), -1).all(1) for g in map(np.asarray, got)], axis=0)
    for c, i in enumerate(inexact):
        for r, grad in enumerate(np.asarray(got[c])):
            if not strict and marked[r]:
                continue
            poison, index = divmod(r, len(trial.places))
            message = f"gradient of argument {i}, layout {index}, {poisons[poison]} around"
            if i < num_shared:
                total = np.sum([w[c] for w in want[index]], axis=0)
                assert_close(grad, total, case.tolerance * 10, message)
                continue
            grad = grad.copy()
            shape = case.arrays[i - num_shared].shape({trial.dim: trial.symbol})
            for k, w in enumerate(want[index]):
                part = trial.unpack(index, k, grad, shape, w[c])
                assert_close(part, w[c], case.tolerance, f"{message}, segment {k}")
                trial.clear(index, k, grad, shape, w[c])
            assert not grad.any(), f"{message}: not zero where no segment is"
