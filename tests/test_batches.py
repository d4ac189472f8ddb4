import itertools
import re
from collections.abc import Iterator

import jax
import jaxtyping
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import numpy as jnp

import jaxbatch as jb

# How long an example takes says nothing on a busy machine.
patient = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])

VECTOR = jb.spec("n", "float32")
GRID = jb.Grid(n=[4, 8, 16], rows=[4])


def vectors(*lengths):
    """Return one vector per length, whose numbers say which it is."""
    return [np.full(n, i, np.float32) for i, n in enumerate(lengths)]


def indices_of(batches):
    return [batch.indices.tolist() for batch in batches]


def real(batches):
    return [i for row in indices_of(batches) for i in row if i >= 0]


# --- a model: words are embedded, look at each other, and each predicts its label ---

RNG = np.random.default_rng(0)
PARAMS = {
    "embedding": RNG.normal(size=(11, 6)).astype("float32"),
    "mix": RNG.normal(size=(6, 6)).astype("float32"),
    "out": RNG.normal(size=(6, 3)).astype("float32"),
}
TAGGED = {"ids": jb.spec("n", "int32"), "labels": jb.spec("n", "int32")}


def tagging_loss(params, example):
    """Return the sum of the words' losses, and no mean, of one example at its exact size."""
    x = params["embedding"][example["ids"]]
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    x = x + jax.nn.softmax(x @ params["mix"] @ x.T) @ x
    logits = (x - x.mean(0)) @ params["out"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), example["labels"][:, None], axis=1).sum()


def tagged(*lengths):
    rng = np.random.default_rng(1)
    return [
        {"ids": rng.integers(0, 11, n).astype(np.int32), "labels": rng.integers(0, 3, n)} for n in lengths
    ]


def gradient_step(loss=tagging_loss, spec=TAGGED):
    """Return the jitted function of params, batch and denominator: its part of the loss, and the gradient."""
    each = jax.vmap(jb.mask(loss, in_axes=(None, 0), spec=spec), in_axes=(0, None, 0))
    part = lambda params, batch, count: batch.sum(each(batch.lengths, params, batch.arrays)) / count
    return jax.jit(jax.value_and_grad(part))


def added(trees):
    return jax.tree.map(lambda *leaves: np.sum(np.stack(leaves), axis=0), *trees)


def accumulated(step, batches, count):
    parts = [step(PARAMS, batch, count) for batch in batches]
    return added(parts)


def full_batch(examples, count):
    """Return loss and gradient with no padding and no batch at all."""
    step = jax.jit(jax.value_and_grad(lambda params, example: tagging_loss(params, example) / count))
    parts = [step(PARAMS, example) for example in examples]
    return added(parts)


def assert_close(got, expected):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))

    jax.tree.map(compare, got, expected)


# --- what a batch holds ---


