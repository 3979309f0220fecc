"""What `python -m benchmarks compare` compares, checked before anything is started.

And how the times of tokens become figures, the same way for every engine:

    prompts handed over
    |------- every prompt is read -------|---- all of them decode ----|-- some have ended --|
    0                                  last first token        first last token            end

Decode rates count the tokens between the last request's first token and the first request's last one: while the batch
is full, whether or not an engine decodes some requests already while it reads the prompts of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from twostroke.config.checks import number, one_of, switch, text, whole_number, whole_numbers
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
        """For people."""
        return f"{self.num_requests} x {self.prompt_length} in / {self.output_length} out"

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of what it shows (`figures_of`)."""
        if self.output_length == 1:
            return (f"prefill {self.prompt_length}",)
        batch = f"batch {self.num_requests}"
        return (f"decode, {batch}",) if self.num_requests == 1 else (f"decode, {batch}", f"end to end, {batch}")


def checked_tokens(answer: Any, work: PeerWork) -> list[tuple[float, int]]:
    """An engine's answer as (seconds, request), in the order of time.

    Raises:
        PeerFailed: it is none, or a request has not exactly the tokens that were asked for.
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
    """Tokens per second of what the work shows.

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
"""Another version of ours, in an environment of its own; in ours it is the same one twice, which shows the scatter."""
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
"""Engines that can be compared with, by name."""

Precision = Literal["bf16", "int8", "int4"]

READY = PeerWork(1, 16, 1)
"""An engine is ready when it has answered this."""
WARM_UP = (READY, PeerWork(1, 32, 4), PeerWork(8, 32, 4))
"""What each engine does before anything counts."""

_MAX_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Which engines, what work, how long."""

    model: str = "embedded"
    """A Hugging Face model folder, a hub id, or 'embedded', from which GGUF files are made; or a GGUF file, which every
    engine that can read it runs as it is."""
    peers: str = ",".join(name for name in PEERS if name != BEFORE.name)
    """Engines to stand beside, with commas between them; twostroke-before is another version of ours."""
    env: tuple[str, ...] = ()
    """NAME=INTERPRETER: the Python of the environment with a peer in it; default: our own. Can be repeated."""
    precision: Precision | None = None
    """Type of a folder's weights: bf16 (the default), int8 (peers: Q8_0) or int4 (peers: Q4_0). GGUF files keep
    theirs."""
    activation_quantization: ActivationQuantization | None = None
    """Of twostroke, as in its settings; the peers do as they do."""
    threads: int | None = None
    """Threads of every engine; default: the processors this process may use."""
    rounds: int = 3
    """Times that each work is done by each engine in turn, A B A B."""
    time_limit: float = 480.0
    """Seconds for everything; past the first round, a work is left out of a round that would pass this."""
    answer_limit: float = 600.0
    """Seconds an engine may take to load, or for one work; one that takes longer is given up."""
    prefill_length: int = 512
    """Prompt tokens of the work that measures prefill."""
    prompt_length: int = 128
    """Prompt tokens of a request of the other works."""
    output_length: int = 64
    """Output tokens of these."""
    batch_sizes: str = "1,8,32"
    """Requests at once, of these works."""
    gguf_folder: Path | None = None
    """Where GGUF files are kept from one run to the next; default: a temporary folder."""
    seed: int = 0
    """Of the prompts."""
    results: Path = DEFAULT_FOLDER
    """Where JSON and PNG go."""
    plots: bool = True
    """Draw a PNG beside the JSON (needs the extra 'bench')."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        text("model", self.model)
        if self.precision is not None:
            one_of("precision", self.precision, get_args(Precision))
            if self.is_gguf:
                limit = "is of a folder's weights, and a GGUF file's are what they are"
                raise InvalidParameter("precision", self.precision, limit, "Leave it out.")
        if self.activation_quantization is not None:
            one_of("activation_quantization", self.activation_quantization, get_args(ActivationQuantization))
            if self.weights == "bf16":
                limit = "is about quantized weights"
                raise InvalidParameter("activation_quantization", self.activation_quantization, limit, "Leave it out.")
        whole_number("threads", 1 if self.threads is None else self.threads, 1, MAX_THREADS)
        for name in ("time_limit", "answer_limit"):
            number(name, getattr(self, name), 1.0, _MAX_SECONDS, f"1 to {_MAX_SECONDS:g} seconds")
        for name in ("rounds", "prefill_length", "prompt_length"):
            whole_number(name, getattr(self, name), 1)
        whole_number("output_length", self.output_length, 3)  # a first token, a decode, a last token
        whole_number("seed", self.seed, 0, 2**32 - 1)
        switch("plots", self.plots)
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
        """Type of the weights in the engines' words: bf16, int8, int4, or gguf for a file as it is."""
        return "gguf" if self.is_gguf else self.precision or "bf16"

    @property
    def peer_names(self) -> tuple[str, ...]:
        """In the order given, each once."""
        return tuple(dict.fromkeys(name.strip() for name in self.peers.split(",") if name.strip()))

    @property
    def interpreters(self) -> dict[str, Path]:
        """Of the peers that have an environment of their own."""
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
        """In the order they are done."""
        sizes = whole_numbers("batch_sizes", self.batch_sizes, 1, 1024)
        others = (PeerWork(size, self.prompt_length, self.output_length) for size in sizes)
        return (PeerWork(1, self.prefill_length, 1), *others)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request, warm-ups included."""
        return max(work.prompt_length + work.output_length for work in (*WARM_UP, *self.works))

    @property
    def max_num_requests(self) -> int:
        """Most requests at once, warm-ups included."""
        return max(work.num_requests for work in (*WARM_UP, *self.works))

    @property
    def name(self) -> str:
        """Of the files that are written."""
        activations = f"-activations-{self.activation_quantization}" if self.activation_quantization else ""
        name = Path(model_name(self.model)).name
        model = name.removesuffix(Path(name).suffix) if self.is_gguf else f"{name}-{self.weights}"
        versions = "-before" if self.peer_names == (BEFORE.name,) else ""
        return f"compare-{model}{activations}{versions}"

    def as_json(self) -> dict[str, Any]:
        """What a result says of them: nothing that names a place."""
        places = ("results", "env", "gguf_folder", "plots")
        kept = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in places}
        return kept | {"model": model_name(self.model), "precision": self.weights}


def _known(option: str, name: str) -> None:
    if name not in PEERS:
        raise InvalidParameter(option, name, f"must be one of {', '.join(PEERS)}")
