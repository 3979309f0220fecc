"""Options of `python -m benchmarks compare`, checked before anything is started.

And the calculation of figures from the times of tokens, the same for every engine:

    prompts handed over
    |------- every prompt is read -------|---- all of them decode ----|-- some have ended --|
    0                                  last first token        first last token            end

Decode rates count the tokens between the last request's first token and the first request's last one. During this time
the batch is full, even if an engine decodes some requests earlier, while it reads the prompts of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from twostroke.config.checks import check_bool, check_choice, check_int, check_number, check_text, parse_ints
from twostroke.config.load import MAX_THREADS, ActivationQuantization
from twostroke.errors import InvalidParameter
from twostroke.measure.peers.peer import IK_LLAMA_CPP, LLAMA_CPP, Peer, PeerFailed
from twostroke.measure.report import DEFAULT_FOLDER, model_name


@dataclass(frozen=True, slots=True)
class PeerWork:
    """Requests of one size, all at once."""

    num_requests: int
    prompt_length: int
    output_length: int

    @property
    def name(self) -> str:
        """Display name of the work."""
        return f"{self.num_requests} x {self.prompt_length} in / {self.output_length} out"

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of its figures (`figures_of`)."""
        if self.output_length == 1:
            return (f"prefill {self.prompt_length}",)
        batch = f"batch {self.num_requests}"
        return (f"decode, {batch}",) if self.num_requests == 1 else (f"decode, {batch}", f"end to end, {batch}")


def checked_tokens(answer: Any, work: PeerWork) -> list[tuple[float, int]]:
    """Return an engine's answer as (seconds, request), ordered by time.

    Raises:
        PeerFailed: it is no such list, or a request does not have exactly the requested number of tokens.
    """
    try:
        tokens = sorted((float(time_s), int(index)) for time_s, index in answer)
    except (TypeError, ValueError) as error:
        raise PeerFailed(f"its tokens are no list of (seconds, request): {str(answer)[:80]}") from error
    counts = [0] * work.num_requests
    for time_s, index in tokens:
        if not (0 < time_s < float("inf") and 0 <= index < work.num_requests):
            raise PeerFailed(f"it reported a token of request {index} of {work.num_requests} after {time_s} s")
        counts[index] += 1
    if set(counts) != {work.output_length}:
        raise PeerFailed(f"it made between {min(counts)} and {max(counts)} of {work.output_length} tokens a request")
    return tokens


