"""Members and requests of two pools, for tests of their policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st

from twostroke.config.pools import RoutingConfig
from twostroke.pools.member import Member, Role, Transport
from twostroke.pools.route import RouteRequest
from twostroke.pools.router import Router

BLOCK_SIZE = 16
_USUAL = Member(
    member_id="",
    role=Role.BOTH,
    max_num_seqs=8,
    num_free_blocks=4000,
    num_blocks=4000,
    block_size=BLOCK_SIZE,
    kv_bytes_per_token=100_000,
    num_layers=28,
    prefill_tokens_per_s=1000.0,
    step_s=0.02,
    step_s_per_sequence=0.001,
)
"""An idle one."""


def member(member_id: str, role: Role = Role.BOTH, **other: Any) -> Member:
    """Return an idle member, changed as given."""
    return replace(_USUAL, member_id=member_id, role=role, **other)


def prefill_member(number: int, **other: Any) -> Member:
    """Return prefill worker p0, p1 and so on."""
    return member(f"p{number}", Role.PREFILL, **other)


def decode_member(number: int, **other: Any) -> Member:
    """Return decode worker d0, d1 and so on."""
    return member(f"d{number}", Role.DECODE, **other)


def router_of(*members: Member, **config: Any) -> Router:
    """Return a router that knows these members and every block of a prompt."""
    router = Router(RoutingConfig(**({"hash_stride": 1} | config)))
    for one in members:
        router.put(one)
    return router


def chain(name: str, num_blocks: int, parent: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
    """Hashes of a prompt's blocks: those of its beginning, and its own."""
    return parent + tuple(f"{name}/{number}".encode() for number in range(num_blocks))


def request(
    num_prompt_tokens: int = 800, hashes: tuple[bytes, ...] = (), num_output_tokens: int = 100, **other: Any
) -> RouteRequest:
    """Return a valid request."""
    return RouteRequest(
        num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, block_hashes=hashes, **other
    )


CHAINS = st.builds(
    lambda trunk, branch, lengths: chain(f"{trunk}.{lengths[0]}.{branch}", lengths[1], chain(str(trunk), lengths[0])),
    st.integers(0, 2),
    st.integers(0, 2),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
)
"""Prompts that begin alike or do not. A branch is of one trunk and of one length of it: names say both."""

REQUESTS = st.builds(
    lambda hashes, rest, num_output_tokens, may: request(
        len(hashes) * BLOCK_SIZE + rest, hashes, num_output_tokens, may_be_handed_over=may
    ),
    CHAINS,
    st.integers(1, 300),
    st.integers(1, 2000),
    st.booleans(),
)


def _busy_member(number: int, facts: dict[str, Any]) -> Member:
    return member(f"m{number}", **facts)


_FACTS = st.fixed_dictionaries(
    {
        "role": st.sampled_from(list(Role)),
        "is_ready": st.sampled_from([True, True, True, False]),
        "is_draining": st.sampled_from([False, False, False, True]),
        "num_queued_prompt_tokens": st.integers(0, 5000),
        "num_running": st.integers(0, 12),
        "num_waiting": st.integers(0, 3),
        "num_free_blocks": st.integers(0, 4000),
        "prefill_tokens_per_s": st.sampled_from([None, 500.0, 1000.0, 2000.0]),
        "kind": st.sampled_from(["", "cpu", "cuda"]),
        "step_s": st.sampled_from([0.0, 0.02, 0.05]),
        "step_s_per_sequence": st.sampled_from([None, 0.0, 0.001]),
        "transport": st.sampled_from(list(Transport)),
        "kv_bytes_per_token": st.sampled_from([100_000, 100_000, 200_000]),
    }
)


def members(most: int) -> st.SearchStrategy[list[Member]]:
    """Draw up to so many members, in any state."""
    return st.lists(_FACTS, max_size=most).map(lambda all_facts: [_busy_member(*one) for one in enumerate(all_facts)])
