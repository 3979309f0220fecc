"""Files of keys: what is in them, and what is said of those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.api.keys import with_keys_from_files
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter


def test_keys_of_a_file_are_added_to_those_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfann:one\r\n\n   # bob:two\n\tann:two words # no comment\t\nplain")
    config = with_keys_from_files(ServerConfig(api_key=("first",), api_key_file=path))
    assert config.api_key == ("first", "ann:one", "ann:two words # no comment", "plain")
    assert with_keys_from_files(config) == config


def test_the_administrator_has_one(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    path.write_text("# of the operator\nsecret\n", encoding="utf-8")
    assert with_keys_from_files(ServerConfig(admin_api_key_file=path)).admin_api_key == "secret"
    path.write_text("one\ntwo\n", encoding="utf-8")
    with pytest.raises(InvalidParameter, match="has 2 keys; it must have one"):
        with_keys_from_files(ServerConfig(admin_api_key_file=path))
    with pytest.raises(InvalidParameter, match=r"given beside admin_api_key.*Give one of the two"):
        ServerConfig(admin_api_key="x", admin_api_key_file=path)


@pytest.mark.parametrize("name", ["api_key_file", "admin_api_key_file"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read .No such file"),
        (b"", "contains no key"),
        (b"\n \n# only\n  # comments\n", "contains no key"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidParameter, match=f"{name}=.*keys.*{told}.*one key a line"):
        with_keys_from_files(ServerConfig(**{name: path}))
    with pytest.raises(InvalidParameter, match="cannot be read"):
        with_keys_from_files(ServerConfig(**{name: tmp_path}))
