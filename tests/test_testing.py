import functools
import math

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

import jaxbatch as jb
from jaxbatch import _batch, _invariance, _traced, testing
from jaxbatch.testing import assert_padding_invariant, padding_value

VECTOR = jb.spec("n", "float32")


def examples(*lengths: int, width: int | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=n if width is None else (n, width)).astype(np.float32) for n in lengths]


def layer(params, x: Float[Array, "n 4"]):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return {"mean": hidden.mean(0), "attended": jax.nn.softmax(hidden @ hidden.T) @ hidden}


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"w": rng.normal(size=(4, 4)).astype(np.float32), "b": rng.normal(size=4).astype(np.float32)}


# --- what passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_an_exact_function_passes_with_values_and_gradients(grad):
    assert_padding_invariant(layer, params(), examples(1, 3, 8, 5, width=4), in_axes=(None, 0), grad=grad)


def test_gradients_of_scalar_outputs_of_low_precision_and_complex_numbers_are_compared():
    for dtype in ("float32", "bfloat16", "complex64"):
        xs = [np.asarray(x, jnp.dtype(dtype)) for x in examples(1, 4)]
        assert_padding_invariant(lambda x: x.sum(), xs, spec=jb.spec("n", dtype), grad=True)


def test_integers_several_dims_and_empty_examples_pass():
    def pick(table, ids: Int[Array, "n"], x: Float[Array, "m"]):
        return table[ids].sum(0), x * 2, jnp.outer(ids, x)

    ids = [np.array([1, 2]), np.array([3]), np.array([], np.int64)]
    table = examples(9, width=3)[0]
    assert_padding_invariant(pick, table, ids, examples(3, 1, 2), in_axes=(None, 0, 0), grad=True)


def test_an_example_on_which_the_function_raises_must_raise_in_the_batch_too():
    assert_padding_invariant(lambda x: x.max(), [*examples(3), np.zeros(0, np.float32)], spec=VECTOR)


def test_nan_and_inf_in_the_data_are_data():
    xs = [np.array([1, np.nan, 3], np.float32), np.array([np.inf, -np.inf], np.float32)]
    assert_padding_invariant(lambda x: (x * 2, x.max(), x.sum()), xs, spec=VECTOR)


# --- what fails ------------------------------------------------------------------------------------


def leak(monkeypatch, change) -> None:
    """Change every batch's padded outputs, as a wrong rule would."""
    plain = _traced.unstack

    def wrong(arrays, residuals, shapes):
        return plain([change(np.array(array)) for array in arrays], residuals, shapes)

    monkeypatch.setattr(_traced, "unstack", wrong)


def test_a_leak_is_named_by_output_example_poison_and_neighbours(monkeypatch):
    leak(monkeypatch, lambda array: array + (0 if _batch.padding < 1e20 else 1))
    with pytest.raises(AssertionError) as caught:
        assert_padding_invariant(lambda x: {"a": [x * 2]}, examples(3, 5), spec=VECTOR)
    for part in (
        "output `result['a'][0]`",
        "example 0 (n=3)",
        "together",
        "1e+30 in the padding",
        "first at [0]",
    ):
        assert part in str(caught.value)


def test_a_difference_in_the_last_bits_between_poisons_is_a_leak(monkeypatch):
    leak(
        monkeypatch, lambda array: np.nextafter(array, np.float32(9)) if math.isnan(_batch.padding) else array
    )
    with pytest.raises(
        AssertionError,
        match=r"example 0 .n=3., run together with nan instead of 0.0.*`result` changes in its last",
    ):
        assert_padding_invariant(lambda x: x * 2, examples(3, 5), spec=VECTOR)


def test_a_leak_that_only_neighbours_cause_is_found(monkeypatch):
    leak(monkeypatch, lambda array: array + (array[:1] if len(array) > 1 else 0))
    with pytest.raises(AssertionError, match="run together with 0.0 in the padding"):
        assert_padding_invariant(lambda x: x * 2, examples(3, 3), spec=VECTOR)


def test_a_leak_of_large_buckets_only_is_found(monkeypatch):
    leak(monkeypatch, lambda array: array + (1 if array.shape[1] > 8 else 0))
    with pytest.raises(AssertionError, match="run in a larger bucket with 0.0"):
        assert_padding_invariant(lambda x: x * 2, examples(3, 8), spec=VECTOR)


def test_another_shape_or_dtype_is_found(monkeypatch):
    leak(monkeypatch, lambda array: array.astype(np.float16))
    with pytest.raises(AssertionError, match=r"`result` is float16\[3\], expected float32\[3\]"):
        assert_padding_invariant(lambda x: x * 2, examples(3), spec=VECTOR)


def test_an_error_of_the_batch_alone_is_found(monkeypatch):
    monkeypatch.setattr(_traced, "unstack", functools.partial(pytest.fail, "never"))

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(_traced, "pad_and_stack", broken)
    with pytest.raises(AssertionError, match="only the batch raises RuntimeError"):
        assert_padding_invariant(lambda x: x * 2, examples(3), spec=VECTOR)


