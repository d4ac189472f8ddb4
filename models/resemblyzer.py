"""Resemblyzer's speaker encoder for one utterance: a mel spectrogram in, a unit vector of the voice out.

Three LSTMs run over the whole utterance, and the last state of the last one is read: its position depends on
the length. After the "generalized end-to-end loss" (https://arxiv.org/abs/1710.10467); loads the weights
that come with https://github.com/resemble-ai/Resemblyzer.

    params = resemblyzer.load(models.weights.fetch("resemblyzer"))
    similarity = resemblyzer.embed(params, mel) @ resemblyzer.embed(params, other)
"""

from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from . import torch_weights

Params = dict[str, Any]
"""Variables for `VoiceEncoder.bind`: `{"params": {...}}`, float32."""

MELS, WIDTH, LAYERS = 40, 256, 3


class VoiceEncoder(nn.Module):
    """LSTMs on top of each other, then one dense layer on the last state."""

    @nn.compact
    def __call__(self, mel: Float[Array, "n 40"]) -> Float[Array, " d"]:
        x: Any = mel
        for i in range(LAYERS):
            x = nn.RNN(nn.LSTMCell(WIDTH, name=f"lstm_{i}"))(x)
        voice = nn.relu(nn.Dense(WIDTH, name="output")(x[-1]))
        return voice / jnp.linalg.norm(voice)


def embed(params: Params, mel: Float[Array, "n 40"]) -> Float[Array, " d"]:
    """Return the voice of an utterance as a unit vector.

    Args:
      params: from `load`.
      mel: power (no logarithm) in 40 mel bands, in windows of 25 ms, 10 ms apart, of 16 kHz speech.
    """
    return VoiceEncoder().bind(params)(mel)


# -- Loading --------------------------------------------------------------------------------------------


def load(path: str | PathLike) -> Params:
    """Load the weights from the folder with `pretrained.pt`.

    Raises:
      ValueError: the file holds other weights than this model's.
    """
    file = Path(path, "pretrained.pt")
    saved = torch_weights.read(file)
    try:
        return {"params": _params(dict(saved["model_state"]))}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {type(error).__name__}: {error}") from error


def _params(weights: dict[str, np.ndarray]) -> Params:
    """Take each weight, once, checking its shape."""

    def take(name: str, *shape: int) -> np.ndarray:
        weight = weights.pop(name)
        if weight.shape != shape:
            raise ValueError(f"`{name}` has shape {weight.shape}, expected {shape}")
        return weight

    params: Params = {}
    for i, width in enumerate([MELS, WIDTH, WIDTH]):
        params[f"lstm_{i}"] = torch_weights.lstm_cell(
            take(f"lstm.weight_ih_l{i}", 4 * WIDTH, width),
            take(f"lstm.weight_hh_l{i}", 4 * WIDTH, WIDTH),
            take(f"lstm.bias_ih_l{i}", 4 * WIDTH) + take(f"lstm.bias_hh_l{i}", 4 * WIDTH),
        )
    kernel, bias = take("linear.weight", WIDTH, WIDTH).T, take("linear.bias", WIDTH)
    params["output"] = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    unknown = weights.keys() - {"similarity_weight", "similarity_bias"}  # used in training alone
    if unknown:
        raise ValueError(f"weights that this model has no use for: {', '.join(sorted(unknown))}")
    return params
