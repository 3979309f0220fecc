"""Reply to a conversation as a sequence of blocks, each of one kind, for all APIs but OpenAI's older ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from pydantic_core import from_json

from twostroke.api.conversation import ChoiceReader, Conversation
from twostroke.api.dialect import Dialect
from twostroke.api.generation import AnswerHead
from twostroke.api.parsers.json_text import is_complete_value
from twostroke.api.parsers.output import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallBegin
from twostroke.api.protocol.chat import ChatRequest
from twostroke.client.engine_client import EngineClient
from twostroke.outputs import RequestOutput
from twostroke.request import FinishReason


class BlockKind(StrEnum):
    """Kind of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """Part of a reply: reasoning, text or one tool call."""

    index: int
    """Position in the answer."""
    kind: BlockKind
    id: str
    """Id, unique among the blocks of all answers if the answer's id is unique."""
    name: str = ""
    """Name of the function of a call."""
    pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """Text so far; for a call the JSON text of its arguments."""
        return "".join(self.pieces)

    @property
    def is_incomplete_call(self) -> bool:
        """Whether this is a call whose arguments are incomplete."""
        return self.kind is BlockKind.CALL and not is_complete_value(self.text)


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Arguments that are not an object become the value of `arguments`, so that the client sees what the model wrote.
    """
    try:
        found = from_json(text)
    except ValueError:
        found = None
    return cast(dict[str, Any], found) if isinstance(found, dict) else {"arguments": text}


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """Beginning of a block, which is empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """More text in a block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """End of a block, complete or cut off."""

    block: Block


BlockEvent = BlockBegun | BlockGrown | BlockEnded


class Blocks:
    """Blocks of one reply, built from deltas. A new block begins when the kind changes, and with every call.

    >>> blocks = Blocks("answer", shows_reasoning=True)
    >>> _ = blocks.push([ReasoningDelta("Hm."), ContentDelta("It"), ContentDelta(" is")]) + blocks.finish()
    >>> [(block.kind.value, block.text) for block in blocks.all]
    [('reasoning', 'Hm.'), ('text', 'It is')]

    Args:
        answer_id: id of the answer, which its blocks' ids begin with.
        shows_reasoning: whether the client wants the reasoning.
    """

    def __init__(self, answer_id: str, *, shows_reasoning: bool) -> None:
        self._answer_id = answer_id
        self._shows_reasoning = shows_reasoning
        self.all: list[Block] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a function."""
        return any(block.kind is BlockKind.CALL for block in self.all)

    def push(self, deltas: Iterable[Delta]) -> list[BlockEvent]:
        """Add deltas; return the events that they cause."""
        events: list[BlockEvent] = []
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    if self._shows_reasoning:
                        events += self._grow(BlockKind.REASONING, text)
                case ContentDelta(text):
                    events += self._grow(BlockKind.TEXT, text)
                case ToolCallBegin(_, name):
                    events += self._begin(BlockKind.CALL, name)
                case ToolCallArguments(_, text):
                    events += self._grow(BlockKind.CALL, text)
        return events

    def finish(self) -> list[BlockEvent]:
        """End the last block."""
        was_open, self._is_open = self._is_open, False
        return [BlockEnded(self.all[-1])] if was_open else []

    def _begin(self, kind: BlockKind, name: str = "") -> list[BlockEvent]:
        ended = self.finish()
        block = Block(len(self.all), kind, f"{self._answer_id}-{len(self.all)}", name)
        self.all.append(block)
        self._is_open = True
        return [*ended, BlockBegun(block)]

    def _grow(self, kind: BlockKind, text: str) -> list[BlockEvent]:
        begun = [] if self._is_open and self.all[-1].kind is kind else self._begin(kind)
        self.all[-1].pieces.append(text)
        return [*begun, BlockGrown(self.all[-1], text)]


class BlockReply(Conversation):
    """Conversation whose single choice is answered as blocks; subclasses write them.

    Args:
        engine: engine that runs it.
        request: the equivalent chat.
        dialect: syntax of the model's reasoning and tool calls.
        head: head of the answer; the blocks' ids begin with its id.
    """

    def __init__(self, engine: EngineClient, request: ChatRequest, dialect: Dialect, head: AnswerHead) -> None:
        super().__init__(engine, request, dialect, head)
        self.blocks = Blocks(head.id, shows_reasoning=request.include_reasoning is not False)
        self.finish_reason: FinishReason | None = None
        """Finish reason; None before the end."""
        self.stop_reason: int | str | None = None
        self._text: ChoiceReader | None = None
        """Reader of the choice; None before the first output."""

    @property
    def has_incomplete_call(self) -> bool:
        """Whether the text ends within a call."""
        return self._text is not None and self._text.has_incomplete_call

    @property
    def whole_blocks(self) -> list[Block]:
        """All blocks except incomplete calls, which clients could not tell from complete ones."""
        return [block for block in self.blocks.all if not block.is_incomplete_call]

    async def read(self) -> None:
        """Wait for the end and read the whole output; raise what Generation.whole raises."""
        self._take(await self.whole())

    def events(self, number: int, output: RequestOutput) -> bytes:
        self.usage.add(number, output)
        is_first = self._text is None
        happened = self._take(output)
        first = self._first_events() if is_first else b""  # only after the first output
        return first + b"".join(map(self._written, happened))

    def _first_events(self) -> bytes:
        """Return the opening events of a stream."""
        raise NotImplementedError

    def _written(self, event: BlockEvent) -> bytes:
        """Return the stream's events for a block event."""
        raise NotImplementedError

    def _take(self, output: RequestOutput) -> list[BlockEvent]:
        """Read an output; return the block events that it causes."""
        text = self._text = self._text or self.choice_reader()
        part = output.outputs[0]
        happened = self.blocks.push(text.read(part))
        if part.finish_reason is not None:
            happened += self.blocks.finish()
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        self.usage.num_reasoning_tokens = text.num_reasoning_tokens
        return happened
