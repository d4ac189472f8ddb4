"""All systems by name, in the order in which they start; nothing is imported before it is asked for."""

import dataclasses
import importlib
import importlib.util
from typing import Any

from .base import Settings, System

BOTH = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a system is and what it is called.

    Attributes:
      name: as it stands in the tables.
      place: `module:class` in this folder.
      arguments: passed on to the class.
      products: the tables that it is in.
      every: it takes part in every so many rounds, and in the first.
      is_probe: its answers are known to be wrong; it is timed to explain the others.
    """

    name: str
    place: str
    arguments: tuple[Any, ...] = ()
    products: tuple[str, ...] = ("float32",)
    every: int = 1
    is_probe: bool = False

    def make(self, settings: Settings) -> System:
        """Import the system and make one."""
        return self.kind()(settings, *self.arguments)

    def kind(self) -> type[System]:
        module, name = self.place.split(":")
        return getattr(importlib.import_module(f".{module}", __name__), name)

    def missing(self) -> list[str]:
        """Return the packages that it needs and that are not installed."""
        return [name for name in self.kind().needs if importlib.util.find_spec(name) is None]


# jaxbatch comes before the loops that take over its batches.
TEXT = (
    Entry("jaxbatch, powers of two", "with_jaxbatch:Jaxbatch", (None,), BOTH),
    Entry("jaxbatch, 10 fitted sizes", "with_jaxbatch:Jaxbatch", (10,), BOTH),
    Entry("jaxbatch, 20 fitted sizes", "with_jaxbatch:Jaxbatch", (20,), BOTH),
    Entry("jaxbatch, 20 fitted sizes, measured", "with_jaxbatch:Jaxbatch", (20, True)),
    Entry("jaxbatch, 20 fitted sizes, two at a time", "with_jaxbatch:Jaxbatch", (20, False, 2), BOTH),
    Entry("jaxbatch, packed rows of 256", "with_jaxbatch:Packed", ((256,),), BOTH),
    Entry("jaxbatch, packed rows of 256 and 512", "with_jaxbatch:Packed", ((256, 512), True)),
    Entry(
        "jaxbatch, packed rows of 256, two at a time",
        "with_jaxbatch:Packed",
        ((256,), False, "packed", 2),
        BOTH,
    ),
    Entry("jaxbatch, padded or packed", "with_jaxbatch:Packed", ((32, 64, 128, 256), True, "auto")),
    Entry("JAX by hand, powers of two", "by_hand:ByHand", (None,), BOTH),
    Entry("JAX by hand, 10 fitted sizes", "by_hand:ByHand", (10,), BOTH),
    Entry("JAX by hand, 20 fitted sizes", "by_hand:ByHand", (20,), BOTH),
    Entry("JAX by hand, 20 fitted sizes, two at a time", "by_hand:ByHand", (20, 2), BOTH),
    Entry("JAX, pad to max", "jax_simple:JaxPadToMax", (), BOTH, every=3),
    Entry("JAX, one by one", "jax_simple:JaxOneByOne", (), BOTH),
    Entry("JAX, jit at every exact shape", "jax_simple:JaxEveryShape"),
    Entry("sentence-transformers", "torch_models:SentenceTransformers", (), BOTH),
    Entry("torch, batches of 32", "torch_models:TorchByCount", (), BOTH),
    Entry("torch, token budget", "torch_models:TorchByTokens", (), BOTH),
    Entry("torch, token budget, two at a time", "torch_models:TorchStreams", (), BOTH),
    Entry("ONNX Runtime, token budget", "onnx_models:OnnxByTokens"),
    Entry("CTranslate2, token batches", "ct2_models:CTranslate2"),
    Entry("CTranslate2, token batches, int8", "ct2_models:CTranslate2Int8", (), ("bfloat16",)),
    Entry("oracle", "oracle:Oracle", (), BOTH),
    Entry("oracle, two at a time", "oracle:Oracle", (2,), BOTH),
    Entry("probe: no mask, 20 fitted sizes", "by_hand:Probe", (20,), is_probe=True),
)
PAGES = (
    Entry("jaxbatch, powers of two", "detectors:Detect", (None,)),
    Entry("jaxbatch, 16 fitted sizes", "detectors:Detect", (16,)),
    Entry("jaxbatch, pad to max", "detectors:Detect", ("max",), every=3),
    Entry("JAX, zeros to max, no mask", "detectors:DetectZeros"),
    Entry("JAX, jit at every exact shape", "detectors:DetectEveryShape"),
    Entry("ONNX Runtime, one by one", "onnx_models:OnnxDetector"),
)
REFERENCES = {
    "tokens": Entry("reference", "jax_simple:Reference"),
    "pixels": Entry("reference", "detectors:DetectReference"),
}


def entries(unit: str, products: str) -> list[Entry]:
    """Return the systems of one table."""
    return [entry for entry in (TEXT if unit == "tokens" else PAGES) if products in entry.products]
