"""The two tiers of tests: the one that `make test` runs within minutes, and the one that `make test-all` adds.

A test is in the first tier unless `second_tier.toml` names it. An entry there names a file, a test, or a single case,
and says why it can wait. `keep` leaves every n-th case of an entry in the first tier, so that each kind of path still
runs there. Property tests are in both tiers: the first tier tries fewer examples of each.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hypothesis import settings

Tier = Literal["first", "second", "all"]
EXAMPLES = 60
"""Examples of a property test in the profile `ci`, where it does not say how many."""

SECOND_TIER = Path(__file__).with_name("second_tier.toml")


def examples(max_examples: int) -> int:
    """Return how many examples the profile tries of a test that has so many in the profile `ci`."""
    return max(1, max_examples * settings().max_examples // EXAMPLES)


@dataclass(frozen=True)
class Entry:
    """One entry of the second tier.

    Attributes:
        name: of a file, a test or a case, relative to `tests/`: `unit/test_log.py`, `unit/test_log.py::test_x[case]`.
        reason: why it can wait for the second tier.
        keep: every n-th of its cases stays in the first tier; 0 keeps none.
    """

    name: str
    reason: str
    keep: int = 0


class TierList:
    """Tells the tier of each test.

    Args:
        entries: entries of the second tier. No name may come twice.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = list(entries)
        self._by_name = {entry.name: entry for entry in self.entries}
        if len(self._by_name) != len(self.entries):
            repeated = [name for name, count in Counter(entry.name for entry in self.entries).items() if count > 1]
            raise ValueError(f"entries of the second tier that come twice: {', '.join(repeated)}")

    @classmethod
    def read(cls, path: Path = SECOND_TIER) -> TierList:
        """Read the list from a TOML file: a table `[[group]]` for each reason, with `tests` and optionally `keep`."""
        groups: list[dict[str, Any]] = tomllib.loads(path.read_text())["group"]
        return cls(Entry(name, group["reason"], group.get("keep", 0)) for group in groups for name in group["tests"])

    def second(self, names: Iterable[str]) -> list[bool]:
        """Return for each test whether it is in the second tier.

        Args:
            names: names of all collected tests, relative to `tests/`, in their order.
        """
        seen: Counter[str] = Counter()
        verdicts: list[bool] = []
        for name in names:
            entry = self.entry_of(name)
            if entry is None:
                verdicts.append(False)
                continue
            is_kept = entry.keep > 0 and seen[entry.name] % entry.keep == 0
            seen[entry.name] += 1
            verdicts.append(not is_kept)
        return verdicts

    def entry_of(self, name: str) -> Entry | None:
        """Return the most specific entry that names this case, its test or its file."""
        test = name.partition("[")[0]
        file = test.partition("::")[0]
        return self._by_name.get(name) or self._by_name.get(test) or self._by_name.get(file)
