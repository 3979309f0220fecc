"""Sizes as people write them, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from twostroke.config.cache import CacheConfig
from twostroke.config.server import ServerConfig
from twostroke.config.sizes import byte_count, count
from twostroke.errors import InvalidParameter
from twostroke.planner.options import PlanOptions


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("1000", 1000),
        ("1GB", 10**9),
        ("1gb", 10**9),
        ("1 GB", 10**9),
        ("1GiB", 2**30),
        ("1gib", 2**30),
        ("1Gi", 2**30),
        ("1G", 2**30),
        ("1g", 10**9),
        ("512M", 512 * 2**20),
        ("512MB", 512 * 10**6),
        ("64k", 64_000),
        ("64K", 65_536),
        ("64KiB", 65_536),
        ("1.5GB", 1_500_000_000),
        (".5GiB", 2**29),
        ("0.3KiB", 307),
        ("2TB", 2 * 10**12),
        ("4096B", 4096),
        ("4096 bytes", 4096),
        ("1_000_000", 10**6),
        ("1,000,000", 10**6),
        ("1e9", 10**9),
        ("+2GB", 2 * 10**9),
    ],
)
def test_sizes(written: str, num_bytes: int) -> None:
    assert byte_count("memory", written) == num_bytes


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "GB",
        "1.5",
        "-1GB",
        "1XB",
        "1GBs",
        "1G B",
        "half",
        "50%",
        "1e",
        "1..5GB",
        "0x10",
        "nan",
        "1e999",
        "1,5GB",
        "12,34",
        "1,000500",
        "1,,000",
    ],
)
def test_what_is_no_size_is_refused_with_what_would_be_one(written: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^memory=.*must be a number of bytes.* Such as 4GiB\."):
        byte_count("memory", written)


@pytest.mark.parametrize(
    ("written", "number"),
    [("32k", 32_000), ("32K", 32_768), ("1m", 10**6), ("30.0", 30), ("8,192", 8192), ("1e3", 1000)],
)
def test_numbers_of_tokens(written: str, number: int) -> None:
    assert count("max_model_len", written) == number


@pytest.mark.parametrize("written", ["1.5", "32kB", "ten", "k", "4,5k", "1,00", "0x20", "²", "max", "9" * 5000])
def test_what_is_no_whole_number(written: str) -> None:
    with pytest.raises(InvalidParameter, match="must be a whole number"):
        count("max_model_len", written)


def test_settings_take_texts_from_python_and_json_too() -> None:
    given: Any = {"kv_cache_memory": "1GiB", "kv_offloading_size": "2GB"}
    made = CacheConfig(**given)
    assert (made.kv_cache_memory, made.kv_offloading_size) == (2**30, 2 * 10**9)
    written: Any = "24MiB"
    assert ServerConfig(max_body_bytes=written).max_body_bytes == 24 * 2**20
    assert PlanOptions(memory=written).memory == 24 * 2**20
    written = "much"
    with pytest.raises(InvalidParameter, match="kv_cache_memory='much'"):
        CacheConfig(kv_cache_memory=written)
