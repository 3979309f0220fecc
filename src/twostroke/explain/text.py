"""Text rendering of a timeline as a table."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.explain.segments import Label, Lane, Segment, Timeline
from twostroke.plain_words import counted, exact_ms

_TOLD_IN_REASON = (Label.STALLED, Label.PREEMPTED, Label.KV_CHECK)
"""Labels of segments whose reason already names the responsible requests."""


def timeline_text(timeline: Timeline) -> str:
    """Return a table with one line per segment, lanes one below the other; it ends with a line break."""
    lines: list[str] = []
    for lane in timeline.lanes:
        lines += [_heading(timeline, lane), *_table(lane, timeline.begin_s), *_drafts(lane)]
        lines += [f"  note: {note}" for note in lane.notes] + [""]
    return "\n".join(lines)


def _heading(timeline: Timeline, lane: Lane) -> str:
    name = timeline.request_id if len(timeline.lanes) == 1 else lane.sequence_id
    ended = "still running" if lane.finish_reason is None else f"ended: {lane.finish_reason}"
    facts = [ended, f"{exact_ms(lane.duration_s)} ms in all"]
    if lane.ttft_s is not None:
        facts.append(f"first token after {exact_ms(lane.ttft_s)} ms")
    if lane.num_prompt_tokens is not None:
        facts.append(f"{counted(lane.num_prompt_tokens, 'prompt token')} ({lane.num_cached_tokens or 0:,} cached)")
    facts.append(counted(lane.num_output_tokens, "output token"))
    if lane.num_preemptions:
        facts.append(f"preempted {lane.num_preemptions} times" if lane.num_preemptions > 1 else "preempted once")
    return f"{name}: {', '.join(facts)}"


def _table(lane: Lane, origin_s: float) -> list[str]:
    rows: list[tuple[str, ...]] = [("start ms", "ms", "share", "what", "why")]
    for segment in lane.segments:
        share = segment.duration_s / lane.duration_s if lane.duration_s else 0.0
        rows.append(
            (
                exact_ms(segment.start_s - origin_s),
                exact_ms(segment.duration_s),
                f"{share:.1%}",
                str(segment.label),
                segment.reason + _culprits(segment),
            )
        )
    if len(lane.processes) > 1:
        where = ["where", *(segment.process for segment in lane.segments)]
        width = max(map(len, where))
        rows = [(*row[:-1], f"{place:<{width}}  {row[-1]}") for row, place in zip(rows, where, strict=True)]
    return _aligned(rows)


def _drafts(lane: Lane) -> list[str]:
    if lane.drafts is None:
        return []
    drafts = lane.drafts
    accepted = f"{drafts.num_accepted_tokens:,} of {drafts.num_draft_tokens:,} accepted"
    by_position = ", ".join(f"{number:,}" for number in drafts.num_accepted_tokens_per_pos)
    return [f"  drafts: {accepted} (by position: {by_position}); {drafts.tokens_per_pass:.2f} tokens a pass"]


def _culprits(segment: Segment) -> str:
    if segment.label in _TOLD_IN_REASON or not segment.because_of:
        return ""
    named = [f"{c.request_id} ({counted(c.num_tokens, 'token')})" for c in segment.because_of]
    unnamed = segment.num_culprits - len(named)
    who = f"{', '.join(named)}{f', {unnamed} more' if unnamed else ''}"
    return f"; beside {who}" if segment.label in (Label.PREFILL, Label.RECOMPUTE) else f" [{who}]"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align numbers to the right and words to the left; leave the last column as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"  {row[0]:>{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}"
        for row in rows
    ]
