"""One server on several hosts: a model over all of them, and a replica on each."""

import json
import os
import re
import signal
import socket
import threading
from pathlib import Path

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from podway.errors import UserError
from podway.model.hf import read_config, shape_from_hf
from podway.model.weights import load_weights
from podway.serve.batcher import Step
from podway.serve.engine import HostInputs, Prepared
from podway.serve.hosts import Address, HostListener, frames, groups_of, join, pack, send, unpack
from tests.conftest import wait_until
from tests.serve.gang import gang
from tests.serve.tiny import all_logits

MODEL = Path(__file__).parent / "fixtures" / "trained"  # clear choices, whatever the order of sums
SMALL = [str(MODEL), "--max-len", "64", "--max-seqs", "2", "--prompt-tokens", "16", "--pages", "40"]
PROMPTS = ["We the People", "The Congress shall have power to", "Section 2.", "No person shall be"]


def greedy_text(prompt: str, count: int) -> str:
    shape = shape_from_hf(read_config(MODEL))
    tree = load_weights(MODEL, shape, dtype=jnp.float32)
    tokens = list(prompt.encode())
    for _ in range(count):
        tokens.append(int(all_logits(shape, tokens, tree)[-1].argmax()))
    return bytes(tokens[len(prompt) :]).decode()


def ask(url: str, prompt: str, **more: object) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.timeout(400)
def test_a_model_over_two_hosts_answers_as_one_and_ends_when_one_is_lost() -> None:
    with gang(2, 2, [*SMALL, "--tp", "4"]) as server:
        for prompt in PROMPTS[:2]:
            assert ask(server.url, prompt) == greedy_text(prompt, 12)
        hot = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "presence_penalty": 0.3, "logprobs": 2}
        assert ask(server.url, PROMPTS[2], **hot) == ask(server.url, PROMPTS[2], **hot)
        assert ask(server.url, "x", guided_choice=["yes", "no"]) in ("yes", "no")
        follower, front = server.processes[1], server.processes[0]
        os.kill(follower.pid, signal.SIGKILL)
        assert front.wait(30) == 1
        assert "Error: the host of rank 1 is gone" in server.output[0] and "Traceback" not in server.output[0]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_replica_on_each_of_two_hosts() -> None:
    with gang(2, 2, [*SMALL, "--tp", "2", "--replicas", "2"]) as server:
        # As many as to need both; n = 2 goes to one of them.
        answers = [ask(server.url, prompt) for prompt in PROMPTS]
        assert answers == [greedy_text(prompt, 12) for prompt in PROMPTS]
        body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "n": 2, "logprobs": 1}
        together = httpx.post(f"{server.url}/v1/completions", json={**body, "echo": True}, timeout=60).json()
        expected = [prompt + text for prompt, text in zip(PROMPTS, answers, strict=True) for _ in (0, 1)]
        assert [choice["text"] for choice in together["choices"]] == expected
        for choice in together["choices"]:
            assert len(choice["logprobs"]["tokens"]) == len(choice["text"])
        assert {ask(server.url, "x", guided_choice=["yes", "no"]) for _ in range(4)} <= {"yes", "no"}
        left = {"prompt": "x", "max_tokens": 50, "ignore_eos": True, "stream": True}
        for _ in range(4):
            with httpx.stream("POST", f"{server.url}/v1/completions", json=left, timeout=60) as response:
                next(response.iter_lines())
        assert ask(server.url, PROMPTS[0]) == answers[0]
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'vllm:request_success_total{finished_reason="length"' in metrics and 'finished_reason="abort"' in metrics
        assert server.end() == [0, 0], server.output


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_lost_host_takes_its_own_replica_and_no_other() -> None:
    """Who was being answered there is told at once; whoever asks next is answered by the replica that is left."""
    with gang(2, 2, [*SMALL, "--tp", "2", "--replicas", "2"]) as server:
        whole = httpx.get(f"{server.url}/health")
        body = {"prompt": "x", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        ends: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                ends.append([line for line in response.iter_lines() if line][-1])

        os.kill(server.processes[1].pid, signal.SIGSTOP)  # its answers wait, so that they are cut off for certain
        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        wait_until(lambda: len(ends) == 2, 60, "the answers of the replica that runs")
        os.kill(server.processes[1].pid, signal.SIGKILL)
        for reader in readers:
            reader.join(60)
        assert sorted("the host of this replica is gone" in end for end in ends) == [False, False, True, True], ends
        assert [ask(server.url, prompt) for prompt in PROMPTS] == [greedy_text(prompt, 12) for prompt in PROMPTS]
        assert (whole.status_code, httpx.get(f"{server.url}/health").status_code) == (200, 503)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_replicas_in_one_process() -> None:
    with gang(1, 2, [*SMALL, "--replicas", "2"]) as server:
        body = {"prompt": PROMPTS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        made = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert [choice["text"] for choice in made["choices"]] == [greedy_text(prompt, 12) for prompt in PROMPTS]
        counted = re.search(
            r'request_success_total\{finished_reason="length",.*\} (\S+)', httpx.get(f"{server.url}/metrics").text
        )
        assert counted is not None and float(counted[1]) == 4
        assert "replica 2 of 2: compiled" in server.output[0]
        assert server.end() == [0], server.output


class Chip:
    """A device of a host, as far as `groups_of` looks at it."""

    def __init__(self, host: int, id: int) -> None:
        self.process_index, self.id = host, id


@given(hosts=st.integers(1, 6), each=st.sampled_from([1, 2, 4, 8]), size=st.integers(1, 64), count=st.integers(1, 8))
def test_groups_use_every_host_or_say_why_not(hosts: int, each: int, size: int, count: int) -> None:
    devices = [Chip(host, host * each + at) for host in range(hosts) for at in range(each)]
    try:
        groups = groups_of(devices, size, count)  # type: ignore[arg-type]
    except UserError as error:
        assert error.hint
        return
    assert [len(group) for group in groups] == [size] * count
    used = [device.id for group in groups for device in group]
    assert len(set(used)) == len(used)
    assert hosts == 1 or len(used) == hosts * each
    for group in groups:
        assert size <= each or all(sum(d.process_index == h.process_index for d in group) == each for h in group)


INTS = arrays.arrays(np.int32, arrays.array_shapes(max_dims=3, max_side=5))
MAYBE = st.none() | arrays.arrays(np.uint32, (2, 3))


@given(fills=st.lists(INTS, max_size=3), rows=INTS, blocks=st.none() | INTS, mask=MAYBE, turns=st.none() | INTS,
       scoring=st.none() | st.booleans(), plain=st.booleans())  # fmt: skip
def test_a_step_reaches_other_hosts_as_it_is(fills, rows, blocks, mask, turns, scoring, plain) -> None:  # type: ignore[no-untyped-def]
    step = Step(admitted=[], rows=[], pieces=[], steps=3, row_bucket=8, block_bucket=2)
    inputs = HostInputs(
        rows, blocks, rows + 1, mask, None if scoring is None else np.bool_(scoring),
        turns,
    )  # fmt: skip
    got = unpack(pack(Prepared(step, fills, inputs, plain)))
    assert (got.step.steps, got.step.row_bucket, got.step.block_bucket, got.plain) == (3, 8, 2, plain)
    for mine, theirs in zip([*fills, *inputs], [*got.slot_fills, *got.inputs], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype


def test_a_stranger_is_not_let_in() -> None:
    post = HostListener()
    raw = post.encoded_address().tobytes()
    port = int.from_bytes(raw[4:6], "big")
    with socket.create_connection((post.ip, port)) as stranger:
        stranger.sendall(b"x" * 36)
        friend = join(Address(post.ip, port, post.secret), 5)
        peer, number = post.accept()
        assert number == 5
        send(friend, json.dumps([1]).encode())
        send(friend, b"")
        assert list(frames(peer)) == [b"[1]"]
        friend.close()
        with pytest.raises(EOFError):
            next(frames(peer))
        peer.close()
    post.close()
