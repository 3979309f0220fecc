"""The cost of the live view: the same load without viewers and with two, alternating, and the time to fold the log.

The client runs at a lower priority than the server, as do the viewers, which read frames without processing them. The
order of the two changes from round to round. Throughput on a shared machine is noisy; the confidence interval of the
median is reported, as is the processor time of the HTTP process, which does all of the view's work: the engine does
nothing for it.

The live view in a browser: pictures per second with 1,000 requests and 100,000 blocks, memory over an hour's frames.

The page is a real server's. A stand-in between it and the browser replaces the engine: it computes nothing and is
always full, and sends far more frames than a server. Needs playwright and Chromium.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from random import Random
from typing import Any

import msgspec
from tqdm.auto import tqdm

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.serving.local_server import LocalServer, local_server, room_for
from twostroke.batch import NewRequest
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.engine.generation import GenerationRequest
from twostroke.errors import SetupError
from twostroke.events import Event
from twostroke.live.state import LiveState
from twostroke.measure.report import median
from twostroke.measure.serve.load import batch_priority
from twostroke.measure.workload import Lengths, Workload
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.sampling_params import SamplingParams

STREAMS = 64
NUM_VIEWERS = 2
GOAL_RATIO = 0.99


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Alternate the two loads."""
    rounds, outputs = (40, 384) if options.full else (2, 32)
    workload = options.drawn(STREAMS, Lengths.uniform(16, 64), Lengths.fixed(outputs))
    settings: dict[str, Any] = {"threads": 1, **room_for(STREAMS, workload.max_request_tokens)}
    tok_s: dict[bool, list[float]] = {False: [], True: []}
    http_s: dict[bool, list[float]] = {False: [], True: []}
    num_frames = 0
    with local_server(options.model, settings) as server:
        _rate(server, options.model, workload.cut_outputs(8))
        for number in range(rounds):
            for are_there in (False, True) if number % 2 else (True, False):
                with _viewers(server) if are_there else contextlib.nullcontext([0]) as counted:
                    begin_s = server.http_cpu_s()
                    tok_s[are_there].append(_rate(server, options.model, workload))
                    http_s[are_there].append(server.http_cpu_s() - begin_s)
                num_frames += sum(counted)
        events = server.events()
    ratios = [b / a for a, b in zip(tok_s[False], tok_s[True], strict=True)]
    low, high = _of_median(ratios)
    extra_s = median([b - a for a, b in zip(http_s[False], http_s[True], strict=True)])
    beside_s = sum(workload.num_output_tokens / rate for rate in tok_s[True])
    claims = (
        Claim.at_least("throughput: two viewers / none", GOAL_RATIO, median(ratios)).judged(options.full),
        Claim.reported("the true median is more than this, in 19 of 20 runs", low),
        Claim.reported("and less than this", high),
        Claim.reported(
            "processor time of the HTTP process for two viewers, share of a core", extra_s / (beside_s / rounds)
        ),
        Claim.reported("the fold of the log, viewers or not, us a token", _fold_us(events)),
        Claim.reported("frames a second and viewer", num_frames / NUM_VIEWERS / beside_s),
    )
    return Reproduction(
        claims=claims,
        config={"model": options.model_name, "streams": STREAMS, "viewers": NUM_VIEWERS, **settings},
        workload=dict(workload.description),
        details={
            "without_tok_s": tok_s[False],
            "with_viewers_tok_s": tok_s[True],
            "ratios": ratios,
            "http_s_without": http_s[False],
            "http_s_with_viewers": http_s[True],
        },
        warmup=1,
        repeats=rounds,
    )


def _of_median(values: list[float]) -> tuple[float, float]:
    """Return the interval that contains the true median in 95 of 100 cases.

    It follows from the binomial distribution, for any distribution of the values (the order statistics of the sign
    test).

    >>> _of_median([float(i) for i in range(1, 21)]), _of_median([1.0, 2.0])
    ((6.0, 15.0), (1.0, 2.0))
    """
    ordered, num_values = sorted(values), len(values)
    skipped, left = 0, 0.5**num_values
    while left <= 0.025:
        skipped += 1
        left += math.comb(num_values, skipped) * 0.5**num_values
    first = max(0, skipped - 1)
    return ordered[first], ordered[num_values - 1 - first]


