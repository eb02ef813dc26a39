"""Services of a real server behind the gateway that it starts: found by model name, under load, through every fault.

The only requests that end early are streams of a replica that was killed, and those say so.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from podway.gateway.state_dir import running_gateway
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.task.task import Accelerator, Probe, Resources, Scaling, ServedModel, ServiceSpec, Task
from tests.conftest import HURRY, wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_services import ended, needs_networks, ready
from tests.gateway.load_run import LoadRun, load
from tests.serve.test_hosts import MODEL, PROMPTS, greedy_text

REPLICA = Path(__file__).parent.parent / "gateway" / "replica_program.py"


def request(run: str, *, low: int = 1, high: int | None = None, model: str = "m", **env: str) -> LaunchRequest:
    scaling = Scaling(min_replicas=low, max_replicas=low if high is None else high, target_qps=100.0)
    probe = Probe(path="/health", interval_s=0.5, timeout_s=10, initial_delay_s=400)
    task = Task(
        name="web",
        kind="service",
        run=run,
        env=env,
        resources=(Resources(accelerator=Accelerator(type="v5litepod-1")),),
        service=ServiceSpec(port=18080, probes=(probe,), scaling=scaling, model=ServedModel(name=model)),
        stop_duration_s=5,
    )
    return LaunchRequest(task=task, options=LaunchOptions(provider="local"))


def replicas(word: str, **more: int) -> LaunchRequest:
    return request(f"exec {sys.executable} {REPLICA} $PODWAY_PORT $WORD-$PODWAY_CLUSTER", WORD=word, **more)  # type: ignore[arg-type]


def gateway_url(pod: Podway) -> str:
    wait_until(lambda: pod.client.service("web").url, 60, "the gateway's report")
    running = running_gateway(pod.home / "gateway")
    assert running is not None and str(pod.client.service("web").url).startswith(running.url)
    return running.url


def test_a_tiny_model_is_asked_by_name(pod: Podway) -> None:
    """openai-python -> gateway -> `podway serve`, with a key that has a budget, and usage in the store."""
    pod.start()
    flags = "--max-len 64 --max-seqs 2 --prompt-tokens 16 --pages 40 --host 0.0.0.0"
    serve = f"export XLA_FLAGS='{HURRY}'; exec {sys.executable} -m podway.cli.main serve {MODEL} --name tiny {flags}"
    pod.client.apply_service(request(f"{serve} --port $PODWAY_PORT", model="tiny"))
    ready(pod, 1, seconds=300)
    key = pod.client.make_gateway_key("app", tokens_per_day=45)
    client = openai.OpenAI(base_url=f"{gateway_url(pod)}/v1", api_key=key, max_retries=0)
    wait_until(lambda: _names(client) == ["tiny"], 60, "the key at the gateway")
    asked = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == greedy_text(PROMPTS[0], 12)
    stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    assert "".join(part.choices[0].text for part in stream) == answer.choices[0].text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").completions.create(model="tiny", prompt="x")
    with pytest.raises(openai.RateLimitError, match="budget"):
        for _ in range(5):
            client.completions.create(**asked, extra_body={"ignore_eos": True})
    user = pod.client.info().user
    wait_until(lambda: _reported(pod) >= 2, 60, "usage in the store")
    row = pod.client.usage_by_day()[-1]
    assert (row.user, row.service, row.model) == (f"{user}/app", "web", "tiny") and row.completion_tokens >= 12
    client.close()
    ended(pod)


def _names(client: openai.OpenAI) -> list[str]:
    return [one.id for one in client.models.list().data]


@needs_networks
@pytest.mark.timeout(900)
def test_no_request_fails_whatever_happens_to_the_service(pod: Podway) -> None:
    """A replica is killed, the service rolls, scales 1 -> 4 -> 1 -> 0 -> 1, the server is killed, the gateway replaced."""
    pod.start()
    pod.client.apply_service(replicas("one", low=2))
    ready(pod, 2)
    key = pod.client.make_gateway_key("load")
    url = gateway_url(pod)
    wait_until(lambda: _opens(url, key), 60, "the key at the gateway")

    async def until(condition: Callable[[], object], what: str) -> None:
        await asyncio.to_thread(wait_until, condition, 150, what)

    async def test() -> LoadRun:
        async with load(url, key=key, clients=4) as run:
            await run.more()
            number = min(one.number for one in pod.client.service("web").replicas)
            await asyncio.to_thread(pod.kill_all_in, pod.home / "local" / f"web-{number}")
            await run.more()
            assert run.outcomes["cut"] <= 4  # one for each client at most
            await asyncio.to_thread(ready, pod, 2, seconds=150)
            cut = run.outcomes["cut"]
            await asyncio.to_thread(pod.client.apply_service, replicas("two", low=2))
            await until(lambda: pod.client.service("web").revision == 2, "the update")
            pod.kill_server()
            await run.more()  # the gateway serves while the server is away
            pod.start()
            await asyncio.to_thread(ready, pod, 2, 2, seconds=200)
            for count in (1, 4, 1, 0, 1):
                await asyncio.to_thread(pod.client.scale_service, "web", count)
                await asyncio.to_thread(ready, pod, count, seconds=150)
                if count:
                    await run.more()
            running = running_gateway(pod.home / "gateway")
            assert running is not None
            before = running.pid
            os.kill(before, signal.SIGHUP)
            await until(lambda: running_pid(pod) not in (None, before), "the new gateway")
            run.names.clear()
            await run.more(40)
            assert run.outcomes["cut"] == cut  # nothing but the killed replica cuts a stream
            assert all(name.startswith("two-") for name in run.names)
        return run

    run = asyncio.run(test())
    assert run.failures == []
    wait_until(lambda: _reported(pod) == run.answered + run.outcomes["cut"], 60, "every request in the usage")
    ended(pod)


def running_pid(pod: Podway) -> int | None:
    found = running_gateway(pod.home / "gateway")
    return found.pid if found is not None else None


def _opens(url: str, key: str) -> bool:
    return bool(httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).json()["data"])


def _reported(pod: Podway) -> int:
    today = time.strftime("%Y-%m-%d", time.gmtime(time.time() - 3600))  # the test may run over midnight
    return sum(row.requests for row in pod.client.usage_by_day(today))
