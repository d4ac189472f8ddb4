"""Functions of padded batches that mask themselves; the oracle is the function on one example, unpadded."""

import inspect
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen
from jax import numpy as jnp

import jaxbatch as jb
from jaxbatch.testing import POISONS, assert_padding_invariant, padding_value

VECTOR = jb.spec("n", "float32")
IDS = jb.spec("n", "int32")
GRID = jb.Grid(n=(4, 64), rows=(1, 8))


def examples(*lengths: int, width: int | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=n if width is None else (n, width)).astype(np.float32) for n in lengths]


def tokens(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).astype(np.int32) for n in lengths]


def assert_close(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    scale = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * scale)


def mean(x, mask):
    """The mean of each row, by a mask."""
    valid = mask["n"]
    return jnp.where(valid, x, 0).sum(1) / valid.sum(1)


def encode(params, input_ids, attention_mask: Any = None):
    """One attention layer of the usual shape: ids and a mask in, hidden states and a pooled vector out."""
    x = params["table"][input_ids]
    scores = jnp.einsum("bqd,bkd->bqk", x @ params["q"], x)
    scores = jnp.where(attention_mask[:, None, :], scores, -jnp.inf)
    x = jax.nn.softmax(scores) @ x
    valid = attention_mask[:, :, None]
    return {"hidden": x, "pooled": jnp.where(valid, x, 0).sum(1) / valid.sum(1)}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"table": rng.normal(size=(50, 4)).astype(np.float32), "q": np.eye(4, dtype=np.float32)}


# --- what the function gets ------------------------------------------------------------------------


def test_a_model_with_an_attention_mask_gets_the_mask_itself_and_gives_what_it_gives_unpadded():
    ids, params = tokens(3, 17, 64, 1, 5), weights()
    run = jb.batched(
        encode, (None, 0), spec=IDS, grid=GRID, per_example=False, mask_arg="attention_mask", frozen=True
    )
    run.warm_up(params, lengths=[len(each) for each in ids])
    for got, each in zip(run(params, ids), ids, strict=True):
        expected = encode(params, each[None], np.ones((1, len(each)), bool))
        assert got.keys() == expected.keys()
        assert_close(got["hidden"], expected["hidden"][0])
        assert_close(got["pooled"], expected["pooled"][0])
        assert got["hidden"].flags.owndata


def test_lengths_and_masks_are_dicts_by_dim_with_the_rows_that_are_examples():
    seen = {}

    def f(x, y, lengths, mask):
        seen.update(lengths=jax.tree.map(jnp.shape, lengths), mask=jax.tree.map(jnp.shape, mask))
        told = jnp.stack([lengths["n"], lengths["m"], mask["n"].sum(1), mask["m"].sum(1)], axis=1)
        rows = jnp.broadcast_to(mask["rows"].sum(), x.shape[:1])
        return told, rows, mask["rows"]

    specs = (VECTOR, jb.spec("m, 2", "float32"))
    run = jb.batched(f, spec=specs, grid=jb.Grid(n=8, m=16, rows=4), per_example=False)
    got = run(examples(3, 5, 8), examples(2, 9, 16, width=2))
    assert seen["lengths"] == {"n": (4,), "m": (4,)}
    assert seen["mask"] == {"n": (4, 8), "m": (4, 16), "rows": (4,)}
    for (told, rows, valid), n, m in zip(got, (3, 5, 8), (2, 9, 16), strict=True):
        assert told.tolist() == [n, m, n, m] and rows == 3 and valid
        assert told.dtype == np.int32


def test_with_several_ragged_dims_a_named_mask_is_a_dict_too():
    def f(x, *, valid):
        return jnp.where(valid["h"][:, :, None] & valid["w"][:, None, :], x, 0).sum((1, 2))

    x = np.ones((3, 5), np.float32)
    run = jb.batched(
        f, spec=jb.spec("h w", "float32"), grid=jb.Grid(h=8, w=8), per_example=False, mask_arg="valid"
    )
    with padding_value(np.nan):
        assert run([x])[0] == 15


