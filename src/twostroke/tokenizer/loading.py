"""The tokenizer of a folder or of a GGUF file, by its path alone: for a process that never loads the model."""

from __future__ import annotations

from pathlib import Path

from twostroke.gguf.container import GGUFFile
from twostroke.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from twostroke.tokenizer.tokenizer import Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads it.

    Raises:
        SetupError: there is none, or a file that cannot be read as one.
    """
    if path.is_dir():
        return Tokenizer.from_folder(path)
    return tokenizer_from_gguf(GGUFFile(path).metadata)
