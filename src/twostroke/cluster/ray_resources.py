"""Checks of a Ray cluster that need no Ray: its version, its address, and the resources of its nodes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from twostroke.errors import SetupError
from twostroke.pools.member import Role

RAY_VERSIONS = ((2, 50), (3, 0))
"""Supported versions: from the first, before the second."""
REMEDY = "Run: pip install 'twostroke[ray]'"
REACH_TIMEOUT_S = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Resources that a process needs."""

    num_ranks: int
    cpus_each: int
    role: str | None
    """Custom resource of which each rank needs one."""
    is_spread: bool
    """Whether each rank needs a node of its own, because no node has enough CPUs for all."""

    @property
    def resources(self) -> list[dict[str, float]]:
        """Resources of each actor."""
        num_actors = self.num_ranks if self.is_spread else 1
        of_role = {} if self.role is None else {self.role: 1.0}
        return [{"CPU": float(self.cpus_each * self.num_ranks // num_actors), **of_role}] * num_actors

    def __str__(self) -> str:
        cpus = int(self.resources[0]["CPU"])
        words = f"{cpus} CPU" + ("s" if cpus > 1 else "")
        words += "" if self.role is None else f" and one {self.role!r}"
        return f"{words} on each of {self.num_ranks} nodes" if self.is_spread else words

    def num_fitting(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """Return the number of such processes that the nodes could hold when empty."""
        (wanted, *others) = self.resources
        fits = [int(min(node.get(name, 0) // number for name, number in wanted.items())) for node in nodes]
        if not others:
            return sum(fits)
        number = 0  # each node holds at most one rank of a process
        while sum(min(number + 1, of_node) for of_node in fits) >= (number + 1) * self.num_ranks:
            number += 1
        return number


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request for more processes than the nodes could hold when empty."""

    wanted: Mapping[Role, int]
    """Number of processes, by pool, that share the scarce resource."""
    request: ResourceRequest
    """Resources that each process needs."""
    num_fitting: int
    """Number of such processes that the nodes could hold."""

    @property
    def num_wanted(self) -> int:
        """Number of processes over all pools."""
        return sum(self.wanted.values())


def shortage(
    nodes: Sequence[Mapping[str, float]],
    wanted: Mapping[Role, int],
    requests: Mapping[Role, ResourceRequest],
    *,
    may_share: bool,
) -> Shortage | None:
    """Return the shortage of the nodes for so many processes; None: there is none.

    Args:
        nodes: resources of each node.
        wanted: number of processes, by pool.
        requests: resources that a process of each pool needs.
        may_share: processes of both pools need the same processors, so both are also checked together.
    """
    asked: list[tuple[Mapping[Role, int], ResourceRequest]] = [
        ({role: n}, requests[role]) for role, n in wanted.items()
    ]
    if may_share and len(wanted) > 1 and all(wanted.values()):
        asked.append((wanted, replace(requests[Role.DECODE], role=None)))
    for part, request in asked:
        num_fitting = request.num_fitting(nodes)
        if sum(part.values()) > num_fitting:
            return Shortage(part, request, num_fitting)
    return None


def figures(node: Mapping[str, float], *, with_roles: bool) -> str:
    """Return a node's amounts of the needed resources, in words."""
    names = ("CPU", *(role.value for role in (Role.PREFILL, Role.DECODE) if with_roles))
    return ", ".join(f"{node.get(name, 0):g} {name}" for name in names)


def check_version(installed: str | None) -> None:
    """Refuse a Ray version that is not supported.

    >>> check_version("2.60.0")

    Raises:
        SetupError: the version is not supported, or None.
    """
    low, high = (".".join(map(str, version)) for version in RAY_VERSIONS)
    if installed is None:
        raise SetupError(f"--cluster needs Ray (from {low} on, before {high}), which is not installed. {REMEDY}")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if not RAY_VERSIONS[0] <= version < RAY_VERSIONS[1]:
        raise SetupError(f"--cluster needs Ray from {low} on, before {high}; {installed} is installed. {REMEDY}")


def installed_version() -> str | None:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_reach(address: str) -> None:
    """Check that something listens at an address; Ray itself would try for most of a minute."""
    host, _, port = address.rpartition(":")
    if host in ("localhost", "127.0.0.1"):
        return  # Ray replaces it by this node's own address
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise SetupError(
            f"--cluster {address}: no cluster answers there ({error}). Start one with: ray start --head --port={port}"
        ) from None


async def with_timeout(call: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """Return the result of a call that may hang; run it in a daemon thread, which is abandoned after the timeout."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def tell(value: _T | None, error: Exception | None) -> None:
        if not result.done():
            if error is None:
                result.set_result(value)  # pyright: ignore[reportArgumentType]
            else:
                result.set_exception(error)

    def run() -> None:
        try:
            value, error = call(), None
        except Exception as caught:
            value, error = None, caught
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, daemon=True, name="twostroke-ray").start()
    try:
        return await asyncio.wait_for(result, timeout_s)
    except TimeoutError:
        raise SetupError(f"{what}: Ray has not answered within {timeout_s:g} s. Is a cluster there?") from None
