"""Routes of the page at /: plain ES modules sent as they are in the package; nothing is loaded from other servers."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from twostroke.api.http_errors import HTTPError
from twostroke.errors import shown

FOLDER = Path(__file__).parents[1] / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
}
HEADERS = {
    # the page may load and call this server alone, and no other page may frame it
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # a newer server has newer files under the same names
    "cache-control": "no-cache",
}


def page_router(*, has_lab: bool = False, has_keys: bool = False) -> APIRouter:
    """Return the routes of the page. Its files are read once.

    Args:
        has_lab: whether the page offers the lab of experiments.
        has_keys: whether requests need a key. The page cannot see a key that the browser sends by itself.
    """
    router = APIRouter(include_in_schema=False)
    contents = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES}

    if has_lab:
        contents["index.html"] = contents["index.html"].replace(b'<a href="#lab" hidden>', b'<a href="#lab">')
    if has_keys:
        contents["index.html"] = contents["index.html"].replace(b'<html lang="en">', b'<html lang="en" data-keys>')

    @router.get("/")
    async def index() -> Response:
        """Return the page."""
        return sent("index.html")

    @router.get("/page/{name}")
    async def part(name: str) -> Response:
        """Return a file that the page loads."""
        return sent(name)

    def sent(name: str) -> Response:
        if name not in contents:
            raise HTTPError(404, f"the page has no file {shown(name)}.")
        return Response(contents[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS)

    return router