def _rate(server: LocalServer, model: str, workload: Workload) -> float:
    """Return the output tokens per second of the workload, sent at once."""
    with batch_priority():
        return workload.num_output_tokens / server.run(model, workload).duration_s


@contextlib.contextmanager
def _viewers(server: LocalServer) -> Generator[list[int]]:
    """Run the viewers of the feed; yield the number of frames that each has received."""
    counted = [0] * NUM_VIEWERS
    over = threading.Event()

    def look(number: int) -> None:
        with urllib.request.urlopen(f"{server.url}/live/events", timeout=30) as lines:
            for line in lines:
                counted[number] += line.startswith(b"event: ")
                if over.is_set():
                    return

    viewers = [threading.Thread(target=look, args=(number,), daemon=True) for number in range(NUM_VIEWERS)]
    for viewer in viewers:
        viewer.start()
    yield counted
    over.set()
    for viewer in viewers:
        viewer.join(5)


def _fold_us(events: list[Event]) -> float:
    """Return the microseconds per token that the fold takes without viewers."""
    metrics = FleetMetrics("model", lambda _: None)
    state = LiveState(metrics)
    spent_s = 0.0
    for event in events:
        taken = metrics.observe(event)
        begin_s = time.perf_counter()
        state.observe(event, taken)
        spent_s += time.perf_counter() - begin_s
    figures = state.whole("model", 0.0)["engines"]["engine"]["figures"]
    return 1e6 * spent_s / max(1.0, figures["generation_tokens"])


NUM_REQUESTS = 1_000
NUM_RUNNING = 256
NUM_BLOCKS = 100_000
FRAMES_SENT_PER_S = 60
FRAMES_OF_AN_HOUR = 36_000
"""Frames of an hour, at a server's limit of ten per second. Memory grows with frames, not time: they are sent
faster."""
STEP_S = 0.01
"""Seconds of the stand-in's clock per step."""
GOAL_FRAMES_PER_S = 30.0
GOAL_GROWTH_MB = 1.0
MIN_SAMPLES = 4
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


