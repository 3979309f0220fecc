"""A Ray cluster of this machine's processes, for tests: one node, or two in two network namespaces.

Every process of it is started here and ended here, by its number.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.handover.link import Host, link

PATIENCE_S = 60.0
PORT = 6379
CPUS = 5
CLOCK_AHEAD_S = 1_000_000
"""Of the second node: as machines that were started on different days."""
_AHEAD = ["unshare", "--time", "--monotonic", str(CLOCK_AHEAD_S), "--fork"]


@dataclass
class Cluster:
    """Running cluster."""

    hosts: tuple[Host, ...]
    """Namespaces, the head's first; none: it is on this machine's own network."""
    address: str
    env: dict[str, str]
    folder: Path
    """Of its own, where commands run."""
    _nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, "subprocess.Popen[bytes]"])

    @property
    def prefix(self) -> list[str]:
        """Words before a command that has to run on the head's node."""
        return self.hosts[0].prefix if self.hosts else []

    def run(self, *command: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        """Run a command on the head's node."""
        return subprocess.run(
            [*self.prefix, *command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start_node(self, host: Host | None, *, is_head: bool) -> None:
        """Start a node; return when it can be used."""
        own = self.address.rpartition(":")[0] if host is None or is_head else host.address
        if is_head:
            where = ["--head", f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self.folder}"]
            where += ["--include-dashboard=false", '--resources={"decode": 9}']
        else:
            where = [f"--address={self.address}", '--resources={"prefill": 9}']
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", *where, f"--node-ip-address={own}", f"--num-cpus={CPUS}", "--block"]
        log = self.folder / f"node-{len(self._nodes)}.log"
        with log.open("wb") as out:
            self._nodes[own] = subprocess.Popen(
                [*(host.prefix if host else []), *([] if is_head else _AHEAD), *command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + PATIENCE_S
        while b"Ray runtime started" not in log.read_bytes():
            said = log.read_text(errors="replace")
            assert self._nodes[own].poll() is None, f"ray start has ended:\n{said}"
            assert time.monotonic() < deadline, f"no Ray node:\n{said}"
            time.sleep(0.1)

    def end(self) -> None:
        """End every process that was started."""
        for host in self.hosts:
            kill_all(host.namespace)
        for node in self._nodes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def kill_all(namespace: str) -> None:
    """Kill all processes, as when a machine loses power."""
    for _ in range(20):  # what was just being started is not on the first list
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        pids = [int(pid) for pid in listed.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def cluster(*, has_namespaces: bool) -> Generator[Cluster]:
    """Start a cluster, and end it in any case."""
    folder = Path(tempfile.mkdtemp(prefix="ts-ray-"))  # short: sockets are in it
    env = {
        **os.environ,  # noqa: TID251 (of the processes that it starts)
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_WAIT_POLICY": "passive",
        # Ray takes a silent node for dead after some seconds, not after half a minute
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
    }
    env.pop("RAY_ADDRESS", None)
    with contextlib.ExitStack() as made:
        made.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts: tuple[Host, ...] = ()
        if has_namespaces:
            hosts = made.enter_context(link(1.0))
            for host in hosts:
                subprocess.run(["ip", "-n", host.namespace, "link", "set", "lo", "up"], check=True)
            address = f"{hosts[0].address}:{PORT}"
        else:
            address = _own_address()
        running = Cluster(hosts, address, env, folder)
        made.callback(running.end)
        running.start_node(hosts[0] if hosts else None, is_head=True)
        if hosts:
            running.start_node(hosts[1], is_head=False)
        yield running


def _own_address() -> str:
    """Return this machine's address as Ray sees it, and a free port outside of the range of Ray's workers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            host = probe.getsockname()[0]
        except OSError:
            host = "127.0.0.1"
    for port in range(7000, 7100):
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return f"{host}:{port}"
    raise AssertionError("no free port from 7000 to 7099")
