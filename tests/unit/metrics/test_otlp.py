"""The extra `otel`: what is sent where, and what is said without it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from factories import make_layout
from fakes import FakeEngine
from twostroke.events import EventRing
from twostroke.metrics.otlp import request_tracer


class Collector:
    """An HTTP server that keeps what is posted to it."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, bytes]] = []
        posted = self.posted

        class Keep(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Keep)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.mark.parametrize("written", ["", "/", "/v1/traces", "/v1/traces/"])
def test_spans_and_durations_are_posted(collector: Collector, written: str) -> None:
    log = EventRing(100)
    engine = FakeEngine(make_layout(), 16, max_model_len=32, log=log)
    engine.submit("mine#0.0", [1, 2, 3], 2)
    engine.run()
    tracer = request_tracer(collector.endpoint + written, model="some-model", epoch_offset_ns=0)
    tracer.begin("mine", "chat", {}, {})
    for event in log:
        tracer.append(event)
    tracer.close()
    by_path = dict(collector.posted)
    assert set(by_path) == {"/v1/traces", "/v1/metrics"}, "below the base, however the endpoint is written"
    assert b"chat some-model" in by_path["/v1/traces"]
    assert b"gen_ai.server.time_to_first_token" in by_path["/v1/metrics"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_extra_there_is_a_remedy() -> None:
    told = run(
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from twostroke.errors import InvalidParameter\n"
        "from twostroke.metrics.otlp import request_tracer\n"
        "try:\n"
        "    request_tracer('http://127.0.0.1:1', model='m', epoch_offset_ns=0)\n"
        "except InvalidParameter as error:\n"
        "    print(error)\n"
    )
    assert "otlp_traces_endpoint='http://127.0.0.1:1': needs OpenTelemetry" in told
    assert "pip install 'twostroke[otel]'" in told


def test_metrics_and_explanations_load_neither_torch_nor_opentelemetry() -> None:
    loaded = run(
        "import sys\n"
        "import twostroke.explain.recorder, twostroke.explain.text, twostroke.explain.trace\n"
        "import twostroke.metrics.exposition, twostroke.metrics.otlp\n"
        "print({'torch', 'opentelemetry'} & set(sys.modules))\n"
    )
    assert loaded.strip() == "set()"
