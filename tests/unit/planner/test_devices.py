"""The table of published figures is complete, plausible, and part of the package."""

from __future__ import annotations

from importlib import resources

import pytest

from twostroke.errors import InvalidParameter
from twostroke.planner.devices import devices, find_device

NAMES = "A10 A100-40 A100-80 L4 L40S H100-SXM H100-PCIe H200 B200 RTX-4090 RTX-3090 T4 MI300X"


def test_every_device_has_what_plans_need() -> None:
    assert set(devices()) == set(NAMES.split())
    for name, device in devices().items():
        assert len(device.source) > 10, name
        assert 1e10 < device.memory_bytes < 1e12, name
        assert 2e11 < device.bytes_per_s < 1e13, name
        assert device.fp16_flops_per_s is not None, name
        # dense: 8 bits take half the time of 16, but where float32 sums slow 16 bits down to a quarter of whole numbers
        if device.int8_ops_per_s is not None:
            assert device.int8_ops_per_s / device.fp16_flops_per_s == pytest.approx(2, rel=0.03) or "RTX" in name
        if device.fp8_flops_per_s is not None:
            assert device.fp8_flops_per_s / device.fp16_flops_per_s == pytest.approx(2, rel=0.03), name
        assert device.price_per_hour is None, f"{name}: a price needs a source, too"


def test_the_file_lies_beside_the_code() -> None:
    """scikit-build takes every file of the package into the wheel."""
    assert resources.files("twostroke.planner").joinpath("devices.json").is_file()


def test_names_are_read_in_any_case_and_others_refused_with_those_there_are() -> None:
    assert find_device("h100-sxm")[0] == find_device("H100 SXM")[0] == "H100-SXM"
    with pytest.raises(
        InvalidParameter, match=r"device_name='H100'.*Did you mean .*H100-SXM.*Known: T4, A10, .*MI300X"
    ):
        find_device("H100")
    with pytest.raises(InvalidParameter, match="Known: T4"):
        find_device("abacus")


def test_a_type_without_a_rate_is_refused_with_one_that_has() -> None:
    t4 = devices()["T4"]
    with pytest.raises(InvalidParameter, match=r"bfloat16 is published.*--dtype float16"):
        t4.limits("T4", "bfloat16")
    assert t4.limits("T4", "float16").flops_per_s == 65e12
    with pytest.raises(InvalidParameter, match="--dtype bfloat16 or --dtype float16"):
        devices()["L4"].limits("L4", "float32")
