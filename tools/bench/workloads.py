"""What the systems are given: real texts as token ids, and pages of text as images of many sizes."""

import dataclasses
import importlib
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from models import weights
from models.tokenizer import Tokenizer

MAX_TOKENS = 256
"""Longer texts are cut, as sentence-transformers cuts them for this model."""

MAX_PIXELS = 640
"""The largest height and width of a page."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Examples, the same for all systems.

    Attributes:
      about: one sentence for the report.
      items: int32 token ids [n], or float32 images [3, h, w].
      texts: where the ids come from, for systems that take text.
      unit: what a cell of an example is.
    """

    name: str
    about: str
    items: list[np.ndarray]
    texts: list[str]
    unit: str

    @property
    def lengths(self) -> dict[str, np.ndarray]:
        """The ragged sizes of the examples, by dim."""
        if self.unit == "tokens":
            return {"n": np.array([len(item) for item in self.items], np.int64)}
        sizes = np.array([item.shape[1:] for item in self.items], np.int64) // 32
        return {"h": sizes[:, 0], "w": sizes[:, 1]}

    @property
    def cells(self) -> np.ndarray:
        """How many tokens or pixels each example has."""
        return np.array([item.size if item.ndim == 1 else item[0].size for item in self.items], np.int64)


def wide(num: int | None = None) -> Workload:
    """Return the descriptions in docstrings, whole: from one line to many paragraphs."""
    about = "whole descriptions from the docstrings of numpy, jax and flax"
    return _of_texts("wide", about, _spread(_descriptions(), num or 1500))


def skewed(num: int | None = None) -> Workload:
    """Return the sentences of the same descriptions: mostly short, a few long."""
    about = "single sentences and code examples from the same docstrings"
    sentences = {s for text in _descriptions() for s in re.split(r"(?<=[.!?])\s+", text)}
    return _of_texts("skewed", about, _spread(sorted(sentences), num or 2700))


def pages(num: int | None = None) -> Workload:
    """Return descriptions drawn as black text on white pages, each as large as its text needs."""
    drawn = [_page(text) for text in _spread(_descriptions(), 4 * (num or 48))]
    drawn = [page for page in drawn if max(page.shape) <= MAX_PIXELS][: num or 48]
    about = f"docstrings drawn as pages of up to {MAX_PIXELS} x {MAX_PIXELS} pixels"
    return Workload("pages", about, drawn, [], "pixels")


WORKLOADS: dict[str, Callable[[int | None], Workload]] = {"wide": wide, "skewed": skewed, "pages": pages}


def _of_texts(name: str, about: str, texts: list[str]) -> Workload:
    ids = Tokenizer(weights.fetch("minilm"))(texts, MAX_TOKENS)
    # In random order: systems that sort shall sort, and those that do not shall meet what users have.
    order = random.Random(0).sample(range(len(texts)), len(texts))
    return Workload(name, about, [ids[i] for i in order], [texts[i] for i in order], "tokens")


def _descriptions() -> list[str]:
    # The import is here because it brings JAX along, which only some of the systems use.
    from examples.embed_texts import collect

    return collect(None, None)[1]


def _spread(values: list[str], num: int) -> list[str]:
    """Take `num` of the values at even distances."""
    return [values[i * len(values) // num] for i in range(num)] if num < len(values) else values


def _page(text: str) -> np.ndarray:
    """Draw a text with a margin and round both sizes up to multiples of 32; values from -1 to 1."""
    new, draw, font = _pillow()
    box = draw(new("L", (1, 1))).multiline_textbbox((16, 16), text, font)
    size = [-(-(int(end) + 16) // 32) * 32 for end in box[2:]]
    image = new("L", (size[0], size[1]), 255)
    draw(image).multiline_text((16, 16), text, 0, font)
    gray = np.asarray(image, np.float32) / 127.5 - 1
    return np.ascontiguousarray(np.broadcast_to(gray, (3, *gray.shape)))


def _pillow() -> tuple[Any, Any, Any]:
    """Return what draws; Pillow comes with matplotlib, and nothing but the pages needs it."""
    names = ("Image", "ImageDraw", "ImageFont")
    image, draw, fonts = (importlib.import_module(f"PIL.{name}") for name in names)
    return image.new, draw.Draw, fonts.load_default(16)
