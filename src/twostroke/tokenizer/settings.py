"""Tokenizer settings of a model folder beside tokenizer.json."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken

from twostroke.errors import CorruptCheckpoint, ModelNotFound, shown
from twostroke.plain_words import kind_of

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens, which are also the names of chat template variables."""

MAX_SETTINGS_BYTES = 64 * 2**20
"""Maximum size of a JSON file beside a tokenizer; real ones are far smaller."""


_MAX_ID_DIGITS = 10

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The used fields of tokenizer_config.json, special_tokens_map.json and the chat template files."""

    tokenizer_class: str = ""
    named_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """Role to token text, for example eos_token to <|im_end|>."""
    special_tokens: tuple[AddedToken, ...] = ()
    """Tokens to make special, whatever tokenizer.json says."""
    added_tokens: tuple[AddedToken, ...] = ()
    """Tokens of tokenizer_config.json, ordered by id; tokenizer.json may lack some."""
    add_bos_token: bool | None = None
    """Whether a begin token should come first; only compared with tokenizer.json, which decides."""
    chat_templates: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name to Jinja source; the template of a model with only one is named default."""

    @classmethod
    def from_folder(cls, folder: Path) -> TokenizerSettings:
        """Read the settings from a model folder; every file is optional.

        Raises:
            CorruptCheckpoint: a file that is not JSON, or whose fields have the wrong shape.
        """
        # special_tokens_map.json is the older place for the same names; tokenizer_config.json overrides it.
        given = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        where = folder / "tokenizer_config.json"
        named = {role: _added_token(given[role], where, role) for role in NAMED_TOKENS if given.get(role) is not None}
        return cls(
            tokenizer_class=str(given.get("tokenizer_class") or ""),
            named_tokens={role: token.content for role, token in named.items()},
            special_tokens=(*named.values(), *_extra_special_tokens(given, where)),
            added_tokens=_added_tokens(given, where),
            add_bos_token=_switch(given, "add_bos_token", where),
            chat_templates=_chat_templates(folder, given.get("chat_template"), where),
        )


def read_eos_token_ids(folder: Path, eos_token_id: int | None, vocab_size: int | None = None) -> frozenset[int]:
    """Return the ids that end a generation: the tokenizer's own and those of generation_config.json (else config.json).

    Chat models often name several in that file, of which the tokenizer knows only one.

    Args:
        folder: folder of the model.
        eos_token_id: end token of the tokenizer.
        vocab_size: vocabulary size of the model, to check the ids against; None: they are not checked.

    Raises:
        CorruptCheckpoint: values that are not token ids, or ids that the model has no logits for.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        path = folder / "config.json"
    config = _read_json(path)
    text = config.get("text_config")  # the text part of a model that also reads images
    given = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    ids: list[Any] = [] if given is None else given if isinstance(given, list) else [given]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise CorruptCheckpoint(f"{path}: eos_token_id is {shown(given)}; it must be a token id or a list of them.")
    outside = [i for i in ids if vocab_size is not None and i >= vocab_size]
    if outside:
        raise CorruptCheckpoint(f"{path}: eos_token_id {outside[0]} is outside vocab_size {vocab_size}.")
    return frozenset([*ids, *([] if eos_token_id is None else [eos_token_id])])


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling values that generation_config.json recommends; they are not applied (`SamplingParams`)."""
    given = _read_json(folder / "generation_config.json")
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: given[name] for name in names if given.get(name) is not None}


def read_text(path: Path) -> str:
    """Read a whole text file.

    Raises:
        ModelNotFound: the file does not exist or may not be read.
        CorruptCheckpoint: it is a pipe or a device, not UTF-8, or larger than MAX_SETTINGS_BYTES.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CorruptCheckpoint(f"{path} is not a regular file. Fetch the model again.")
        if path.stat().st_size > MAX_SETTINGS_BYTES:
            raise CorruptCheckpoint(f"{path}: {path.stat().st_size} bytes; at most {MAX_SETTINGS_BYTES} are read.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path}: not UTF-8 text ({error}).") from error
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read ({error.strerror}).") from error


def is_valid_utf8(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8; JSON can contain lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        given = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path}: not valid JSON ({error}). Fetch the file again.") from error
    if not isinstance(given, dict):
        raise CorruptCheckpoint(f"{path}: must hold a JSON object, not {kind_of(given)}.")
    return given


def _added_token(given: Any, where: Path, role: str) -> AddedToken:
    """Return a special token, given as its text or as an object with its matching rules."""
    rules = cast(dict[str, Any], given if isinstance(given, dict) else {"content": given, "normalized": False})
    content = rules.get("content")
    if not isinstance(content, str) or not content or not is_valid_utf8(content):
        wanted = "a token's text or an object with 'content'"
        raise CorruptCheckpoint(f"{where}: {role} is {shown(given)}; it must be {wanted}.")
    switches = {name: bool(rules[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in rules}
    return AddedToken(content, special=bool(rules.get("special", True)), **switches)


def _extra_special_tokens(given: Mapping[str, Any], where: Path) -> list[AddedToken]:
    tokens: list[AddedToken] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = given.get(name) or []
        # the newer form is an object: {"image_token": "<image>"}
        values = list(cast(dict[str, Any], extra).values()) if isinstance(extra, dict) else extra
        if not isinstance(values, list):
            raise CorruptCheckpoint(f"{where}: {name} must be a list of tokens, not {kind_of(extra)}.")
        tokens += [_added_token(value, where, name) for value in cast(list[Any], values)]
    return tokens


def _added_tokens(given: Mapping[str, Any], where: Path) -> tuple[AddedToken, ...]:
    listed: Any = given.get("added_tokens_decoder")
    if listed is None:
        return ()
    if not isinstance(listed, dict) or not all(_is_added(key, rules) for key, rules in cast(JSON, listed).items()):
        raise CorruptCheckpoint(f"{where}: added_tokens_decoder must be an object of tokens, keyed by their ids.")
    by_id = sorted(cast(dict[str, JSON], listed).items(), key=lambda entry: int(entry[0]))
    return tuple(_added_token({"special": False, **rules}, where, "added_tokens_decoder") for _, rules in by_id)


def _is_added(token_id: str, rules: Any) -> bool:
    return token_id.isdecimal() and len(token_id) <= _MAX_ID_DIGITS and isinstance(rules, dict)


def _switch(given: Mapping[str, Any], name: str, where: Path) -> bool | None:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise CorruptCheckpoint(f"{where}: {name} is {shown(value)}; it must be true or false.")
    return value


def _chat_templates(folder: Path, given: Any, where: Path) -> dict[str, str]:
    """Return the chat templates; template files override the older field in tokenizer_config.json."""
    templates: dict[str, Any] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    if templates or given is None:
        return templates
    if isinstance(given, str):
        return {"default": given}
    try:
        templates = {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError) as error:
        raise CorruptCheckpoint(f"{where}: chat_template must be a string or a list of name and template.") from error
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise CorruptCheckpoint(f"{where}: chat_template must be a string or a list of name and template.")
    return templates
