"""Six stories, one per technique: two settings, a workload, the figure to look at, and the reasons for the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twostroke.lab.claims import Remark, Sentence, StoryClaim, StoryFigures
from twostroke.lab.figures import Measured, Tokens
from twostroke.lab.workload import LabWorkload

_FEW_BYTES = 8 << 20
"""KV memory so small that it limits how many requests run."""
_LONG_AMONG_SHORT = LabWorkload(prompt_words=10, min_output=80, max_output=150, every_nth_is_long=3)
"""Workload in which every third request has a long prompt and arrives while others decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Comparison of a technique turned off and on."""

    name: str
    title: str
    question: str
    a_title: str
    a: Mapping[str, Any]
    b_title: str
    b: Mapping[str, Any]
    workload: LabWorkload
    figure_title: str
    claims: tuple[StoryClaim | Remark, ...] = field(compare=False)
    """Claims about the effect, its side effects, and last the price."""

    @property
    def promise(self) -> StoryClaim:
        """Main claim of the story."""
        first = self.claims[0]
        assert isinstance(first, StoryClaim), f"{self.name} begins with a remark"
        return first

    @property
    def figure(self) -> str:
        """Name of the figure to look at, a field of `Figures`."""
        return self.promise.figure

    def tell(self, a: Measured, b: Measured, tokens: Tokens) -> list[Sentence]:
        """Return the sentences about the measured figures."""
        seen = StoryFigures(a, b, tokens)
        return [claim.sentence(seen) for claim in self.claims]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of a story that has not run."""
        texts = ("name", "title", "question", "a_title", "b_title", "figure", "figure_title")
        shown = {name: getattr(self, name) for name in texts}
        return shown | {"a": dict(self.a), "b": dict(self.b), "workload": asdict(self.workload)}


