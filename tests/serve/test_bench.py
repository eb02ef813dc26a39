"""The load client: its arithmetic by hand, and against a live server."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from podway.bench import serve as bench
from podway.bench.serve import Outcome
from podway.bench.sse import target_of
from podway.cli.index import podway
from podway.errors import UserError
from tests.serve.live import Live, live

# The block of the seed that people compare with; numbers stand for any number of the same form.
BLOCK = """\
Successful requests: 100
Benchmark duration: 8.753792 s
Total input tokens: 21888
Total generated tokens: 18803
Request throughput: 11.42 requests/s
Input token throughput: 2500.40 tokens/s
Output token throughput: 2147.98 tokens/s
Mean TTFT: 1981.93 ms
Median TTFT: 1829.33 ms
P99 TTFT: 4511.95 ms
Mean TPOT: 130.71 ms
Median TPOT: 18.88 ms
P99 TPOT: 2487.37 ms"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model")) as running:
        yield running


def form(text: str) -> str:
    """Digits before the point become one #; those after it keep their number."""
    return re.sub(r"\d+(\.\d+)?", lambda m: "#" + "." * bool(m[1]) + "#" * (len(m[1] or ".") - 1), text)


def test_numbers_by_hand() -> None:
    made = [
        Outcome(sent=0.0, first=1.0, ended=3.0, prompt_tokens=10, tokens=5, gaps=[0.5, 1.5]),
        Outcome(sent=1.0, first=1.5, ended=2.0, prompt_tokens=20, tokens=1, gaps=[]),
        Outcome(sent=1.0, ended=2.0, error="status 500"),
    ]
    s = bench.summary(made, 4.0, slo=(600.0, 10.0))
    assert (s["successful"], s["failed"], s["input_tokens"], s["output_tokens"]) == (2, 1, 30, 6)
    assert s["mean_ttft_ms"] == pytest.approx(750)
    assert s["mean_tpot_ms"] == pytest.approx((600 + 1000) / 2)  # latency / tokens
    assert s["mean_tpot_after_first_ms"] == pytest.approx(500)  # 2 s for 4 tokens; one token has none
    assert s["mean_itl_ms"] == pytest.approx(1000)
    assert s["goodput"] == 0.0
    assert bench.summary(made, 4.0, slo=(1000.0, 500.0))["goodput"] == pytest.approx(0.5)
    assert bench.percentile([1, 2, 3, 4], 0.5) == 2.5 and bench.percentile([5], 0.99) == 5


