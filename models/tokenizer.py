"""Texts to arrays of token ids, each as long as its text: nothing is padded, and nothing cut unasked."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import tokenizers


class Tokenizer:
    """The tokenizer of a model's folder (`tokenizer.json`), without the padding that the file asks for.

    Saved tokenizers usually pad and truncate on their own (that of all-MiniLM-L6-v2 makes everything 128
    tokens long); both are turned off here.
    """

    def __init__(self, path: str | PathLike):
        """Read `tokenizer.json`; `path` is the file or the folder that holds it."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"{file} is not there; expected a saved fast tokenizer")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def __call__(self, texts: Sequence[str], max_tokens: int | None = None) -> list[np.ndarray]:
        """Return the int32 token ids of each text, special tokens included.

        Args:
          texts: any strings; an empty one still has its special tokens.
          max_tokens: the longest result, special tokens counted; `None` never cuts. sentence-transformers
            uses 256 for all-MiniLM-L6-v2.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        tokens = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
        return tokens if max_tokens is None else [truncate(ids, max_tokens) for ids in tokens]

    def words(self, ids: Sequence[int] | np.ndarray) -> list[str | None]:
        """Return the vocabulary's entry for each id, `None` for an id that it does not have."""
        return [self._tokenizer.id_to_token(int(i)) for i in ids]


def truncate(tokens: np.ndarray, max_tokens: int) -> np.ndarray:
    """Cut one text to `max_tokens`, keeping its last token ([SEP]), as the BERT tokenizers do."""
    if max_tokens < 2:
        raise ValueError(f"max_tokens is {max_tokens}; the two special tokens alone need 2")
    return tokens if len(tokens) <= max_tokens else np.append(tokens[: max_tokens - 1], tokens[-1])
