"""PP-OCR's text recogniser for one line of text: an image 48 high and of any width in, characters out.

The backbone halves the height until one row is left; two transformer layers let the columns see each other;
each column then names a character, or the blank between two (connectionist temporal classification).

    params, characters = ppocr_rec.load(models.weights.fetch("ppocr"))
    text = ppocr_rec.text(characters, ppocr_rec.recognize(params, image))
"""

import math
from os import PathLike
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from . import onnx_file
from .ppocr import Backbone, Params, Stage, fill

STAGES = (
    Stage(96, squeezes=(True, False, False)),
    Stage(192, squeezes=(True, False) * 3, stride=(2, 1)),
    Stage(384, squeezes=(True, False), stride=(2, 1)),
)
WIDTH, HEADS = 120, 8
NUM_CHARACTERS = 18710


class Norm(nn.Module):
    """Batch normalisation with the statistics that training ended with."""

    @nn.compact
    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        c = x.shape[-1:]
        scale, bias = (
            self.param("scale", nn.initializers.ones, c),
            self.param("bias", nn.initializers.zeros, c),
        )
        mean, var = self.param("mean", nn.initializers.zeros, c), self.param("var", nn.initializers.ones, c)
        return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias


class Attention(nn.Module):
    """Multi-head self-attention of every column to every column."""

    @nn.compact
    def __call__(self, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        n, d = x.shape
        q, k, v = nn.Dense(3 * d)(x).reshape(n, 3, HEADS, d // HEADS).transpose(1, 2, 0, 3)
        scores = jnp.einsum("hqd,hkd->hqk", q, k) / math.sqrt(d // HEADS)
        mixed = jnp.einsum("hqk,hkd->hqd", nn.softmax(scores), v)
        return nn.Dense(d)(mixed.swapaxes(0, 1).reshape(n, d))


class Neck(nn.Module):
    """Mix the columns: a 1x7 filter for the near ones, two transformer layers for all of them."""

    @nn.compact
    def __call__(self, x: Float[Array, "1 n c"]) -> Float[Array, "n d"]:
        around = nn.swish(Norm()(nn.Dense(WIDTH, use_bias=False)(x)))
        x = nn.swish(Norm()(nn.Dense(WIDTH, use_bias=False)(x)))
        near = nn.Conv(WIDTH, (1, 7), padding=((0, 0), (3, 3)), feature_group_count=WIDTH, use_bias=False)(x)
        x = (x + nn.swish(Norm()(near)))[0]
        for _ in range(2):
            x = x + Attention()(_layer_norm(1e-5)(x))
            h = nn.swish(nn.Dense(2 * WIDTH)(_layer_norm(1e-5)(x)))
            x = x + nn.Dense(WIDTH)(h)
        return _layer_norm(1e-6)(x) + around[0]


class Recognizer(nn.Module):
    """An image of a line of text to the probabilities of the characters, column by column."""

    @nn.compact
    def __call__(self, image: Float[Array, "3 48 8*w"]) -> Float[Array, "w characters"]:
        (*_, x) = Backbone(48, STAGES)(image.transpose(1, 2, 0))
        x = Neck()(nn.avg_pool(x, (3, 2), (3, 2)))
        return nn.softmax(nn.Dense(NUM_CHARACTERS)(x))


def recognize(params: Params, image: Float[Array, "3 48 8*w"]) -> Float[Array, "w characters"]:
    """Return, for every 8 pixels of width, the probability of each character.

    Args:
      params: from `load`.
      image: blue, green and red, each from -1 to 1.
    """
    return Recognizer().bind(params)(image)


def text(characters: tuple[str, ...], probabilities: np.ndarray) -> str:
    """Return the best character of each column: each run of the same one once, and no blanks."""
    best = np.argmax(probabilities, axis=-1)
    return "".join(characters[i] for i in best[np.diff(best, prepend=-1) != 0])


def _layer_norm(epsilon: float) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=epsilon, use_fast_variance=False)


# -- Loading --------------------------------------------------------------------------------------------

_FILE = "PP-OCRv6_rec_small.onnx"


def load(path: str | PathLike) -> tuple[Params, tuple[str, ...]]:
    """Load the weights and the characters from the folder with `PP-OCRv6_rec_small.onnx`.

    The blank is the first character, as an empty string.

    Raises:
      ValueError: the file holds other weights than this model's.
    """
    path = Path(path, _FILE)
    file = onnx_file.read(path)
    try:
        params = fill(Recognizer(), (3, 48, 8), file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    characters = ("", *file.metadata.get("character", "").split("\n"), " ")
    if len(characters) != NUM_CHARACTERS:
        raise ValueError(f"{path}: names {len(characters)} characters, expected {NUM_CHARACTERS}")
    return params, characters
