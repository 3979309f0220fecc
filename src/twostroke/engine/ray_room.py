"""What processes of the pools ask of the nodes of a Ray cluster, and whether these could hold so many. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from twostroke.pools.member import Role


@dataclass(frozen=True, slots=True)
class Wish:
    """What a process asks of the nodes."""

    num_ranks: int
    cpus_each: int
    role: str | None
    """The custom resource of which each rank asks for one."""
    is_spread: bool
    """No node has processors for all ranks: each gets one of its own."""

    @property
    def resources(self) -> list[dict[str, float]]:
        """Of each actor."""
        num_actors = self.num_ranks if self.is_spread else 1
        of_role = {} if self.role is None else {self.role: 1.0}
        return [{"CPU": float(self.cpus_each * self.num_ranks // num_actors), **of_role}] * num_actors

    def __str__(self) -> str:
        cpus = int(self.resources[0]["CPU"])
        words = f"{cpus} CPU" + ("s" if cpus > 1 else "")
        words += "" if self.role is None else f" and one {self.role!r}"
        return f"{words} on each of {self.num_ranks} nodes" if self.is_spread else words

    def num_places(self, nodes: Sequence[Mapping[str, float]]) -> int:
        """How many such processes the nodes hold, were they empty."""
        (wanted, *others) = self.resources
        fits = [int(min(node.get(name, 0) // number for name, number in wanted.items())) for node in nodes]
        if not others:
            return sum(fits)
        number = 0  # each node has one rank of a process at most
        while sum(min(number + 1, of_node) for of_node in fits) >= (number + 1) * self.num_ranks:
            number += 1
        return number


@dataclass(frozen=True, slots=True)
class Shortage:
    """More processes than the nodes could hold, were they empty."""

    wanted: Mapping[Role, int]
    """Processes of each pool that share what is short."""
    wish: Wish
    """What each asks for."""
    num_places: int
    """Such processes that the nodes could hold."""

    @property
    def num_wanted(self) -> int:
        """Processes, together."""
        return sum(self.wanted.values())


def shortage(
    nodes: Sequence[Mapping[str, float]], wanted: Mapping[Role, int], wishes: Mapping[Role, Wish], *, may_share: bool
) -> Shortage | None:
    """Return what the nodes lack for so many processes; None: nothing.

    Args:
        nodes: resources of each.
        wanted: processes of each pool.
        wishes: what a process of each pool asks for.
        may_share: processes of both pools ask for the same processors, so they are looked at together, too.
    """
    asked: list[tuple[Mapping[Role, int], Wish]] = [({role: n}, wishes[role]) for role, n in wanted.items()]
    if may_share and len(wanted) > 1 and all(wanted.values()):
        asked.append((wanted, replace(wishes[Role.DECODE], role=None)))
    for part, wish in asked:
        num_places = wish.num_places(nodes)
        if sum(part.values()) > num_places:
            return Shortage(part, wish, num_places)
    return None


def figures(node: Mapping[str, float], *, with_roles: bool) -> str:
    """Return what a node has of what processes ask for, in words."""
    names = ("CPU", *(role.value for role in (Role.PREFILL, Role.DECODE) if with_roles))
    return ", ".join(f"{node.get(name, 0):g} {name}" for name in names)
