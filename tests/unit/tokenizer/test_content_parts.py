"""Content of messages that comes in parts."""

from __future__ import annotations

import pytest

from twostroke.errors import InvalidPrompt
from twostroke.tokenizer.chat_template import ChatTemplate

KNOWS_TEXTS = "{% for message in messages %}{{ message.content }}{% endfor %}"
KNOWS_PARTS = "{% for part in messages[0].content %}{{ part.text or '<|' + part.type + '|>' }}{% endfor %}"


@pytest.mark.parametrize("source", [KNOWS_TEXTS, KNOWS_PARTS], ids=["texts", "parts"])
@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "video_url", "file", "document"])
def test_media_are_refused_by_name(source: str, kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, "text": "a text beside it"}]
    with pytest.raises(InvalidPrompt, match=rf"messages\[0\]\.content\[1\] is of type '{kind}'"):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": parts}])


@pytest.mark.parametrize("source", [KNOWS_TEXTS, KNOWS_PARTS], ids=["texts", "parts"])
def test_texts_pass(source: str) -> None:
    parts = [{"type": "text", "text": "an image"}, {"type": "input_text", "text": "file"}]
    assert ChatTemplate({"default": source}, {}).render([{"role": "user", "content": parts}]).split() == (
        ["an", "image", "file"] if source is KNOWS_TEXTS else ["an", "imagefile"]
    )
