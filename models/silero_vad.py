"""Silero's voice activity detector for one recording: frames in, the probability of speech in each out.

Each frame is taken to its spectrum by a filter bank and squeezed by four convolutions into one vector; an
LSTM then runs over all frames of the recording, from silence, so no state has to be handed around.
Loads the 16 kHz weights that come with https://github.com/snakers4/silero-vad.

    params = silero_vad.load(models.weights.fetch("silero-vad"))
    probabilities = silero_vad.speech(params, silero_vad.frames(samples))
"""

from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from . import onnx_file
from .torch_weights import lstm_cell

Params = dict[str, Any]
"""Variables for `SileroVad.bind`: `{"params": {...}}`, float32."""

HOP, CONTEXT = 512, 64
"""A frame is 512 new samples (32 ms) behind the last 64 of the frame before."""


class SileroVad(nn.Module):
    """Spectrum, four convolutions, an LSTM over the frames, and one probability a frame."""

    @nn.compact
    def __call__(self, frames: Float[Array, "n 576"]) -> Float[Array, "n"]:
        x = jnp.pad(frames, ((0, 0), (0, 64)), mode="reflect")[:, :, None]
        x = nn.Conv(258, (256,), strides=128, padding="VALID", use_bias=False, name="stft")(x)
        x = jnp.sqrt(x[:, :, :129] ** 2 + x[:, :, 129:] ** 2)
        for i, (width, stride) in enumerate([(128, 1), (64, 2), (64, 2), (128, 1)]):
            x = nn.relu(nn.Conv(width, (3,), strides=stride, padding=1, name=f"encoder_{i}")(x))
        x = x[:, 0]  # four steps of time within a frame, halved twice
        x = nn.relu(nn.RNN(nn.LSTMCell(128, name="lstm"))(x))  # pyright: ignore[reportArgumentType]: no carry
        return nn.sigmoid(nn.Dense(1, name="output")(x))[:, 0]


def speech(params: Params, frames: Float[Array, "n 576"]) -> Float[Array, "n"]:
    """Return the probability that each frame holds speech."""
    return SileroVad().bind(params)(frames)


def frames(samples: np.ndarray) -> np.ndarray:
    """Cut a recording (16 kHz, one channel, -1 to 1) into the frames that `speech` takes, on the host.

    The last frame is filled with silence, as is the context of the first.
    """
    samples = np.asarray(samples, np.float32)
    num = -(-len(samples) // HOP)
    samples = np.pad(samples, (CONTEXT, num * HOP - len(samples)))
    return np.stack([samples[i * HOP : (i + 1) * HOP + CONTEXT] for i in range(num)])


# -- Loading --------------------------------------------------------------------------------------------

_FILE = "silero_vad_16k_op15.onnx"


def load(path: str | PathLike) -> Params:
    """Load the weights from the folder with `silero_vad_16k_op15.onnx`.

    Raises:
      ValueError: the file holds other weights than this model's.
    """
    file = Path(path, _FILE)
    tensors = dict(onnx_file.read(file).tensors)
    try:
        params = _params(tensors)
    except KeyError as error:
        raise ValueError(f"{file} has no weight {error}") from error
    if tensors:
        raise ValueError(f"{file} has weights that this model has no use for: {', '.join(tensors)}")
    return {"params": params}


def _params(tensors: dict[str, np.ndarray]) -> Params:
    """Take each tensor out of `tensors`, once, checking its shape."""

    def take(name: str, *shape: int) -> np.ndarray:
        tensor = tensors.pop(f"model.{name}")
        if tensor.shape != shape:
            raise ValueError(f"`model.{name}` has shape {tensor.shape}, expected {shape}")
        return tensor

    def conv(name: str, *shape: int) -> Params:
        kernel, bias = take(f"{name}.weight", *shape), take(f"{name}.bias", shape[0])
        return {"kernel": jnp.asarray(kernel.transpose(2, 1, 0)), "bias": jnp.asarray(bias)}

    lstm = lstm_cell(
        take("decoder.rnn.weight_ih", 512, 128),
        take("decoder.rnn.weight_hh", 512, 128),
        take("decoder.rnn.bias_ih", 512) + take("decoder.rnn.bias_hh", 512),
    )
    output = conv("decoder.decoder.2", 1, 128, 1)
    return {
        "stft": {"kernel": jnp.asarray(take("stft.forward_basis_buffer", 258, 1, 256).transpose(2, 1, 0))},
        "encoder_0": conv("encoder.0.reparam_conv", 128, 129, 3),
        "encoder_1": conv("encoder.1.reparam_conv", 64, 128, 3),
        "encoder_2": conv("encoder.2.reparam_conv", 64, 64, 3),
        "encoder_3": conv("encoder.3.reparam_conv", 128, 64, 3),
        "lstm": lstm,
        "output": output | {"kernel": output["kernel"][0]},
    }
