"""The fork server, as a real process: its children live and end like any others, also when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from twostroke.cluster.forking import ForkedChild, ForkServer, can_fork
from twostroke.errors import SetupError

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system has no descriptors of processes")
SOON_S = 20.0


def has_ended(pid: int) -> bool:
    """Return whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def children_of(pid: int) -> list[str]:
    """Return the children of a process's first thread."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until_ended(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(SOON_S):
        while not has_ended(pid):
            await asyncio.sleep(0.01)


def folder() -> Path:
    """Folder for a child that waits for the message of what to load, which never comes."""
    return Path(tempfile.mkdtemp(prefix="twostroke-"))


async def lives(child: ForkedChild) -> None:
    """Wait until a child has reached its sockets."""
    async with asyncio.timeout(SOON_S):
        while len(list(child.folder.iterdir())) == 0:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def fork_server() -> AsyncGenerator[ForkServer]:
    """Fork server that is closed at the end."""
    server = ForkServer()
    try:
        yield server
    finally:
        await server.close()


def test_a_child_is_told_apart_by_how_it_ends() -> None:
    async def scenario() -> None:
        async with fork_server() as server:
            children = await asyncio.gather(*(server.fork(folder()) for _ in range(3)))
            assert len({child.pid for child in children}) == 3
            for child in children:
                await lives(child)
                assert os.getsid(child.pid) == child.pid, "a Ctrl-C would reach it"
            children[0].kill()
            assert await children[0].ending() == "was ended by signal 9"
            os.kill(children[1].pid, signal.SIGTERM)
            assert await children[1].ending() == "was ended by signal 15"
            os.kill(children[2].pid, signal.SIGSTOP)
            children[2].kill()
            assert await children[2].ending() == "was ended by signal 9"
            children[2].kill()  # no other process is killed
            for child in children:
                child.forget()
                assert not child.folder.exists()

    asyncio.run(scenario())


def test_a_child_has_nothing_of_the_server_or_of_its_siblings() -> None:
    """If an end of a pipe stayed open in another process, a process that should end would live on."""

    async def scenario() -> None:
        async with fork_server() as server:
            first = await server.fork(folder())
            second = await server.fork(folder())
            for child in (first, second):
                await lives(child)
            ours = {os.readlink(f"/proc/{first.pid}/fd/{name}") for name in os.listdir(f"/proc/{first.pid}/fd")}
            theirs = {os.readlink(f"/proc/{second.pid}/fd/{name}") for name in os.listdir(f"/proc/{second.pid}/fd")}
            outputs = {os.readlink(f"/proc/{second.pid}/fd/{number}") for number in (1, 2)}
            shared = {name for name in ours & theirs if not name.startswith("anon_inode:")}
            assert shared <= outputs
            for child in (first, second):
                child.kill()
                await child.ending()
                child.forget()

    asyncio.run(scenario())


def test_children_outlive_the_server_and_another_takes_its_place() -> None:
    async def scenario() -> None:
        async with fork_server() as server:
            orphan = await server.fork(folder())
            await lives(orphan)
            os.kill(server.pid, signal.SIGKILL)
            await until_ended(server.pid)
            heir = await server.fork(folder())
            await lives(heir)
            assert not has_ended(orphan.pid)
            orphan.kill()
            assert await orphan.ending() == "has ended"
            heir.kill()
            assert await heir.ending() == "was ended by signal 9"

    asyncio.run(scenario())


def test_nothing_stays_of_one_that_nobody_waits_for() -> None:
    async def scenario() -> None:
        async with fork_server() as server:
            where = folder()
            asked = asyncio.create_task(server.fork(where))
            await asyncio.sleep(0.5)  # asked for, and the server still imports
            asked.cancel()
            await asyncio.wait([asked])
            after = await server.fork(folder())
            async with asyncio.timeout(SOON_S):
                while where.exists() or len(children_of(server.pid)) > 1:
                    await asyncio.sleep(0.01)
            after.kill()
            await after.ending()

    asyncio.run(scenario())


def test_a_server_that_cannot_start_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.cluster.forking.SERVER", (sys.executable, "-c", "raise SystemExit(3)"))

    async def scenario() -> None:
        async with fork_server() as server:
            where = folder()
            with pytest.raises(SetupError, match="no process could be forked"):
                await server.fork(where)
            assert not where.exists()

    asyncio.run(scenario())


GATEWAY = """
import asyncio, tempfile
from pathlib import Path
from twostroke.cluster.forking import ForkServer

async def main():
    server = ForkServer()
    child = await server.fork(Path(tempfile.mkdtemp(prefix="twostroke-")))
    print(server.pid, child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [(), (0,), (1,), (0, 1)], ids=["none", "server", "child", "both"])
def test_all_end_with_the_process_that_asked_for_them(stopped: tuple[int, ...]) -> None:
    """Stopped children end, too, although they do not see the connection close."""

    async def scenario() -> None:
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GATEWAY, stdout=asyncio.subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}
        )
        assert gateway.stdout is not None
        pids = [int(pid) for pid in (await asyncio.wait_for(gateway.stdout.readline(), SOON_S)).split()]
        assert len(pids) == 2
        for place in stopped:
            os.kill(pids[place], signal.SIGSTOP)
        gateway.kill()
        await gateway.wait()
        for pid in pids:
            await until_ended(pid)

    asyncio.run(scenario())
