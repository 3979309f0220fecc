"""`twostroke bench quality`: loss of quality with smaller formats of weights and KV, for any model and text.

Each row is also compared with float32 arithmetic on the same weights (distance.py): mean and maximal KL divergence,
top-1 agreement and perplexity. llama.cpp can be measured on the same file and text (peer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from twostroke.config.cache import CacheConfig
from twostroke.config.checks import check_int
from twostroke.config.engine import EngineConfig
from twostroke.errors import InvalidParameter
from twostroke.hardware import Hardware
from twostroke.llm import LLM
from twostroke.measure.quality.configuration import keywords_of
from twostroke.measure.quality.distance import (
    FLOAT32,
    Distance,
    DistributionModel,
    StoredDistributions,
    Window,
    first_positions,
    stored_distributions,
)
from twostroke.measure.quality.peer import KV_TYPES, PeerRow, PeerScorer, interpreter_of
from twostroke.measure.quality.scoring import (
    ANSWER,
    CUE,
    Document,
    Needle,
    Perplexity,
    needles,
    perplexity,
    retrieval,
    windows,
)
from twostroke.measure.report import DEFAULT_FOLDER, check_folder, last_part, record, settings
from twostroke.measure.spec.measure import held_out_texts, read_text
from twostroke.model.model_files import ModelFiles, find_model
from twostroke.tables import plain_table, print_table
from twostroke.tokenizer.tokenizer import Tokenizer

KV_CONFIGURATIONS = ("kv_cache_dtype=int8", "kv_cache_dtype=int4")
CONFIGURATIONS = (
    "quantization=int8",
    "quantization=int4",
    "quantization=int4,group_size=64",
    "quantization=int4,group_size=128",
    *KV_CONFIGURATIONS,
)
DISTANCES = (0, 64, 256, 1024, 2048, 3500)
MAX_PERPLEXITY_RISE = {
    "quantization=int8": 0.01,
    "quantization=int4": 0.04,
    "kv_cache_dtype=int8": 0.005,
    "kv_cache_dtype=int4": 0.03,
}
"""Limits for the rise of perplexity over the stored model, for the embedded model on its held-out text."""

MIN_TEXT_TOKENS = 256
"""Minimum length of a text: below, a mean depends on a few tokens, and retrieval is trivial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """Options: the model, the text and the configurations, and the result file."""

    model: str = "embedded"
    """A model folder, a GGUF file, a hub id, or 'embedded'."""
    text: Path | None = None
    """UTF-8 text to score; default: modules of Python's library that the embedded model was not trained on."""
    configuration: tuple[str, ...] = ()
    """Engine settings to compare with the model as it is, as NAME=VALUE,NAME=VALUE with the names of flags
    (quantization=int4,group_size=64); repeat for several rows. Default: int8 and int4 for weights and for KV; only
    for KV if the model is already quantized."""
    context: int | None = None
    """Tokens of a window; default: the model's context, at most 4096."""
    max_text_tokens: int | None = None
    """Score at most this many tokens of the text; at least 256."""
    float32_positions: int = 2048
    """Positions whose distributions are compared with float32 on the same weights; 0 skips this. Each needs 4 bytes x
    the vocabulary in a temporary file."""
    env: tuple[str, ...] = ()
    """llama.cpp=INTERPRETER: the Python of an environment with llama-cpp-python, to compare llama.cpp with float32 too;
    the model must be a GGUF file."""
    num_needles: int = 16
    """Passages of the retrieval task for each distance; 0 skips the task."""
    threads: int | None = None
    """Threads of the model's operators, unless a configuration sets them; default: the processors available to this
    process."""
    seed: int = 0
    """Seed of the retrieval task."""
    name: str = "quality"
    """Name of the result file."""
    results: Path = DEFAULT_FOLDER
    """Folder of the result file."""

    def __post_init__(self) -> None:
        """Check what needs no model, including the names and values in configurations."""
        limits = (("context", self.context, 128), ("max_text_tokens", self.max_text_tokens, MIN_TEXT_TOKENS))
        for name, value, low in limits:
            if value is not None:
                check_int(name, value, low)
        check_int("float32_positions", self.float32_positions, 0)
        check_int("num_needles", self.num_needles, 0)
        check_int("seed", self.seed, 0)
        for configuration in self.configuration:
            keywords_of(configuration)
        if interpreter_of(self.env) is not None:
            if not self.float32_positions:
                raise InvalidParameter("env", self.env[0], "changes nothing with float32_positions=0", "Leave it out.")
            if Path(self.model).suffix.lower() != ".gguf":
                raise InvalidParameter("env", self.env[0], "llama.cpp reads only GGUF files", "Give --model FILE.gguf.")

    @property
    def has_limits(self) -> bool:
        """Whether the limits apply: the embedded model on all of its held-out text."""
        return self.model == "embedded" and self.text is None and self.max_text_tokens is None