def test_a_batch_has_arrays_lengths_validity_and_positions():
    (batch,) = jb.batches(vectors(3, 2, 4), spec=VECTOR, grid=GRID)
    assert batch.bucket == jb.Bucket(n=4, rows=4)
    np.testing.assert_array_equal(batch.indices, [0, 1, 2, -1])
    np.testing.assert_array_equal(batch.valid, [True, True, True, False])
    np.testing.assert_array_equal(batch.lengths["n"], [3, 2, 4, 3])
    np.testing.assert_array_equal(batch.arrays, [[0, 0, 0, 0], [1, 1, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    assert batch.lengths["n"].dtype == np.int32 and batch.arrays.dtype == np.float32
    assert batch.count() == 3 and batch.count("n") == 9


def test_rows_that_only_fill_up_repeat_a_real_row():
    with jb.testing.padding_value(np.nan):
        (batch,) = jb.batches(vectors(2), spec=VECTOR, grid=GRID)
    assert np.isfinite(batch.arrays[:, :2]).all() and np.isnan(batch.arrays[:, 2:]).all()


def test_trees_and_fixed_sizes_and_scalars_come_in_the_users_structure():
    spec = ({"x": jb.spec("n, 2, k", "float32"), "skip": None}, jb.spec("", "int32"))
    data = [({"x": np.full((n, 2, 5), n)}, n) for n in (1, 3, 2)]
    (batch,) = jb.batches(data, spec=spec, grid=GRID)
    tree, label = batch.arrays
    assert tree["skip"] is None and tree["x"].shape == (4, 4, 2, 5) and label.tolist() == [1, 3, 2, 1]
    assert set(batch.lengths) == {"n"}


def test_two_ragged_dims_are_padded_together():
    spec, grid = jb.spec("h, w, 3", "uint8"), jb.Grid(h=[4, 8], w=[4, 16], rows=[2])
    shapes = [(3, 4), (8, 2), (8, 15), (1, 1)]
    data = [np.full((*shape, 3), i, np.uint8) for i, shape in enumerate(shapes)]
    batches = list(jb.batches(data, spec=spec, grid=grid))
    assert sorted(real(batches)) == [0, 1, 2, 3]
    for batch in batches:
        assert batch.arrays.shape == (batch.bucket["rows"], batch.bucket["h"], batch.bucket["w"], 3)
        for row, index in enumerate(batch.indices):
            if index >= 0:
                h, w = batch.lengths["h"][row], batch.lengths["w"][row]
                assert (h, w) == shapes[index]
                np.testing.assert_array_equal(batch.arrays[row, :h, :w], data[index])


def test_examples_without_a_ragged_dim_are_stacked():
    batches = list(jb.batches(range(5), spec=jb.spec("", "int32"), grid=jb.Grid(rows=[2])))
    assert [batch.arrays.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 4]]


def test_a_batch_goes_through_jit_vmap_and_device_put_with_its_bucket_static():
    (batch,) = jb.batches(vectors(3, 4), spec=VECTOR, grid=GRID)
    seen = []

    @jax.jit
    def step(batch):
        seen.append(batch.bucket)
        row = jax.vmap(lambda row: row.arrays.sum() + row.lengths["n"])(batch)
        return row, batch.count("n"), batch.sum(batch.arrays)

    row, count, total = step(jax.device_put(batch))
    assert seen == [batch.bucket] and row.tolist() == [3, 8, 3, 3] and int(count) == 7 and float(total) == 4


def test_a_jitted_step_compiles_once_for_each_shape(count_compiles):
    lengths = np.random.default_rng(0).integers(1, 17, 60)
    step = jax.jit(lambda batch: batch.sum(batch.arrays))
    with count_compiles() as compiles:
        for seed in (None, 0, 1):
            for batch in jb.batches(vectors(*lengths), spec=VECTOR, grid=GRID, seed=seed):
                step(batch)
    assert compiles.count <= len(GRID) == 3


# --- each once, in an order that can be repeated ---

any_grid = st.sampled_from(
    [
        GRID,
        jb.Grid(n=(1, 16), rows=(1, 4)),
        jb.Grid(n=16, rows=1),
        jb.Grid(n=(4, 16), rows=(2, 8), max_cells=32),
    ]
)


@patient
@given(
    st.lists(st.integers(1, 16), max_size=60),
    any_grid,
    st.none() | st.integers(0, 3),
    st.none() | st.integers(1, 50),
    st.booleans(),
)
def test_every_example_is_in_exactly_one_batch(lengths, grid, seed, window, lazily):
    data = vectors(*lengths)
    batches = list(
        jb.batches(iter(data) if lazily else data, spec=VECTOR, grid=grid, seed=seed, window=window)
    )
    assert sorted(real(batches)) == list(range(len(data)))
    buckets = set(grid)
    for batch in batches:
        assert batch.bucket in buckets and batch.valid.any()
        np.testing.assert_array_equal(batch.valid, batch.indices >= 0)
        for row in np.flatnonzero(batch.valid):
            own = data[batch.indices[row]]
            assert batch.lengths["n"][row] == len(own)
            np.testing.assert_array_equal(batch.arrays[row, : len(own)], own)


def test_without_a_seed_batches_follow_the_users_order():
    lengths = [2, 9, 3, 10, 4, 11, 1, 16]
    batches = jb.batches(vectors(*lengths), spec=VECTOR, grid=jb.Grid(n=[4, 16], rows=[2]))
    assert indices_of(batches) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    data = vectors(*np.random.default_rng(0).integers(1, 17, 100))
    epoch = lambda seed: list(jb.batches(data, spec=VECTOR, grid=GRID, seed=seed))
    first, again, other = epoch(7), epoch(7), epoch(8)
    assert indices_of(first) == indices_of(again) != indices_of(other)
    for a, b in zip(first, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    mates = lambda epoch: {frozenset(row) for row in indices_of(epoch)}
    assert len(mates(first) & mates(other)) < 5


def test_a_seed_spreads_large_and_small_batches_over_the_epoch():
    data = vectors(*[16] * 40, *[2] * 40)
    sizes = [batch.bucket["n"] for batch in jb.batches(data, spec=VECTOR, grid=GRID, seed=0)]
    assert sorted(sizes) == [4] * 10 + [16] * 10
    assert 4 in sizes[:5] and 16 in sizes[:5] and 4 in sizes[-5:] and 16 in sizes[-5:]


def test_ten_examples_in_batches_of_four_are_each_used_once_and_scored_over_ten():
    labels = [1.0] * 7 + [0.0] * 3
    data = [{"x": np.ones(3, np.float32), "hit": hit} for hit in labels]
    spec = {"x": VECTOR, "hit": jb.spec("", "float32")}
    for seed in (None, 0, 1):
        batches = list(jb.batches(data, spec=spec, grid=jb.Grid(n=4, rows=[4]), seed=seed))
        assert sorted(real(batches)) == list(range(10)) and len(batches) == 3
        assert sum(batch.valid.size - batch.count() for batch in batches) == 2
        hits = sum(float(batch.sum(batch.arrays["hit"])) for batch in batches)
        assert hits / sum(batch.count() for batch in batches) == pytest.approx(0.7)


# --- lazily ---


def test_an_endless_iterator_is_read_one_window_ahead():
    num_read = 0

    def endless() -> Iterator[np.ndarray]:
        nonlocal num_read
        for num_read in itertools.count(1):
            yield np.zeros(1 + num_read % 16, np.float32)

    batches = jb.batches(endless(), spec=VECTOR, grid=GRID, window=40, seed=0)
    assert num_read == 0
    seen = []
    for batch in itertools.islice(batches, 200):
        seen += batch.indices[batch.valid].tolist()
        assert num_read <= len(seen) + 40
    assert len(set(seen)) == len(seen) > 700


def test_what_does_not_fill_a_batch_waits_for_the_next_window_and_no_longer():
    # One long example among the first eight, one among the four that the second window adds, none later.
    lengths = [2] * 7 + [16] + [2] + [9] + [2] * 38
    batches = list(jb.batches(iter(vectors(*lengths)), spec=VECTOR, grid=GRID, window=8))
    long = [batch for batch in batches if batch.bucket["n"] == 16]
    assert indices_of(long) == [[7, 9, -1, -1]]
    assert batches.index(long[0]) <= 3
    assert all(batch.count() == 4 for batch in batches[:-2] if batch is not long[0])


def test_the_number_of_batches_of_an_iterator_does_not_depend_on_the_seed():
    data = vectors(*np.random.default_rng(0).integers(1, 17, 200))
    epochs = (jb.batches(iter(data), spec=VECTOR, grid=GRID, window=24, seed=seed) for seed in (None, 0, 1))
    assert len({len(list(epoch)) for epoch in epochs}) == 1


def test_examples_of_an_iterator_that_reuses_its_buffer_are_copied():
    def reused() -> Iterator[np.ndarray]:
        buffer = np.empty(3, np.float32)
        for i in range(6):
            buffer[:] = i
            yield buffer

    for batch in jb.batches(reused(), spec=VECTOR, grid=GRID):
        np.testing.assert_array_equal(batch.arrays[:, 0][batch.valid], batch.indices[batch.valid])


def test_batches_do_not_share_memory():
    first, second = jb.batches(vectors(*[4] * 8), spec=VECTOR, grid=GRID)
    assert not np.shares_memory(first.arrays, second.arrays)


def test_an_error_of_the_iterable_is_its_own():
    def broken() -> Iterator[np.ndarray]:
        yield np.zeros(3, np.float32)
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        list(jb.batches(broken(), spec=VECTOR, grid=GRID))


# --- bad examples ---

BAD_EXAMPLES = (
    (np.zeros((2, 2), np.float32), jb.SpecError, "`example[2]` has rank 2 (shape (2, 2)), expected rank 1"),
    (np.zeros(17, np.float32), jb.OversizeError, "`example[2]`: dim `n` has length 17; the"),
    (np.zeros(0, np.float32), jb.SpecError, "`example[2]` has length 0 in dim `n`"),
    (["a"], jb.SpecError, "`example[2]` has dtype <U1"),
    (None, jb.SpecError, "`example[2]` is None"),
)


@pytest.mark.parametrize(("bad", "error", "message"), BAD_EXAMPLES)
def test_a_bad_example_is_named_before_any_batch_of_a_list(bad, error, message):
    data = [*vectors(3, 5), bad, *vectors(4)]
    with pytest.raises(error) as caught:
        next(jb.batches(data, spec=VECTOR, grid=GRID))
    assert str(caught.value).startswith("jaxbatch.batches: ") and message in str(caught.value)


@pytest.mark.parametrize(("bad", "error", "message"), BAD_EXAMPLES)
def test_bad_examples_can_be_skipped_and_are_kept_by_position(bad, error, message):
    data = [*vectors(3, 5), bad, *vectors(4, 2)]
    batches = jb.batches(iter(data), spec=VECTOR, grid=GRID, errors="skip", window=2)
    assert batches.skipped == {}
    assert sorted(real(batches)) == [0, 1, 3, 4]
    ((position, caught),) = batches.skipped.items()
    assert position == 2 and isinstance(caught, error) and message in str(caught)
    assert caught.__traceback__ is None


def test_fixed_sizes_and_dtypes_must_agree():
    grid = jb.Grid(n=8, rows=[2])
    with pytest.raises(jb.SpecError, match=r"`example\[1\]` has size 3 in dim `d`, but an earlier one has 2"):
        list(jb.batches([np.ones((4, 2)), np.ones((4, 3))], spec=jb.spec("n d", "float32"), grid=grid))
    with pytest.raises(
        jb.SpecError, match=r"`example\[1\]\['x'\]` has dtype float16, but an earlier one has"
    ):
        data = [{"x": np.ones(4, np.float32)}, {"x": np.ones(4, np.float16)}]
        list(jb.batches(data, spec={"x": jb.spec("n", jaxtyping.Float)}, grid=grid))


BAD_ARGUMENTS = (
    ("text", {}, TypeError, "expected an iterable of examples, got str"),
    ({"x": [1]}, {}, TypeError, "expected an iterable of examples, got dict"),
    (7, {}, TypeError, "expected an iterable of examples, got int"),
    ([], {"errors": "return"}, ValueError, "errors='return'; use 'raise' or 'skip'"),
    ([], {"window": 0}, ValueError, "window=0"),
    ([], {"spec": "n"}, jb.SpecError, "the spec of `example` is 'n'"),
    ([], {"grid": jb.Grid(m=4)}, jb.SpecError, "the grid has dim `m`, but the spec has n"),
)


@pytest.mark.parametrize(("iterable", "options", "error", "message"), BAD_ARGUMENTS)
def test_wrong_arguments_are_refused_at_once(iterable, options, error, message):
    from jaxbatch._batches import batches

    plain = getattr(batches, "__wrapped__", batches)  # without the type check that tests add
    with pytest.raises(error) as caught:
        plain(iterable, **{"spec": VECTOR, "grid": GRID, **options})
    assert message in str(caught.value)


def test_no_examples_give_no_batches():
    assert (
        list(jb.batches([], spec=VECTOR, grid=GRID))
        == list(jb.batches(iter(()), spec=VECTOR, grid=GRID))
        == []
    )


# --- one denominator, whatever the batches are ---


@pytest.mark.parametrize("rows", [[1], [2], [1, 8]])
def test_the_mean_over_tokens_has_one_denominator(rows):
    data = [np.full(8, 1, np.float32), np.full(2, 9, np.float32)]
    total = tokens = 0
    each = jax.vmap(jb.mask(lambda x: x.sum(), spec=VECTOR))
    for batch in jb.batches(data, spec=VECTOR, grid=jb.Grid(n=[2, 8], rows=rows)):
        total += float(batch.sum(each(batch.lengths, batch.arrays)))
        tokens += int(batch.count("n"))
    assert total / tokens == pytest.approx(2.6)


def test_loss_and_gradient_do_not_depend_on_the_order_or_the_ladder():
    lengths = np.random.default_rng(2).choice([1, 3, 7, 16], 40)
    data, count = tagged(*lengths), int(lengths.sum())
    expected = full_batch(data, count)
    step = gradient_step()
    for grid in (jb.Grid(n=(4, 16), rows=[4]), jb.Grid.fit(lengths, max_sizes=2, multiple_of=1, rows=[8])):
        num_steps = set()
        for seed in (None, 0, 1):
            batches = list(jb.batches(data, spec=TAGGED, grid=grid, seed=seed))
            assert_close(accumulated(step, batches, count), expected)
            num_steps.add(len(batches))
        assert len(num_steps) == 1


def test_nan_in_the_padding_does_not_reach_the_clipped_gradient():
    data = tagged(3, 7, 2, 2, 2)
    count = sum(len(example["ids"]) for example in data)
    expected = full_batch(data, count)
    step = gradient_step()
    clip = optax.clip_by_global_norm(0.1)
    for poison in (np.nan, np.inf, 1e30):
        with jb.testing.padding_value(poison):
            batches = list(jb.batches(data, spec=TAGGED, grid=GRID))
        loss, gradient = accumulated(step, batches, count)
        assert_close((loss, gradient), expected)
        clipped, _ = clip.update(gradient, clip.init(PARAMS))
        assert float(optax.tree.norm(clipped)) == pytest.approx(0.1, rel=1e-5)


def test_whatever_a_row_that_only_fills_up_gives_is_selected_away():
    (batch,) = jb.batches(vectors(3, 4), spec=VECTOR, grid=GRID)
    values = np.array([1.0, 2.0, np.nan, np.inf], np.float32)
    total, gradient = jax.value_and_grad(batch.sum)(values)
    assert total == 3 and gradient.tolist() == [1, 1, 0, 0]
    assert batch.sum(np.stack([values, values], axis=1)) == 6


def test_a_bad_example_is_named_by_its_loss_and_dropped_in_the_same_shapes(count_compiles):
    spec = {"x": jb.spec("n, 6", "float32")}
    loss = lambda params, example: jnp.tanh(example["x"] @ params["mix"]).sum()
    rng = np.random.default_rng(3)
    data = [{"x": rng.normal(size=(n, 6)).astype("float32")} for n in (3, 2, 4, 1)]
    data[2]["x"][0, 0] = np.nan
    step = gradient_step(loss, spec)
    each = jax.jit(jax.vmap(jb.mask(loss, in_axes=(None, 0), spec=spec), in_axes=(0, None, 0)))
    (batch,) = jb.batches(data, spec=spec, grid=GRID)
    assert np.isnan(step(PARAMS, batch, 1)[0])
    bad = batch.indices[~np.isfinite(each(batch.lengths, PARAMS, batch.arrays))]
    assert bad.tolist() == [2]
    with count_compiles() as compiles:
        total, gradient = step(PARAMS, batch.without(bad), 1)
    assert compiles.count == 0
    good = [jax.value_and_grad(loss)(PARAMS, data[i]) for i in (0, 1, 3)]
    assert_close((total, gradient), added(good))
    assert batch.without(bad).count("n") == 6 and batch.without(bad).indices.tolist() == [0, 1, -1, 3]
    with pytest.raises(ValueError, match="no row would be left"):
        batch.without([0, 1, 2, 3])


# --- the example ---


@pytest.mark.slow
def test_the_training_example_learns_and_its_gradient_is_that_of_unpadded_texts(tmp_path, capsys):
    from examples.train_ragged import main

    lines = [
        f"the {noun} is {word}" for noun in ("size", "length of a row", "sum") for word in ["one", "two"]
    ]
    file = tmp_path / "lines.txt"
    file.write_text("\n".join(f"{line} {i}" for i in range(12) for line in lines))
    main(["--texts", str(file), "--epochs", "4", "--sizes", "2", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2
    assert "programs compiled    2 of at most 2" in printed
    assert float(re.findall(r"gradient difference  (\S+),", printed)[0]) < 1e-5
    scored, again = re.findall(r"([\d.]+)% right", printed)[-2:]
    assert scored == again  # by the checkpoint, its artifact, and `jaxbatch run` in a process of its own
    assert jb.load(tmp_path / "out" / "spacer.jbx")([np.zeros(3, np.uint8)])[0].shape == (3,)
