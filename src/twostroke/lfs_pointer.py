"""Git LFS pointers: a few lines of text that replace large files in a clone without LFS."""

from __future__ import annotations

from pathlib import Path

_BEGINNING = b"version https://git-lfs"


def remedy_for(path: Path, otherwise: str = "Download it again.") -> str:
    """Return the remedy for a file without its expected content; `otherwise` if it is no LFS pointer."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return otherwise
    return (
        "It is a pointer of Git LFS in the file's place: run `git lfs pull` in its folder." if is_pointer else otherwise
    )