def test_masks_of_dims_that_are_only_written_as_expressions():
    def f(x, mask):
        return jnp.where(jnp.repeat(mask["h"], 4, axis=1), x, 0).sum(1)

    run = jb.batched(f, spec=jb.spec("4*h", "float32"), grid=jb.Grid(h=(2, 8)), per_example=False)
    with padding_value(np.nan):
        assert [float(each) for each in run([np.ones(4, np.float32), np.ones(12, np.float32)])] == [4, 12]


def test_a_function_that_names_neither_is_called_with_its_arguments_alone_and_sees_zeros_in_the_padding():
    run = jb.batched(lambda ids: (ids != 0).sum(1), spec=IDS, grid=GRID, per_example=False)
    assert [int(each) for each in run(tokens(3, 17))] == [3, 17]


def test_a_parameter_that_callers_give_is_theirs():
    def f(x, mask):
        return jnp.where(mask, x, 0).sum(1)

    run = jb.batched(
        f, (0, 0), spec=(VECTOR, jb.spec("n", "bool")), grid=GRID, per_example=False, key="theirs"
    )
    (got,) = run([np.ones(3, np.float32)], [np.array([True, False, True])])
    assert got == 2


def test_any_keyword_is_passed_if_the_function_takes_all():
    def f(x, **kwargs):
        return jnp.where(kwargs["valid"], x, 0).sum(1)

    run = jb.batched(f, (0,), spec=VECTOR, grid=GRID, per_example=False, mask_arg="valid")
    assert_close(run(examples(3))[0], examples(3)[0].sum())


# (keyword arguments, the error, a part of its message)
BAD_OPTIONS = (
    (
        dict(mask_arg="attention_mask", in_axes=(0,)),
        ValueError,
        "has no such parameter beside its arguments x",
    ),
    (dict(mask_arg="x", in_axes=(0,)), ValueError, "mask_arg='x'"),
    (dict(mask_arg="mask", per_example=True), ValueError, "for functions that mask themselves"),
    (dict(spec=None), jb.SpecError, "has no annotation.*With per_example=False, pass spec="),
)


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS)
def test_options_are_checked_when_the_function_is_wrapped(options, error, message):
    with pytest.raises(error, match=message):
        jb.batched(mean, **{"spec": VECTOR, "grid": GRID, "per_example": False, **options})  # pyright: ignore


# --- outputs ---------------------------------------------------------------------------------------


def test_outputs_are_cut_to_formulas_of_the_lengths():
    def f(x, y):
        return {
            "twice": jnp.repeat(x, 2, axis=1),
            "half": x[:, ::2],
            "one more": jnp.pad(x, ((0, 0), (1, 0))),
            "pairs": x[:, :, None] * y[:, None, :],
            "fixed": x[:, :2] * 0 + 1,
        }

    xs, ys = examples(3, 5, 17), examples(2, 9, 1)
    run = jb.batched(f, spec=(VECTOR, jb.spec("m", "float32")), per_example=False, grid=jb.Grid(n=32, m=16))
    for got, x, y in zip(run(xs, ys), xs, ys, strict=True):
        expected = jax.tree.map(lambda each: each[0], f(x[None], y[None]))
        jax.tree.map(assert_close, got, expected)


# (function, a part of the refusal)
NO_ROWS = (
    (
        lambda x: {"loss": x.sum()},
        r"output `result\['loss'\]` has shape \(\), without a leading axis of rows",
    ),
    (lambda x: (x, x.sum(0)), r"output `result\[1\]` has shape \(n\)"),
    (lambda x: x[:1], r"output `result` has shape \(1, n\)"),
    (lambda x: x.T, r"output `result` has shape \(n, rows\)"),
    (lambda x: x.reshape(-1), r"output `result` has shape \(n\*rows\)"),
    (lambda x: x.shape[1], r"has shape \(\)"),
)