@dataclass(frozen=True, slots=True)
class QualityRow:
    """Results of one configuration."""

    configuration: str
    """Settings of the row; empty: the model as it is."""
    score: Perplexity
    found: dict[int, float]
    rise: float
    """Rise of perplexity over the first row, as a share."""
    most_rise: float | None
    distance: Distance | None = None
    """Distance from float32 on the same weights; None if not measured."""

    @property
    def holds(self) -> bool:
        """Whether the rise is within its limit."""
        return self.most_rise is None or self.rise <= self.most_rise


@dataclass(frozen=True, slots=True)
class Quality:
    """Results of all configurations and peers."""

    rows: tuple[QualityRow, ...]
    """Rows: the stored model, then each configuration."""
    peers: tuple[PeerRow, ...] = ()
    """Rows of llama.cpp, if its environment was given."""

    @property
    def holds(self) -> bool:
        """Whether every row is within its limit and every peer gave figures."""
        return all(row.holds for row in self.rows) and all(peer.failure is None for peer in self.peers)


def run_quality(options: QualityOptions) -> Quality:
    """Measure perplexity and retrieval in each configuration, and save JSON.

    Raises:
        InvalidParameter: the text cannot be read or is too short, or there is no space for the temporary file.
        SetupError: the model cannot be loaded in one of the configurations.
    """
    check_folder(options.results)
    files = find_model(options.model)
    configurations = ("", *_configurations(options, files))
    context = options.context or min(files.config().max_context, 4096)
    documents = _documents(options, files.tokenizer())
    # in a shorter text, the tokens in between would contain the passage once more
    longest = min(context - 1, sum(len(document.token_ids) - 1 for document in documents))
    distances = [distance for distance in DISTANCES if distance + CUE + ANSWER <= longest]
    prompts = needles(documents, distances, options.num_needles, options.seed)
    apart, peers = _distances(options, configurations, _windows(options, documents, context), context)
    rows: list[QualityRow] = []
    for configuration in configurations:
        score, found = _measure(options, configuration, documents, prompts, context)
        base = rows[0].score if rows else score
        limit = MAX_PERPLEXITY_RISE.get(configuration) if options.has_limits else None
        rise = score.per_token / base.per_token - 1
        rows.append(QualityRow(configuration, score, found, rise, limit, apart.get(configuration)))
    quality = Quality(tuple(rows), peers)
    _record(options, quality, context)
    return quality


def _windows(options: QualityOptions, documents: list[Document], context: int) -> list[Window]:
    """Return the windows with the positions to compare with float32."""
    cut = (
        Window(document.token_ids[begin:end], first - begin)
        for document in documents
        for begin, first, end in windows(len(document.token_ids), context - 1)
    )
    return first_positions(cut, options.float32_positions)


def _distances(
    options: QualityOptions, configurations: Sequence[str], cut: Sequence[Window], context: int
) -> tuple[dict[str, Distance], tuple[PeerRow, ...]]:
    """Compare each configuration, and llama.cpp if given, with float32."""
    if not cut:
        return {}, ()
    float32 = DistributionModel(_engine_config(options, FLOAT32, context), context, as_numbers=True)
    vocab_size, num_positions = float32.vocab_size, sum(window.num_scored for window in cut)
    with stored_distributions(num_positions, vocab_size) as (kept, folder):
        kept.put(cut, float32.log_probs)
        del float32
        apart = {
            configuration: _distance(options, configuration, cut, kept, context) for configuration in configurations
        }
        interpreter = interpreter_of(options.env)
        if interpreter is None:
            return apart, ()
        threads = options.threads or Hardware.of_this_machine().cores
        scorer = PeerScorer(interpreter, Path(options.model).resolve(), threads, vocab_size, folder)
        kv_types = (None, *(KV_TYPES[one] for one in configurations if one in KV_TYPES))
        return apart, tuple(scorer.row(cut, kept, kv_type) for kv_type in kv_types)


def _distance(
    options: QualityOptions, configuration: str, cut: Sequence[Window], kept: StoredDistributions, context: int
) -> Distance:
    keywords = keywords_of(configuration) if configuration else {}
    model = DistributionModel(_engine_config(options, keywords, context), context)
    return kept.distance(cut, model.log_probs)


def _engine_config(options: QualityOptions, keywords: Mapping[str, Any], context: int) -> EngineConfig:
    """Return engine settings for one process: several ranks compute the same bits."""
    of_ranks = ("tensor_parallel_size", "tensor_parallel_address", "enable_expert_parallel")
    given = {"threads": options.threads, **{name: value for name, value in keywords.items() if name not in of_ranks}}
    return EngineConfig.from_keywords(model=options.model, max_model_len=context, **given)


def _configurations(options: QualityOptions, files: ModelFiles) -> tuple[str, ...]:
    """Return the requested or default configurations; raise if the model cannot be loaded in one, before any runs."""
    config = files.config()
    if not options.configuration:
        return CONFIGURATIONS if files.weights(config, None).quantization is None else KV_CONFIGURATIONS
    for configuration in options.configuration:
        files.weights(config, keywords_of(configuration).get("quantization"))
    return options.configuration


