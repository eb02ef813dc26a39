"""Other people's clients against a live server: LiteLLM, LangChain, lm-eval, schemathesis. (openai-python is in test_http.py.)

They live in an environment of their own, which `tools/clients` makes (`make test` and `make soak` call it).
"""

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serve.live import Live, live

CLIENTS = Path(os.environ.get("PODWAY_CLIENTS", ".cache/clients/bin")).absolute()
needed = pytest.mark.skipif(not (CLIENTS / "st").exists(), reason="tools/clients has not been run")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model"), max_queue=4096) as running:
        yield running
        running.wait_until_empty()


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One whose answers are short: a body that asks for 128 choices without a limit is well formed."""
    with live(tmp_path_factory.mktemp("model"), max_queue=4096, max_len=24, max_seqs=16, prompt_tokens=16) as running:
        yield running
        running.wait_until_empty()


@needed
@pytest.mark.parametrize(
    "client", ["litellm_asks", "langchain_asks", pytest.param("lm_eval_asks", marks=pytest.mark.soak)]
)
@pytest.mark.timeout(300)
def test_clients_that_people_use(server: Live, client: str, tmp_path: Path) -> None:
    command = [str(CLIENTS / "python"), str(Path(__file__).parent / "clients.py"), server.url, client]
    # Nothing is to be fetched: lm-eval's data sets and LiteLLM's price list come from their packages.
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env={**os.environ, **offline})
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"{client} works" in ran.stdout


def conforms(server: Live, folder: Path, phases: str, examples: int, seconds: float) -> int:
    """How many cases schemathesis made of the OpenAPI document; it fails where an answer is not as the document says.

    Two processes of one thread each: two threads parse at once, and Python 3.11's ast breaks then (CPython 106905)."""

    def ask(which: str) -> int:
        command = [
            str(CLIENTS / "st"), "run", f"{server.url}/openapi.json", "--phases", phases, "--max-examples", str(examples),
            "--continue-on-failure", "--exclude-checks", "positive_data_acceptance", "--generation-deterministic",
            "--request-timeout", "60", "-w", "1", which, "/chat/",
        ]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=folder)
        assert ran.returncode == 0, ran.stdout[-4000:]
        found = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
        assert found is not None and found[1] == found[2], ran.stdout[-4000:]
        return int(found[1])

    with ThreadPoolExecutor(2) as pool:
        made = sum(pool.map(ask, ["--include-path-regex", "--exclude-path-regex"]))
    server.wait_until_empty()
    return made


@pytest.mark.long
@needed
@pytest.mark.timeout(300)
def test_every_answer_is_as_the_document_says(brief: Live, tmp_path: Path) -> None:
    """`positive_data_acceptance` is left out: a body may be well formed and still too long for this model."""
    assert conforms(brief, tmp_path, "coverage,fuzzing", 8, 280) > 200


@needed
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_thousands_of_answers_are_as_the_document_says(brief: Live, tmp_path: Path) -> None:
    assert conforms(brief, tmp_path, "coverage,fuzzing", 400, 1700) > 2000
