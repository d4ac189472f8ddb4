"""Real networks with real weights: they answer as they were published to, and padding is unseen.

Every network is an unpadded function of one example. The references are outputs of ONNX Runtime 1.32 and
CTranslate2 4.8 on the same inputs; with `onnxruntime` installed, it is also asked directly.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import Array

import jaxbatch as jb
from models import onnx_file, ppocr_det, ppocr_rec, silero_vad, weights


@functools.cache
def fetched(name):
    try:
        return weights.fetch(name)
    except weights.WeightsError as error:
        return str(error)


def folder(name):
    """Return the folder with the weights, or skip and say why there is none."""
    found = fetched(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


# -- Inputs -------------------------------------------------------------------------------------------------

GLYPHS = {
    "A": (".###.", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
    "E": ("#####", "#....", "#....", "####.", "#....", "#....", "#####"),
    "H": ("#...#", "#...#", "#...#", "#####", "#...#", "#...#", "#...#"),
    "J": ("..###", "...#.", "...#.", "...#.", "...#.", "#..#.", ".##.."),
    "L": ("#....", "#....", "#....", "#....", "#....", "#....", "#####"),
    "T": ("#####", "..#..", "..#..", "..#..", "..#..", "..#..", "..#.."),
    "X": ("#...#", "#...#", ".#.#.", "..#..", ".#.#.", "#...#", "#...#"),
}


def line_of_text(word, multiple):
    """Draw a word, black on white, 48 pixels high and `multiple` x n wide."""
    rows = [".".join(GLYPHS[letter][row] for letter in word) for row in range(7)]
    ink = np.array([[dot == "#" for dot in row] for row in rows])
    ink = np.kron(ink, np.ones((4, 4), bool))
    right = -(ink.shape[1] + 12) % multiple + 6
    ink = np.pad(ink, ((10, 10), (6, right)))
    return np.broadcast_to(np.where(ink, -1, 1).astype(np.float32), (3, *ink.shape))


def page(height, width, words):
    """Draw words, one a line, on a white page."""
    image = np.ones((3, height, width), np.float32)
    for i, word in enumerate(words):
        line = line_of_text(word, 1)[:, :, : width - 8]
        image[:, 48 * i + 8 : 48 * i + 56, 8 : 8 + line.shape[2]] = line
    return image


def buzz(num):
    """Return frames of a voice-like tone that comes and goes, for Silero."""
    t = np.arange(num * silero_vad.HOP) / 16000
    tone = sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 20))
    return silero_vad.frames(0.2 * tone * (np.sin(2 * np.pi * 3 * t) > 0))


# -- The networks -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Network:
    """One network with what the tests below need of it.

    Attributes:
      weights: its name in `models.weights`.
      f: the function of one example, after the weights.
      load: from the folder to the weights.
      examples: of sizes that fill their bucket, do not, or are the smallest there is.
      grid: few sizes, because each is a program of some seconds.
      shapes: of an example and of its result, in symbols.
      reference: an example, the part of the result that was recorded, and its values in another runtime.
    """

    weights: str
    f: Callable[..., Array]
    load: Callable[[Path], Any]
    examples: Callable[[], list[np.ndarray]]
    grid: jb.Grid
    shapes: tuple[str, str]
    reference: tuple[Callable[[], np.ndarray], Callable[[np.ndarray], np.ndarray], list[float]]


NETWORKS = {
    "silero_vad": Network(
        weights="silero-vad",
        f=silero_vad.speech,
        load=silero_vad.load,
        examples=lambda: [buzz(n) for n in (1, 7, 8, 50)],
        grid=jb.Grid(n=[8, 64], rows=[1, 4]),
        shapes=("n, 576", "(n,)"),
        reference=(
            lambda: buzz(6),
            lambda y: y,
            [0.13057443, 0.09252274, 0.028893977, 0.0096125007, 0.0034354627, 0.011839181],
        ),
    ),
    "ppocr_rec": Network(
        weights="ppocr",
        f=ppocr_rec.recognize,
        load=lambda path: ppocr_rec.load(path)[0],
        examples=lambda: [line_of_text(word, 8) for word in WORDS] + [line_of_text("A", 8)[:, :, :8]],
        grid=jb.Grid(w=[16], rows=[5]),
        shapes=("3, 48, 8*w", "(w, 18710)"),
        reference=(
            lambda: line_of_text("JAX", 8),
            lambda y: y[[2, 5, 8], [52, 43, 66]],
            [0.9999928, 0.9990140, 0.9999301],
        ),
    ),
    "ppocr_det": Network(
        weights="ppocr",
        f=ppocr_det.detect,
        load=ppocr_det.load,
        examples=lambda: [page(64, 128, ["JAX"]), page(160, 96, ["ALL", "THE"]), page(32, 32, [])],
        grid=jb.Grid(h=[5], w=[4], rows=[3]),
        shapes=("3, 32*h, 32*w", "(32*h, 32*w)"),
        reference=(
            lambda: page(64, 128, ["JAX"]),
            lambda y: y[32, ::16],
            [5.66e-7, 0.00087568164, 0.9996713, 0.9997112, 0.9991213, 0.0015588701, 2.2560358e-5, 5.186e-6],
        ),
    ),
}
WORDS = ["A", "JAX", "HALL", "LATEX"]
every_network = pytest.mark.parametrize("name", NETWORKS)


@functools.cache
def loaded(name):
    network = NETWORKS[name]
    return network.load(folder(network.weights))


@functools.cache
def compiled(name):
    return jax.jit(NETWORKS[name].f)


# -- Padding ------------------------------------------------------------------------------------------------


@pytest.mark.weights
@pytest.mark.slow
@every_network
def test_padded_equals_single(name):
    network, params = NETWORKS[name], loaded(name)
    examples = network.examples()
    run = jb.batched(network.f, in_axes=(None, 0), grid=network.grid)
    with jb.testing.padding_value(np.nan):
        results = run(params, examples)
    for example, result in zip(examples, results, strict=True):
        alone = np.asarray(compiled(name)(params, example))
        assert result.shape == alone.shape
        np.testing.assert_allclose(result, alone, rtol=0, atol=2e-5, err_msg=f"example {example.shape}")


@pytest.mark.weights
@every_network
def test_the_output_size_is_a_formula_in_the_input_size(name):
    network, params = NETWORKS[name], loaded(name)
    before, after = network.shapes
    example = jax.ShapeDtypeStruct(jax.export.symbolic_shape(before), np.float32)
    (out,) = jax.make_jaxpr(network.f)(params, example).out_avals
    assert str(out.shape) == after


@pytest.mark.weights
def test_plain_padding_would_move_the_pixels_of_the_detector():
    params, image = loaded("ppocr_det"), page(64, 128, ["JAX"])
    alone = compiled("ppocr_det")(params, image) > 0.3
    padded = compiled("ppocr_det")(params, np.pad(image, ((0, 0), (0, 96), (0, 0)))) > 0.3
    assert np.mean(padded[:64] != alone) > 0.01


# -- Answers ------------------------------------------------------------------------------------------------


@pytest.mark.weights
@every_network
def test_answers_are_those_of_another_runtime(name):
    example, read, recorded = NETWORKS[name].reference
    result = np.asarray(compiled(name)(loaded(name), example()))
    np.testing.assert_allclose(read(result), recorded, rtol=0, atol=2e-5)


def ask_silero(session, frames):
    state, found = np.zeros((2, 1, 128), np.float32), []
    for frame in frames:
        inputs = {"input": frame[None], "state": state, "sr": np.array(16000)}
        probability, state = session.run(None, inputs)
        found.append(probability[0, 0])
    return np.array(found)


def ask_ppocr(session, image):
    return session.run(None, {"x": image[None]})[0][0].squeeze()


@pytest.mark.weights
@pytest.mark.parametrize(
    "name, file, ask",
    [
        ("silero_vad", "silero_vad_16k_op15.onnx", ask_silero),
        ("ppocr_rec", "PP-OCRv6_rec_small.onnx", ask_ppocr),
        ("ppocr_det", "PP-OCRv6_det_small.onnx", ask_ppocr),
    ],
)
def test_answers_are_those_of_onnx_runtime_if_it_is_installed(name, file, ask):
    onnxruntime = pytest.importorskip("onnxruntime")
    network, params = NETWORKS[name], loaded(name)
    session = onnxruntime.InferenceSession(str(folder(network.weights) / file))
    for example in network.examples()[:2]:
        ours = np.asarray(compiled(name)(params, example)).squeeze()
        np.testing.assert_allclose(ours, ask(session, example), rtol=0, atol=2e-5)


@pytest.mark.weights
@pytest.mark.parametrize("word", WORDS)
def test_the_recogniser_reads(word):
    params, characters = ppocr_rec.load(folder("ppocr"))
    probabilities = np.asarray(compiled("ppocr_rec")(params, line_of_text(word, 8)))
    assert ppocr_rec.text(characters, probabilities) == word


# -- Loading ------------------------------------------------------------------------------------------------


def field(number, content):
    """Return one field of a protocol buffer: an int as a varint, bytes with their length (both below 128)."""
    if isinstance(content, int):
        return bytes([number << 3, content])
    return bytes([number << 3 | 2, len(content)]) + content


def tensor(name, array):
    dims = b"".join(field(1, size) for size in array.shape)
    return field(5, dims + field(2, 1) + field(8, name) + field(9, array.astype("<f4").tobytes()))


def onnx(*fields):
    return field(7, b"".join(fields)) + field(14, field(1, b"author") + field(2, b"us"))


def test_an_onnx_file_gives_its_weights_in_the_order_of_use(tmp_path):
    first, second = np.ones((2, 3)), np.arange(3.0)
    nodes = (field(1, field(1, name) + field(4, op)) for name, op in ((b"w", b"MatMul"), (b"b", b"Add")))
    half = tensor(b"half", np.array(0.5)) + field(1, field(1, b"half") + field(4, b"Mul"))
    whole = onnx(tensor(b"b", second), tensor(b"w", first), *nodes, half)
    (tmp_path / "model.onnx").write_bytes(whole)
    file = onnx_file.read(tmp_path / "model.onnx")
    assert [name for name, _ in file.in_order()] == ["w", "b"]
    np.testing.assert_array_equal(file.tensors["w"], first)
    np.testing.assert_array_equal(file.tensors["b"], second)
    assert file.metadata == {"author": "us"}


def test_a_file_that_is_cut_short_or_no_onnx_is_refused(tmp_path):
    path = tmp_path / "model.onnx"
    whole = onnx(tensor(b"w", np.ones(3)))
    for content in (whole[:-1], whole[:9], b"", b"\x07", b"not an onnx file"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model.onnx is not a whole ONNX model"):
            onnx_file.read(path)


@pytest.mark.parametrize("module", [ppocr_det, ppocr_rec, silero_vad])
def test_other_weights_are_refused(tmp_path, module):
    path = tmp_path / module._FILE
    path.write_bytes(onnx(tensor(b"w", np.ones(3)), field(1, field(1, b"w") + field(4, b"Add"))))
    with pytest.raises(ValueError, match=f"{module._FILE}.*(there are 1 weights|has no weight)"):
        module.load(tmp_path)
