"""FeatureHistory against a dictionary of everything that was ever seen."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiers import examples
from twostroke.speculation.history import FeatureHistory
from twostroke.speculation.proposer import ComputedSpan, TargetStep

SIZE = 2
MAX_TOKENS = 12
ROWS = st.integers(0, 2)


class HistoryMachine(RuleBasedStateMachine):
    """Sequences go on by some tokens, leave steps out, lose drafts, begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.history = FeatureHistory((1,), MAX_TOKENS)
        self.next_position: dict[int, int] = {}
        self.seen: dict[int, dict[int, float]] = {}
        """Per row and position, the value that stands for its features."""
        self.serial = 0.0

    @rule(shares=st.dictionaries(ROWS, st.tuples(st.integers(0, 5), st.integers(0, 2)), min_size=1))
    def step(self, shares: dict[int, tuple[int, int]]) -> None:
        """Record a step: per row, accepted tokens, and rejected drafts after them."""
        reads: list[ComputedSpan] = []
        values: list[float] = []
        for row, (num_tokens, num_fallen) in shares.items():
            begin = self.next_position.get(row, 0)
            reads.append(ComputedSpan(row, len(values), begin, num_tokens, begin + num_tokens + 1))
            for position in range(begin, begin + num_tokens + num_fallen):
                self.serial += 1.0
                values.append(self.serial)
                if position < begin + num_tokens:
                    self.seen.setdefault(row, {})[position] = self.serial
            self.next_position[row] = begin + num_tokens
        features = torch.tensor(values).unsqueeze(1).repeat(1, SIZE)
        self.history.add(TargetStep(torch.empty(0), features, reads, ()))
        self.latest = {
            row: range(self.next_position[row] - num_tokens, self.next_position[row])
            for row, (num_tokens, _) in shares.items()
        }

    @rule(row=ROWS, begin=st.integers(0, 40))
    def begins_anew(self, row: int, begin: int) -> None:
        """Begin after a prefix that was found in the cache."""
        self.history.forget(row)
        self.next_position[row] = begin
        self.seen.pop(row, None)

    @rule(rows=st.lists(ROWS, unique=True), shorter=st.integers(0, 3))
    def is_asked(self, rows: list[int], shorter: int) -> None:
        """Check that features within the spans are returned, for several rows in any order."""
        spans = {row: self.history.span(row) for row in rows}
        wanted = [(row, range(min(s.start + shorter, s.stop), s.stop)) for row, s in spans.items() if s]
        if any(positions for _, positions in wanted):
            found = self.history.features(wanted)
            expected = [self.seen[row][position] for row, positions in wanted for position in positions]
            assert found.tolist() == [[value] * SIZE for value in expected]

    @invariant()
    def the_latest_are_there(self) -> None:
        """Check that all features of the last step are there, and none after the last accepted token."""
        for row, position in self.next_position.items():
            span = self.history.span(row)
            assert not span or span.stop == position
        for row, positions in getattr(self, "latest", {}).items():
            if row in self.seen and positions and positions.stop == self.next_position[row]:
                assert self.history.span(row).start <= positions.start


HistoryMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestHistory = HistoryMachine.TestCase


def test_what_is_old_is_let_go() -> None:
    history = FeatureHistory((1,), MAX_TOKENS)
    for position in range(100):
        read = ComputedSpan(0, 0, position, 1, position + 2)
        history.add(TargetStep(torch.empty(0), torch.full((1, SIZE), float(position)), [read], ()))
    assert history.span(0) == range(100 - MAX_TOKENS, 100)
    assert len(history._pieces[0]) <= MAX_TOKENS + 1  # pyright: ignore[reportPrivateUsage]
