"""Lines of code of functions: docstrings, comments and blank lines are not counted, nor functions within functions."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TRIVIA = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class PathSize:
    """Number of functions, and lines of code by file, that ran for one request."""

    num_functions: int
    lines_by_file: Mapping[str, int]
    """Lines of code of the functions that ran, by file."""

    @property
    def num_files(self) -> int:
        """Files with such functions."""
        return len(self.lines_by_file)

    @property
    def num_lines(self) -> int:
        """Lines of code of all functions that ran."""
        return sum(self.lines_by_file.values())


def size_of(seen: Iterable[str]) -> PathSize:
    """Return the size of the functions that were seen.

    Args:
        seen: FILE:LINE:NAME of each, as sitecustomize.py writes them. Lambdas and comprehensions belong to the function
            around them, and the body of a module to nobody.
    """
    lines: dict[str, int] = {}
    functions: set[tuple[str, int]] = set()
    for entry in set(seen):
        path, first, name = entry.rsplit(":", 2)
        found = _functions(Path(path)).get(int(first))
        if name.endswith(">") or found is None:
            continue
        functions.add((path, int(first)))
        file = path.rpartition("/twostroke/")[2]
        lines[file] = lines.get(file, 0) + found
    return PathSize(len(functions), dict(sorted(lines.items())))


@cache
def _functions(path: Path) -> Mapping[int, int]:
    """Return the lines of code of a file's functions, by the line where each begins, decorators included."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code = _code_lines(text) - set(_docstring_lines(tree))
    spans = {node: _span(node) for node in ast.walk(tree) if isinstance(node, _Function)}
    found: dict[int, int] = {}
    for node, span in spans.items():
        within = {line for other, inner in spans.items() if other is not node and inner[0] > span[0] for line in inner}
        found[span[0]] = len(code & (set(span) - (within & set(span))))
    return found


def _span(node: _Function) -> range:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return range(first, node.end_lineno + 1)


def _code_lines(text: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = [token for token in tokens if token.type not in _TRIVIA]
    return {line for token in kept for line in range(token.start[0], token.end[0] + 1)}


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                assert node.end_lineno is not None
                yield from range(node.lineno, node.end_lineno + 1)
            case _:
                pass
