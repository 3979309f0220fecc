"""Six stories, one for each technique: two settings, what they are asked, what to look at, and why it comes out so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from twostroke.lab.figures import Figures
from twostroke.lab.workload import LabWorkload

_FEW_BYTES = 8 << 20
"""Of KV memory: little enough that it decides who runs."""
Explain = Callable[[Figures, Figures], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A technique, off and on."""

    name: str
    title: str
    question: str
    a_title: str
    a: Mapping[str, Any]
    b_title: str
    b: Mapping[str, Any]
    workload: LabWorkload
    figure: str
    """The one to look at, of Figures."""
    figure_title: str
    is_better_high: bool
    explain: Explain = field(compare=False)
    """Why it came out as it did, with what was measured."""

    def to_dict(self) -> dict[str, Any]:
        """As it is sent, before it has run."""
        texts = ("name", "title", "question", "a_title", "b_title", "figure", "figure_title", "is_better_high")
        shown = {name: getattr(self, name) for name in texts}
        return shown | {"a": dict(self.a), "b": dict(self.b), "workload": self.workload.to_dict()}


def ratio(a: float, b: float) -> str:
    """How two figures compare, in words.

    >>> ratio(10.0, 25.0), ratio(3.0, 3.0), ratio(3.0, 1.0)
    ('2.5 times', 'the same', 'a third')
    """
    share = b / a if a else float("inf")
    if abs(share - 1) < 0.02:
        return "the same"
    if abs(share - 1 / 3) < 0.01:
        return "a third"
    return f"{share:.1f} times" if share >= 2 else f"{share:.2f} times"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.1f} ms"


def _batching(a: Figures, b: Figures) -> str:
    return (
        f"Static batches gave {a.output_tokens_per_s:.0f} tokens a second, continuous ones "
        f"{b.output_tokens_per_s:.0f}: {ratio(a.output_tokens_per_s, b.output_tokens_per_s)}. A static batch ends "
        "with its longest answer; until then the places of those that have ended compute nothing, and who waits "
        "goes on waiting. A continuous batch is made anew for every step, so a place is taken again in the step "
        "after it was left. The longer the longest answer is beside the others, the more that brings; answers of "
        "one length would show no difference. Tokens are equal: who shares a batch with whom changes no bit here."
    )


def _chunking(a: Figures, b: Figures) -> str:
    return (
        f"With whole prompts the longest gap between two tokens of an answer was {_ms(a.longest_gap_ms)}, with chunks "
        f"{_ms(b.longest_gap_ms)}; TTFT p99 {_ms(a.ttft_p99_ms)} and {_ms(b.ttft_p99_ms)}. While a long prompt is "
        "computed in one pass, everybody who decodes waits for that pass. Cut into chunks, each step takes some "
        "of the prompt beside the others' next tokens, so they wait for one mixed step: longer than a decode "
        "step alone, and much shorter than the whole prompt. The prompt itself pays for it: its chunks share "
        "their steps, and read the weights once each."
    )


def _prefix(a: Figures, b: Figures) -> str:
    return (
        f"Without the cache a first token took {_ms(a.ttft_p50_ms)} (TTFT p50), with it {_ms(b.ttft_p50_ms)}; "
        f"{100 * b.cached_share:.0f} % of the prompts' tokens were found. K and V of a token depend on the tokens "
        "before it alone, so prompts that begin alike have the same K and V there: whole blocks of them are "
        "found by a hash of all their tokens and shared by reference. What is shared is not computed, and takes "
        "memory once. Decoding is no faster for it: each token still reads everything before it."
    )


def _speculation(a: Figures, b: Figures) -> str:
    per_pass = "" if b.tokens_per_pass is None else f", which gave {b.tokens_per_pass:.2f} tokens a pass"
    return (
        f"Without drafts {a.output_tokens_per_s:.0f} tokens a second, with drafts of the text's own past "
        f"(n-grams) {b.output_tokens_per_s:.0f}: {ratio(a.output_tokens_per_s, b.output_tokens_per_s)}{per_pass}. "
        "A pass that decodes one token for one reader is bound by reading the weights; checking a few guessed "
        "tokens in the same pass reads them no oftener. Guesses that the model would not have made are thrown "
        "away, so the tokens are the same; what the guesses take is room for their K and V, and arithmetic. This "
        "text repeats itself, as edits do. Where guesses fail, or a large batch has no arithmetic to spare, "
        "drafts cost more than they bring, and the gate stops them."
    )


def _kv_format(a: Figures, b: Figures) -> str:
    return (
        f"The same bytes hold {a.kv_capacity_tokens:,} tokens in the model's own type and {b.kv_capacity_tokens:,} "
        f"in 8 bits; so {a.most_running} and {b.most_running} sequences ran at once, and half of the first tokens "
        f"were there within {_ms(a.ttft_p50_ms)} and {_ms(b.ttft_p50_ms)} (TTFT p50). K and V are rounded to 8 bits "
        "with a scale per token and head, so attention sees slightly other numbers, and where two next tokens are "
        "nearly equally likely the other one may win: these tokens may differ, and from there on the rest of the "
        "answer does. With 8 bits they are the same again in every run and every batch."
    )


