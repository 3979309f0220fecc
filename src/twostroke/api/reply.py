"""The one reply to a conversation as a row of blocks, each of one kind: for the Messages and the Responses API."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from twostroke.api.conversation import ChoiceText, Conversation
from twostroke.api.dialect import Dialect
from twostroke.api.generation import AnswerHead
from twostroke.api.parsers.json_text import is_whole_value
from twostroke.api.parsers.output import ContentDelta, Delta, ReasoningDelta, ToolCallArguments, ToolCallBegin
from twostroke.api.protocol.chat import ChatRequest
from twostroke.client.engine_client import EngineClient
from twostroke.outputs import RequestOutput
from twostroke.request import FinishReason


class BlockKind(StrEnum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """One block."""

    index: int
    """Its place in the answer."""
    kind: BlockKind
    id: str
    """Unique among all answers' blocks when the answer's id is."""
    name: str = ""
    """The name of the function that a call is of."""
    pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        """All there is so far; of a call the JSON text of its arguments."""
        return "".join(self.pieces)

    @property
    def is_half_call(self) -> bool:
        """Whether it is a call whose arguments are not there to their end."""
        return self.kind is BlockKind.CALL and not is_whole_value(self.text)


@dataclass(frozen=True, slots=True)
class BlockBegun:
    """A block begins; it is empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockGrown:
    """A block has more text."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnded:
    """A block is complete, or the generation was cut off within it."""

    block: Block


BlockEvent = BlockBegun | BlockGrown | BlockEnded


class Blocks:
    """Sorts deltas into blocks: a new one begins where the kind changes, and with every call.

    >>> blocks = Blocks("answer", shows_reasoning=True)
    >>> _ = blocks.push([ReasoningDelta("Hm."), ContentDelta("It"), ContentDelta(" is")]) + blocks.finish()
    >>> [(block.kind.value, block.text) for block in blocks.all]
    [('reasoning', 'Hm.'), ('text', 'It is')]

    Args:
        answer_id: of the answer, in the ids of its blocks.
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
        """Takes what is new."""
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
        """Nothing more will come."""
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
    """A conversation whose one choice is answered as blocks; how these are written, subclasses say.

    Args:
        engine: that answers.
        request: the chat that asks for the same.
        dialect: how the model writes reasoning and tool calls.
        head: of the answer; its id is in those of its blocks.
    """

    def __init__(self, engine: EngineClient, request: ChatRequest, dialect: Dialect, head: AnswerHead) -> None:
        super().__init__(engine, request, dialect, head)
        self.blocks = Blocks(head.id, shows_reasoning=request.include_reasoning is not False)
        self.finish_reason: FinishReason | None = None
        """None until it has ended."""
        self.stop_reason: int | str | None = None
        self._text: ChoiceText | None = None
        """None until the first output has come."""

    @property
    def has_half_call(self) -> bool:
        """Whether the model has stopped within a call."""
        return self._text is not None and self._text.has_half_call

    @property
    def whole_blocks(self) -> list[Block]:
        """All blocks but half calls, which nobody could tell from whole ones."""
        return [block for block in self.blocks.all if not block.is_half_call]

    async def read(self) -> None:
        """Waits for the end; raises what Generation.whole raises."""
        self._take(await self.whole())

    def events(self, number: int, output: RequestOutput) -> bytes:
        """What is new of a streamed answer."""
        self.usage.add(number, output)
        is_first = self._text is None
        happened = self._take(output)
        first = self._first_events() if is_first else b""  # not before there is an output
        return first + b"".join(map(self._written, happened))

    def _first_events(self) -> bytes:
        """Return what a stream begins with."""
        raise NotImplementedError

    def _written(self, event: BlockEvent) -> bytes:
        """Return what a stream says of this."""
        raise NotImplementedError

    def _take(self, output: RequestOutput) -> list[BlockEvent]:
        """Takes what is new; returns what that does to the blocks."""
        text = self._text = self._text or self.choice_text()
        part = output.outputs[0]
        happened = self.blocks.push(text.read(part))
        if part.finish_reason is not None:
            happened += self.blocks.finish()
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        self.usage.num_reasoning_tokens = text.num_reasoning_tokens
        return happened