def _documents(options: QualityOptions, tokenizer: Tokenizer) -> list[Document]:
    texts = held_out_texts() if options.text is None else [read_text("text", options.text)]
    before = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    left = options.max_text_tokens
    documents: list[Document] = []
    num_tokens = 0
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)[:left]
        num_tokens += len(token_ids)
        if left is not None:
            left -= len(token_ids)
        num_bytes = len((text if options.max_text_tokens is None else tokenizer.decode(token_ids)).encode())
        if token_ids:
            # if the tokenizer has neither token, the text's first token is not scored
            opening = () if before is None else (before,)
            documents.append(Document((*opening, *token_ids), num_bytes))
    if num_tokens < MIN_TEXT_TOKENS:
        limit = f"has {num_tokens} tokens; at least {MIN_TEXT_TOKENS} are needed for meaningful figures"
        raise InvalidParameter("text", str(options.text), limit, "Give a longer text.")
    return documents


def _measure(
    options: QualityOptions, configuration: str, documents: list[Document], prompts: list[Needle], context: int
) -> tuple[Perplexity, dict[int, float]]:
    keywords = keywords_of(configuration) if configuration else {}
    # no prefix cache: requests with prompt log-probabilities compute the whole prompt anyway
    given: dict[str, Any] = {"threads": options.threads, "enable_prefix_caching": False, "max_num_seqs": 8, **keywords}
    if "kv_cache_memory" not in keywords and "num_kv_blocks" not in keywords:
        given["num_kv_blocks"] = given["max_num_seqs"] * -(
            -context // given.get("block_size", CacheConfig().block_size)
        )
    with LLM(options.model, max_model_len=context, **given) as llm:
        return perplexity(llm, documents, context - 1), retrieval(llm, prompts)


def _record(options: QualityOptions, quality: Quality, context: int) -> None:
    rows = quality.rows
    text = "held-out modules of Python's library" if options.text is None else last_part(options.text)
    kept = {name: value for name, value in settings(options).items() if name != "env"}
    record(
        "twostroke bench quality",
        options,
        config={**kept, "configuration": [row.configuration for row in rows if row.configuration]},
        workload={"text": text, "context": context, "tokens": rows[0].score.num_tokens},
        results={
            row.configuration or "base": {
                "perplexity": row.score.per_token,
                "bits_per_byte": row.score.bits_per_byte,
                "perplexity_rise": row.rise,
                "most_rise": row.most_rise,
                "retrieval": {str(distance): share for distance, share in row.found.items()},
                "against_float32": None if row.distance is None else row.distance.as_json(),
            }
            for row in rows
        }
        | {peer.name: peer.as_json() for peer in quality.peers},
    )


def print_quality(quality: Quality, console: Console | None = None) -> None:
    """Print perplexity and retrieval, then the distances from float32."""
    console = console or Console()
    if quality.rows[0].found:
        console.print("passage tokens that are the first choice: unseen, and after @N tokens", style="dim")
    print_table(_score_table(quality.rows), console)
    if any(row.distance is not None for row in quality.rows):
        console.print("\ncompared with float32 arithmetic on the same weights", style="dim")
        print_table(_distance_table(quality), console)
    for peer in quality.peers:
        if peer.failure is not None:
            console.print(f"[bold red]{peer.name}[/]: {peer.failure}", highlight=False)


def _score_table(rows: tuple[QualityRow, ...]) -> Table:
    distances = list(rows[0].found)
    names = [f"@{distance}" if distance else "unseen" for distance in distances]
    table = plain_table(("configuration",), ("perplexity", "bits/byte", "rise", "limit", *names))
    for row in rows:
        limit = "" if row.most_rise is None else f"{row.most_rise:.1%}{'' if row.holds else ' [bold red]FAILS[/]'}"
        cells = [f"{row.score.per_token:.4f}", f"{row.score.bits_per_byte:.4f}", f"{row.rise:+.2%}", limit]
        table.add_row(_named(row), *cells, *(f"{row.found[d]:.0%}" for d in distances))
    return table


def _distance_table(quality: Quality) -> Table:
    figures = ("positions", "mean KL", "max KL", "same top-1", "perplexity", "float32", "rise")
    table = plain_table(("configuration",), figures)
    named = [(_named(row), row.distance) for row in quality.rows]
    for name, distance in [*named, *((peer.name, peer.distance) for peer in quality.peers)]:
        if distance is None:
            continue
        table.add_row(
            name,
            f"{distance.num_positions:,}",
            f"{distance.mean_kl:.5f}",
            f"{distance.max_kl:.3f}",
            f"{distance.top1_agreement:.2%}",
            f"{distance.perplexity:.4f}",
            f"{distance.float32_perplexity:.4f}",
            f"{distance.rise:+.2%}",
        )
    return table


def _named(row: QualityRow) -> str:
    return row.configuration or "as it is"
