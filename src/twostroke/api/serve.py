"""Life cycle of a server: engine process, socket, signals and shutdown.

On shutdown running requests may finish, new ones are refused, and every client gets an answer:

    first SIGTERM or SIGINT     /ready and new requests get 503 immediately; running requests continue
    all have ended              exit code 0
    timeout or second signal    running requests end with an error, in a stream as an event; exit code 0
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from twostroke.api.app import build_app
from twostroke.api.dialect import check_parsers
from twostroke.api.keys import with_keys_from_files
from twostroke.api.observation import Observation
from twostroke.api.transport import guarded_protocol
from twostroke.cluster.child import drop_early
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.config.server import ServerConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import printed_lines
from twostroke.engine.garbage import freeze_gc
from twostroke.errors import InvalidParameter, InvalidPrompt, SetupError
from twostroke.lab.lab import Lab
from twostroke.log import RateLimitFilter, get_logger
from twostroke.plain_words import reason_of
from twostroke.process_start import seconds_since_start
from twostroke.tokenizer.chat_template import check_template


def listen(host: str, port: int) -> socket.socket:
    """Return the bound socket. This runs before the model is loaded, so that an address in use is reported immediately.

    Raises:
        InvalidParameter: the host is not an address of this machine.
        SetupError: the address cannot be listened on, for example because it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except socket.gaierror as error:
        listener.close()
        limit = f"is not an address of this machine ({error.strerror})"
        raise InvalidParameter("host", host, limit, "Use 127.0.0.1, or 0.0.0.0 for all networks.") from error
    except OSError as error:
        listener.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        remedy = "Use an address of this machine as --host." if is_elsewhere else "Choose another --port."
        raise SetupError(f"{host}:{port} cannot be listened on ({error.strerror or error}). {remedy}") from error
    return listener


def address_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a socket, as typed into a browser."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


log = get_logger(__name__)

DRAIN_POLL_S = 0.05


