"""Real text for benchmarks."""

from __future__ import annotations

import shutil
import struct
import subprocess
import tempfile
import zlib
from pathlib import Path

from vllm_evict.embedded_model import cache_dir

NOVELS_PACKAGE = "r-cran-janeaustenr"
"""Debian's package of six novels by Jane Austen (public-domain text in an MIT package)."""

_IN_PACKAGE = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
_STRINGS = struct.pack(">i", 16)  # R serialisation: a vector of strings without attributes


def real_text(path: str | None = None) -> str:
    """The text in `path`; by default the Python language reference that CPython ships (460,000 characters)."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def chosen_text(path: str | None) -> tuple[str, str]:
    """(what it is, the text in `path`), or `novels`."""
    return (Path(path).name, real_text(path)) if path else novels()


def novels() -> tuple[str, str]:
    """(what it is, four million characters of novels), or `real_text` where Debian's package is out of reach."""
    kept = cache_dir() / "novels.txt"
    if not kept.exists():
        installed = Path("/") / _IN_PACKAGE
        data = installed.read_bytes() if installed.exists() else _download()
        if data is None:
            return "the Python language reference", real_text()
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(".unfinished")
        unfinished.write_text("\n\n".join(_books(data)), encoding="utf-8")
        unfinished.rename(kept)
    return f"six novels by Jane Austen (Debian {NOVELS_PACKAGE})", kept.read_text(encoding="utf-8")


def _download() -> bytes | None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return None
    with tempfile.TemporaryDirectory() as folder:
        got = subprocess.run(["apt-get", "download", NOVELS_PACKAGE], cwd=folder, capture_output=True, check=False)
        files = list(Path(folder).glob("*.deb"))
        if got.returncode != 0 or not files:
            return None
        subprocess.run(["dpkg-deb", "-x", str(files[0]), folder], check=True)
        return (Path(folder) / _IN_PACKAGE).read_bytes()


def _books(database: bytes) -> list[str]:
    """R's lazy-load database: objects one after the other, each its length and a zlib stream of serialised R."""
    books = []
    while database:
        stream = zlib.decompressobj()
        book = _lines(stream.decompress(database[4:]))
        if book:
            books.append("\n".join(book))
        database = stream.unused_data
    return books


def _lines(serialised: bytes) -> list[str]:
    """The first vector of strings in an object: count, then of each string flags, length and bytes."""
    start = serialised.find(_STRINGS)
    if start < 0:
        return []
    (count,) = struct.unpack_from(">i", serialised, start + 4)
    lines, at = [], start + 8
    for _ in range(count):
        (length,) = struct.unpack_from(">i", serialised, at + 4)
        at += 8
        lines.append(serialised[at : at + max(length, 0)].decode("utf-8"))
        at += max(length, 0)
    return lines
