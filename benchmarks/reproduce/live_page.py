"""The live view in a browser: pictures a second with 1,000 requests and 100,000 blocks, memory over an hour's frames.

The page is a real server's. A stand-in between it and the browser answers for the engine, with made-up frames, far more
of them than a server sends. Needs playwright and Chromium.
"""

from __future__ import annotations

import json
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

from tqdm.auto import tqdm

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.serving.local_server import local_server
from twostroke.errors import SetupError
from twostroke.live.rows import FIELDS
from twostroke.measure.report import median

NUM_REQUESTS = 1_000
NUM_RUNNING = 256
NUM_BLOCKS = 100_000
FRAMES_SENT_PER_S = 60
FRAMES_OF_AN_HOUR = 36_000
"""A server sends at most ten a second. Memory would grow with frames, not with time: they are sent faster here."""
GOAL_FRAMES_PER_S = 30.0
GOAL_GROWTH_MB = 1.0
MIN_SAMPLES = 4
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Counts pictures, then watches memory."""
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
    # what is compiled and cached at first is no growth
    early, late = heap_mb[len(heap_mb) // 6 : len(heap_mb) // 3], heap_mb[-max(1, len(heap_mb) // 6) :]
    growth_mb = median(late) - median(early)
    claims = (
        Claim.at_least("pictures a second", GOAL_FRAMES_PER_S, median(rates)).judged(options.full),
        Claim.at_most(f"growth of the heap over {num_frames:,} frames, MB", GOAL_GROWTH_MB, growth_mb).judged(
            options.full
        ),
        Claim.reported("the heap at the end, MB", median(late)),
    )
    config = {
        "requests": NUM_REQUESTS,
        "running": NUM_RUNNING,
        "blocks": NUM_BLOCKS,
        "frames_sent_per_s": FRAMES_SENT_PER_S,
    }
    return Reproduction(
        claims=claims,
        config=config,
        workload={},
        details={"pictures_per_s": rates, "heap_mb": heap_mb, "heap_every_s": every_s},
        warmup=1,
        repeats=len(rates),
    )


def _frames_per_s(page: Any, seconds: float) -> float:
    first, begin_s = page.evaluate("window.twostrokeFrames"), time.monotonic()
    page.wait_for_timeout(1000 * seconds)
    return (page.evaluate("window.twostrokeFrames") - first) / (time.monotonic() - begin_s)


def _heap_mb(page: Any, frames_so_far: Callable[[], int], num_frames: int, every_s: float) -> list[float]:
    """What is left of the page's heap after a collection, every now and then until so many frames have been sent."""
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


