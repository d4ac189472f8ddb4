"""Whisper's encoder for one recording: its log-mel spectrogram in, a vector for every 20 ms out.

Two convolutions, the second at half the rate, then a transformer over as much time as there is: the published
code pads every recording to thirty seconds, and a padded second costs what a real one does.
The form is that of the paper (https://arxiv.org/abs/2212.04356): fixed positions, layer norm before a branch.
Loads the folder of a Whisper model for CTranslate2 (https://github.com/OpenNMT/CTranslate2).

    params = whisper.load(models.weights.fetch("whisper-tiny.en"))
    states = whisper.encode(params, whisper.log_mel(samples))
"""

import math
import struct
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

Params = dict[str, Any]
"""Variables for `Encoder.bind`: `{"params": {...}}`, float32."""

WIDTH, HEADS, LAYERS = 384, 6, 4
MELS, MAX_STATES = 80, 1500


class Attention(nn.Module):
    """Multi-head self-attention of every moment to every moment."""

    @nn.compact
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        n, d = x.shape
        q, k, v = nn.Dense(3 * d, name="qkv")(x).reshape(n, 3, HEADS, d // HEADS).transpose(1, 2, 0, 3)
        scores = jnp.einsum("hqd,hkd->hqk", q, k) / math.sqrt(d // HEADS)
        mixed = jnp.einsum("hqk,hkd->hqd", nn.softmax(scores), v)
        return nn.Dense(d, name="output")(mixed.swapaxes(0, 1).reshape(n, d))


class Layer(nn.Module):
    """Attention, then an MLP, each on a normalised input and added to it."""

    @nn.compact
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        d = x.shape[1]
        x = x + Attention(name="attention")(_norm("attention_norm")(x))
        h = nn.Dense(4 * d, name="intermediate")(_norm("output_norm")(x))
        return x + nn.Dense(d, name="output")(nn.gelu(h, approximate=False))


class Encoder(nn.Module):
    """Convolutions, positions, and the layers."""

    @nn.compact
    def __call__(self, mel: Float[Array, "80 t"]) -> Float[Array, "n d"]:
        x = mel.T
        x = nn.gelu(nn.Conv(WIDTH, (3,), padding=1, name="conv1")(x), approximate=False)
        x = nn.gelu(nn.Conv(WIDTH, (3,), strides=2, padding=1, name="conv2")(x), approximate=False)
        x = x + self.param("positions", nn.initializers.zeros, (MAX_STATES, WIDTH))[: x.shape[0]]
        for i in range(LAYERS):
            x = Layer(name=f"layer_{i}")(x)
        return _norm("norm")(x)


def encode(params: Params, mel: Float[Array, "80 t"]) -> Float[Array, "n d"]:
    """Return a vector for every two columns of a spectrogram of at most 3000 columns (30 seconds)."""
    return Encoder().bind(params)(mel)


def _norm(name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=name)


# -- Spectrogram ----------------------------------------------------------------------------------------


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Return the spectrogram [80, t] of a recording (16 kHz, one channel, -1 to 1), on the host.

    There is a column for every 10 ms. As in Whisper, values span 8 powers of ten below the loudest.
    """
    samples = np.pad(np.asarray(samples, np.float32), 200, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(samples, 400)[::160][:-1]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    mel = np.log10(np.maximum(_mel_filters() @ power.T, 1e-10))
    return ((np.maximum(mel, mel.max() - 8) + 4) / 4).astype(np.float32)


def _mel_filters() -> np.ndarray:
    """Return triangles [80, 201] of equal area, evenly spaced to 1 kHz, by ratio above (Slaney's scale)."""
    step = math.log(6.4) / 27
    top = 15 + math.log(8) / step  # 8 kHz
    mels = np.linspace(0, top, MELS + 2)
    edges = np.where(mels < 15, 200 / 3 * mels, 1000 * np.exp(step * (mels - 15)))[:, None]
    bins = np.linspace(0, 8000, 201)
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


# -- Loading --------------------------------------------------------------------------------------------

_CTRANSLATE2 = {
    "conv1": "conv1",
    "conv2": "conv2",
    "norm": "layer_norm",
    "attention_norm": "self_attention/layer_norm",
    "attention/qkv": "self_attention/linear_0",
    "attention/output": "self_attention/linear_1",
    "output_norm": "ffn/layer_norm",
    "intermediate": "ffn/linear_0",
    "output": "ffn/linear_1",
}
"""Our modules and theirs; those of a layer are below `layer_0/` and so on."""

_LEAVES = {"kernel": "weight", "bias": "bias"}
_NORM_LEAVES = {"scale": "gamma", "bias": "beta"}


def load(path: str | PathLike) -> Params:
    """Load the encoder's weights from the folder with CTranslate2's `model.bin`.

    Raises:
      ValueError: the file is not whole, or holds another encoder than Whisper tiny's.
    """
    file = Path(path, "model.bin")
    try:
        found = {
            name.removeprefix("encoder/"): array
            for name, array in read_ctranslate2(file).items()
            if name.startswith("encoder/") and array.ndim
        }
        return _params(found)
    except (ValueError, struct.error) as error:
        raise ValueError(f"{file}: {error}") from error


def _params(weights: dict[str, np.ndarray]) -> Params:
    example = jax.ShapeDtypeStruct((MELS, 2), jnp.float32)
    variables = jax.eval_shape(Encoder().init, jax.random.key(0), example)
    shapes = jax.tree.map(jnp.shape, flatten_dict(variables["params"]))
    wanted = {_theirs(path): (path, shape) for path, shape in shapes.items()}
    if wanted.keys() != weights.keys():
        missing, unknown = sorted(wanted.keys() - weights), sorted(weights.keys() - wanted)
        raise ValueError(f"missing weights: {missing or 'none'}; unknown weights: {unknown or 'none'}")
    params = {}
    for name, (path, shape) in wanted.items():
        # Kernels are stored [out, in] and [out, in, width]; Flax keeps [in, out] and [width, in, out].
        weight = weights[name].T if path[-1] == "kernel" else weights[name]
        if weight.shape != shape:
            raise ValueError(f"`{name}` has shape {weights[name].shape}; {'/'.join(path)} is {shape}")
        params[path] = jnp.asarray(weight, jnp.float32)
    return {"params": unflatten_dict(params)}


def _theirs(path: tuple[str, ...]) -> str:
    """Return their name: for `layer_3/output/kernel`, `layer_3/ffn/linear_1/weight`."""
    if path == ("positions",):
        return "position_encodings/encodings"
    layer, module = (f"{path[0]}/", path[1:-1]) if path[0].startswith("layer_") else ("", path[:-1])
    leaves = _NORM_LEAVES if module[-1].endswith("norm") else _LEAVES
    return f"{layer}{_CTRANSLATE2['/'.join(module)]}/{leaves[path[-1]]}"


def read_ctranslate2(path: str | PathLike) -> dict[str, np.ndarray]:
    """Return the variables of a CTranslate2 model file, version 6, as they are stored.

    Raises:
      ValueError: it has another version or types that are not plain numbers.
      struct.error: it is cut short.
    """
    content, at = Path(path).read_bytes(), 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{form}", content, at)
        at += struct.calcsize(f"<{form}")
        return values

    def text() -> str:
        return take(f"{take('H')[0]}s")[0].rstrip(b"\0").decode()

    if (version := take("I")[0]) != 6:
        raise ValueError(f"version {version} of CTranslate2's format; only 6 is supported")
    text()  # the kind of model
    take("I")  # its revision
    variables = {}
    for _ in range(take("I")[0]):
        name = text()
        shape = take(f"{take('B')[0]}I")
        kind, size = take("BI")
        if kind not in _CTRANSLATE2_TYPES:
            raise ValueError(f"`{name}` is of type {kind}; only {list(_CTRANSLATE2_TYPES)} are supported")
        (data,) = take(f"{size}s")
        variables[name] = np.frombuffer(data, _CTRANSLATE2_TYPES[kind]).reshape(shape)
    return variables


_CTRANSLATE2_TYPES = {0: "<f4", 1: "i1", 2: "<i2", 3: "<i4", 4: "<f2"}
