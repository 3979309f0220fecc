"""The gateway's end of an engine process: its sockets and the event loop."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import zmq

from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.messages import Alive, encode_message
from twostroke.cluster.process_sockets import FolderSockets, engine_ends


class Child:
    """Runs until it is killed."""

    pid = 0

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def ending(self) -> str:
        await self._ended.wait()
        return "has ended"

    def kill(self) -> None:
        self._ended.set()

    def forget(self) -> None:
        pass


class Counting(EngineProcess):
    num_wakes = 0

    def _wake(self, *of: object) -> None:
        self.num_wakes += 1
        super()._wake(*of)


def test_a_report_that_nobody_waits_for_does_not_keep_the_loop_busy() -> None:
    """The report is kept until it is read; while the HTTP process prepares itself, nothing reads for seconds."""

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
            process = Counting(Child(), FolderSockets(Path(folder)), final_reports_s=0.0)
            commands, reports = engine_ends(context, Path(folder))
            for _ in range(3):
                reports.send(encode_message(Alive()))
            for _ in range(200):
                await asyncio.sleep(0.001)
            assert process.num_wakes < 20
            for _ in range(3):
                assert isinstance(await asyncio.wait_for(process.receive(), 10), Alive)
            waiting = asyncio.create_task(process.receive())
            await asyncio.sleep(0.01)
            reports.send(encode_message(Alive()))
            assert isinstance(await asyncio.wait_for(waiting, 10), Alive)
            process.kill()
            await process.stop()
            commands.close()
            reports.close()

    asyncio.run(main())
