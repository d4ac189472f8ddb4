"""Real weights for tests: fetched once, and a reason to skip where they cannot be had."""

import functools
from pathlib import Path
from typing import Any

import pytest

from models import bert, weights
from models.tokenizer import Tokenizer


@functools.cache
def _fetched(name: str) -> Path | str:
    try:
        return weights.fetch(name)
    except weights.WeightsError as error:
        return str(error)


def folder(name: str) -> Path:
    """Return the folder with the weights, or skip and say why there is none."""
    found = _fetched(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def real_bert(name: str) -> tuple[Any, Any, Tokenizer]:
    """Return model, params and tokenizer, or skip."""
    return *bert.load(folder(name)), Tokenizer(folder(name))