def test_the_block_is_the_known_one_line_for_line(server: Live, tmp_path: Path) -> None:
    saved, picture = tmp_path / "r.json", tmp_path / "r.svg"
    result = CliRunner().invoke(
        podway,
        ["bench", "serve", "--url", server.url, "--wait", "5", "--num-prompts", "12",
         "--input-len", "20", "--output-len", "6", "--concurrency", "4",
         "--spread", "0.3", "--slo", "60000", "60000", "--save-result", str(saved), "--plot", str(picture)],
        catch_exceptions=False,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first = "\n".join(result.output.splitlines()[:13])
    assert form(first) == form(BLOCK)
    kept = json.loads(saved.read_text())
    assert kept["successful"] == 12 and len(kept["requests"]) == 12
    assert kept["input_tokens"] == sum(len(p) for p, _ in bench.synthetic(12, 20, 6, 0, 0.3))
    assert kept["output_tokens"] == sum(n for _, n in bench.synthetic(12, 20, 6, 0, 0.3))
    assert kept["mean_ttft_ms"] <= kept["mean_latency_ms"]
    assert "<polyline" in picture.read_text()
    assert "Goodput:" in result.output


def test_rate_and_files(server: Live, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "one", "max_tokens": 3}\n\n{"prompt": [1, 2], "max_tokens": 2}\n')
    target = target_of(server.url + "/v1")
    load = bench.Load(prompts=bench.from_lines(file, None), model="tiny", rate=50.0)
    outcomes, seconds = asyncio.run(bench.run(target, load))
    assert [o.tokens for o in outcomes] == [3, 2] and seconds > 0
    share = tmp_path / "s.json"
    talk = [{"from": "human", "value": "how are you"}, {"from": "gpt", "value": "well, thank you"}]
    share.write_text(json.dumps([{"conversations": talk}, {"conversations": talk[:1]}]))
    assert asyncio.run(bench.from_sharegpt(share, 5, 0, target)) == [("how are you", 15)]


def test_errors_are_counted_not_hidden(server: Live) -> None:
    load = bench.Load(prompts=[([1], 3), ([1] * 900, 3)], model="tiny")
    outcomes, seconds = asyncio.run(bench.run(target_of(server.url), load))
    s = bench.summary(outcomes, seconds)
    assert (s["successful"], s["failed"]) == (1, 1)
    assert "Failed requests: 1" in bench.report(s) and "limit is" in bench.report(s)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999999"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UserError):
        target_of(url)


def test_nobody_there() -> None:
    with pytest.raises(UserError, match="no server"):
        asyncio.run(bench.model_name(target_of("http://127.0.0.1:9")))


def test_serve_shows_its_options_and_refuses_nonsense(tmp_path: Path) -> None:
    shown = CliRunner().invoke(podway, ["serve", "--help"])
    assert shown.exit_code == 0 and "--max-seqs" in shown.output
    with pytest.raises(UserError, match="no such directory"):
        CliRunner().invoke(podway, ["serve", str(tmp_path / "none")], catch_exceptions=False)
    with pytest.raises(UserError, match="port"):
        CliRunner().invoke(podway, ["serve", str(tmp_path), "--port", "70000"], catch_exceptions=False)


def test_a_server_that_is_not_ready_is_waited_for(server: Live) -> None:
    target = target_of(server.url)
    asyncio.run(bench.until_ready(target, 0))
    loops, server.service.loops, server.service.status = server.service.loops, [], "compiling: 3 of 9"
    try:
        with pytest.raises(UserError, match="compiling: 3 of 9"):
            asyncio.run(bench.until_ready(target, 0.3))
    finally:
        server.service.loops = loops
    with pytest.raises(UserError, match="not ready"):
        asyncio.run(bench.until_ready(target_of("http://127.0.0.1:9"), 0))


@pytest.mark.parametrize("chat", [False, True])
def test_gaps_are_counted_by_token(server: Live, chat: bool) -> None:
    """A chunk may bring several tokens; its usage says how many."""
    load = bench.Load(prompts=[("hello", 24)] * 3, model="tiny", concurrency=2, chat=chat)
    outcomes, _ = asyncio.run(bench.run(target_of(server.url), load))
    assert [(o.error, o.tokens) for o in outcomes] == [(None, 24)] * 3
    for outcome in outcomes:
        assert len(outcome.gaps) < 24
        assert sum(outcome.gaps) == pytest.approx(outcome.ended - (outcome.first or 0), rel=0.01, abs=1e-3)


def followed(events: list[dict[str, object]]) -> Outcome:
    async def lines() -> AsyncIterator[bytes]:
        for event in events:
            yield b"data: " + json.dumps(event).encode()

    outcome = Outcome(sent=0.0, gaps=[])
    asyncio.run(bench._follow(lines(), outcome))
    return outcome


def test_chunks_of_other_servers() -> None:
    """A role alone is not a token; without a count in each chunk, a chunk is one."""
    outcome = followed([
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"content": "bc"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}},
    ])  # fmt: skip
    assert (outcome.tokens, outcome.prompt_tokens, len(outcome.gaps)) == (3, 4, 2)


def test_chunks_of_several_tokens() -> None:
    def chunk(count: int) -> dict[str, object]:
        return {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 4, "completion_tokens": count}}

    outcome = followed([chunk(1), chunk(5), chunk(7)])
    assert len(outcome.gaps) == 6 and len(set(outcome.gaps)) == 2


def test_an_answer_ends_with_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after it (why it ended, what it used) may come late and is no part of its gaps."""

    def chunk(count: int, text: str, reason: str | None = None) -> dict[str, object]:
        usage = {"prompt_tokens": 4, "completion_tokens": count}
        return {"choices": [{"delta": {"content": text}, "finish_reason": reason}], "usage": usage}

    clock = iter([1.0, 2.0, 4.0, 9.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    outcome = followed([chunk(1, "a"), chunk(2, "b"), chunk(4, "cd"), chunk(4, "", "length")])
    assert (outcome.first, outcome.ended, outcome.tokens, outcome.gaps) == (1.0, 4.0, 4, [1.0, 1.0, 1.0])
