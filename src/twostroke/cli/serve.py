"""`twostroke serve [MODEL]`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from twostroke.cli.flags import (
    ModelFlag,
    ModelNames,
    PresetFlag,
    QuietFlag,
    ServedEngineFlags,
    check_model_names,
    group,
    json_object,
    with_model,
)
from twostroke.cli.interrupts import restore_interrupt_handler
from twostroke.config.pools import KVTransport, PoolConfig, PoolWorkers
from twostroke.config.server import MetricsNames, ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsFromFlags(PoolConfig):
    """Settings of pools; those of a single pool are given as JSON."""

    prefill_config: Annotated[Mapping[str, Any] | None, json_object("prefill_config")] = field(default=None, hash=False)
    """Settings of prefill workers alone, as JSON: '{"dtype": "bfloat16", "kv_cache_dtype": "int8"}'."""
    decode_config: Annotated[Mapping[str, Any] | None, json_object("decode_config")] = field(default=None, hash=False)
    """Settings of decode workers alone, as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFromFlags(ServerConfig):
    """Server settings, with a flag that takes several values."""

    served_model_name: ModelNames = ()
    """Names that clients may call the model by, the first in answers; default: as MODEL was given. All words up to the
    next flag are names, so put MODEL first."""


PoolFlags = Annotated[PoolsFromFlags, Parameter(name="*", group=group("Pools"))]
ServerFlags = Annotated[ServerFromFlags, Parameter(name="*", group=group("Server"))]

__all__ = ["KVTransport", "MetricsNames", "Path", "PoolWorkers"]
# cyclopts evaluates the annotations of ServerConfig and PoolConfig in this module


def serve(
    model: str | None = None,
    /,
    *,
    model_flag: ModelFlag = None,
    server: ServerFlags = ServerFromFlags(),
    engine: Annotated[ServedEngineFlags, Parameter(name="*")] = ServedEngineFlags(),
    preset: PresetFlag = None,
    pools: PoolFlags = PoolsFromFlags(),
    quiet: QuietFlag = False,
) -> None:
    """Serve a model to OpenAI clients, only on this machine by default (--host).

    Parameters
    ----------
    model
        Model folder, GGUF file or hub id; without it the embedded code model answers (a demonstration).
    model_flag
        The same as MODEL.
    quiet
        Print the address as the only start-up line.
    """
    import uvloop  # slow imports, needed by this command only

    from twostroke.api.serve import serve as run

    if model is None and model_flag is None:
        check_model_names(server.served_model_name)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    config = engine.config(with_model(engine.load, positional=model, flag=model_flag))
    restore_interrupt_handler()
    uvloop.run(run(config, server, pools, quiet=quiet))