@pytest.mark.parametrize(("f", "message"), NO_ROWS)
def test_an_output_without_rows_is_refused_by_name_before_anything_compiles(f, message, count_compiles):
    with count_compiles() as compiles, pytest.raises(jb.MaskError, match=message):
        jb.batched(f, spec=VECTOR, grid=GRID, per_example=False)
    assert compiles.count == 0


def test_an_output_without_rows_is_refused_in_a_call_even_if_errors_are_returned_or_sizes_are_exact():
    def f(scale, x):
        return (scale * x).sum()

    options: dict[str, Any] = dict(spec=VECTOR, grid=GRID, per_example=False)
    with pytest.raises(jb.MaskError, match=r"batched\(f\)"):
        jb.batched(f, (None, 0), **options)(2.0, examples(3), errors="return")
    with pytest.raises(jb.MaskError, match="without a leading axis of rows"):
        jb.batched(f, (None, 0), **options)(2.0, examples(0), errors="return")
    run = jb.batched(f, (None, 0), on_unmaskable="exact", **options)
    with pytest.warns(UserWarning, match="exact sizes"), pytest.raises(jb.MaskError, match="axis of rows"):
        run(2.0, examples(3))


def test_outputs_whose_valid_part_does_not_come_first_are_refused():
    def flat(x):
        return x.reshape(x.shape[0], -1)

    with pytest.raises(jb.MaskError, match=r"axis 1 has size h\*w, whose valid part cannot come first"):
        jb.batched(flat, spec=jb.spec("h w", "float32"), grid=jb.Grid(h=(4, 8), w=(4, 8)), per_example=False)


def test_branches_on_the_padded_size_are_the_functions_own_affair(count_compiles):
    def f(x, mask):
        x = jnp.where(mask["n"], x, 0)
        if x.shape[1] % 16 == 0:  # no symbolic size can answer that
            x = x.reshape(x.shape[0], -1, 16).reshape(x.shape)
        return x.sum(1), 2 * x, jnp.pad(x, ((0, 0), (1, 2)))

    xs = examples(3, 20, 50)
    run = jb.batched(f, spec=VECTOR, grid=GRID, per_example=False)
    with count_compiles() as compiles, padding_value(np.nan):
        got = run(xs)
    assert compiles.count == 3
    for (total, doubled, padded), x in zip(got, xs, strict=True):
        assert_close(total, x.sum())
        assert_close(doubled, 2 * x)
        assert_close(padded, np.pad(x, (1, 2)))


def by_four(x):
    if hash(x.shape[1]) % 2:
        raise ValueError("even sizes, please")
    return x[:, :: 2 if x.shape[1] > 8 else 1]


# (function, grid, a part of the refusal)
NO_FORMULA = (
    (by_four, jb.Grid(n=[4, 8, 16]), "has the sizes 4, 8, 8 for n = 4, 8, 16, which is no whole multiple"),
    (lambda x: x[:, :: 1 + (hash(x.shape[1]) > 0)], jb.Grid(n=[3, 5, 7]), "expected|whole multiple"),
    (
        lambda x: x.reshape(-1, int(x.shape[1]), 1)[:, :, 0] if hash(x.shape[1]) == 8 else {},
        jb.Grid(n=8),
        "kind",
    ),
)


@pytest.mark.parametrize(("f", "grid", "message"), NO_FORMULA)
def test_output_sizes_that_follow_no_line_are_refused_not_guessed(f, grid, message):
    with pytest.raises(jb.MaskError, match=message):
        jb.batched(f, spec=VECTOR, grid=grid, per_example=False)


def test_a_bucket_that_breaks_the_formula_is_refused_when_it_is_met():
    def f(x):
        return x[:, :8] if hash(x.shape[1]) == 32 else x

    run = jb.batched(f, spec=VECTOR, grid=GRID, per_example=False)
    assert_close(run(examples(7))[0], examples(7)[0])
    with pytest.raises(jb.MaskError, match=r"batch of n=32, rows=1 .*\(1, 8\).*expected \[\(1, 32\)\]"):
        run(examples(30), errors="return")


def test_the_functions_own_error_is_raised_as_it_is():
    def f(x, mask):
        raise TypeError("no such thing")

    with pytest.raises(TypeError, match="no such thing"):
        jb.batched(f, spec=VECTOR, grid=GRID, per_example=False)(examples(3))


