"""Content of messages that comes in parts: texts, and what these models cannot see or hear."""

from __future__ import annotations

from typing import Any, cast

from twostroke.errors import InvalidPrompt

JSON = dict[str, Any]

MEDIA = ("image", "audio", "video", "file", "document")
"""In the type of a part (image_url, input_image, input_audio, …): what a template would write a mark for that no model
here reads."""


def refuse_media(message: JSON, where: str) -> None:
    """Refuses parts that are no text, by their type.

    Raises:
        InvalidPrompt: there is one.
    """
    parts = message.get("content")
    for index, part in enumerate(cast(list[Any], parts) if isinstance(parts, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(medium in kind for medium in MEDIA):
            raise InvalidPrompt(
                f"{where}.content[{index}] is of type {kind!r}; models here take text only. Leave it out."
            )


def joined_content(message: JSON) -> JSON:
    """Content that is a list of text parts, as one text for a template that only knows texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts: list[str] = []
    for part in cast(list[Any], parts):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
            raise InvalidPrompt(f"the model's chat template takes text only; a content part is of type {kind!r}.")
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
