"""Puts an engine together: the one place where model, memory, scheduler and text meet."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from twostroke.config.engine import EngineConfig
from twostroke.config.model import ModelConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.engine import Engine
from twostroke.engine.event_sinks import open_event_log
from twostroke.engine.input_processor import InputProcessor
from twostroke.engine.journal import Journal
from twostroke.engine.output_processor import OutputProcessor
from twostroke.engine.text_engine import TextEngine
from twostroke.errors import SetupError
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.sizing import KVSizing, size_kv_cache
from twostroke.log import get_logger
from twostroke.model.checkpoint import find_model_folder, read_model_config
from twostroke.model.loader import load_model
from twostroke.runner.executor import InProcessExecutor
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.machine_limits import measure_machine_limits
from twostroke.runner.memory import free_host_bytes
from twostroke.runner.model_runner import ModelRunner
from twostroke.sampling.sampler import Sampler
from twostroke.scheduler.scheduler import Scheduler
from twostroke.tokenizer.settings import read_eos_token_ids
from twostroke.tokenizer.tokenizer import Tokenizer

log = get_logger(__name__)
