"""The distributions of times and sizes, over sequences and requests that have ended."""

from __future__ import annotations

from twostroke.metrics import families
from twostroke.metrics.instruments import Instruments
from twostroke.request_times import RequestTimes


class Latencies:
    """How long it took; the durations are those of RequestTimes."""

    def __init__(self, instruments: Instruments) -> None:
        self.ttft = instruments.distribution(families.TIME_TO_FIRST_TOKEN)
        self.itl = instruments.distribution(families.INTER_TOKEN_LATENCY)
        self.gap = instruments.distribution(families.OUTPUT_GAP)
        self._tpot = instruments.distribution(families.TIME_PER_OUTPUT_TOKEN)
        self._e2e = instruments.distribution(families.E2E_LATENCY)
        self._queue_time = instruments.distribution(families.QUEUE_TIME)
        self._prefill_time = instruments.distribution(families.PREFILL_TIME)
        self._decode_time = instruments.distribution(families.DECODE_TIME)
        self._inference_time = instruments.distribution(families.INFERENCE_TIME)

    def ended(self, times: RequestTimes) -> None:
        """A sequence that got a token has ended."""
        self._e2e.observe(times.e2e_s)
        self._decode_time.observe(times.e2e_s - times.ttft_s)
        if times.tpot_s is not None:
            self._tpot.observe(times.tpot_s)
        if times.scheduled_s is not None:
            self._queue_time.observe(times.queue_time_s)
            self._prefill_time.observe(times.ttft_s - times.queue_time_s)
            self._inference_time.observe(times.e2e_s - times.queue_time_s)


class SizeHistograms:
    """How much was asked for and given."""

    def __init__(self, instruments: Instruments) -> None:
        self._prompt_tokens = instruments.distribution(families.REQUEST_PROMPT_TOKENS)
        self._generation_tokens = instruments.distribution(families.REQUEST_GENERATION_TOKENS)
        self._longest_generation = instruments.distribution(families.REQUEST_MAX_NUM_GENERATION_TOKENS)
        self._params_n = instruments.distribution(families.REQUEST_PARAMS_N)
        self._params_max_tokens = instruments.distribution(families.REQUEST_PARAMS_MAX_TOKENS)

    def sequence_ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """One of a request's n answers is there."""
        self._prompt_tokens.observe(num_prompt_tokens)
        self._generation_tokens.observe(num_output_tokens)

    def request_ended(self, num_sequences: int, max_tokens: int, most_output_tokens: int) -> None:
        """All of them are."""
        self._params_n.observe(num_sequences)
        self._params_max_tokens.observe(max_tokens)
        self._longest_generation.observe(most_output_tokens)
