"""`python -m benchmarks compare`: twostroke and other engines, alternating, on the same weights and threads.

Each driver (drivers.py) explains what is comparable and what is not. The rules for all engines:

- each runs in its own process, in the given environment; twostroke is driven the same way;
- the same prompts as token ids, different ones in each round; greedy; each request to exactly its length; no text is
  made;
- prefix caches are off; everything else is the engine's default, except threads and the space for the workload;
- while one engine is measured, the processes of the others are stopped;
- "ready after" counts from the start of the process to the first token of a short prompt, including imports and
  loading; files are in the page cache from an earlier read or from writing the GGUF file. Only twostroke quantizes
  while it loads: the GGUF files hold 8 or 4 bits already.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tqdm.auto import tqdm

from benchmarks.compare.gguf_file import write_gguf
from benchmarks.compare.options import (
    PEERS,
    READY,
    TWOSTROKE,
    WARM_UP,
    CompareOptions,
    PeerWork,
    checked_tokens,
    figures_of,
)
from twostroke.errors import InvalidParameter, TwostrokeError, UnsupportedModel
from twostroke.hardware import Hardware
from twostroke.kernels.dispatch import operators_for
from twostroke.measure.figure import MEASURED, PREDICTED, save_figure
from twostroke.measure.limits import MachineRates, format_limits, measure_limits
from twostroke.measure.peers.peer import Peer, PeerFailed, PeerProcess
from twostroke.measure.report import BenchResult, check_folder, median, record
from twostroke.measure.workload import Lengths, SyntheticSpec, synthetic
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table, print_table


@dataclass(slots=True)
class PeerResult:
    """One engine's figures, or the reason why it has none (or no more)."""

    name: str
    about: dict[str, str] = field(default_factory=dict[str, str])
    ready_after_s: float | None = None
    """Seconds from the start of its process to the first token of a short prompt."""
    failure: str | None = None
    figures: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Tokens per second of each round, by figure."""
    process: PeerProcess | None = None
    """Process of the engine while it runs."""
    places: tuple[Path, ...] = ()
    """Paths that a result must not contain, since they may identify the machine's owner."""

    def close(self) -> None:
        """End the engine's process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def add(self, round_number: int, figures: Mapping[str, float]) -> None:
        """Add the figures of one work in one round."""
        for name, value in figures.items():
            self.figures.setdefault(name, {})[round_number] = value

    def median(self, figure: str) -> float | None:
        """Return the median over rounds; None if it was not measured."""
        values = self.figures.get(figure)
        return median(list(values.values())) if values else None

    def ratio_to(self, other: PeerResult, figure: str) -> float | None:
        """Return the median ratio over the rounds of both engines; each ratio compares neighbours in time."""
        mine, theirs = self.figures.get(figure, {}), other.figures.get(figure, {})
        ratios = [mine[round_number] / theirs[round_number] for round_number in mine.keys() & theirs.keys()]
        return median(ratios) if ratios else None

    def as_json(self, ours: PeerResult) -> dict[str, Any]:
        """Return the standing for the result; a ratio above 1 means that ours is faster."""
        return {
            "about": self.about,
            "ready_after_s": self.ready_after_s,
            "failure": self.failure,
            "figures": {
                name: {
                    "tok_s": list(rounds.values()),
                    "rounds": list(rounds),
                    "median_tok_s": self.median(name),
                    "twostroke_to_this": ours.ratio_to(self, name),
                }
                for name, rounds in self.figures.items()
            },
        }


_OURS = "twostroke"


def figure_names(results: Mapping[str, Any]) -> list[str]:
    """Return the names of all figures, in the order in which engines were measured."""
    return list(dict.fromkeys(name for engine in results["engines"].values() for name in engine["figures"]))


def print_compared(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print medians, in brackets how many times faster ours is, and the reasons for missing ones."""
    console = console or Console()
    names = figure_names(results)
    rows = plain_table(("tokens per second",), (*names, "ready after"))
    for engine, found in results["engines"].items():
        ready_s = found["ready_after_s"]
        cells = [_cell(engine, found["figures"].get(name)) for name in names]
        rows.add_row(engine, *cells, "-" if ready_s is None else f"{ready_s:.1f} s")
    print_table(rows, console)
    for engine, found in results["engines"].items():
        if found["failure"] is not None:
            console.print(f"[bold red]{engine}[/]: {found['failure']}", highlight=False)
    console.print(format_limits(results["limits"]))
    if results["works_left_out_of_a_round"]:
        console.print(f"[yellow]{results['works_left_out_of_a_round']} works were left out of a round for time[/]")