def figures_of(work: PeerWork, tokens: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return the work's figures in tokens per second.

    Two requests; the second one's prompt is read in the step that brings the first one's second token:

    >>> figures_of(Work(2, 10, 3), [(1.0, 0), (2.0, 0), (2.0, 1), (3.0, 0), (3.0, 1), (3.5, 1)])
    {'decode, batch 2': 2.0, 'end to end, batch 2': 7.428571428571429}
    """
    end_s = tokens[-1][0]
    first_s = [min(t for t, i in tokens if i == index) for index in range(work.num_requests)]
    if work.output_length == 1:
        return {work.figures[0]: work.num_requests * work.prompt_length / end_s}
    last_s = [max(t for t, i in tokens if i == index) for index in range(work.num_requests)]
    begin_s, full_s = max(first_s), min(last_s)
    if full_s <= begin_s:
        raise PeerFailed(f"its requests never decode all at once ({work.name})")
    count = sum(begin_s < t <= full_s for t, _ in tokens)
    rates = [count / (full_s - begin_s), work.num_requests * (work.prompt_length + work.output_length) / end_s]
    return dict(zip(work.figures, rates, strict=False))


_DRIVERS = Path(__file__).resolve().parent / "drivers.py"
TWOSTROKE = Peer("twostroke", _DRIVERS, reads_any=True, engine="Twostroke")
BEFORE = replace(TWOSTROKE, name="twostroke-before")
"""Another version of twostroke, in its own environment; in ours it is the same version twice, which shows the
scatter."""
PEERS = {
    peer.name: peer
    for peer in (
        LLAMA_CPP,
        IK_LLAMA_CPP,
        Peer("openvino", _DRIVERS, {"bf16": "F16", "int8": "Q8_0", "int4": "Q4_0"}, engine="OpenVINO"),
        Peer("vllm", _DRIVERS, engine="VLLM"),
        Peer("transformers", _DRIVERS, engine="Transformers"),
        BEFORE,
    )
}
"""Engines to compare with, by name."""

Precision = Literal["bf16", "int8", "int4"]

READY = PeerWork(1, 16, 1)
"""Work that shows that an engine is ready."""
WARM_UP = (READY, PeerWork(1, 32, 4), PeerWork(8, 32, 4))
"""Warm-up work of each engine."""

_MAX_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Engines, work and time of a comparison."""

    model: str = "embedded"
    """A Hugging Face model folder, a hub id, or 'embedded', which are converted to GGUF files; or a GGUF file, which
    every engine that can read it runs unchanged."""
    peers: str = ",".join(name for name in PEERS if name != BEFORE.name)
    """Engines to compare with, separated by commas; twostroke-before is another version of twostroke."""
    env: tuple[str, ...] = ()
    """NAME=INTERPRETER: the Python of a peer's environment; default: our own. Can be repeated."""
    precision: Precision | None = None
    """Type of a folder's weights: bf16 (the default), int8 (peers: Q8_0) or int4 (peers: Q4_0). GGUF files keep
    theirs."""
    activation_quantization: ActivationQuantization | None = None
    """Activation quantization of twostroke, as in its settings; the peers use their own."""
    threads: int | None = None
    """Threads of every engine; default: the processors that this process may use."""
    rounds: int = 3
    """Rounds in which each engine does each work, alternating: A B A B."""
    time_limit: float = 480.0
    """Seconds for everything; after the first round, work that would exceed them is skipped."""
    answer_limit: float = 600.0
    """Seconds that an engine may take to load, or for one work; then it counts as failed."""
    prefill_length: int = 512
    """Prompt tokens of the work that measures prefill."""
    prompt_length: int = 128
    """Prompt tokens per request of the other works."""
    output_length: int = 64
    """Output tokens per request of the other works."""
    batch_sizes: str = "1,8,32"
    """Simultaneous requests of the other works."""
    gguf_folder: Path | None = None
    """Folder that keeps GGUF files between runs; default: a temporary folder."""
    seed: int = 0
    """Seed of the prompts."""
    results: Path = DEFAULT_FOLDER
    """Folder for JSON and PNG."""
    plots: bool = True
    """Draw a PNG of the result (needs the extra 'bench')."""

    def __post_init__(self) -> None:
        """Check what needs no model."""
        check_text("model", self.model)
        if self.precision is not None:
            check_choice("precision", self.precision, get_args(Precision))
            if self.is_gguf:
                limit = "is of a folder's weights, and a GGUF file's are what they are"
                raise InvalidParameter("precision", self.precision, limit, "Leave it out.")
        if self.activation_quantization is not None:
            check_choice("activation_quantization", self.activation_quantization, get_args(ActivationQuantization))
            if self.weights == "bf16":
                limit = "is about quantized weights"
                raise InvalidParameter("activation_quantization", self.activation_quantization, limit, "Leave it out.")
        check_int("threads", 1 if self.threads is None else self.threads, 1, MAX_THREADS)
        for name in ("time_limit", "answer_limit"):
            check_number(name, getattr(self, name), 1.0, _MAX_SECONDS, f"1 to {_MAX_SECONDS:g} seconds")
        for name in ("rounds", "prefill_length", "prompt_length"):
            check_int(name, getattr(self, name), 1)
        check_int("output_length", self.output_length, 3)  # a first token, a decode, a last token
        check_int("seed", self.seed, 0, 2**32 - 1)
        check_bool("plots", self.plots)
        for name in self.peer_names:
            _known("peers", name)
        for name in self.interpreters:
            if name not in self.peer_names:
                limit = f"names an engine that is not compared with ({self.peers})"
                raise InvalidParameter("env", name, limit, "Add it to --peers, or leave it out.")
        assert self.works

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file."""
        return Path(self.model).suffix.lower() == ".gguf"

    @property
    def weights(self) -> str:
        """Type of the weights: bf16, int8, int4, or gguf for an unchanged file."""
        return "gguf" if self.is_gguf else self.precision or "bf16"

    @property
    def peer_names(self) -> tuple[str, ...]:
        """Names of the peers in the given order, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.peers.split(",") if name.strip()))

    @property
    def interpreters(self) -> dict[str, Path]:
        """Interpreters of the peers that have their own environment."""
        found: dict[str, Path] = {}
        for pair in self.env:
            name, _, interpreter = pair.partition("=")
            if not name or not interpreter:
                raise InvalidParameter("env", pair, "must be NAME=INTERPRETER, like llama.cpp=./llama/bin/python")
            _known("env", name)
            path = Path(interpreter).expanduser().absolute()
            if not path.is_file():
                raise InvalidParameter("env", pair, "names no file", "Give the environment's python.")
            found[name] = path
        return found

    @property
    def works(self) -> tuple[PeerWork, ...]:
        """Works in the order of their execution."""
        sizes = parse_ints("batch_sizes", self.batch_sizes, 1, 1024)
        others = (PeerWork(size, self.prompt_length, self.output_length) for size in sizes)
        return (PeerWork(1, self.prefill_length, 1), *others)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest request, warm-ups included."""
        return max(work.prompt_length + work.output_length for work in (*WARM_UP, *self.works))

    @property
    def max_num_requests(self) -> int:
        """Most simultaneous requests, warm-ups included."""
        return max(work.num_requests for work in (*WARM_UP, *self.works))

    @property
    def name(self) -> str:
        """Name of the written files."""
        activations = f"-activations-{self.activation_quantization}" if self.activation_quantization else ""
        name = Path(model_name(self.model)).name
        model = name.removesuffix(Path(name).suffix) if self.is_gguf else f"{name}-{self.weights}"
        versions = "-before" if self.peer_names == (BEFORE.name,) else ""
        return f"compare-{model}{activations}{versions}"

    def as_json(self) -> dict[str, Any]:
        """Return the options for a result, without any place."""
        places = ("results", "env", "gguf_folder", "plots")
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in places}
        return kept | {"model": model_name(self.model), "precision": self.weights}


def _known(option: str, name: str) -> None:
    if name not in PEERS:
        raise InvalidParameter(option, name, f"must be one of {', '.join(PEERS)}")
