"""Real networks with real weights: they answer as they were published to, and padding is unseen.

Every network is an unpadded function of one example. The references are outputs of ONNX Runtime 1.32 and
CTranslate2 4.8 on the same inputs; with `onnxruntime` installed, it is also asked directly.
"""

import dataclasses
import functools
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.special
from jax import Array
from pretrained import folder

import jaxbatch as jb
from models import onnx_file, ppocr_det, ppocr_rec, resemblyzer, silero_vad, torch_weights, whisper

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
    """Return samples of a voice-like tone that comes and goes."""
    t = np.arange(num) / 16000
    tone = sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 20))
    return 0.2 * tone * (np.sin(2 * np.pi * 3 * t) > 0)


def frames(num):
    return silero_vad.frames(buzz(num * silero_vad.HOP))


def log_mel(num):
    return whisper.log_mel(buzz(num * 160))


def power_mel(num):
    return np.power(10, 4 * log_mel(num)[:40].T - 4)


def assert_close(found, expected):
    """Compare with the largest magnitude in mind, 2e-5 of it or of 1."""
    assert found.shape == expected.shape
    atol = 2e-5 * max(1, np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


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
      reference: an example, the part of the result that was recorded, and its values in another runtime;
        None if there is another test.
    """

    weights: str
    f: Callable[..., Array]
    load: Callable[[Path], Any]
    examples: Callable[[], list[np.ndarray]]
    grid: jb.Grid
    shapes: tuple[str, str]
    reference: tuple[Callable[[], np.ndarray], Callable[[np.ndarray], np.ndarray], list[float]] | None = None


NETWORKS = {
    "silero_vad": Network(
        weights="silero-vad",
        f=silero_vad.speech,
        load=silero_vad.load,
        examples=lambda: [frames(n) for n in (1, 7, 8, 50)],
        grid=jb.Grid(n=[8, 64], rows=[1, 4]),
        shapes=("n, 576", "(n,)"),
        reference=(
            lambda: frames(6),
            lambda y: y,
            [0.13057443, 0.09252274, 0.028893977, 0.0096125007, 0.0034354627, 0.011839181],
        ),
    ),
    "ppocr_rec": Network(
        weights="ppocr",
        f=ppocr_rec.recognize,
        load=lambda path: ppocr_rec.load(path)[0],
        examples=lambda: [line_of_text(word, 8) for word in WORDS] + [line_of_text("A", 8)[:, :, :8]],
        grid=jb.Grid(w=[16], rows=[4]),
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
    "whisper": Network(
        weights="whisper-tiny.en",
        f=whisper.encode,
        load=whisper.load,
        examples=lambda: [log_mel(64)[:, :t] for t in (1, 16, 17, 51)],
        grid=jb.Grid(t=[16, 64], rows=[2]),
        shapes=("80, t", "(floordiv(t - 1, 2) + 1, 384)"),
        reference=(
            lambda: log_mel(51),
            lambda y: y[::5, 100],
            [-0.23915133, -0.52591461, -0.96738052, -1.60353923, -1.30613518, -0.47125375],
        ),
    ),
    "resemblyzer": Network(
        weights="resemblyzer",
        f=resemblyzer.embed,
        load=resemblyzer.load,
        examples=lambda: [power_mel(n) for n in (1, 7, 16, 33)],
        grid=jb.Grid(n=[16, 64], rows=[4]),
        shapes=("n, 40", "(256,)"),
    ),
}
WORDS = ["A", "JAX", "LATEX"]
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
        assert_close(result, alone)


@pytest.mark.weights
@every_network
def test_the_output_size_is_a_formula_in_the_input_size(name):
    network, params = NETWORKS[name], loaded(name)
    before, after = network.shapes
    # Without a bound, the position table that Whisper slices might be too short.
    bounds = [f"{dim} <= {top}" for dim, top in network.grid.limits.items()]
    example = jax.ShapeDtypeStruct(jax.export.symbolic_shape(before, constraints=bounds), np.float32)
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
@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.reference])
def test_answers_are_those_of_another_runtime(name):
    example, read, recorded = NETWORKS[name].reference  # pyright: ignore[reportGeneralTypeIssues]: not None
    assert_close(read(np.asarray(compiled(name)(loaded(name), example()))), np.array(recorded))


def ask_silero(session, frames):
    state, found = np.zeros((2, 1, 128), np.float32), []
    for frame in frames:
        inputs = {"input": frame[None], "state": state, "sr": np.array(16000)}
        probability, state = session.run(None, inputs)
        found.append(probability[0, 0])
    return np.array(found)


def ask_recogniser(session, image):
    return session.run(None, {"x": image[None]})[0][0]


def ask_detector(session, image):
    return session.run(None, {"x": image[None]})[0][0, 0]


@pytest.mark.weights
@pytest.mark.parametrize(
    "name, file, ask",
    [
        ("silero_vad", "silero_vad_16k_op15.onnx", ask_silero),
        ("ppocr_rec", "PP-OCRv6_rec_small.onnx", ask_recogniser),
        ("ppocr_det", "PP-OCRv6_det_small.onnx", ask_detector),
    ],
)
def test_answers_are_those_of_onnx_runtime_if_it_is_installed(name, file, ask):
    onnxruntime = pytest.importorskip("onnxruntime")
    network, params = NETWORKS[name], loaded(name)
    session = onnxruntime.InferenceSession(str(folder(network.weights) / file))
    for example in network.examples()[:2]:
        assert_close(np.asarray(compiled(name)(params, example)), ask(session, example))


@pytest.mark.weights
def test_resemblyzer_follows_the_equations_of_pytorch():
    saved = torch_weights.read(folder("resemblyzer") / "pretrained.pt")["model_state"]
    saved = {name: array.astype(np.float64) for name, array in saved.items()}
    x = example = power_mel(16)
    for i in range(3):
        h = c = np.zeros(256)
        states = []
        for step in x:  # https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html
            gates = saved[f"lstm.weight_ih_l{i}"] @ step + saved[f"lstm.bias_ih_l{i}"]
            gates += saved[f"lstm.weight_hh_l{i}"] @ h + saved[f"lstm.bias_hh_l{i}"]
            input_gate, forget, new, output = np.split(gates, 4)
            c = scipy.special.expit(forget) * c + scipy.special.expit(input_gate) * np.tanh(new)
            h = scipy.special.expit(output) * np.tanh(c)
            states.append(h)
        x = states
    voice = np.maximum(saved["linear.weight"] @ x[-1] + saved["linear.bias"], 0)
    ours = compiled("resemblyzer")(loaded("resemblyzer"), example)
    assert_close(np.asarray(ours), voice / np.linalg.norm(voice))


def test_a_spectrogram_peaks_at_its_tone_and_spans_eight_powers_of_ten():
    for hertz, band in ((500, 12), (1000, 25), (4000, 61)):
        mel = whisper.log_mel(np.sin(2 * np.pi * hertz * np.arange(1600) / 16000))
        assert mel.shape == (80, 10)
        assert abs(int(mel[:, 5].argmax()) - band) <= 1
        assert mel.max() - mel.min() == pytest.approx(2)


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


class NotATensor:
    """What no file of weights should be able to call."""

    def __reduce__(self):
        return print, ("run by a file of weights",)


def torch_file(path, saved, keys=()):
    """Write a file of the kind that PyTorch wrote before 2020."""
    parts = (torch_weights._MAGIC, torch_weights._VERSION, {"little_endian": True}, saved, list(keys))
    path.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
    return path


def test_a_pytorch_file_can_run_nothing(tmp_path, capsys):
    path = torch_file(tmp_path / "evil.pt", {"model_state": NotATensor()})
    with pytest.raises(ValueError, match="evil.pt is no .* it asks for __builtin__.print"):
        torch_weights.read(path)
    assert capsys.readouterr().out == ""


def test_a_pytorch_file_that_is_cut_short_is_refused(tmp_path):
    path = torch_file(tmp_path / "model.pt", {"step": 3}, keys=["storage"])
    for content in (path.read_bytes(), path.read_bytes()[:40], b"", b"PK zip"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model.pt is no PyTorch file that this can read"):
            torch_weights.read(path)


def test_plain_values_of_a_pytorch_file_are_kept(tmp_path):
    saved = {"step": 3, "names": ["a", "b"], "pair": (1.5, None)}
    assert torch_weights.read(torch_file(tmp_path / "model.pt", saved)) == saved


def test_another_whisper_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    kind = struct.pack("<H12sI", 12, b"WhisperSpec\0", 3)
    weight = struct.pack("<H9sBIBI2f", 9, b"encoder/w", 1, 2, 0, 8, 1.0, 2.0)
    path.write_bytes(struct.pack("<I", 6) + kind + struct.pack("<I", 1) + weight)
    np.testing.assert_array_equal(whisper.read_ctranslate2(path)["encoder/w"], [1, 2])
    with pytest.raises(
        ValueError, match=r"model.bin: missing weights: \['conv1/bias'.*unknown weights: \['w'\]"
    ):
        whisper.load(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.bin: .*buffer"):
        whisper.load(tmp_path)
    path.write_bytes(struct.pack("<I", 5))
    with pytest.raises(ValueError, match="version 5 of CTranslate2's format; only 6"):
        whisper.load(tmp_path)