def reproduce_page(options: ReproduceOptions) -> Reproduction:
    """Measure the page's frames per second, then the growth of its memory."""
    count_s, num_frames, every_s = (60.0, FRAMES_OF_AN_HOUR, 15.0) if options.full else (5.0, 600, 3.0)
    with (
        local_server(options.model, {"threads": 1, "num_kv_blocks": 300}) as server,
        _stand_in(server.url) as stand_in,
        _page(f"{stand_in.url}/#live") as page,
    ):
        page.wait_for_function("() => window.twostrokeFrames > 5")
        rates = [_frames_per_s(page, count_s / 5) for _ in range(5)]
        first = stand_in.engine.num_frames
        heap_mb = _heap_mb(page, lambda: stand_in.engine.num_frames - first, num_frames, every_s)
    # compilation and caching at the start are no growth
    early, late = heap_mb[len(heap_mb) // 6 : len(heap_mb) // 3], heap_mb[-max(1, len(heap_mb) // 6) :]
    growth, words = median(late) - median(early), f"growth of the heap over {num_frames:,} frames, MB"
    return Reproduction(
        claims=(
            Claim.at_least("pictures a second", GOAL_FRAMES_PER_S, median(rates)).judged(options.full),
            Claim.at_most(words, GOAL_GROWTH_MB, growth).judged(options.full),
            Claim.reported("the heap at the end, MB", median(late)),
        ),
        config={
            "requests": NUM_REQUESTS,
            "running": NUM_RUNNING,
            "blocks": NUM_BLOCKS,
            "frames_sent_per_s": FRAMES_SENT_PER_S,
        },
        details={"pictures_per_s": rates, "heap_mb": heap_mb, "heap_every_s": every_s},
        warmup=1,
        repeats=len(rates),
    )


def _frames_per_s(page: Any, seconds: float) -> float:
    first, begin_s = page.evaluate("window.twostrokeFrames"), time.monotonic()
    page.wait_for_timeout(1000 * seconds)
    return (page.evaluate("window.twostrokeFrames") - first) / (time.monotonic() - begin_s)


def _heap_mb(page: Any, frames_so_far: Callable[[], int], num_frames: int, every_s: float) -> list[float]:
    """Return the page's heap after a garbage collection, at intervals until `num_frames` frames have been sent."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    found: list[float] = []
    with tqdm(total=num_frames, desc="memory", unit="frame", leave=False) as progress:
        while (sent := frames_so_far()) < num_frames or len(found) < MIN_SAMPLES:
            progress.update(min(sent, num_frames) - progress.n)
            page.wait_for_timeout(1000 * every_s)
            session.send("HeapProfiler.collectGarbage")
            metrics = session.send("Performance.getMetrics")["metrics"]
            found.append(next(metric["value"] for metric in metrics if metric["name"] == "JSHeapUsedSize") / 1e6)
    return found


@contextmanager
def _page(url: str) -> Generator[Any]:
    chromium = shutil.which("chromium")
    try:
        sync_playwright = import_module("playwright.sync_api").sync_playwright
    except ModuleNotFoundError as error:
        raise SetupError("this needs playwright: pip install 'twostroke[dev]'.") from error
    if chromium is None:
        raise SetupError("this needs Chromium: apt install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(url)
        yield page
        browser.close()


class _EngineProxy(ThreadingHTTPServer):
    """Proxy that passes requests for the page on to a server, and answers in place of its engine."""

    daemon_threads = True

    def __init__(self, server_url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_url = server_url
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.engine = _BusyEngine()


@contextmanager
def _stand_in(server_url: str) -> Generator[_EngineProxy]:
    with _EngineProxy(server_url) as stand_in:
        threading.Thread(target=stand_in.serve_forever, daemon=True).start()
        yield stand_in
        stand_in.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: _EngineProxy  # pyright: ignore[reportIncompatibleVariableOverride] (it is no other)

    def do_GET(self) -> None:
        if self.path == "/live/events":
            self._send_events()
            return
        if self.path == "/live/state":
            content, kind = msgspec.json.encode(self.server.engine.state()), "application/json"
        else:
            with urllib.request.urlopen(self.server.server_url + self.path) as answer:
                content, kind = answer.read(), answer.headers["content-type"]
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_events(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        engine = self.server.engine
        try:
            self._write("state", engine.state())
            while True:
                begin_s = time.monotonic()
                self._write("delta", engine.delta())
                time.sleep(max(0.0, begin_s + 1 / FRAMES_SENT_PER_S - time.monotonic()))
        except OSError:
            return  # the browser has left

    def _write(self, name: str, content: dict[str, Any] | None) -> None:
        self.wfile.write(b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content)))

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing."""


class _BusyEngine:
    """An engine that is always full, and computes nothing: some requests decode, some prefill, many wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._metrics = FleetMetrics("made up", lambda _: None)
        self._live = LiveState(self._metrics)
        self._dice = Random(0)
        self._num_arrived = 0
        self.num_frames = 0
        """Deltas made so far."""
        scheduler = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=2048)
        cache = CacheConfig(num_kv_blocks=NUM_BLOCKS)
        built = counting_engine(scheduler, cache, max_model_len=4096, event_log=self._events, step_time_s=STEP_S)
        self._engine, self._clock = built.engine, built.clock
        for _ in range(NUM_REQUESTS):
            self._arrive()
        for _ in range(NUM_RUNNING):
            self._step()

    def state(self) -> dict[str, Any]:
        """Return a State; deltas follow it."""
        with self._lock:
            self._live.watch(True)
            return self._live.whole("made up", self._clock())

    def delta(self) -> dict[str, Any] | None:
        """Return a Delta: two steps, each running request two tokens further, a few requests that end and begin."""
        with self._lock:
            self._step()
            self._step()
            self.num_frames += 1
            return self._live.changes(self._clock())

    def _step(self) -> None:
        """Run one step; as many requests arrive as end in it."""
        for update in self._engine.step():
            if update.finish_reason is not None:
                self._arrive()
        for event in self._events:
            self._live.observe(event, self._metrics.observe(event))
        self._events.clear()

    def _arrive(self) -> None:
        """Add a request with a unique prompt and 64 to 192 tokens of output."""
        number, max_tokens = self._num_arrived, self._dice.randrange(64, 192)
        self._num_arrived += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = NewRequest(f"r{number}", tuple(range(number, number + 512)), params, seed=0)
        self._engine.add_request(GenerationRequest(request, self._clock(), max_tokens))
