"""Two network namespaces with a link of limited rate between them. Needs root, and Linux's ip and tc.

```
 twostroke-TOKEN-a                    twostroke-TOKEN-b
   10.213.77.1  ── veth, tbf RATE ──  10.213.77.2            no other address can be reached from either
```
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass

from twostroke.errors import SetupError

HOSTS = ("10.213.77.1", "10.213.77.2")
"""Addresses inside the namespaces; they mean nothing outside."""


@dataclass(frozen=True, slots=True)
class Host:
    """One end of the link."""

    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """Prefix for a command that runs in the namespace."""
        return ["ip", "netns", "exec", self.namespace]


def why_no_link() -> str:
    """Return what is missing on this machine; empty: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: iproute2)" if missing else ""


@contextlib.contextmanager
def link(gbit_per_s: float) -> Generator[tuple[Host, Host]]:
    """Make the link, and remove it in any case.

    Args:
        gbit_per_s: rate in either direction, headers included.

    Raises:
        SetupError: it cannot be made here.
    """
    _check_link("link between two network namespaces")
    token = secrets.token_hex(3)
    ends = tuple(Host(f"twostroke-{token}-{name}", host) for name, host in zip("ab", HOSTS, strict=True))
    with contextlib.ExitStack() as made:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
            # also removes the link
            made.callback(subprocess.run, ["ip", "netns", "del", end.namespace], capture_output=True, check=False)
        devices = [f"ts{token}{name}" for name in "ab"]
        pairs = list(zip(ends, devices, strict=True))
        peer = ("peer", "name", devices[1], "netns", ends[1].namespace)
        _run("ip", "link", "add", devices[0], "netns", ends[0].namespace, "type", "veth", *peer)
        for end, device in pairs:
            _run("ip", "-n", end.namespace, "addr", "add", f"{end.address}/30", "dev", device)
            _run("ip", "-n", end.namespace, "link", "set", device, "up")
            rate = ("rate", f"{gbit_per_s * 1000:.0f}mbit", "burst", "512k", "latency", "30ms")
            _run(*end.prefix, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)
        yield ends[0], ends[1]


@contextlib.contextmanager
def slow_loopback(gbit_per_s: float) -> Generator[tuple[str, ...]]:
    """Make a namespace with only a loopback of limited rate, for processes of one machine.

    Args:
        gbit_per_s: rate, both directions together.

    Yields:
        The prefix for a command that runs there.

    Raises:
        SetupError: it cannot be made here.
    """
    _check_link("slow loopback")
    namespace = f"twostroke-{secrets.token_hex(3)}-lo"
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "-n", namespace, "link", "set", "lo", "up", "mtu", "9000")
        rate = ("rate", f"{gbit_per_s * 1000:.0f}mbit", "burst", "128k", "latency", "50ms")
        _run("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *rate)
        yield ("ip", "netns", "exec", namespace)
    finally:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _check_link(wanted: str) -> None:
    missing = why_no_link()
    if missing:
        raise SetupError(f"no {wanted}: {missing}.")


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise SetupError(
            f"{' '.join(command)}: {said}. A link between namespaces needs root and veth and tbf."
        ) from None