class DrainingServer(uvicorn.Server):
    """Uvicorn server that keeps listening while it drains.

    Args:
        config: settings of uvicorn.
        engine: engine whose requests are waited for.
        drain_timeout_s: maximum seconds to wait.
        address: URL, printed once the server listens and handles signals.
        on_end: called when all requests have ended, to end other transfers.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        engine: RemoteEngine | PooledEngine,
        drain_timeout_s: float,
        address: str,
        *,
        on_end: Callable[[], Awaitable[object]],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_timeout_s = drain_timeout_s
        self._address = address
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None
        self._stop_now = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen and print the address."""
        await super().startup(sockets)
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # a signal came before uvicorn handled signals
            return
        sys.stderr.write(f"serving  {self._address}\n")
        sys.stderr.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain. Uvicorn's own handler would stop listening immediately and exit with the signal's code."""
        del sig, frame
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._draining is None:
            self._engine.drain()
            self._draining = self._loop.create_task(self._drain())
        else:
            self._stop_now.set()

    async def _drain(self) -> None:
        """Wait for the running requests, then let the server exit."""
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while self._engine.health().num_requests and not self._stop_now.is_set():
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            log.warning(
                "ended requests that still ran %g s after the signal (--drain-timeout-s)", self._drain_timeout_s
            )
        self._engine.end_all("the server was shut down")
        await self._on_end()
        self.should_exit = True


BACKLOG = 2048
KEEP_ALIVE_S = 75
FINAL_REPORTS_S = 5
"""Seconds to send remaining answers after all requests have ended."""


async def serve(
    engine_config: EngineConfig, config: ServerConfig, pools: PoolConfig | None = None, *, quiet: bool = False
) -> None:
    """Serve until told to stop; running requests may then finish within --drain-timeout-s.

    Raises:
        InvalidParameter: a key file or certificate cannot be used, or a setting is invalid; the model is not loaded.
        SetupError: the model cannot be loaded, or the address cannot be listened on.
    """
    imports_s = seconds_since_start()
    config = with_keys_from_files(config)
    _check_certificate(config)
    check_parsers(config)
    listener = listen(config.host, config.port)
    model = (config.served_model_name or (engine_config.load.model,))[0]
    has_pools = pools is not None and pools.num_workers > 0
    observation = Observation(config, model, monotonic_clock(), has_pools=has_pools)
    engine = _engine(engine_config, config, pools, observation)
    lab = Lab() if config.lab else None
    try:
        await engine.start()
        if not quiet:
            for line in printed_lines(engine.facts.startup_lines):
                sys.stderr.write(line + "\n")
        listener.listen(BACKLOG)  # connections wait from here on
        scheme = "http" if config.ssl_certfile is None else "https"
        logging.getLogger("uvicorn.error").addFilter(RateLimitFilter())  # invalid requests must not fill the disk
        pools_client = engine if isinstance(engine, PooledEngine) else None
        if pools_client is not None:
            observation.live.show_pools(lambda: [dataclasses.asdict(member) for member in pools_client.members()])
        app: Any = build_app(engine, config, engine_config.load.model, observation, pools_client, lab)

        async def end() -> None:
            observation.feed.close()
            if lab is not None:
                await lab.stop()

        server = DrainingServer(
            uvicorn.Config(
                app,
                http=guarded_protocol(config.max_connections, config.head_timeout_s, config.answer_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FINAL_REPORTS_S,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            ),
            engine,
            config.drain_timeout_s,
            address_of(listener, scheme),
            on_end=end,
        )
        freeze_gc()
        if not quiet and isinstance(engine, RemoteEngine):
            sys.stderr.write(_ready_line(engine, imports_s) + "\n")
        await server.serve(sockets=[listener])
    finally:
        if lab is not None:
            await lab.stop()
        await engine.close()
        observation.close()
        listener.close()


def _ready_line(engine: RemoteEngine, imports_s: float) -> str:
    """Return the line with the seconds of each part of the start. Both processes import at the same time."""
    loading_s = engine.ready_s - engine.imports_s
    return (
        f"ready    {seconds_since_start():.2f} s after the start; imports {imports_s:.2f} s here and "
        f"{engine.imports_s:.2f} s in the engine's process, where the model then took {loading_s:.2f} s"
    )


def _engine(
    engine_config: EngineConfig, config: ServerConfig, pools: PoolConfig | None, observation: Observation
) -> RemoteEngine | PooledEngine:
    """Return an engine of one process or of pools."""
    template = _read_template(config.chat_template)
    if pools is None or not pools.num_workers:
        return RemoteEngine(
            engine_config,
            listeners=(observation,),
            stall_after_s=config.stall_timeout_s,
            step_timeout_s=(pools or PoolConfig()).step_timeout_s,
            chat_template=template,
            on_trouble=observation.dump,
        )
    drop_early()  # pools start their processes in another way
    engine = PooledEngine(
        engine_config,
        pools,
        listeners=(observation,),
        stall_after_s=config.stall_timeout_s,
        chat_template=template,
        on_trouble=observation.dump,
        drain_timeout_s=config.drain_timeout_s,
    )
    observation.gateway.follow(engine.dispatcher)
    return engine


def _check_certificate(config: ServerConfig) -> None:
    """Refuse certificate files that are missing or invalid, before the model is loaded."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    for name, path in (("ssl_certfile", config.ssl_certfile), ("ssl_keyfile", config.ssl_keyfile)):
        if not path.is_file():
            raise InvalidParameter(name, str(path), "there is no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        limit = f"is not a certificate for {config.ssl_keyfile} ({reason_of(error)})"
        raise InvalidParameter("ssl_certfile", str(config.ssl_certfile), limit, "Use PEM format for both.") from error


def _read_template(path: Path | None) -> str | None:
    """Return the chat template of a file, if one is given; refuse an invalid one."""
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
        check_template(source)
    except (OSError, UnicodeDecodeError, InvalidPrompt) as error:
        limit = f"cannot be read as a chat template ({reason_of(error)})"
        raise InvalidParameter("chat_template", str(path), limit, "Give a Jinja file in UTF-8.") from error
    return source
