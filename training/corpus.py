"""Corpus: the running Python's standard library, split by file, with a manifest.

Library files are trained on at full weight and test files at a lower one (see ``train.py``). Held-out modules are
excluded by name together with their tests, as is any training file that shares much text with one of them.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

from twostroke.measure.spec import measure as held_out

HELD_OUT = held_out.MODULES
"""Held-out modules of various kinds, as paths inside the standard library; training never sees them."""

# Dropped everywhere: generated sources, and files that differ between machines.
DROPPED = re.compile(
    r"^(site-packages|dist-packages|config-[^/]*|ensurepip/_bundled|lib-dynload)/"
    r"|^_sysconfig(data|_vars)[^/]*$"
    r"|^pydoc_data/"
    r"|^encodings/(cp|iso|mac_|koi8|kz1048|ptcp|tis_|palmos|hp_|euc|big5|gb|shift|johab|hz)"
    r"|^lib2to3/tests/data/"
    r"|(^|/)(cjkencodings|data|testdata)/"
    r"|(^|/)bad_?[^/]*\.py$"
)
TEST = re.compile(r"(^|/)(test|tests|idle_test|_?test[^/]*\.py|[^/]*_tests?\.py|[^/]*tests?er\.py)(/|$)")
SHARED_LIMIT = 0.1
"""Share of its 3-line shingles in a held-out file above which a training file counts as a copy."""
DATA_LIMIT = 0.3
"""Share of digits, backslashes and commas above which a file counts as a table, not code."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; ``split`` is ``library``, ``test`` or ``heldout``."""

    path: str
    split: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes."""
        return len(self.text.encode())


def is_test_of_held_out(path: str) -> bool:
    """Return whether ``path`` is a test of a held-out module, as test_json/..., test_csv.py or test_pathlib_x.py."""
    modules = {held.split("/")[0].removesuffix(".py") for held in HELD_OUT}
    for part in path.split("/"):
        stem = part.removesuffix(".py").lstrip("_")
        if any(stem == f"test_{m}" or stem.startswith(f"test_{m}_") or stem == f"{m}_tests" for m in modules):
            return True
    return False


def shingles(text: str) -> set[str]:
    """Return every run of three non-blank lines, stripped; runs under 40 characters are too common and left out."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    runs = ("\n".join(lines[i : i + 3]) for i in range(len(lines) - 2))
    return {run for run in runs if len(run) >= 40}


def is_table(text: str) -> bool:
    """Return whether the file is mostly numbers and escapes."""
    dense = re.sub(r"\s", "", text)
    return bool(dense) and len(re.findall(r"[0-9\\,]|x[0-9a-f]{2}", dense)) / len(dense) > DATA_LIMIT


def read_source(path: Path) -> str | None:
    """Return the text of a file that is UTF-8 and parses as Python, else None."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text if text.strip() else None


def reason_to_leave_out(name: str, text: str | None, seen: dict[str, str]) -> str | None:
    """Return why a file is not in the corpus, by itself and by the earlier texts (text -> path); None if it is."""
    if DROPPED.search(name):
        return "dropped by name"
    if is_test_of_held_out(name):
        return "test of a held-out module"
    if text is None:
        return "empty, not UTF-8 or does not parse"
    if is_table(text):
        return "data table"
    return f"same text as {seen[text]}" if text in seen else None


def load_corpus(root: Path | None = None) -> tuple[list[SourceFile], dict[str, str]]:
    """Return all files in the order of their paths, and the excluded paths with the reason."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files: list[SourceFile] = []
    left_out: dict[str, str] = {}
    seen: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(("site-packages/", "dist-packages/")):
            continue
        text = None if DROPPED.search(name) else read_source(path)
        reason = reason_to_leave_out(name, text, seen)
        if reason is None and text is not None:
            seen[text] = name
            split = "heldout" if name in HELD_OUT else "test" if TEST.search(name) else "library"
            files.append(SourceFile(name, split, text))
        elif reason is not None:
            left_out[name] = reason
    missing = set(HELD_OUT) - {f.path for f in files}
    if missing:
        raise FileNotFoundError(f"held-out modules not in this standard library: {sorted(missing)}")
    return without_copies(files, left_out), left_out


def without_copies(files: list[SourceFile], left_out: dict[str, str]) -> list[SourceFile]:
    """Return ``files`` without training files that share much text with a held-out one; note those in ``left_out``."""
    held = set().union(*(shingles(f.text) for f in files if f.split == "heldout"))
    kept = []
    for file in files:
        own = shingles(file.text)
        if file.split != "heldout" and own and len(own & held) / len(own) > SHARED_LIMIT:
            left_out[file.path] = "shares text with a held-out module"
        else:
            kept.append(file)
    return kept


def manifest(files: list[SourceFile], left_out: dict[str, str]) -> dict[str, object]:
    """Return the record of a corpus: Python version, totals for each split, and each file with its hash."""
    splits = {}
    for split in ("library", "test", "heldout"):
        chosen = [f for f in files if f.split == split]
        splits[split] = {"files": len(chosen), "bytes": sum(f.num_bytes for f in chosen)}
    rows = [
        {
            "path": f.path,
            "split": f.split,
            "bytes": f.num_bytes,
            "sha256": hashlib.sha256(f.text.encode()).hexdigest(),
        }
        for f in files
    ]
    version = ".".join(map(str, sys.version_info[:3]))
    return {"python": version, "splits": splits, "files": rows, "left_out": left_out}


def dump_manifest(value: dict[str, object]) -> str:
    """Return JSON with one line per file, so that a change of the corpus gives a readable diff."""
    head = {k: v for k, v in value.items() if k not in ("files", "left_out")}
    lines = [json.dumps(head)[:-1] + ","]
    rows = value["files"]
    assert isinstance(rows, list)
    lines.append('"files": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n],")
    left_out = value["left_out"]
    assert isinstance(left_out, dict)
    pairs = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in left_out.items())
    lines.append('"left_out": {\n' + ",\n".join(pairs) + "\n}}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the manifest and print the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "manifest.json")
    args = parser.parse_args()
    files, left_out = load_corpus()
    value = manifest(files, left_out)
    args.output.write_text(dump_manifest(value))
    print(json.dumps(value["splits"], indent=1))


if __name__ == "__main__":
    main()