def _cell(engine: str, figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    value = f"{figure['median_tok_s']:,.1f}"
    ratio = figure["twostroke_to_this"]
    return value if engine == _OURS or ratio is None else f"{value} ({ratio:.2f}x)"


def draw(figure: Any, results: Mapping[str, Any]) -> None:
    """Draw one plot per figure, since their scales differ."""
    names = figure_names(results)
    columns = max(1, -(-len(names) // 2))
    for i, name in enumerate(names):
        axes = figure.add_subplot(2, columns, i + 1)
        shown = {
            engine: found["figures"][name]["median_tok_s"]
            for engine, found in results["engines"].items()
            if name in found["figures"]
        }
        colours = [MEASURED if engine == _OURS else PREDICTED for engine in shown]
        drawn = axes.bar(list(shown), list(shown.values()), color=colours)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
        axes.set_title(f"{name} (tok/s)", fontsize=9)
        axes.tick_params(axis="x", labelrotation=20, labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)


@dataclass(slots=True)
class EngineComparison:
    """Comparison of engines, which are loaded one after the other and then measured alternately."""

    options: CompareOptions
    vocab_size: int
    threads: int
    clock: Callable[[], float] = time.monotonic
    before_round: Callable[[], None] = lambda: None
    """Called while all engines are stopped."""
    peers_in_order: list[PeerResult] = field(default_factory=list[PeerResult])
    _num_prompts_drawn: int = 0

    @property
    def standings(self) -> list[PeerResult]:
        """Standings in the order in which the engines were entered."""
        return self.peers_in_order

    def refuse(self, peer: Peer, why: str) -> None:
        """Enter an engine that cannot be started, as a row with the reason."""
        self.peers_in_order.append(PeerResult(peer.name, failure=why))

    def enter(self, peer: Peer, interpreter: Path, model: Path) -> None:
        """Start and warm up one engine, and stop it until it is measured; a failure becomes its row."""
        entered = PeerResult(peer.name, places=(model, interpreter))
        self.peers_in_order.append(entered)
        begin_s = self.clock()
        with self._in_turn(entered):
            entered.process = PeerProcess(peer, interpreter)
            order = {
                "model": str(model),
                "precision": self.options.weights,
                "activation_quantization": self.options.activation_quantization,
                "threads": self.threads,
                "max_model_len": self.options.max_request_tokens,
                "max_num_seqs": self.options.max_num_requests,
            }
            entered.about = entered.process.load(order, self.options.answer_limit)
            for work in WARM_UP:
                self._tokens(entered, work, self._prompts(work))
                if work is READY:
                    entered.ready_after_s = self.clock() - begin_s

    def measure(self, deadline_s: float, *, progress: bool = True) -> int:
        """Measure every work, in every round, with every engine.

        Args:
            deadline_s: by the clock; rounds after the first skip work that would not end before it.
            progress: show a progress bar.

        Returns:
            Number of works that were skipped in some round.
        """
        works, lasted_s, num_left_out = self.options.works, dict[PeerWork, float](), 0
        with tqdm(
            total=self.options.rounds * len(works) * len(self.peers_in_order),
            desc="compare",
            disable=None if progress else True,
            leave=False,
        ) as bar:
            for round_number in range(self.options.rounds):
                self.before_round()
                for work in works:
                    begin_s = self.clock()
                    if round_number and begin_s + lasted_s[work] > deadline_s:
                        num_left_out += 1
                        bar.update(len(self.peers_in_order))
                        continue
                    prompts = self._prompts(work)
                    for contestant in self.peers_in_order:
                        bar.set_postfix_str(f"round {round_number + 1}, {work.name}, {contestant.name}")
                        if contestant.process is not None:
                            with self._in_turn(contestant):
                                figures = figures_of(work, self._tokens(contestant, work, prompts))
                                contestant.add(round_number, figures)
                        bar.update()
                    lasted_s[work] = self.clock() - begin_s
        return num_left_out

    def close(self) -> None:
        """End every process."""
        for contestant in self.peers_in_order:
            contestant.close()

    @contextmanager
    def _in_turn(self, contestant: PeerResult) -> Generator[None]:
        """Let one engine run, then stop it; one that fails is ended."""
        if contestant.process is not None:
            contestant.process.resume()
        try:
            yield
        except PeerFailed as failure:
            why = str(failure)
            for place in contestant.places:
                why = why.replace(str(place), place.name)
            contestant.failure = why
            contestant.close()
        else:
            assert contestant.process is not None
            contestant.process.pause()

    def _tokens(
        self, contestant: PeerResult, work: PeerWork, prompts: Sequence[Sequence[int]]
    ) -> list[tuple[float, int]]:
        assert contestant.process is not None
        answer = contestant.process.run(prompts, work.output_length, self.options.answer_limit)
        return checked_tokens(answer, work)

    def _prompts(self, work: PeerWork) -> list[tuple[int, ...]]:
        """Return new prompts each time, which no cache can contain."""
        self._num_prompts_drawn += 1
        spec = SyntheticSpec(
            num_requests=work.num_requests,
            prompt_lengths=Lengths.fixed(work.prompt_length),
            output_lengths=Lengths.fixed(work.output_length),
            vocab_size=self.vocab_size,
            seed=self.options.seed * 1000 + self._num_prompts_drawn,
        )
        return [request.prompt_token_ids for request in synthetic(spec).requests]


def run_compare(options: CompareOptions) -> BenchResult:
    """Run the comparison; save JSON and PNG.

    Raises:
        InvalidParameter: the work does not fit the model's context, or results cannot be written.
        SetupError: the model cannot be read, or matplotlib is missing while plots are requested.
    """
    began_s = time.monotonic()
    check_folder(options.results)
    files = find_model(options.model)
    model, config = files.path.resolve(), files.config()
    if options.max_request_tokens > config.max_context:
        limit = f"the longest request, {options.max_request_tokens} tokens, exceeds its context ({config.max_context})"
        raise InvalidParameter("model", options.model, limit, "Make --prefill-length and --prompt-length shorter.")
    threads = options.threads or Hardware.of_this_machine().cores
    # before and after each round, because the bandwidth that a host gives its guests changes within minutes
    limits = [_limits(threads)]
    with ExitStack() as stack:
        gguf_folder = options.gguf_folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contest = EngineComparison(
            options, config.vocab_size, threads, before_round=lambda: limits.append(_limits(threads))
        )
        stack.callback(contest.close)
        contest.enter(TWOSTROKE, Path(sys.executable), model)
        interpreters = options.interpreters
        for name in options.peer_names:
            peer = PEERS[name]
            try:
                theirs = _model_of(peer, model, options.weights, gguf_folder)
            except TwostrokeError as error:
                contest.refuse(peer, str(error))
            else:
                contest.enter(peer, interpreters.get(name, Path(sys.executable)), theirs)
        num_left_out = contest.measure(began_s + options.time_limit)
        limits.append(_limits(threads))
    ours = contest.standings[0]
    result = record(
        "python -m benchmarks compare",
        options,
        config=options.as_json() | {"threads": threads},
        workload={"works": [work.name for work in options.works], "seed": options.seed},
        results={
            "engines": {standing.name: standing.as_json(ours) for standing in contest.standings},
            "limits": reduce(MachineRates.best_of, limits).as_json(),
            "works_left_out_of_a_round": num_left_out,
        },
        warmup=1,
        repeats=options.rounds,
    )
    if options.plots:
        path = options.results / f"{options.name}.png"
        save_figure(lambda figure: draw(figure, result.results), path, size=(11, 6))
    return result


def _model_of(peer: Peer, model: Path, weights: str, gguf_folder: Path) -> Path:
    """Return what a peer loads: the model itself, or a GGUF file made from it.

    Raises:
        TwostrokeError: the peer cannot read a GGUF file, or none can be made.
    """
    if weights == "gguf":
        if not peer.reads_gguf:
            raise UnsupportedModel(f"{peer.name} is compared on model folders; its driver loads no GGUF file.")
        return model
    return model if peer.gguf_types is None else write_gguf(model, peer.gguf_types[weights], gguf_folder)


def _limits(threads: int) -> MachineRates:
    return measure_limits(operators_for(torch.device("cpu"), torch.bfloat16), threads)