# --- all else is the same --------------------------------------------------------------------------


def test_empty_and_oversize_examples_run_at_their_exact_sizes():
    xs = examples(0, 3, 100, 0)
    run = jb.batched(mean, spec=VECTOR, grid=GRID, per_example=False, oversize="exact")
    got = run(xs)
    assert np.isnan(got[0]) and np.isnan(got[3])
    assert_close(got[1], xs[1].mean())
    assert_close(got[2], xs[2].mean())
    counts = run.statistics()
    assert (counts.compiles, counts.exact_compiles, counts.exact.examples) == (1, 2, 3)
    with pytest.raises(jb.OversizeError, match=r"`x\[2\]`"):
        jb.batched(mean, spec=VECTOR, grid=GRID, per_example=False)(xs)


def test_errors_of_examples_maps_statistics_and_programs_are_as_always(count_compiles):
    xs = examples(*range(1, 60))
    run = jb.batched(mean, spec=VECTOR, grid=GRID, per_example=False)
    with count_compiles() as compiles:
        got = run([*xs, np.ones((2, 2))], errors="return")
    assert isinstance(got[-1], jb.SpecError)
    assert compiles.count == run.statistics().compiles == run.explain(range(1, 60)).programs
    with count_compiles() as compiles:
        again = list(run.map(iter(xs)))
    assert compiles.count <= 3  # a map's first windows are small
    for a, b, x in zip(got[:-1], again, xs, strict=True):
        assert_close(a, x.mean())
        assert_close(b, x.mean())
    assert run.statistics().examples == 2 * len(xs)


def test_nothing_compiles_after_a_warm_up_of_the_grid(count_compiles):
    params, grid = weights(), jb.Grid(n=(4, 16), rows=(1, 4))
    run = jb.batched(
        encode, (None, 0), spec=IDS, grid=grid, per_example=False, mask_arg="attention_mask", frozen=True
    )
    run.warm_up(params)
    assert run.statistics().compiles == len(grid)
    with count_compiles() as compiles:
        run(params, tokens(1, 16, 3, 9, 9, 2, 8))
    assert compiles.count == 0


def test_an_inferred_grid_grows():
    run = jb.batched(mean, spec=VECTOR, per_example=False)
    with pytest.warns(UserWarning, match="no grid was given"):
        run(examples(3))
    assert_close(run(examples(300))[0], examples(300)[0].mean())


def test_arrays_that_the_function_closes_over_are_arguments_and_are_on_the_device_once(count_compiles):
    tables = [jnp.asarray(np.random.default_rng(i).normal(size=(50, 1000)), np.float32) for i in range(2)]
    for table in tables:
        run = jb.batched(
            lambda ids, mask, table=table: jnp.where(mask["n"][..., None], table[ids], 0).sum(1),
            in_axes=(0,),
            spec=IDS,
            grid=GRID,
            per_example=False,
            key="closed over",
        )
        before = sum(array.nbytes for array in jax.live_arrays())
        with count_compiles() as compiles:
            got = [run([ids])[0] for ids in tokens(3, 9, 17, 40)]
        grown = sum(array.nbytes for array in jax.live_arrays()) - before
        for each, ids in zip(got, tokens(3, 9, 17, 40), strict=True):
            assert_close(each, np.asarray(table)[ids].sum(0))
        assert grown < 0.1 * table.nbytes
        assert compiles.count == (4 if table is tables[0] else 0)


# --- functions that look across rows ---------------------------------------------------------------


def centre(x, mask):
    """x - x.mean over rows, filler rows left out."""
    rows = mask["rows"][:, None]
    return x - jnp.where(rows, x, 0).sum(0) / rows.sum()


def contrastive(a, b, mask):
    """The in-batch contrastive loss of each row: the other rows are its negatives."""
    scores = jnp.where(mask["rows"][None, :], a @ b.T, -jnp.inf)
    return -jnp.diagonal(jax.nn.log_softmax(scores, axis=1)), scores


