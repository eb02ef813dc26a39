"""A real server in a thread of this process, on a port of its own, over a tiny model of bytes."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn

from podway.model.tokenizer import ModelTokenizer
from podway.serve.http import make_app
from podway.serve.loop import EngineLoop
from podway.serve.metrics import Metrics
from podway.serve.service import Service
from tests.serve.tiny import LLAMA, engine_for

BYTES = msgspec.structs.replace(LLAMA, vocab=256, max_position=512)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Live:
    """Where it is, and its inside for tests that look."""

    def __init__(self, url: str, service: Service, loop: EngineLoop, events: asyncio.AbstractEventLoop) -> None:
        self.url, self.service, self.loop, self.events = url, service, loop, events

    def tasks(self) -> int:
        """Tasks of the server's event loop."""
        return len(asyncio.all_tasks(self.events))

    def wait_until_empty(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.loop.batcher.idle and not self.loop._under_way and not self.loop.batcher.pool.held:
                return
            time.sleep(0.02)
        raise AssertionError("requests are left, or hold pages")


@contextmanager
def live(folder: Path, keys: tuple[str, ...] = (), max_queue: int = 256, **options: object) -> Iterator[Live]:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    defaults = {"max_len": 256, "max_seqs": 4, "page": 8, "pages": 120, "prompt_tokens": 64, "decode_steps": 4}
    engine = engine_for(BYTES, **{**defaults, **options})
    service = Service("tiny", ModelTokenizer(folder, 256), engine.limits.max_len)
    loop = EngineLoop(engine, Metrics(), max_queue)
    loop.start()
    service.loops = [loop]
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(make_app(service, keys), log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield Live(f"http://127.0.0.1:{listening.getsockname()[1]}", service, loop, loops[0])
    finally:
        server.should_exit = True
        thread.join(10)
        loop.stop()
