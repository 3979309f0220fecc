"""Lines of code for each family, counted in the source, and the table of docs/adding-an-architecture.md."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.model.gguf.architectures import GGUF_ARCHITECTURES
from twostroke.model.registry import ARCHITECTURES

REPOSITORY = Path(__file__).parents[3]
SOURCE = REPOSITORY / "src" / "twostroke"
SHARED = {"twostroke.model.llama:Llama", "twostroke.model.sparse:Sparse"}
"""The maths that families share; another file of maths is a family's own."""
MOST_LINES = 40
"""Of a family without new maths."""
LONGER = {"FalconForCausalLM", "Glm4MoeForCausalLM", "GPT2LMHeadModel", "GptOssForCausalLM", "StableLmForCausalLM"}
"""Families that cost more without a file of maths: for their GGUF files, for how checkpoints store weights, or for what
a config leaves out."""


@dataclass
class Table:
    """A dict in the source: the lines of each entry, and of what stands beside it under a name."""

    lines: dict[str, int] = field(default_factory=dict[str, int])
    """Of each entry."""
    uses: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """By entry or name: the names that it is made from."""
    named: dict[str, int] = field(default_factory=dict[str, int])
    """Lines of what has a name at the top of the file."""

    def brought(self, entry: str, seen: set[str]) -> int:
        """Return the lines of names that no entry before this one is made from; they are `seen` from now on."""
        found, waiting = 0, list(self.uses[entry])
        while waiting:
            name = waiting.pop()
            if name in self.named and name not in seen:
                seen.add(name)
                found += self.named[name]
                waiting += self.uses[name]
        return found


def read(path: Path, table: str | None = None) -> Table:
    """Read the assignments and functions at the top of a file, and the entries of one dict among them."""
    found = Table()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            name, value = node.name, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, value = node.target.id, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, node.value
        else:
            continue
        if name == table and isinstance(value, ast.Dict):
            for key, entry in zip(value.keys, value.values, strict=True):
                if key is None:  # the entries of another file
                    continue
                assert isinstance(key, ast.Constant)
                found.lines[str(key.value)] = num_lines(entry)
                found.uses[str(key.value)] = names_in(entry)
        else:
            found.named[name], found.uses[name] = num_lines(node), names_in(value)
    return found


def num_lines(node: ast.AST) -> int:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return last - first + 1


def names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def gguf_lines() -> Mapping[str, int]:
    """Return for each family the lines about its GGUF files: entries, and what only those are made from."""
    table = read(SOURCE / "model" / "gguf" / "architectures.py", "GGUF_ARCHITECTURES")
    found, seen = Counter[str](), set[str]()
    for kind, num_entry in table.lines.items():
        found[GGUF_ARCHITECTURES[kind].name] += num_entry + table.brought(kind, seen)
    return found


def storage_lines(family: str) -> int:
    """Return the lines of the files that put weights in order for this family alone."""
    files = {"has_transposed_matrices": "transposed.py", "has_norms_by_head": "stacked_norms.py"}
    flags = [flag for flag in files if getattr(ARCHITECTURES[family], flag)]
    texts = ((SOURCE / "model" / files[flag]).read_text(encoding="utf-8") for flag in flags)
    return sum(len(text.splitlines()) for text in texts)


def costs() -> Mapping[str, tuple[int, int, int, int, int, int]]:
    """Return for each family the lines of its traits, of its names, of its entry in the registry, of its GGUF files, of
    files about how its weights are stored, and of its own file of maths.

    What several families are made from counts for the first of them; Llama's names, and the maths of all, for none.
    """
    traits = read(SOURCE / "config" / "architectures.py", "ARCHITECTURE_TRAITS")
    of_gpt = read(SOURCE / "config" / "gpt_architectures.py", "GPT_TRAITS")
    sparse = read(SOURCE / "config" / "sparse_architectures.py", "SPARSE_TRAITS")
    traits.lines |= of_gpt.lines | sparse.lines
    others = (read(SOURCE / "config" / name) for name in ("architecture_traits.py", "gemma4.py"))
    for beside in (of_gpt, sparse, *others):
        traits.named |= beside.named
        traits.uses |= beside.uses
    registry = read(SOURCE / "model" / "registry.py", "ARCHITECTURES")
    tables = read(SOURCE / "model" / "weight_map.py")
    seen_traits, seen_tables = {"ArchitectureTraits", "ExpertTraits"}, {"LLAMA"}
    of_gguf = gguf_lines()
    found: dict[str, tuple[int, int, int, int, int, int]] = {}
    for family, num_traits in traits.lines.items():
        tables.uses[family] = registry.uses[family]
        module, _, _ = ARCHITECTURES[family].path.partition(":")
        own = SOURCE.parent / f"{module.replace('.', '/')}.py"
        found[family] = (
            num_traits + traits.brought(family, seen_traits),
            tables.brought(family, seen_tables),
            registry.lines[family],
            of_gguf.get(family, 0),
            storage_lines(family),
            0 if ARCHITECTURES[family].path in SHARED else len(own.read_text(encoding="utf-8").splitlines()),
        )
    return found


def shown() -> str:
    """Return the table as the page has it."""
    rows = [
        "| architecture | traits | names | entry | GGUF | storage | own file | together |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, lines in sorted(costs().items()):
        rows.append(f"| {family} | {' | '.join(map(str, (*lines, sum(lines))))} |")
    return "\n".join(rows)


def test_every_family_is_counted() -> None:
    assert set(costs()) == set(ARCHITECTURE_TRAITS) == set(ARCHITECTURES)
    assert all(traits and entry for traits, _, entry, *_ in costs().values())


def test_a_family_without_new_maths_costs_forty_lines_at_most_but_for_those_that_the_page_names() -> None:
    assert {family for family, lines in costs().items() if not lines[-1] and sum(lines) > MOST_LINES} == LONGER


def test_the_page_has_the_table() -> None:
    page = (REPOSITORY / "docs" / "adding-an-architecture.md").read_text(encoding="utf-8")
    assert shown() in page, f"docs/adding-an-architecture.md wants this table:\n{shown()}"