def test_with_the_mask_of_rows_three_rows_in_four_see_only_each_other():
    fixed, grid = jb.spec("4", "float32"), jb.Grid(rows=4)
    a = np.stack(examples(4, 4, 4))
    b = a[::-1] + 1
    got = jb.batched(centre, spec=fixed, grid=grid, per_example=False)(a)
    for row, expected in zip(got, a - a.mean(0), strict=True):
        assert_close(row, expected)
    got = jb.batched(contrastive, spec=(fixed, fixed), grid=grid, per_example=False)(a, b)
    losses, scores = contrastive(jnp.asarray(a), jnp.asarray(b), {"rows": np.ones(3, bool)})
    for (loss, row), expected, expected_row in zip(got, losses, scores, strict=True):
        assert_close(loss, expected)
        assert_close(row, expected_row)  # [3]: the filler row is cut off


def test_batch_normalisation_in_training_gives_the_outputs_and_statistics_of_the_unpadded_batch():
    norm = linen.BatchNorm(use_running_average=False, momentum=0.9)
    xs = [x + 1 for x in np.asarray(examples(17, 17, width=4))]
    variables = norm.init(jax.random.key(0), xs[0][None])

    def step(variables, x, mask):
        valid = (mask["n"] & mask["rows"][:, None])[:, :, None]
        y, state = norm.apply(variables, x, mask=valid, mutable=["batch_stats"])
        return y, jax.tree.map(lambda each: jnp.broadcast_to(each, (len(x), *each.shape)), state)

    expected, state = norm.apply(variables, jnp.stack(xs), mutable=["batch_stats"])
    run = jb.batched(
        step, (None, 0), spec=jb.spec("n, 4", "float32"), grid=jb.Grid(n=32, rows=4), per_example=False
    )
    for poison in POISONS:
        with padding_value(poison):
            got = run(variables, xs)
        for (y, running), want in zip(got, expected, strict=True):
            assert_close(y, want)
            jax.tree.map(assert_close, running, state)


# --- the check -------------------------------------------------------------------------------------


def test_a_right_mask_passes_the_check_under_every_poison():
    assert_padding_invariant(mean, examples(1, 3, 8, 0), spec=VECTOR, per_example=False)
    assert_padding_invariant(
        encode,
        weights(),
        tokens(1, 3, 8),
        in_axes=(None, 0),
        spec=IDS,
        per_example=False,
        mask_arg="attention_mask",
    )


def forgets(x, mask):
    return {"ok": x * 2, "mean": x.sum(1) / mask["n"].sum(1)}


def subtracts(x, mask):
    return jax.nn.softmax(x + jnp.where(mask["n"], 0, -1e9)) @ jnp.arange(x.shape[1]), x


def test_a_wrong_mask_is_found_and_the_output_and_the_poison_are_named():
    with pytest.raises(AssertionError, match=r"example 0 \(n=3\), run together with 1.0.*`result\['mean'\]`"):
        assert_padding_invariant(forgets, examples(3, 8), spec=VECTOR, per_example=False)
    with pytest.raises(AssertionError, match=r"with 1e\+30 in the padding: output `result\[0\]` is wrong"):
        assert_padding_invariant(subtracts, examples(3, 8), spec=VECTOR, per_example=False)
    assert_padding_invariant(subtracts, examples(3, 8), spec=VECTOR, per_example=False, poisons=(0, 1, -1e30))


def test_a_function_that_looks_across_rows_is_found_by_its_neighbours():
    with pytest.raises(AssertionError, match="run together.*reads padding, or other examples"):
        assert_padding_invariant(
            centre, examples(4, 4), spec=jb.spec("4", "float32"), grid=jb.Grid(rows=2), per_example=False
        )


def test_gradients_of_functions_that_mask_themselves_are_not_checked():
    with pytest.raises(ValueError, match="grad=True is for functions of one example"):
        inspect.unwrap(assert_padding_invariant)(mean, examples(3), spec=VECTOR, per_example=False, grad=True)
