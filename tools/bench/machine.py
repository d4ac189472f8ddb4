"""On what the numbers were measured: the machine and the versions of all that took part."""

import importlib.metadata
import os
import platform
from pathlib import Path

PACKAGES = (
    "jaxbatch",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "torch",
    "transformers",
    "sentence-transformers",
    "onnxruntime",
    "ctranslate2",
)


def machine() -> dict[str, str]:
    """Return facts by name, for the head of the report."""
    facts = {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    known = [flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(known)})"