class _StandIn(ThreadingHTTPServer):
    """Passes what is asked of the page on to a server, and answers for its engine."""

    daemon_threads = True

    def __init__(self, server_url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_url = server_url
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.engine = _MadeUpEngine()


@contextmanager
def _stand_in(server_url: str) -> Generator[_StandIn]:
    with _StandIn(server_url) as stand_in:
        threading.Thread(target=stand_in.serve_forever, daemon=True).start()
        yield stand_in
        stand_in.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: _StandIn  # pyright: ignore[reportIncompatibleVariableOverride] (it is no other)

    def do_GET(self) -> None:
        if self.path == "/live/events":
            self._send_events()
            return
        if self.path == "/live/state":
            content, kind = json.dumps(self.server.engine.state()).encode(), "application/json"
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

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(content)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


class _MadeUpEngine:
    """An engine that is always full: some decode, some prefill, many wait; who ends is followed by another."""

    def __init__(self) -> None:
        self._dice = Random(0)
        self._seq = 0
        self._step = 0
        self.num_frames = 0
        """Deltas made so far."""
        self._time_s = 1000.0
        self._next = NUM_REQUESTS
        self._running = dict.fromkeys(range(NUM_RUNNING), 100)
        """Output tokens so far, by request."""
        self._rows = {number: [number * 64 + entry for entry in range(32)] for number in range(NUM_RUNNING)}

    def state(self) -> dict[str, Any]:
        """A State."""
        waiting = [self._request(number, "waiting") for number in range(NUM_RUNNING, NUM_REQUESTS)]
        running = [self._request(number, "running") for number in self._running]
        engine = {
            **self._figures(),
            "process": "engine-1",
            "lost": "",
            "config": {
                "num_blocks": NUM_BLOCKS,
                "block_size": 16,
                "block_tokens": [16],
                "num_groups": 1,
                "windows": [None],
                "max_num_seqs": NUM_RUNNING,
                "max_num_batched_tokens": 512,
                "max_model_len": 4096,
                "kv_cache_dtype": "auto",
                "enable_prefix_caching": True,
                "speculation": None,
            },
            "steps": [],
            "requests": [*running, *waiting],
            "rows": {f"r{number}#{number}.0": [[0, row]] for number, row in self._rows.items()},
            "blocks": {"runs": [[self._dice.choice([0, 1, 3]), 100] for _ in range(NUM_BLOCKS // 100)], "written": []},
        }
        return {
            "v": 1,
            "seq": self._seq,
            "time_s": self._time_s,
            "model": "made up",
            "version": "0",
            "recording": None,
            "fields": FIELDS,
            "slo": {"ttft_s": 0.5, "itl_s": None},
            "engines": {"engine": engine},
            "links": [],
            "pools": None,
        }

    def delta(self) -> dict[str, Any]:
        """A Delta: two steps, every running request a token or two further, a few that end and begin."""
        self._seq += 1
        self.num_frames += 1
        self._time_s += 0.02
        dice, requests, gone, grown = self._dice, [], [], {}
        for number in dice.sample(list(self._running), 4):
            del self._running[number], self._rows[number]
            gone.append(f"r{number}#{number}.0")
            self._running[self._next] = 0
            self._rows[self._next] = []
            self._next += 1
        written: list[int] = []
        for number in self._running:
            self._running[number] += 2
            if dice.random() < 1 / 8:
                block, row = dice.randrange(NUM_BLOCKS), self._rows[number]
                grown[f"r{number}#{number}.0"] = [[len(row), 0, [block]]]
                row.append(block)
                written.append(block)
            requests.append(self._request(number, "running"))
        changed = [
            [dice.randrange(NUM_BLOCKS - 8), dice.randrange(1, 8), dice.choice([0, 1, 2, 3])] for _ in range(200)
        ]
        engine = {
            **self._figures(),
            "steps": [self._made_step() for _ in range(2)],
            "requests": requests,
            "gone": gone,
            "rows": grown,
            "blocks": {"set": changed, "written": written},
        }
        return {"seq": self._seq, "time_s": self._time_s, "engines": {"engine": engine}, "links": [], "pools": None}

    def _request(self, number: int, state: str) -> list[Any]:
        values: dict[str, Any] = dict.fromkeys(FIELDS["request"], 0)
        is_running = state == "running"
        values |= {
            "id": f"r{number}#{number}.0",
            "state": state,
            "stroke": "decode" if is_running else "",
            "tenant_is_other": False,
            "arrival_s": self._time_s - 3,
            "scheduled_s": self._time_s - 2 if is_running else None,
            "first_token_s": self._time_s - 1 if is_running else None,
            "last_token_s": self._time_s if is_running else None,
            "finish_s": None,
            "finish": "",
            "num_prompt": 512,
            "num_output": self._running.get(number, 0),
            "max_tokens": 1000,
            "itl_ms": 10.0,
            "background": False,
        }
        return list(values.values())

    def _made_step(self) -> list[Any]:
        self._step += 1
        values: dict[str, Any] = dict.fromkeys(FIELDS["step"], 0)
        values |= {
            "step": self._step,
            "at_s": self._time_s,
            "ms": 8 + 4 * self._dice.random(),
            "floor_ms": 5.0,
            "bound": "memory",
            "decode": NUM_RUNNING,
            "prefill": self._dice.choice([0, 0, 256]),
            "limit": "seqs",
            "wait": f"seqs: {NUM_RUNNING} of {NUM_RUNNING} running",
            "head": f"r{NUM_RUNNING}#{NUM_RUNNING}.0",
            "num_running": NUM_RUNNING,
            "num_waiting": NUM_REQUESTS - NUM_RUNNING,
            "preempted": [],
        }
        return list(values.values())

    def _figures(self) -> dict[str, Any]:
        names = ("preempted", "num_preemptions", "prompt_tokens", "cached_tokens", "cache_queries", "cache_hits")
        figures: dict[str, Any] = dict.fromkeys(names, 100)
        figures |= {
            "running": NUM_RUNNING,
            "waiting": NUM_REQUESTS - NUM_RUNNING,
            "num_steps": self._step,
            "generation_tokens": self._step * NUM_RUNNING,
            "kv_usage": 0.5,
            "prefill_tokens_per_s": 1000.0 * self._dice.random(),
            "decode_tokens_per_s": 20_000.0 * self._dice.random(),
            "step_ms": 10.0,
            "floor_ms": 5.0,
        }
        bounds = [0.001 * 2**power for power in range(12)]
        histogram = {"bounds": bounds, "counts": [self._step] * 13, "sum": 1.0, "count": 13 * self._step}
        waiting = {"slots": NUM_REQUESTS - NUM_RUNNING, "tokens": 0, "kv": 0, "step": 0}
        histograms = dict.fromkeys(("ttft", "tpot", "itl"), histogram)
        return {"figures": figures, "waiting_by_reason": waiting, "histograms": histograms}