def change_gradients(monkeypatch, rule) -> None:
    """Change the gradients of the masked function (the one whose example is padded to 4) by `rule`."""
    plain = _invariance.differentiate

    def differentiate(f, weights):
        gradient = plain(f, weights)

        def changed(leaves, lengths, cotangents):
            gradients = gradient(leaves, lengths, cotangents)
            return rule(*gradients) if leaves[0].shape == (4,) else gradients

        return changed

    monkeypatch.setattr(_invariance, "differentiate", differentiate)


def test_a_gradient_in_the_padding_is_found(monkeypatch):
    rule = lambda shared, own: (shared, {0: own[0].at[-1].set(1e-30)})
    change_gradients(monkeypatch, rule)
    with pytest.raises(AssertionError, match="`x` is not exactly 0 in its padding"):
        assert_padding_invariant(lambda x: x * x, examples(3), spec=VECTOR, grad=True)


def test_a_wrong_gradient_is_found_for_examples_and_for_shared_arguments(monkeypatch):
    rule = lambda shared, own: (shared, {0: own[0].at[0].add(0.1)})
    change_gradients(monkeypatch, rule)
    with pytest.raises(AssertionError, match=r"example 0 \(n=3\), gradient with 0.0.*`x` is wrong"):
        assert_padding_invariant(lambda x: x * x, examples(3), spec=VECTOR, grad=True)
    monkeypatch.undo()
    change_gradients(monkeypatch, lambda shared, own: ([shared[0] + 0.1], own))
    with pytest.raises(AssertionError, match=r"summed over the examples.*`w` is wrong"):
        assert_padding_invariant(
            lambda w, x: w * x, np.ones(1, np.float32), examples(3), in_axes=(None, 0), spec=VECTOR, grad=True
        )


def test_a_refusal_is_raised_as_it_is():
    with pytest.raises(jb.MaskError):
        assert_padding_invariant(lambda x: jnp.abs(jnp.fft.fft(x)), examples(3), spec=VECTOR)


# --- the poison itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*testing.POISONS, 7])
def test_the_padding_value_fills_batches_and_is_put_back(monkeypatch, value):
    seen = []
    plain = _traced.pad_and_stack
    monkeypatch.setattr(_traced, "pad_and_stack", lambda *args: seen.append(plain(*args)) or seen[-1])
    run = jb.batched(lambda x: x.sum(), spec=VECTOR, grid=jb.Grid(n=4, rows=1))
    with padding_value(value):
        (inside,) = run(examples(2))
    (outside,) = run(examples(2))
    assert inside == outside
    np.testing.assert_array_equal(seen[0][0][0][0, 2:], np.full(2, value, np.float32))
    np.testing.assert_array_equal(seen[1][0][0][0, 2:], [0, 0])


def test_the_padding_value_is_put_back_after_an_error():
    with pytest.raises(KeyError), padding_value(5):
        raise KeyError
    assert _batch.padding == 0


# --- packed rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_packed_rows_are_checked_with_values_and_gradients(grad):
    def f(w, x, y, pairs):
        h = jnp.tanh(x @ w)
        return {
            "rows": jax.nn.softmax(h @ h.T) @ h,
            "pair": pairs @ h,
            "mean": h.mean(0) * y,
            "size": x.shape[0],
        }

    spec = jb.spec("n, 4", "float32"), jb.spec("", "float32"), jb.spec("n, n", "float32")
    pairs = [np.outer(x[:, 0], x[:, 1]) for x in examples(1, 3, 8, 5, width=4)]
    args = params()["w"], examples(1, 3, 8, 5, width=4), [np.float32(k) for k in range(4)], pairs
    assert_padding_invariant(f, *args, in_axes=(None, 0, 0, 0), spec=spec, grad=grad, layouts=("packed",))


def test_what_cannot_be_packed_is_refused_where_it_is_to_be():
    spec = jb.spec("n", "float32"), jb.spec("m", "float32")
    with pytest.raises(jb.MaskError, match=r"layouts has 'packed', and .* padded only: .*one ragged dim"):
        assert_padding_invariant(
            lambda x, y: x.sum() * y, examples(3), examples(2), spec=spec, layouts=("padded", "packed")
        )
    with pytest.raises(ValueError, match=r"layouts=\(\); name one or both"):
        assert_padding_invariant(lambda x: x, examples(3), spec=VECTOR, layouts=())


def test_a_leak_between_neighbours_in_a_row_is_named(monkeypatch):
    monkeypatch.setattr("jaxbatch._pack._context.Row.fill", lambda self, x, value: x.data)
    with pytest.raises(AssertionError, match=r"run packed \w+"):
        assert_padding_invariant(
            lambda x: jnp.exp(-x[:, None] * x).sum(1), examples(3, 5), spec=VECTOR, layouts=("packed",)
        )
