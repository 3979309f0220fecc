"""The one reply to a conversation, in blocks; under the APIs that have no choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from twostroke.api.blocks import Block, BlockEvent, Blocks
from twostroke.api.conversation import Conversation
from twostroke.api.parsers.chat_parser import ChatParser
from twostroke.outputs import CompletionOutput, NumericDrift, RequestOutput
from twostroke.request import FinishReason
from twostroke.tokenizer.detokenizer import TokenTexts


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What the reply has cost so far."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of the prompt's."""
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Of the output's."""
    numeric_drift: NumericDrift = field(default_factory=dict[str, list[str]])
    """Differences between the numerics of the workers that made the answer."""

    @property
    def drift(self) -> dict[str, NumericDrift]:
        """Return the `numeric_drift` field of `usage`; empty where the workers do not differ."""
        return {"numeric_drift": self.numeric_drift} if self.numeric_drift else {}


class Reply:
    """Takes in a conversation's output, whole or as it comes.

    Args:
        conversation: with one choice; opened before anything is read.
        answer_id: of the answer, in the ids of its blocks.
    """

    def __init__(self, conversation: Conversation, answer_id: str) -> None:
        self._conversation = conversation
        self.blocks = Blocks(answer_id, shows_reasoning=conversation.request.include_reasoning is not False)
        self.counts = TokenCounts()
        self.finish_reason: FinishReason | None = None
        """None until it has ended."""
        self.stop_reason: int | str | None = None
        self._parser: ChatParser | None = None
        self._token_texts: TokenTexts | None = None

    @property
    def has_half_call(self) -> bool:
        """Whether the model has stopped within a call."""
        return self._parser is not None and self._parser.has_half_call

    @property
    def whole_blocks(self) -> list[Block]:
        """All blocks but half calls, which nobody could tell from whole ones."""
        return [block for block in self.blocks.all if not block.is_half_call]

    async def read(self) -> None:
        """Waits for the end; raises what Generation.whole raises."""
        output = await self._conversation.whole()
        part = output.outputs[0]
        parser = self._parser = self._conversation.parser()
        texts, is_cut = self._conversation.token_texts(), part.finish_reason is not FinishReason.STOP
        message = parser.push_whole(part.text, texts.of(part.token_ids), is_cut=is_cut)
        self.blocks.push(message)
        self.blocks.finish()
        self._count(output, part)

    def push(self, output: RequestOutput) -> list[BlockEvent]:
        """Takes what is new; returns what that does to the blocks."""
        parser = self._parser = self._parser or self._conversation.parser()
        texts = self._token_texts = self._token_texts or self._conversation.token_texts()
        part = output.outputs[0]
        happened = self.blocks.push(parser.push(part.text, texts.of(part.token_ids)))
        if part.finish_reason is not None:
            is_cut = part.finish_reason is not FinishReason.STOP
            happened += self.blocks.push(parser.finish(is_cut=is_cut)) + self.blocks.finish()
        self._count(output, part)
        return happened

    def _count(self, output: RequestOutput, part: CompletionOutput) -> None:
        assert self._parser is not None, "counted before anything was read"
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        self.counts = TokenCounts(
            len(output.prompt_token_ids),
            output.num_cached_tokens,
            self.counts.num_output_tokens + len(part.token_ids),
            self._parser.num_reasoning_tokens,
            output.numeric_drift,
        )
