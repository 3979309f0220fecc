"""A server from start to end: the engine's process, the socket, the signals."""

from __future__ import annotations

import dataclasses
import logging
import ssl
import sys
from pathlib import Path
from typing import Any

import uvicorn

from twostroke.api.app import build_app
from twostroke.api.dialect import check_parsers
from twostroke.api.draining import DrainingServer
from twostroke.api.keys import with_keys_of_files
from twostroke.api.listening import address_of, listen
from twostroke.api.observation import Observation
from twostroke.api.transport import guarded_protocol
from twostroke.cluster.early_child import drop_early
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.remote_engine import RemoteEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.config.server import ServerConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.facts import lines_to_print
from twostroke.engine.garbage import keep_what_is_there
from twostroke.errors import InvalidParameter, InvalidPrompt
from twostroke.lab.lab import Lab
from twostroke.log import Sparingly
from twostroke.plain_words import reason_of
from twostroke.process_start import seconds_since_start
from twostroke.tokenizer.chat_template import check_template

BACKLOG = 2048
KEEP_ALIVE_S = 75
LAST_WORDS_S = 5
"""When nothing runs any more, answers have so long to be sent."""


async def serve(
    engine_config: EngineConfig, config: ServerConfig, pools: PoolConfig | None = None, *, quiet: bool = False
) -> None:
    """Serves until it is told to stop; then what runs may end, for as long as the config says.

    Raises:
        InvalidParameter: a file of keys or a certificate cannot be used.
        SetupError: the model cannot be loaded, or the address cannot be listened on.
        InvalidParameter: a setting that names nothing; the model is not loaded then.
    """
    imports_s = seconds_since_start()
    config = with_keys_of_files(config)
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
            for line in lines_to_print(engine.facts.startup_lines):
                sys.stderr.write(line + "\n")
        listener.listen(BACKLOG)  # from here on whoever connects is answered, if not at once
        scheme = "http" if config.ssl_certfile is None else "https"
        logging.getLogger("uvicorn.error").addFilter(Sparingly())  # whoever sends nonsense must not fill the disk
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
                timeout_graceful_shutdown=LAST_WORDS_S,
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            ),
            engine,
            config.drain_timeout_s,
            address_of(listener, scheme),
            on_end=end,
        )
        keep_what_is_there()
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
    """Return the line that says where the start's seconds went. Both processes import at the same time."""
    loading_s = engine.ready_s - engine.imports_s
    return (
        f"ready    {seconds_since_start():.2f} s after the start; imports {imports_s:.2f} s here and "
        f"{engine.imports_s:.2f} s in the engine's process, where the model then took {loading_s:.2f} s"
    )


def _engine(
    engine_config: EngineConfig, config: ServerConfig, pools: PoolConfig | None, observation: Observation
) -> RemoteEngine | PooledEngine:
    """One process, or several."""
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
    drop_early()  # pools start theirs in another way
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
    """Files that are not there, or hold something else, are told before the model is loaded."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    for name, path in (("ssl_certfile", config.ssl_certfile), ("ssl_keyfile", config.ssl_keyfile)):
        if not path.is_file():
            raise InvalidParameter(name, str(path), "there is no such file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        limit = f"is no certificate that goes with {config.ssl_keyfile} ({reason_of(error)})"
        raise InvalidParameter("ssl_certfile", str(config.ssl_certfile), limit, "Give both in PEM form.") from error


def _read_template(path: Path | None) -> str | None:
    """Of the file that was given; one that is no template is refused at once."""
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
        check_template(source)
    except (OSError, UnicodeDecodeError, InvalidPrompt) as error:
        limit = f"cannot be read as a chat template ({reason_of(error)})"
        raise InvalidParameter("chat_template", str(path), limit, "Give a Jinja file in UTF-8.") from error
    return source