STORIES = (
    Story(
        name="batching",
        title="Continuous batching",
        question="What does it cost when a batch has to wait for its longest answer?",
        a_title="static",
        a={"batching": "static", "max_num_seqs": 4},
        b_title="continuous",
        b={"batching": "continuous", "max_num_seqs": 4},
        workload=LabWorkload(seed=1, num_requests=16, prompt_words=30, min_output=5, max_output=250),
        figure_title="tokens per second",
        claims=(
            StoryClaim(
                figure="output_tokens_per_s",
                what="Tokens a second",
                should_rise=True,
                because="A static batch ends with its longest answer. Until then the slots of finished requests stay "
                "empty, and waiting requests keep waiting. A continuous batch is formed anew for every step, so a "
                "free slot is filled in the next step.",
                unless="Empty slots cost nothing if all answers of a batch are equally long, or if a step with fewer "
                "sequences is shorter in proportion.",
            ),
            StoryClaim(
                figure="ttft_p99_ms",
                what="TTFT p99, ms",
                should_rise=False,
                because="A waiting request is admitted when any request ends, not when all have ended.",
                unless="A waiting request is admitted sooner only if some request ends sooner.",
            ),
            StoryClaim(
                kind="price",
                figure="itl_p99_ms",
                what="ITL p99, ms",
                should_rise=True,
                because="Prompts of new requests are computed in the same steps as decodes, and lengthen them. A "
                "static batch computes all its prompts before it decodes.",
                unless="Prompts of new requests are computed in the same steps as decodes; short prompts lengthen a "
                "step only a little.",
            ),
        ),
    ),
    Story(
        name="chunking",
        title="Chunked prefill",
        question="How does a long prompt delay requests that decode?",
        a_title="whole prompts",
        a={"enable_chunked_prefill": False, "enable_prefix_caching": False, "max_num_seqs": 16},
        b_title="steps of at most 64 tokens",
        b={
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            "max_num_seqs": 16,
        },
        workload=replace(_LONG_AMONG_SHORT, seed=2, num_requests=12, rate=5, long_words=400),
        figure_title="longest gap between two tokens, ms",
        claims=(
            StoryClaim(
                figure="longest_gap_ms",
                what="Longest gap between two tokens of an answer, ms",
                should_rise=False,
                because="A prompt that is computed in one pass delays all decodes for the whole pass. With chunks, "
                "each step computes one chunk beside the next tokens of other requests. They wait for one mixed step: "
                "longer than a step of decodes alone, and much shorter than the whole prompt.",
                unless="Chunks limit only what a prompt adds to a step. They gain nothing if no request decodes while "
                "a long prompt is computed, or if other programs take the processor for as long.",
            ),
            StoryClaim(
                kind="price",
                figure="ttft_p99_ms",
                what="TTFT p99, ms",
                should_rise=True,
                because="Long prompts wait longer for their first token: each of their steps also computes tokens of "
                "other requests, has the fixed cost of a step, and reads the K and V of the earlier chunks again.",
                unless="The step of a chunk also computes tokens of other requests and has the fixed cost of a step; "
                "the effect is too small to see here.",
            ),
        ),
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
            seed=3, num_requests=12, rate=4, prompts="shared", prompt_words=200, min_output=20, max_output=60
        ),
        figure_title="TTFT p50, ms",
        claims=(
            StoryClaim(
                figure="ttft_p50_ms",
                what="TTFT p50, ms",
                should_rise=False,
                because="{seen[b.cached_share]} of the prompt tokens were found in the cache and not computed. K and V "
                "of a token depend only on it and the tokens before it, so prompts with the same beginning have the "
                "same K and V there. Whole blocks are found by a hash of all tokens up to their end, and shared.",
                unless="{seen[b.cached_share]} of the prompt tokens were found in the cache. Time is saved only for "
                "tokens that are found and would have taken time to compute.",
            ),
            StoryClaim(
                figure="tpot_p50_ms",
                what="TPOT p50, ms",
                should_rise=False,
                because="Steps are shorter because they compute fewer prompt tokens of other requests. A decode reads "
                "as much K and V as before.",
                unless="A decode reads as much K and V with the cache as without. Only steps that compute prompts of "
                "other requests can become shorter.",
            ),
            Remark(
                kind="price",
                lower="ttft_p50_ms",
                higher="ttft_p99_ms",
                text="The first request with the text computes it for all: TTFT p99 is {seen[b.ttft_p99_ms]} ms with "
                "the cache, its median {seen[b.ttft_p50_ms]}. Cached blocks fill KV memory until another request "
                "needs the space.",
                otherwise="The first request with the text computes it for all; the effect is too small to see here "
                "(TTFT p99 with the cache {seen[b.ttft_p99_ms]} ms, its median {seen[b.ttft_p50_ms]}). Cached blocks "
                "fill KV memory until another request needs the space.",
            ),
        ),
    ),
    Story(
        name="speculation",
        title="Speculative decoding",
        question="Can a step give a request several tokens without changing them?",
        a_title="no drafts",
        a={"speculation": "none", "max_num_seqs": 1},
        b_title="n-gram drafts",
        b={"speculation": "ngram", "max_num_seqs": 1},
        workload=LabWorkload(seed=4, num_requests=5, prompts="edit", prompt_words=45, min_output=200, max_output=300),
        figure_title="tokens per second",
        claims=(
            StoryClaim(
                figure="output_tokens_per_s",
                what="Tokens a second",
                should_rise=True,
                because="A pass gave {seen[b.tokens_per_pass]} tokens instead of one. Four draft tokens per pass are "
                "copied from earlier text, which edits repeat, and are verified together. That is faster than a pass "
                "for each token, since starting a pass and reading the weights is paid once.",
                unless="A pass gave {seen[b.tokens_per_pass]} tokens. Drafts also make a pass longer, and save time "
                "only if they save more passes than that costs.",
            ),
            Remark(
                kind="price",
                lower="rejected_share",
                text="Of the draft tokens {seen[b.rejected_share]} were rejected: they were computed for nothing, and "
                "used KV blocks meanwhile. This story always drafts four tokens. A server "
                'chooses by measurement ("auto"), and drafts fewer or none if drafts do not pay.',
                otherwise="No draft token was rejected in this text. Other texts have some: a server "
                'chooses by measurement ("auto"), and drafts fewer or none if drafts do not pay.',
            ),
        ),
    ),
    Story(
        name="kv-format",
        title="KV in 8 bits",
        question="What if each token's K and V took fewer bytes?",
        a_title="the model's own type",
        a={"kv_cache_dtype": "auto", "kv_cache_memory": _FEW_BYTES, "max_model_len": 512, "max_num_seqs": 32},
        b_title="8 bits",
        b={"kv_cache_dtype": "int8", "kv_cache_memory": _FEW_BYTES, "max_model_len": 512, "max_num_seqs": 32},
        workload=LabWorkload(seed=5, num_requests=24, prompt_words=60, min_output=20, max_output=80),
        figure_title="sequences at once",
        claims=(
            StoryClaim(
                figure="most_running",
                what="Sequences at once",
                should_rise=True,
                because="The same bytes hold {seen[a.kv_capacity_tokens]} tokens in the model's own type and "
                "{seen[b.kv_capacity_tokens]} in 8 bits: each value of K and V is quantized to one byte, with a scale "
                "and a zero point per vector (one per token and head).",
                unless="The same bytes hold {seen[a.kv_capacity_tokens]} and {seen[b.kv_capacity_tokens]} tokens, "
                "but memory did not limit how many requests ran.",
            ),
            StoryClaim(
                figure="ttft_p50_ms",
                what="TTFT p50, ms",
                should_rise=False,
                because="Requests that do not wait for memory get their first token sooner.",
                unless="More sequences share the same processor: requests no longer wait for memory, but each step "
                "takes longer.",
            ),
            StoryClaim(
                kind="price",
                figure="tpot_p50_ms",
                what="TPOT p50, ms",
                should_rise=True,
                because="More sequences share each step, and K and V are dequantized before attention reads them.",
                unless="K and V are dequantized before attention reads them; that and the fuller steps cost too little "
                "to see here.",
            ),
            Remark(
                kind="price",
                lower="most_running",
                text="Answers: {seen.tokens.num_equal} of {seen.tokens.num_requests} are the same on both sides. "
                "Rounding changes the results of attention slightly. If two next tokens are almost equally likely, "
                "the other one may be chosen, and the rest of the answer then differs. With 8 bits, too, all runs and "
                "all batches give the same tokens.",
                otherwise="No request ran.",
            ),
        ),
    ),
    Story(
        name="pools",
        title="Two pools",
        question="What if prefill and decode each had a process of their own?",
        a_title="one process",
        a={"pools": "one"},
        b_title="a prefill and a decode process",
        b={"pools": "prefill and decode"},
        workload=replace(_LONG_AMONG_SHORT, seed=6, num_requests=9, rate=4, long_words=500),
        figure_title="TTFT p50, ms",
        claims=(
            StoryClaim(
                figure="ttft_p50_ms",
                what="TTFT p50, ms",
                should_rise=False,
                because="A prompt in the prefill pool shares neither steps nor cores with decodes. The router sends a "
                "prompt there if it predicts an earlier first token, and otherwise leaves it to the decode pool.",
                unless="A prompt in the prefill pool shares no step with decodes, but it waits for the prompts before "
                "it, and all processes share one machine.",
            ),
            StoryClaim(
                figure="itl_p99_ms",
                what="ITL p99, ms",
                should_rise=False,
                because="Prompts in the prefill pool are not computed in the steps of decodes.",
                unless="Prompts in the prefill pool are not computed in the steps of decodes. But the router leaves "
                "some prompts to the decode pool if that is faster, the gap after each first token includes the "
                "transfer of K and V, and both processes share memory and possibly cores.",
            ),
            StoryClaim(
                kind="price",
                figure="tokens_per_s_a_process",
                what="Tokens a second for each engine process",
                should_rise=False,
                because="Two pools are two processes with twice the cores, and each is idle while it has no prefills "
                "or no decodes. The transfer of K and V delays the second token, not the first.",
                unless="Two pools are two processes with twice the cores; here both had enough work. The transfer of "
                "K and V delays the second token, not the first.",
            ),
        ),
    ),
)
BY_NAME: Mapping[str, Story] = {story.name: story for story in STORIES}
