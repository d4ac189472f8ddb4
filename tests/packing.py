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

    def __init__(self, case: Case):
        self.case = case
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

    def inputs(self, examples: Any, poisons: Sequence[float]) -> list[Any]:
        """Return the packed arguments of all rows: every layout under every poison."""
        args: list[Any] = list(self.case.shared)
        for j, spec in enumerate(self.case.arrays):
            shape = spec.shape({self.dim: self.symbol})
            rows = [
                self.pack(i, [xs[j] for xs in examples[i]], shape, poison)
                for i in range(len(self.places))
                for poison in poisons
            ]
            args.append(np.stack(rows))
        return args


def assert_packed(case: Case) -> Any:
    """Check values under every layout and poison, neighbours that are not finite, and gradients."""
    trial = Trial(case)
    call = jax.jit(jax.vmap(trial.packed, in_axes=trial.in_axes))
    where = [np.repeat(x, len(POISONS), axis=0) for x in trial.where()]
    outs, flags = call(*where, *trial.inputs(trial.examples, POISONS))
    assert not np.any(flags), "a row was flagged though all examples are finite"
    wants = _references(trial, trial.examples)
    shapes = _out_shapes(trial)
    outs = [np.asarray(out) for out in jax.tree.leaves(outs)]
    for j, out in enumerate(outs):
        for i, place in enumerate(trial.places):
            for p, poison in enumerate(POISONS):
                row = out[i * len(POISONS) + p].copy()
                for k in range(len(place.lengths)):
                    got = trial.unpack(i, k, row, shapes[j], wants[i][k][j])
                    message = f"output {j}, layout {i}, segment {k} of {place.lengths}, {poison} around"
                    assert_close(got, wants[i][k][j], case.tolerance, message)
                    trial.clear(i, k, row, shapes[j], wants[i][k][j])
                assert not row.any(), f"output {j}, layout {i}, {poison} around: not zero where no segment is"
    _assert_neighbours(trial, call, wants, shapes)
    if case.grad and any(jnp.issubdtype(spec.dtype, jnp.inexact) for spec in case.arrays):
        _assert_gradients(trial, wants, shapes)
    return trial.packed


def _references(trial: Trial, examples: Any) -> list[list[list[np.ndarray]]]:
    f = jax.jit(lambda *args: trial.case.f(*args))
    return [
        [[np.asarray(out) for out in jax.tree.leaves(f(*trial.case.shared, *xs))] for xs in each]
        for each in examples
    ]


def _out_shapes(trial: Trial) -> list[Any]:
    assert trial.packed._latest is not None
    packed, _ = trial.packed._latest  # the latest call's program
    return [aval.shape for aval in packed.program.out_avals]


def _assert_neighbours(trial: Trial, call: Any, wants: Any, shapes: Any) -> None:
    """Let one segment of each row be not finite: the others keep their values, or the row is flagged."""
    for poison in (np.nan, np.inf, 1e30):
        examples, bad = [], []
        for i, each in enumerate(trial.examples):
            k = i % len(each)
            bad.append(k)
            spoilt = [np.full_like(x, poison) if np.issubdtype(x.dtype, np.floating) else x for x in each[k]]
            examples.append([*each[:k], spoilt, *each[k + 1 :]])
        outs, flags = call(*trial.where(), *trial.inputs(examples, (0.0,)))
        for j, out in enumerate(map(np.asarray, jax.tree.leaves(outs))):
            for i, place in enumerate(trial.places):
                if flags[i]:
                    continue
                for k in range(len(place.lengths)):
                    if k != bad[i]:
                        got = trial.unpack(i, k, out[i], shapes[j], wants[i][k][j])
                        message = f"output {j}, layout {i}, segment {k} next to one of {poison}"
                        assert_close(got, wants[i][k][j], trial.case.tolerance, message)


def _assert_gradients(trial: Trial, wants: Any, shapes: Any) -> None:
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

    @jax.jit
    def reference(args: Any, cotangents: Any) -> Any:
        def run(*chosen: Any) -> Any:
            outs = jax.tree.leaves(case.f(*put(args, chosen)))
            return [outs[j] for j in inexact_outs]

        return jax.vjp(run, *(args[i] for i in inexact))[1](cotangents)

    def pull_back(place: Any, args: Any, cotangents: Any) -> Any:
        def run(*chosen: Any) -> Any:
            outs = jax.tree.leaves(trial.packed(*place, *put(args, chosen))[0])
            return [outs[j] for j in inexact_outs]

        return jax.vjp(run, *(args[i] for i in inexact))[1](cotangents)

    weights = [
        [[trial.rng.standard_normal(w[j].shape).astype(w[j].dtype) for j in inexact_outs] for w in each]
        for each in wants
    ]
    want = [
        [reference([*case.shared, *xs], ws) for xs, ws in zip(*pair, strict=True)]
        for pair in zip(trial.examples, weights, strict=True)
    ]
    poisons = (0.0, np.nan, np.inf)
    where = [np.repeat(x, len(poisons), axis=0) for x in trial.where()]
    cotangents = [
        np.stack(
            [
                trial.pack(i, [ws[c] for ws in weights[i]], shapes[j], poison)
                for i in range(len(trial.places))
                for poison in poisons
            ]
        )
        for c, j in enumerate(inexact_outs)
    ]
    axes = trial.in_axes[3:]
    got = jax.jit(jax.vmap(pull_back, in_axes=(0, list(axes), 0)))(
        tuple(where), trial.inputs(trial.examples, poisons), cotangents
    )
    for c, i in enumerate(inexact):
        for r, grad in enumerate(np.asarray(got[c])):
            index, poison = divmod(r, len(poisons))
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
