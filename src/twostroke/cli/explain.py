"""`twostroke explain ID`: the time of one request, part by part, from an event log or a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from twostroke.cli.event_logs import check_source, read_logs
from twostroke.cli.flags import JsonFlag
from twostroke.engine.event_sinks import consistent_events
from twostroke.errors import InvalidParameter
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_of
from twostroke.explain.trace import trace_of
from twostroke.plain_words import reason_of

LogsFlag = Annotated[tuple[Path, ...], Parameter(consume_multiple=True)]

SERVER_TIMEOUT_S = 60.0


def explain(
    request_id: str,
    *,
    event_log: LogsFlag = (),
    url: str | None = None,
    api_key: str | None = None,
    json_output: JsonFlag = False,
    trace: Path | None = None,
) -> None:
    """Explain how a request spent every millisecond, and why.

    Parameters
    ----------
    request_id
        Name of the request. If several requests have it, the last one; `name#number` selects another.
    event_log
        A file that --event-log wrote, or the dump of a server's flight recorder; for a server with --prefill and
        --decode the files of all its processes.
    url
        Address of a running server, such as http://127.0.0.1:8000, instead of a file; it provides its last minutes.
        Name a request by the id of its response: cmpl-...
    api_key
        The server's key, if it has one.
    json_output
        Print one JSON object instead of a table.
    trace
        File to write the whole log to as a Chrome trace, for Perfetto.
    """
    check_source(event_log, url, f"twostroke explain {request_id} --event-log FILE")
    if url is not None:
        _explain_from_server(Server(url, api_key), request_id, json_output=json_output, trace=trace)
        return
    events = read_logs(event_log)
    with consistent_events(event_log):
        timeline = timeline_of(events, request_id)
        whole = None if trace is None else json.dumps(trace_of(events))
    if trace is not None and whole is not None:
        _write_trace(trace, whole)
    if json_output:
        print(json.dumps(timeline.to_dict(), indent=2))
    else:
        print(timeline_text(timeline), end="")


@dataclass(frozen=True, slots=True)
class Server:
    """HTTP client of a running `twostroke serve`."""

    url: str
    api_key: str | None

    def get(self, path: str) -> str:
        """Return the body of the response to a GET request.

        Raises:
            InvalidParameter: the server cannot be reached, or returns an error or a web page; or the key is not
                printable ASCII.
        """
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable()):
            raise InvalidParameter("api_key", "...", "must be printable ASCII, because it is sent in a header")
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, headers=headers)
            with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:
                kind, text = answer.headers.get_content_type(), answer.read().decode()
        except urllib.error.HTTPError as error:
            raise InvalidParameter("url", self.url, f"the server answers {error.code}: {_body_of(error)}") from None
        except http.client.InvalidURL as error:
            raise InvalidParameter(
                "url", self.url, f"is not a valid URL ({reason_of(error)})", _ADDRESS_REMEDY
            ) from error
        except http.client.HTTPException as error:
            limit = f"returns an incomplete or invalid HTTP response ({reason_of(error)})"
            raise InvalidParameter("url", self.url, limit, _ADDRESS_REMEDY) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            limit = f"cannot be reached ({reason_of(reason) if isinstance(reason, Exception) else reason})"
            raise InvalidParameter("url", self.url, limit, _ADDRESS_REMEDY) from error
        if kind == "text/html":
            raise self.wrong_server_error("a web page")
        return text

    def get_json(self, path: str) -> object:
        """Return the body of the response, parsed as JSON.

        Raises:
            InvalidParameter: for the reasons of `get`; or the body is not JSON.
        """
        try:
            return json.loads(self.get(path))
        except InvalidParameter:
            raise
        except (ValueError, RecursionError) as error:
            raise self.wrong_server_error("a body that is not JSON") from error

    def wrong_server_error(self, answer: str) -> InvalidParameter:
        """Return the error for a server that is not `twostroke serve`.

        Args:
            answer: what it sent instead, for the message.
        """
        return InvalidParameter("url", self.url, f"returns {answer}; no `twostroke serve` runs there", _ADDRESS_REMEDY)


_ADDRESS_REMEDY = "Give the address that `twostroke serve` printed."


def _explain_from_server(server: Server, request_id: str, *, json_output: bool, trace: Path | None) -> None:
    path = f"/v1/requests/{quote(request_id, safe='')}/timeline"
    if trace is not None:
        _write_trace(trace, json.dumps(server.get_json("/v1/trace")))
    if json_output:
        print(json.dumps(server.get_json(path), indent=2))
    else:
        print(server.get(f"{path}?format=text"), end="")


def _body_of(error: urllib.error.HTTPError) -> str:
    try:
        return _message(error.read())
    except (OSError, http.client.HTTPException):
        return "the response ended early"


def _message(body: bytes) -> str:
    """Return the message of an OpenAI-style error body, or the first 200 characters of any other body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace")[:200]


def _write_trace(path: Path, trace: str) -> None:
    try:
        path.write_text(trace, encoding="utf-8")
    except OSError as error:
        limit = f"cannot be written ({error.strerror or error})"
        raise InvalidParameter("trace", str(path), limit, "Name a file in a folder that you may write to.") from error