def _pools(a: Figures, b: Figures) -> str:
    better = (b.itl_p99_ms or 0.0) < (a.itl_p99_ms or 0.0)
    verdict = (
        "Decoding has a process to itself, so long prompts of others do not stretch its steps."
        if better
        else "On a machine of few cores that is no gain: the two processes take them from each other, and what chunks "
        "had bounded already is not bounded better."
    )
    return (
        f"One process had gaps of {_ms(a.itl_p99_ms)} (ITL p99), two pools {_ms(b.itl_p99_ms)}; a first token "
        f"took {_ms(a.ttft_p50_ms)} and {_ms(b.ttft_p50_ms)} (TTFT p50). {verdict} Each process has half of the "
        "cores here, and a prompt's K and V travel from one to the other, where the first token is there before "
        "they have arrived. Two pools pay where each stroke has hardware of its own, and prompts are long enough "
        "that mixing hurts. Tokens are equal: what is handed over is what was computed."
    )


STORIES = (
    Story(
        name="batching",
        title="Continuous batching",
        question="What does it cost when a batch has to wait for its longest answer?",
        a_title="static",
        a={"batching": "static", "max_num_seqs": 8},
        b_title="continuous",
        b={"batching": "continuous", "max_num_seqs": 8},
        workload=LabWorkload(seed=1, num_requests=40, prompt_words=15, min_output=10, max_output=700),
        figure="output_tokens_per_s",
        figure_title="tokens per second",
        is_better_high=True,
        explain=_batching,
    ),
    Story(
        name="chunking",
        title="Chunked prefill",
        question="What does a long prompt do to those who are reading their answers?",
        a_title="whole prompts",
        a={"enable_chunked_prefill": False, "enable_prefix_caching": False},
        b_title="steps of at most 256 tokens",
        b={"enable_chunked_prefill": True, "max_num_batched_tokens": 256, "enable_prefix_caching": False},
        workload=LabWorkload(
            seed=2, num_requests=15, rate=3, prompt_words=10, min_output=300, max_output=500, every_nth_is_long=3
        ),
        figure="longest_gap_ms",
        figure_title="longest gap between two tokens, ms",
        is_better_high=False,
        explain=_chunking,
    ),
    Story(
        name="prefix",
        title="Prefix cache",
        question="What if every prompt begins with the same long text?",
        a_title="no cache",
        a={"enable_prefix_caching": False},
        b_title="prefix cache",
        b={"enable_prefix_caching": True},
        workload=LabWorkload(
            seed=3, num_requests=18, rate=3, prompts="shared", prompt_words=300, min_output=20, max_output=60
        ),
        figure="ttft_p50_ms",
        figure_title="TTFT p50, ms",
        is_better_high=False,
        explain=_prefix,
    ),
    Story(
        name="speculation",
        title="Speculative decoding",
        question="Can a step give one reader more than one token, and the same ones?",
        a_title="no drafts",
        a={"speculation": "none", "max_num_seqs": 1},
        b_title="n-gram drafts",
        b={"speculation": "ngram", "max_num_seqs": 1},
        workload=LabWorkload(seed=4, num_requests=12, prompts="edit", prompt_words=45, min_output=150, max_output=250),
        figure="output_tokens_per_s",
        figure_title="tokens per second",
        is_better_high=True,
        explain=_speculation,
    ),
    Story(
        name="kv-format",
        title="KV in 8 bits",
        question="What if each token's K and V took fewer bytes?",
        a_title="the model's own type",
        a={"kv_cache_dtype": "auto", "kv_cache_memory": _FEW_BYTES, "max_model_len": 512, "max_num_seqs": 32},
        b_title="8 bits",
        b={"kv_cache_dtype": "int8", "kv_cache_memory": _FEW_BYTES, "max_model_len": 512, "max_num_seqs": 32},
        workload=LabWorkload(seed=5, num_requests=32, prompt_words=40, min_output=100, max_output=300),
        figure="most_running",
        figure_title="sequences at once",
        is_better_high=True,
        explain=_kv_format,
    ),
    Story(
        name="pools",
        title="Two pools",
        question="What if each of the two strokes had a process to itself?",
        a_title="one process",
        a={"pools": "one"},
        b_title="a prefill and a decode process",
        b={"pools": "prefill and decode"},
        workload=LabWorkload(
            seed=6, num_requests=18, rate=3, prompt_words=10, min_output=200, max_output=400, every_nth_is_long=3
        ),
        figure="itl_p99_ms",
        figure_title="ITL p99, ms",
        is_better_high=False,
        explain=_pools,
    ),
)
BY_NAME: Mapping[str, Story] = {story.name: story for story in STORIES}
