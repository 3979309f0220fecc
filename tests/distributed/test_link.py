"""A hand-over between two hosts: processes in two network namespaces, with nothing between them but a link.

How fast it is, is a benchmark's affair (`python -m benchmarks handover --netns`). Here all of it must arrive, and no
more.
"""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.handover.link import link, why_no_link
from benchmarks.handover.pair import LAYOUT, formula_bytes, num_blocks_for, pair
from twostroke.errors import SetupError
from twostroke.kv_transfer.address import Address

NUM_BYTES = 33_000_000


@pytest.fixture(autouse=True)
def needs_namespaces(pytestconfig: pytest.Config) -> None:
    """Skip without root or ip and tc; fail if --require-all is given."""
    missing = why_no_link()
    if missing:
        (pytest.fail if pytestconfig.getoption("require_all") else pytest.skip)(missing)


def test_a_prompt_goes_from_one_host_to_another() -> None:
    """The bytes are compared in the borrower's process."""
    with link(1.0) as (lender, borrower):
        with pair(Address(host=lender.address), NUM_BYTES, (lender.prefix, borrower.prefix)) as both:
            whole, layer_by_layer = both.hand_over(), both.hand_over(prefill_s=0.2)
        received = _received_bytes(borrower.prefix)
    formula = formula_bytes(num_blocks_for(NUM_BYTES))
    assert formula == 288 * LAYOUT.bytes_per_token
    assert whole.num_bytes == layer_by_layer.num_bytes == formula
    # by the link and by no other way, and nothing twice: headers are a twentieth
    assert 2 * formula < received < 1.1 * 2 * formula


def test_the_link_is_taken_down_whatever_happens() -> None:
    def fail(namespace: str) -> None:
        assert namespace in _namespaces()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), link(1.0) as (lender, _):
        fail(lender.namespace)
    assert lender.namespace not in _namespaces()


def test_a_lender_that_is_not_there_is_said() -> None:
    """The lender's process cannot listen at an address that its host does not have."""
    with link(1.0) as (lender, borrower), pytest.raises(SetupError, match="has ended"):  # noqa: SIM117
        with pair(Address(host=borrower.address), 1, (lender.prefix, borrower.prefix)):
            pass


def _received_bytes(prefix: list[str]) -> int:
    command = [*prefix, "sh", "-c", "cat /sys/class/net/ts*/statistics/rx_bytes"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
