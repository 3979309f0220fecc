"""`python -m benchmarks compare`: twostroke beside other engines, in turn, on the same weights and threads.

What is fair and what is not, engine by engine, stands at the head of each driver (drivers.py). The rules for all:

- each runs in a process of its own, in the environment that was given; twostroke is driven the same way;
- the same prompts as token ids, other ones in each round; greedy; each request to exactly its length; no text is made;
- prefix caches are off; everything else is the engine's default, but for threads and the room for the work;
- while one is measured, the processes of the others are stopped;
- "ready after" runs from the start of the process to the first token of a short prompt, imports and loading included;
  files are in the page cache from an earlier look at them or from making the GGUF file. Only twostroke quantizes
  while it loads: the GGUF files hold 8 or 4 bits already.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from twostroke.measure.limits import MachineRates, measure_limits, words_of_limits
from twostroke.measure.peers.peer import Peer, PeerFailed, PeerProcess
from twostroke.measure.report import BenchResult, check_folder, median, record
from twostroke.measure.workload import Lengths, SyntheticSpec, synthetic
from twostroke.model.model_files import find_model
from twostroke.tables import plain_table, print_table


@dataclass(slots=True)
class PeerStanding:
    """One engine's figures, or why it has none (or no more)."""

    name: str
    about: dict[str, str] = field(default_factory=dict[str, str])
    ready_after_s: float | None = None
    """From starting its process to the first token of a short prompt."""
    failure: str | None = None
    figures: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Tokens per second of each round, by figure."""
    process: PeerProcess | None = None
    """While it runs."""
    places: tuple[Path, ...] = ()
    """What a result must not name: whose machine it was is nobody's affair."""

    def close(self) -> None:
        """Ends its process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    def add(self, round_number: int, figures: Mapping[str, float]) -> None:
        """Puts down one work of one round."""
        for name, value in figures.items():
            self.figures.setdefault(name, {})[round_number] = value

    def median(self, figure: str) -> float | None:
        """Over rounds; None when it has not been measured."""
        values = self.figures.get(figure)
        return median(list(values.values())) if values else None

    def ratio_to(self, other: PeerStanding, figure: str) -> float | None:
        """Median over the rounds that both took part in, each of which compares neighbours in time."""
        mine, theirs = self.figures.get(figure, {}), other.figures.get(figure, {})
        ratios = [mine[round_number] / theirs[round_number] for round_number in mine.keys() & theirs.keys()]
        return median(ratios) if ratios else None

    def as_json(self, ours: PeerStanding) -> dict[str, Any]:
        """For the result; a ratio above 1 is ours being faster."""
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
    """Medians, in brackets how many times faster ours is; and why somebody has none."""
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
    console.print(words_of_limits(results["limits"]))
    if results["works_left_out_of_a_round"]:
        console.print(f"[yellow]{results['works_left_out_of_a_round']} works were left out of a round for time[/]")


def _cell(engine: str, figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    value = f"{figure['median_tok_s']:,.1f}"
    ratio = figure["twostroke_to_this"]
    return value if engine == _OURS or ratio is None else f"{value} ({ratio:.2f}x)"


def draw(figure: Any, results: Mapping[str, Any]) -> None:
    """One plot for each figure: their scales have nothing in common."""
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
class Contest:
    """Engines, loaded one after the other and then measured in turn."""

    options: CompareOptions
    vocab_size: int
    threads: int
    clock: Callable[[], float] = time.monotonic
    contestants: list[PeerStanding] = field(default_factory=list[PeerStanding])
    _num_prompts_drawn: int = 0

    @property
    def standings(self) -> list[PeerStanding]:
        """In the order in which the engines were entered."""
        return self.contestants

    def refuse(self, peer: Peer, why: str) -> None:
        """Enters an engine that cannot even be started: a row that says why."""
        self.contestants.append(PeerStanding(peer.name, failure=why))

    def enter(self, peer: Peer, interpreter: Path, model: Path) -> None:
        """Starts and warms up one engine, and stops it until its turn; a failure becomes its row."""
        entered = PeerStanding(peer.name, places=(model, interpreter))
        self.contestants.append(entered)
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
        """Every work, in every round, by every engine in turn.

        Args:
            deadline_s: by the clock; a round after the first leaves out a work that would not end before it.
            progress: show it.

        Returns:
            Works that were left out of some round.
        """
        works, lasted_s, num_left_out = self.options.works, dict[PeerWork, float](), 0
        with tqdm(
            total=self.options.rounds * len(works) * len(self.contestants),
            desc="compare",
            disable=None if progress else True,
            leave=False,
        ) as bar:
            for round_number in range(self.options.rounds):
                for work in works:
                    begin_s = self.clock()
                    if round_number and begin_s + lasted_s[work] > deadline_s:
                        num_left_out += 1
                        bar.update(len(self.contestants))
                        continue
                    prompts = self._prompts(work)
                    for contestant in self.contestants:
                        bar.set_postfix_str(f"round {round_number + 1}, {work.name}, {contestant.name}")
                        if contestant.process is not None:
                            with self._in_turn(contestant):
                                figures = figures_of(work, self._tokens(contestant, work, prompts))
                                contestant.add(round_number, figures)
                        bar.update()
                    lasted_s[work] = self.clock() - begin_s
        return num_left_out

    def close(self) -> None:
        """Ends every process."""
        for contestant in self.contestants:
            contestant.close()

    @contextmanager
    def _in_turn(self, contestant: PeerStanding) -> Generator[None]:
        """Let one engine run, and stop it until its next turn; one that fails has none."""
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
        self, contestant: PeerStanding, work: PeerWork, prompts: Sequence[Sequence[int]]
    ) -> list[tuple[float, int]]:
        assert contestant.process is not None
        answer = contestant.process.run(prompts, work.output_length, self.options.answer_limit)
        return checked_tokens(answer, work)

    def _prompts(self, work: PeerWork) -> list[tuple[int, ...]]:
        """New ones each time: nobody can have seen them."""
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
    """Runs the contest, saves JSON and PNG.

    Raises:
        InvalidParameter: the work does not fit the model's context, or results cannot be written.
        SetupError: the model cannot be read, or matplotlib is missing while plots are wanted.
    """
    began_s = time.monotonic()
    check_folder(options.results)
    files = find_model(options.model)
    model, config = files.path.resolve(), files.config()
    if options.max_request_tokens > config.max_context:
        limit = f"the longest request, {options.max_request_tokens} tokens, exceeds its context ({config.max_context})"
        raise InvalidParameter("model", options.model, limit, "Make --prefill-length and --prompt-length shorter.")
    threads = options.threads or Hardware.of_this_machine().cores
    before = _limits(threads)
    with ExitStack() as stack:
        gguf_folder = options.gguf_folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contest = Contest(options, config.vocab_size, threads)
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
        after = _limits(threads)
    ours = contest.standings[0]
    result = record(
        "python -m benchmarks compare",
        options,
        config=options.as_json() | {"threads": threads},
        workload={"works": [work.name for work in options.works], "seed": options.seed},
        results={
            "engines": {standing.name: standing.as_json(ours) for standing in contest.standings},
            "limits": before.best_of(after).as_json(),
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
    """Return what a peer loads: the model itself, or a GGUF file that is made from it.

    Raises:
        TwostrokeError: it cannot read a GGUF file, or none can be made.
    """
    if weights == "gguf":
        if not peer.reads_gguf:
            raise UnsupportedModel(f"{peer.name} is compared on model folders; its driver loads no GGUF file.")
        return model
    return model if peer.gguf_types is None else write_gguf(model, peer.gguf_types[weights], gguf_folder)


def _limits(threads: int) -> MachineRates:
    return measure_limits(operators_for(torch.device("cpu"), torch.bfloat16), threads)
