"""Pointers of Git LFS: a few lines of text that a clone without it has in the place of large files."""

from __future__ import annotations

from pathlib import Path

_BEGINNING = b"version https://git-lfs"


def remedy_for(path: Path, otherwise: str = "Download it again.") -> str:
    """Return what to do about a file that is not what its name says; `otherwise` where it is no pointer."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_BEGINNING)) == _BEGINNING
    except OSError:
        return otherwise
    return (
        "It is a pointer of Git LFS in the file's place: run `git lfs pull` in its folder." if is_pointer else otherwise
    )
