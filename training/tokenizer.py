"""Tokenizer: a byte-level BPE of 4,096 entries, trained on the library files of the training split."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import SourceFile, load_corpus

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS: tuple[str, ...] = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|pad|>")

# A run of two or more spaces is a piece of its own, so indentation is one token; the line feed stays with the
# punctuation before it ("):\n").  A prompt may thus end after the line feed or after the indentation, and in both
# cases its last token is one that the model has seen there.
SPLIT = r" {2,}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+\n*|\n+|\s"

# A code model knows no dialogue.  Instructions become comments, replies are code: a demonstration, not an assistant.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% set content = message['content'] or '' %}"
    "{% if message['role'] == 'assistant' %}{{ '\\n' + content + '\\n\\n' }}"
    "{% else %}{{ '# ' + content | trim | replace('\\n', '\\n# ') + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges; the special tokens take the first ids, and all 256 bytes are entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_texts(files: Iterable[SourceFile]) -> list[str]:
    """Return the texts to learn the merges from: library files only, the kind of text that the model is evaluated
    on."""
    return [file.text for file in files if file.split == "library"]


def tokenizer_config(context: int) -> dict[str, object]:
    """Return the contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": "<|pad|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(context), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text)


def main() -> None:
    """Train the tokenizer alone and report how well it compresses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    files, _ = load_corpus()
    tokenizer = train_tokenizer(training_texts(files))
    save_tokenizer(tokenizer, args.output, 4096)
    for split in ("library", "test", "heldout"):
        chosen = [file for file in files if file.split == split]
        count = sum(len(encoding.ids) for encoding in tokenizer.encode_batch([file.text for file in chosen]))
        size = sum(file.num_bytes for file in chosen)
        print(f"{split}: {count:,} tokens, {size / count:.3f} bytes a token")


if __name__ == "__main__":
    main()
