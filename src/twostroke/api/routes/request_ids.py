"""Ids of requests within paths: whatever a caller may have named them, slashes and line breaks too."""

from __future__ import annotations

from starlette.convertors import Convertor, register_url_convertor

ID = "request_id:request"
"""The part of a route's path that is one: `/v1/requests/{request_id:request}/timeline`."""
OF_SEVERAL = "Answers to several prompts are known one by one: ID-0, ID-1."
"""Said where an id is unknown."""


class _RequestIds(Convertor[str]):
    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("request", _RequestIds())
