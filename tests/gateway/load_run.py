"""Clients that never pause while something is done to what they use, and what became of every request.

Each client keeps its connection, as HTTP clients do, and asks for small answers and for streams whose events are numbered.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable

import httpx

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
EVENT = re.compile(r"<(\d+)>")


class LoadRun:
    """What became of the requests so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.names: Counter[str] = Counter()  # of the replicas that answered
        self.over = False

    @property
    def answered(self) -> int:
        return self.outcomes["small"] + self.outcomes["stream"]

    async def more(self, count: int = 20) -> None:
        """Until so many more requests were answered."""
        wanted = self.answered + count
        await self.until(lambda: self.answered >= wanted)

    async def until(self, holds: Callable[[], object]) -> None:
        while not holds():
            assert len(self.failures) < 20, self.failures
            await asyncio.sleep(0.02)

    async def pause(self, seconds: float = 2.0) -> None:
        """Until nothing was answered for so long: requests wait."""
        answered = -1
        while answered != self.answered:
            answered = self.answered
            await asyncio.sleep(seconds)


async def _small(client: httpx.AsyncClient, url: str, run: LoadRun) -> None:
    answer = await client.post(url, json=QUESTION)
    if answer.status_code != 200:
        run.failures.append(f"{answer.status_code} {answer.text}")
        return
    run.outcomes["small"] += 1
    run.names[answer.json().get("system_fingerprint", "")] += 1


async def _stream(client: httpx.AsyncClient, url: str, run: LoadRun, events: int) -> None:
    async with client.stream("POST", url, json={**QUESTION, "stream": True, "max_tokens": events}) as answer:
        text = (await answer.aread()).decode()
    seen = [int(number) for number in EVENT.findall(text)]
    if answer.status_code != 200 or seen != list(range(len(seen))) or not text.endswith("data: [DONE]\n\n"):
        run.failures.append(f"{answer.status_code} {text[-300:]}")
    elif len(seen) == events:
        run.outcomes["stream"] += 1
    elif '"code":"replica_lost"' in text:
        run.outcomes["cut"] += 1  # the replica was killed, and the client was told
    else:
        run.failures.append(text[-300:])


async def _client(base: str, key: str, run: LoadRun, number: int) -> None:
    url = f"{base}/v1/chat/completions"
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(timeout=300, headers=headers) as client:
        turn = number
        while not run.over:
            turn += 1
            try:
                if turn % 3:
                    await _small(client, url, run)
                else:
                    await _stream(client, url, run, 20 + turn % 5)
            except httpx.HTTPError as error:
                run.failures.append(repr(error))
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def load(base: str, *, key: str = "none", clients: int = 6) -> AsyncIterator[LoadRun]:
    """So many clients for as long as the block lasts; every request has ended at its end."""
    run = LoadRun()
    tasks = [asyncio.ensure_future(_client(base, key, run, number)) for number in range(clients)]
    try:
        yield run
    finally:
        run.over = True
        await asyncio.gather(*tasks)
