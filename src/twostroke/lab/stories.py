"""Six stories, one for each technique: two settings, what they are asked, what to look at, and why it comes out so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twostroke.lab.claims import Remark, Seen, Sentence, StoryClaim
from twostroke.lab.figures import Measured, Tokens
from twostroke.lab.workload import LabWorkload

_FEW_BYTES = 8 << 20
"""Of KV memory: little enough that it decides who runs."""
_LONG_AMONG_SHORT = LabWorkload(prompt_words=10, min_output=80, max_output=150, every_nth_is_long=3)
"""Each third request has a long prompt, which comes while others read their answers."""


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
    figure_title: str
    claims: tuple[StoryClaim | Remark, ...] = field(compare=False)
    """The effect, what comes with it, and the price."""

    @property
    def promise(self) -> StoryClaim:
        """What is to be seen first of all."""
        first = self.claims[0]
        assert isinstance(first, StoryClaim), f"{self.name} begins with a remark"
        return first

    @property
    def figure(self) -> str:
        """The one to look at, of Figures."""
        return self.promise.figure

    def tell(self, a: Measured, b: Measured, tokens: Tokens) -> list[Sentence]:
        """What came of it and why, by what was measured."""
        seen = Seen(a, b, tokens)
        return [claim.told(seen) for claim in self.claims]

    def to_dict(self) -> dict[str, Any]:
        """As it is sent, before it has run."""
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
                rises=True,
                because="A static batch ends with its longest answer; until then the places of those that have ended "
                "stay empty, and who waits goes on waiting. A continuous batch is made anew for every step, so a "
                "place is taken again in the step after it was left.",
                unless="Empty places cost nothing where the answers of a batch are equally long, or where a step "
                "with fewer sequences takes less time by as much.",
            ),
            StoryClaim(
                figure="ttft_p99_ms",
                what="TTFT p99, ms",
                rises=False,
                because="Who waits is let in when anybody ends, not when everybody has.",
                unless="Who waits is let in sooner only where somebody ends sooner.",
            ),
            StoryClaim(
                kind="price",
                figure="itl_p99_ms",
                what="ITL p99, ms",
                rises=True,
                because="Newcomers' prompts are computed in steps of those who decode, and lengthen them; a static "
                "batch has all its prompts behind it when the first of its answers begins.",
                unless="Newcomers' prompts are computed in steps of those who decode; short ones lengthen a step by "
                "little.",
            ),
        ),
    ),
    Story(
        name="chunking",
        title="Chunked prefill",
        question="What does a long prompt do to those who are reading their answers?",
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
                rises=False,
                because="A prompt that is computed in one pass holds up everybody who decodes for the whole of it. "
                "Cut into chunks, each step takes a piece of it beside the others' next tokens: they wait for one "
                "mixed step, which is longer than a step of decodes alone and much shorter than the whole prompt.",
                unless="Chunks bound what a prompt adds to a step, not what else holds a step up: where nobody "
                "decodes while a long prompt comes, or the processor is taken away for as long, they bring nothing.",
            ),
            StoryClaim(
                kind="price",
                figure="ttft_p99_ms",
                what="TTFT p99, ms",
                rises=True,
                because="The long prompts wait longer for their first token: each of their steps computes others' "
                "tokens too, has what every step costs by itself, and reads the K and V of the chunks before it "
                "again.",
                unless="A chunk's step computes others' tokens too and has what every step costs by itself; here "
                "that does not stand out.",
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
                rises=False,
                because="{seen[b.cached_share]} of the prompts' tokens were found and not computed. K and V of a "
                "token depend on it and the tokens before it alone, so prompts that begin alike have the same K and "
                "V there: whole blocks are found by a hash of all tokens up to their end, and shared.",
                unless="{seen[b.cached_share]} of the prompts' tokens were found; what is not found, or would have "
                "been computed in no time, saves none.",
            ),
            StoryClaim(
                figure="tpot_p50_ms",
                what="TPOT p50, ms",
                rises=False,
                because="A token reads no less for it: the steps became shorter because they no longer carry others' "
                "prompts.",
                unless="A token reads as much K and V with the cache as without; only steps that carry others' "
                "prompts can become shorter.",
            ),
            Remark(
                kind="price",
                lower="ttft_p50_ms",
                higher="ttft_p99_ms",
                text="Whoever brings the text first computes it for all: TTFT p99 is {seen[b.ttft_p99_ms]} ms with "
                "the cache, its median {seen[b.ttft_p50_ms]}. And what is kept fills KV memory until somebody else "
                "needs it.",
                otherwise="Whoever brings the text first computes it for all; here that does not stand out (TTFT p99 "
                "with the cache {seen[b.ttft_p99_ms]} ms, its median {seen[b.ttft_p50_ms]}). What is kept fills KV "
                "memory until somebody else needs it.",
            ),
        ),
    ),
    Story(
        name="speculation",
        title="Speculative decoding",
        question="Can a step give one reader more than one token, and the same ones?",
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
                rises=True,
                because="A pass gave {seen[b.tokens_per_pass]} tokens instead of one. Four guesses a pass are taken "
                "from the text's own past, which repeats itself as edits do, and are checked together; that takes less "
                "than a pass for each, since much of a pass (starting it, reading the weights) is paid once.",
                unless="A pass gave {seen[b.tokens_per_pass]} tokens; its guesses make it longer, too, and bring "
                "time only where that is less than what they save.",
            ),
            Remark(
                kind="price",
                lower="rejected_share",
                text="Of the guesses {seen[b.rejected_share]} were not what the model says, and were computed for "
                "nothing; meanwhile they took room for K and V. This story always takes four. A server goes by "
                'measurement ("auto"), and drafts fewer or none where it does not pay.',
                otherwise="No guess was computed for nothing in this text. Elsewhere some are: a server goes by "
                'measurement ("auto"), and drafts fewer or none where it does not pay.',
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
                rises=True,
                because="The same bytes hold {seen[a.kv_capacity_tokens]} tokens in the model's own type and "
                "{seen[b.kv_capacity_tokens]} in 8 bits: each number of K and V becomes a code of a byte, and each "
                "vector (of a token and head) keeps a scale and a zero.",
                unless="The same bytes hold {seen[a.kv_capacity_tokens]} and {seen[b.kv_capacity_tokens]} tokens, "
                "but memory was not what decided who runs.",
            ),
            StoryClaim(
                figure="ttft_p50_ms",
                what="TTFT p50, ms",
                rises=False,
                because="Who need not wait for memory gets a first token sooner.",
                unless="More sequences at once share the same processor: who no longer waits for memory waits for "
                "steps that have become longer.",
            ),
            StoryClaim(
                kind="price",
                figure="tpot_p50_ms",
                what="TPOT p50, ms",
                rises=True,
                because="More sequences share each step, and codes are turned back into numbers before attention "
                "reads them.",
                unless="Codes are turned back into numbers before attention reads them; that and the fuller steps "
                "cost too little here to see.",
            ),
            Remark(
                kind="price",
                lower="most_running",
                text="The answers: {seen.tokens.num_equal} of {seen.tokens.num_requests} are the same on both sides. "
                "Rounding gives attention slightly other numbers; where two next tokens are nearly equally likely "
                "the other one may win, and the rest of the answer follows it. With 8 bits, too, every run and every "
                "batch gives the same again.",
                otherwise="Nobody ran.",
            ),
        ),
    ),
    Story(
        name="pools",
        title="Two pools",
        question="What if each of the two strokes had a process to itself?",
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
                rises=False,
                because="A prompt that is handed over shares neither its steps nor its core with those who decode. "
                "The router hands one over where it predicts that this is sooner, and leaves it with those who decode "
                "where it is not.",
                unless="A prompt that is handed over shares no step with those who decode any more, but it waits for "
                "the prompts before it, and all processes share one machine.",
            ),
            StoryClaim(
                figure="itl_p99_ms",
                what="ITL p99, ms",
                rises=False,
                because="Prompts that are handed over are computed within no step of decoding.",
                unless="Prompts that are handed over are computed within no step of decoding any more; but the router "
                "leaves some where decoding is, if that is sooner, the gap behind each first token counts, in which K "
                "and V travel, and both processes share memory and, where others need the cores, processor.",
            ),
            StoryClaim(
                kind="price",
                figure="tokens_per_s_a_process",
                what="Tokens a second for each engine process",
                rises=False,
                because="Two pools are two processes with twice the cores, and each stands still while its stroke "
                "has nothing to do. K and V travel between them, which delays the second token, not the first.",
                unless="Two pools are two processes with twice the cores; here both had enough to do. K and V travel "
                "between them, which delays the second token, not the first.",
            ),
        ),
    ),
)
BY_NAME: Mapping[str, Story] = {story.name: story for story in STORIES}
