"""One file of several parts: a zip without compression, in which no bit may change unnoticed.

Standard tools can list and unpack it. Reading trusts nothing: names are looked up and never become paths,
sizes are compared before anything is read, each part has a SHA-256 in the manifest, and everything between
the parts (the zip's own tables) has one in the zip's comment. Nothing is extracted. A file is written under
another name and then renamed, so there is never half of one.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .._errors import ArtifactError

MANIFEST = "manifest.json"

_SEAL = b"jaxbatch artifact, sha256 of all but the parts: "
_HEX = 64
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,99}")
_MAX_MANIFEST = 64 << 20
_CHUNK = 1 << 22
_LOCAL_HEADER = 30


class Writer:
    """Adds parts to an archive that is being written.

    Attributes:
      parts: size and digest of each part so far, for the manifest.
    """

    def __init__(self, archive: zipfile.ZipFile):
        self._archive = archive
        self.parts: dict[str, dict[str, Any]] = {}

    def add(self, name: str, make: Callable[[Callable[[Any], None]], Any]) -> None:
        """Add a part, whose bytes `make` hands, in pieces, to the function that it is given."""
        assert _NAME.fullmatch(name), name
        info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same content, the same bytes
        info.external_attr = 0o644 << 16
        with self._archive.open(info, "w", force_zip64=True) as file:
            hashed = _Hashed(file)
            make(hashed.write)
        self.parts[name] = {"size": hashed.size, "sha256": hashed.digest.hexdigest()}


class _Hashed:
    def __init__(self, file: Any):
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, data: Any) -> None:
        self.size += memoryview(data).nbytes
        self.digest.update(data)
        self._file.write(data)


@contextlib.contextmanager
def create(path: str | os.PathLike[str]) -> Iterator[Writer]:
    """Write an archive; it appears under its name when all is well, and replaces what was there."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.comment = _SEAL + b"0" * _HEX
            yield Writer(archive)
        with open(temporary, "r+b") as file:
            with zipfile.ZipFile(file) as archive:
                seal = _seal(file, archive.infolist())
            file.seek(-_HEX, os.SEEK_END)
            file.write(seal.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class Reader:
    """An archive to read parts from.

    Attributes:
      manifest: its JSON object, of unknown content.

    Raises:
      ArtifactError: the file is no such archive, or is damaged.
      OSError: there is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._file = open(path, "rb")  # noqa: SIM115  (it is closed by `close`)
        try:
            self._infos = self._checked()
            self.manifest = self._read_manifest()
        except ArtifactError:
            self.close()
            raise
        except Exception as error:  # whatever a damaged file makes of a parser
            self.close()
            raise ArtifactError(f"is no artifact, or is damaged ({error})") from error

    def close(self) -> None:  # noqa: D102
        self._file.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> bytes:
        """Return a part that the manifest lists, once size and digest are right."""
        try:
            part = self.manifest["parts"][name]
            size, digest = part["size"], part["sha256"]
            info = self._infos[name]
        except (KeyError, TypeError):
            raise ArtifactError(f"its part {name!r} is missing") from None
        if info.file_size != size:
            raise ArtifactError(f"its part {name!r} has {info.file_size} bytes, and the manifest says {size}")
        data = self._bytes(info)
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise ArtifactError(
                f"its part {name!r} is damaged: SHA-256 {found}, and the manifest says {digest}"
            )
        return data

    def _checked(self) -> dict[str, zipfile.ZipInfo]:
        with zipfile.ZipFile(self._file) as archive:
            infos, comment = archive.infolist(), archive.comment
        if not comment.startswith(_SEAL) or len(comment) != len(_SEAL) + _HEX:
            raise ArtifactError("is a zip file that jaxbatch did not write, or was packed anew")
        for info in infos:
            plain = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
            if not plain or info.flag_bits or not _NAME.fullmatch(info.filename):
                raise ArtifactError(f"has a part {info.filename!r} that jaxbatch did not write")
        if len({info.filename for info in infos}) < len(infos):
            raise ArtifactError("has two parts of one name")
        if _seal(self._file, infos).encode() != comment[len(_SEAL) :]:
            raise ArtifactError("is damaged: the tables of its parts are not those that were written")
        return {info.filename: info for info in infos}

    def _read_manifest(self) -> dict[str, Any]:
        info = self._infos.get(MANIFEST)
        if info is None or info.file_size > _MAX_MANIFEST:
            raise ArtifactError("has no manifest")
        manifest = json.loads(self._bytes(info))
        if not isinstance(manifest, dict) or manifest.get("sha256") != manifest_digest(manifest):
            raise ArtifactError("is damaged: its manifest is not the one that was written")
        return manifest

    def _bytes(self, info: zipfile.ZipInfo) -> bytes:
        self._file.seek(_begin(self._file, info))
        data = self._file.read(info.file_size)
        if len(data) != info.file_size:
            raise ArtifactError(f"ends inside its part {info.filename!r}")
        return data


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return a digest of a manifest, but for the digest itself."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a part begin, behind the header in front of them."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER)
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + name + extra


def _seal(file: BinaryIO, infos: list[zipfile.ZipInfo]) -> str:
    """Return the digest of all bytes outside the parts, but for the place of the digest, at the end."""
    digest, position = hashlib.sha256(), 0
    end = file.seek(0, os.SEEK_END) - _HEX
    ranges = sorted((_begin(file, info), info.file_size) for info in infos)
    for begin, size in [*ranges, (end, 0)]:
        if begin < position or size < 0:
            raise ArtifactError("is damaged: its parts overlap")
        file.seek(position)
        while position < begin:
            chunk = file.read(min(_CHUNK, begin - position))
            if not chunk:
                raise ArtifactError("is damaged: it ends too early")
            digest.update(chunk)
            position += len(chunk)
        position = begin + size
    return digest.hexdigest()
