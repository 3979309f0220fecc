"""The page's files: whole, of this server alone, found where the page looks for them, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server_process import ServerProcess
from twostroke.api.routes.page import FOLDER, MEDIA_TYPES

FILES = sorted(FOLDER.iterdir())
SOURCES = [pytest.param(path, id=path.name) for path in FILES if path.suffix != ".png"]
HTML = (FOLDER / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SOURCES)
def test_no_network_address(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not re.findall(r"""https?:|wss?:|["'`(=]//|\burl\(|@import|data:\w""", source)


@pytest.mark.parametrize("path", SOURCES)
def test_whatever_a_file_refers_to_is_there(server: ServerProcess, path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="([^"]+)"', source) + re.findall(r'from "\.(/[^"]+)"', source)
    for name in named:
        if name.startswith("#"):
            assert f'<main id="{name[1:]}"' in source
            continue
        assert server.http.get(name if name.startswith("page/") else f"/page{name}").status_code == 200, name


def test_every_file_is_sent_and_may_load_from_here_alone(server: ServerProcess) -> None:
    for path in FILES:
        answer = server.http.get(f"/page/{path.name}")
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"] == MEDIA_TYPES[path.suffix]
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert server.http.get("/").text == HTML


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e/app.py", "app.py", "..%2froutes%2fpage.py", ""])
def test_no_other_file_is_sent(server: ServerProcess, name: str) -> None:
    assert server.http.get(f"/page/{name}").status_code == 404


def test_nothing_runs_or_is_styled_within_the_page() -> None:
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son\w+=", HTML)


def test_every_field_has_a_label() -> None:
    fields = re.findall(r"<(?:input|textarea)\b[^>]*>", HTML)
    assert fields
    for field in fields:
        identity = re.search(r'\bid="([^"]+)"', field)
        is_named = identity is not None and f'for="{identity[1]}"' in HTML
        assert is_named or re.search(r"<label\b[^>]*>[^<]*" + re.escape(field), HTML), field


def test_pages_from_elsewhere_neither_administer_nor_end_requests(server: ServerProcess) -> None:
    """A browser on this machine sends what they ask it to, with their origin."""
    elsewhere = {"origin": "http://elsewhere.example"}
    for path in ("/reset_prefix_cache", "/v1/requests/somebody/abort"):
        refused = server.http.post(path, headers=elsewhere)
        assert refused.status_code == 403
        assert "not allowed for pages of http://elsewhere.example" in refused.json()["error"]["message"]
    own = {"origin": server.url}
    assert server.http.post("/v1/requests/nobody/abort", headers=own).status_code == 404
