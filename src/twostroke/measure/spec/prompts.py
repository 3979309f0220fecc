"""What the runs are asked: code the embedded model has never seen, to go on with or to write again.

Text that the embedded model has never seen: the modules of Python's own library that its training held out.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from random import Random
from typing import Literal

from twostroke.errors import InvalidParameter
from twostroke.measure.spec.measure import PromptIds
from twostroke.tokenizer.tokenizer import Tokenizer

MODULES = (
    "argparse.py",
    "bisect.py",
    "calendar.py",
    "configparser.py",
    "contextlib.py",
    "csv.py",
    "fractions.py",
    "getopt.py",
    "graphlib.py",
    "heapq.py",
    "json/__init__.py",
    "json/decoder.py",
    "json/encoder.py",
    "json/scanner.py",
    "json/tool.py",
    "mailbox.py",
    "pathlib.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "textwrap.py",
)
"""What training/corpus.py keeps out; other versions of Python have slightly other texts of the same names."""


def held_out_texts() -> list[str]:
    """One text a module."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (root / name for name in MODULES)
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


Task = Literal["code", "edit", "random"]
"""`code`: go on with a module. `edit`: a piece of code, and the beginning of the same again. `random`: token ids."""


def prompts(
    task: Task,
    count: int,
    length: int,
    tokenizer: Tokenizer,
    vocab_size: int,
    seed: int = 0,
    name: str = "prompt_tokens",
) -> list[PromptIds]:
    """So many prompts of so many tokens; the same for the same seed and version of Python.

    Args:
        task: what is asked.
        count: of prompts.
        length: of each, in tokens.
        tokenizer: makes tokens of code.
        vocab_size: of random tokens.
        seed: 0 and more.
        name: of the setting that `length` is, to refuse it by.

    Raises:
        InvalidParameter: no text has so many tokens.
    """
    dice = Random(seed)
    if task == "random":
        return [tuple(dice.randrange(16, vocab_size) for _ in range(length)) for _ in range(count)]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in held_out_texts()]
    longest = max(map(len, texts), default=0)
    if longest < length:
        limit = f"is more than the {longest} tokens of the longest text that a prompt can be a piece of"
        raise InvalidParameter(name, length, limit, "Give fewer.")
    found: list[PromptIds] = []
    while len(found) < count:
        ids = dice.choice(texts)
        begin = dice.randrange(max(1, len(ids) - length))
        piece = ids[begin : begin + length]
        if task == "edit":
            half = piece[: 3 * length // 4]
            piece = half + half[: length - len(half)]
        if len(piece) == length:
            found.append(tuple(piece))
    return found
