"""A gateway is replaced by a new process: no connection is refused, and streams of the old one end as they should."""

import asyncio
import os
import signal
from pathlib import Path

import psutil

from podway.gateway.table import RoutedService

from .live import Replica, Seen, says
from .test_command import gateway, put
from .test_proxy import EVENTS, USAGE, body_of, run, status


async def ask(port: int, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body)
    answer = await reader.read()
    writer.close()
    return answer


def test_no_request_fails_while_a_gateway_is_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if b"stream" not in seen.body:
                await says(USAGE)(seen, writer)
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number, event in enumerate(EVENTS):
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                if number == 3:
                    await gate.wait()
            writer.write(b"0\r\n\r\n")

        replica = Replica("a", answer)
        await replica.start()
        routes = tmp_path / "routes.json"
        put(routes, RoutedService(name="chat", model="m", auth=False, backends=(replica.backend,)))
        with gateway("--routes", str(routes)) as (process, url):
            port = int(url.rpartition(":")[2])
            stream = asyncio.ensure_future(ask(port, b'{"model":"m","stream":true}'))
            answers: list[bytes] = []
            over = asyncio.Event()

            async def keep_asking() -> None:
                while not over.is_set():
                    answers.append(await ask(port, b'{"model":"m"}'))

            askers = [asyncio.ensure_future(keep_asking()) for _ in range(4)]
            old = psutil.Process(process.pid)
            os.kill(old.pid, signal.SIGHUP)
            while not old.children() or not _accepts_nothing(old, port):
                await asyncio.sleep(0.05)
            (successor,) = old.children()
            before = len(answers)
            while len(answers) < before + 20:
                await asyncio.sleep(0.02)
            over.set()
            await asyncio.gather(*askers)
            assert answers and all(status(one) == 200 for one in answers)
            gate.set()
            assert body_of(await stream) == b"".join(EVENTS)  # on the first process, long after it was replaced
            while process.poll() is None:
                await asyncio.sleep(0.05)
            assert process.returncode == 0
            assert status(await ask(port, b'{"model":"m"}')) == 200
            successor.terminate()
            await asyncio.to_thread(psutil.wait_procs, [successor], 60)
            assert not successor.is_running()
        await replica.kill()

    run(test)


def _accepts_nothing(process: psutil.Process, port: int) -> bool:
    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
        return True
    found = [one for one in process.net_connections() if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    return not found
