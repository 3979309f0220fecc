"""Sequences that go on in another process: counted once, whoever runs them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from twostroke.events import RequestArrived, RequestFinishedByCaller
from twostroke.explain.names import request_of, sequence_of
from twostroke.explain.remembered import Remembered
from twostroke.request import Arrival, FinishReason
from twostroke.request_times import RequestTimes


class Counter(Protocol):
    """Counts sequences of one process after the other."""

    def forget(self, name: str) -> None:
        """A sequence that is there, by this name, goes on elsewhere."""
        ...

    def count_end(self, journey: Journey, finish_s: float | None, reason: FinishReason) -> None:
        """It has ended, with its last token unless `finish_s` says otherwise."""
        ...


@dataclass(slots=True, eq=False)
class Journey:
    """A sequence that has not ended."""

    sequence_id: str
    counter: Counter
    """Of the process where it is, or was last."""
    arrival: Arrival
    """There."""
    num_prompt_tokens: int
    max_tokens: int
    times: RequestTimes
    name_there: str | None = None
    """None between two processes."""
    num_cached_tokens: int = 0
    is_running: bool = False
    told: RequestFinishedByCaller | None = None
    """It was ended from outside, and the process that runs it has not said so yet."""

    @property
    def request(self) -> str:
        """Whose sequence it is."""
        return request_of(self.sequence_id)

    def leave(self) -> None:
        """It is between two processes now, or over if it was to end."""
        self.name_there, self.is_running = None, False
        if self.told is not None:
            self.end_as(self.told)

    def go_on(self, event: RequestArrived, counter: Counter) -> None:
        """Another process has taken it in, with what of it was delivered; what came too late is made again."""
        if self.name_there is not None:
            self.counter.forget(self.name_there)
        arrival = event.arrival
        del self.times.token_times_s[max(0, arrival.num_prompt_tokens - self.num_prompt_tokens) :]
        self.max_tokens = len(self.times.token_times_s) + arrival.max_tokens
        self.arrival, self.counter, self.is_running = arrival, counter, False

    def end_as(self, event: RequestFinishedByCaller) -> None:
        """Ends it the way somebody outside wants it."""
        token_times_s = self.times.token_times_s
        if event.num_output_tokens is not None:
            del token_times_s[event.num_output_tokens :]
        ends_with_its_last_token = event.reason in (FinishReason.STOP, FinishReason.LENGTH) and token_times_s
        self.counter.count_end(self, None if ends_with_its_last_token else event.time_s, event.reason)


@dataclass(slots=True, eq=False)
class RequestSize:
    """The sequences of one request."""

    num_sequences: int = 0
    num_live: int = 0
    most_output_tokens: int = 0


@dataclass(slots=True, eq=False)
class Journeys:
    """All sequences of all processes."""

    _live: dict[str, Journey] = field(default_factory=dict[str, Journey])
    _requests: dict[str, RequestSize] = field(default_factory=dict[str, RequestSize])
    _told: Remembered[str, RequestFinishedByCaller] = field(default_factory=Remembered[str, RequestFinishedByCaller])
    """Ends of sequences that nobody has seen yet."""
    _over: Remembered[str, bool] = field(default_factory=Remembered[str, bool])
    """Sequences that ended between two processes: the second may not know when it takes one in."""

    def taken_in(self, event: RequestArrived, counter: Counter) -> Journey | None:
        """A process has taken a sequence in; None: it is over, and that process will hear of it."""
        arrival, sequence_id = event.arrival, sequence_of(event.request_id)
        if sequence_id in self._over:
            return None
        journey = self._live.get(sequence_id)
        if journey is not None and (arrival.import_id is not None or event.request_id != sequence_id):
            journey.go_on(event, counter)
        else:
            times = RequestTimes(arrival.arrival_time_s)
            journey = Journey(sequence_id, counter, arrival, arrival.num_prompt_tokens, arrival.max_tokens, times)
            self._live[sequence_id] = journey
            size = self._requests.setdefault(journey.request, RequestSize())
            size.num_sequences += 1
            size.num_live += 1
        journey.name_there = event.request_id
        journey.told = self._told.pop(sequence_id, journey.told)
        return journey

    def ended(self, journey: Journey) -> RequestSize | None:
        """It is counted; the whole request, if that was its last sequence."""
        if self._live.get(journey.sequence_id) is journey:
            del self._live[journey.sequence_id]
        size = self._requests[journey.request]
        size.num_live -= 1
        size.most_output_tokens = max(size.most_output_tokens, len(journey.times.token_times_s))
        return None if size.num_live else self._requests.pop(journey.request)

    def ended_from_outside(self, event: RequestFinishedByCaller) -> None:
        """The gateway says so; a process that runs it tells when."""
        journey = self._live.get(event.request_id)
        if journey is None:
            self._told.put(event.request_id, event)
        elif journey.name_there is not None:
            journey.told = event
        else:
            self._over.put(event.request_id, True)
            journey.end_as(event)
