"""Errors without a usable GPU; the facts are from real machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from twostroke import LLM
from twostroke.config.load import LoadConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.startup.cuda_device import (
    CudaFacts,
    check_cuda,
    check_dtype,
    check_gpu_for_each_rank,
    cuda_facts,
    device_of,
)

H200 = CudaFacts(
    torch_version="2.13.0+cu130",
    built_for="13.0",
    failure=None,
    num_devices=1,
    name="NVIDIA H200",
    capability=(9, 0),
    built_architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    total_bytes=150_000_000_000,
    free_bytes=149_000_000_000,
)
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)


def refusal(facts: CudaFacts) -> str:
    with pytest.raises(SetupError) as caught:
        check_cuda(facts)
    return str(caught.value)


def test_a_card_that_serves() -> None:
    check_cuda(H200)
    check_dtype(H200, "bfloat16")
    check_cuda(replace(H200, name="NVIDIA L4", capability=(8, 9)))  # code for 8.0 runs there


def test_no_card() -> None:
    text = refusal(replace(H200, num_devices=0))
    assert "no NVIDIA GPU that this process may use" in text
    assert "CUDA_VISIBLE_DEVICES" in text
    assert "--device cpu" in text


@pytest.mark.parametrize(("failure", "said"), [(OLD_DRIVER, "found version 11040"), (NO_DRIVER, "no NVIDIA driver")])
def test_no_driver_or_an_old_one(failure: str, said: str) -> None:
    text = refusal(CudaFacts(torch_version="2.13.0+cu130", built_for="13.0", failure=failure))
    assert said in text
    assert "driver for CUDA 13.0 or later" in text
    assert "Alternatively" not in text


def test_a_capability_that_pytorch_has_no_code_for() -> None:
    text = refusal(replace(H200, name="Tesla P40", capability=(6, 1)))
    assert "Tesla P40, of compute capability 6.1" in text
    assert "sm_75" in text


def test_a_type_that_the_card_does_not_have() -> None:
    turing = replace(H200, name="Tesla T4", capability=(7, 5))
    check_cuda(turing)
    check_dtype(turing, "float16")
    with pytest.raises(SetupError, match=r"Tesla T4 has compute capability 7\.5.*--dtype float16 or float32"):
        check_dtype(turing, "bfloat16")


def test_each_rank_has_a_gpu_of_its_own() -> None:
    two = replace(H200, num_devices=2)
    load = LoadConfig(device="cuda", tensor_parallel_size=2)
    check_gpu_for_each_rank(two, load)
    assert [device_of(load, rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(InvalidParameter, match=r"may use 2 \(NVIDIA H200\)\. Take --tensor-parallel-size 2, or make"):
        check_gpu_for_each_rank(two, replace(load, tensor_parallel_size=4))
    elsewhere = replace(load, tensor_parallel_size=4, tensor_parallel_address="10.0.0.1:5555")
    check_gpu_for_each_rank(H200, elsewhere)  # one rank a host
    assert device_of(elsewhere, 3).index == 0
    assert device_of(LoadConfig(tensor_parallel_size=2), 1) == torch.device("cpu")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a PyTorch for CUDA")
def test_an_engine_without_cuda_says_so_before_it_reads_a_model() -> None:
    assert cuda_facts().built_for is None
    with pytest.raises(SetupError, match=r"was built for CPUs only.*--device cpu"):
        LLM(model="/nowhere", device="cuda")


def test_a_driver_without_a_device_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:  # as torch does under CUDA_VISIBLE_DEVICES=""
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    text = refusal(cuda_facts())
    assert "no NVIDIA GPU that this process may use" in text
    assert "Install an NVIDIA driver" not in text
