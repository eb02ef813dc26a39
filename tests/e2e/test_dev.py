"""Dev environments as a person types them, with the real OpenSSH client: on a simulated slice and on the sandbox cloud."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podway.sandbox.hosts import why_no_hosts
from podway.sandbox.hosts.netns import why_no_namespaces
from podway.sandbox.running import running_sandbox
from podway.task.task import Autostop
from tests.conftest import wait_until
from tests.e2e.harness import Podway

LIMIT_S = 240
SOON = Autostop(idle_minutes=0.05, wait_for="jobs_and_ssh")
# As dstack's announcement of TPU support has it, with a port, a preparation and an end.
SEED = """type: dev-environment
name: vscode-tpu

python: {python}
ide: vscode
init:
  - echo prepared >> ~/prepared
ports: ["*:{port}"]
inactivity_duration: {inactivity}

resources:
  gpu: v2-8
"""


@pytest.fixture(autouse=True)
def _openssh() -> None:
    if shutil.which("ssh") is None:
        pytest.skip("ssh is not installed (tools/system-packages installs it for root)")


class Terminal:
    """A command that stays in the foreground: what it has printed so far, and Ctrl-C."""

    def __init__(self, pod: Podway, log: Path, words: tuple[str, ...], env: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "podway.cli.main", *words],
                env={**os.environ, "PODWAY_HOME": str(pod.home), **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def shows(self, pattern: str) -> re.Match[str]:
        """The first match, once it is there."""
        wait_until(lambda: re.search(pattern, self.log.read_text()) or self.process.poll() is not None, 60, pattern)
        found = re.search(pattern, self.log.read_text())
        assert found, self.log.read_text()
        return found

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def typed(pod: Podway, log: Path, *words: str, **env: str) -> Iterator[Terminal]:
    terminal = Terminal(pod, log, words, env)
    try:
        yield terminal
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait(LIMIT_S)


def ssh(pod: Podway, *words: str) -> str:
    command = ["ssh", "-F", str(pod.home / "ssh" / "config"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def fetched(port: str) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/prepared", timeout=30) as reply:
            return bytes(reply.read())
    except OSError:
        return b""


def test_a_dev_environment_on_a_simulated_slice(pod: Podway, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "dev.dstack.yml"
    file.write_text(SEED.format(port=port, inactivity="1h", python=".".join(map(str, sys.version_info[:2]))))
    pod.start()
    with typed(pod, tmp_path / "1", "apply", "-f", str(file), "-y") as terminal:
        home = terminal.shows(r"Open in VS Code:  vscode://vscode-remote/ssh-remote\+vscode-tpu(\S+)/sky_workdir")[1]
        terminal.shows("It stops 1h .*after the last connection and job have ended")
        assert "have no effect" not in terminal.log.read_text()
        local = terminal.shows(rf"localhost:(\d+) -> {port}")[1]
        serving = f"cd ~ && setsid -f python3 -m http.server {port} --bind $PODWAY_HOST_IP >/dev/null 2>&1 </dev/null"
        ssh(pod, "vscode-tpu", serving)
        wait_until(lambda: fetched(local) == b"prepared\n", 60, "the forwarded port")
        assert terminal.interrupt() == 0 and "Detached; vscode-tpu keeps running" in terminal.log.read_text()
    assert pod.client.cluster("vscode-tpu").autostop == Autostop(idle_minutes=60, wait_for="jobs_and_ssh")
    pod.client.autostop("vscode-tpu", SOON)
    wait_until(lambda: pod.client.cluster("vscode-tpu").state == "STOPPED", 90, "inactivity")
    # Again: the cluster starts, `init` does not run a second time, and what a broken connection ends comes back.
    with typed(pod, tmp_path / "2", "dev", "-f", str(file), "-y") as terminal:
        pod.client.autostop("vscode-tpu", None)
        terminal.shows("as it is: its init commands have run")
        terminal.shows("Press Ctrl-C to detach")
        assert Path(home, "prepared").read_text() == "prepared\n"
        assert terminal.interrupt() == 0
    with typed(pod, tmp_path / "3", "attach", "vscode-tpu") as terminal:
        terminal.shows("Press Ctrl-C to detach")
        pod.client.down("vscode-tpu")
        terminal.shows("Cluster vscode-tpu is (TERMINATING|GONE)")
        assert terminal.process.wait(LIMIT_S) == 0
    wait_until(lambda: pod.client.cluster("vscode-tpu").state == "GONE", 60, "the end")


def test_a_slice_alone_and_a_port_that_is_taken(pod: Podway, tmp_path: Path) -> None:
    pod.start()
    with typed(pod, tmp_path / "1", "dev", "--gpus", "tpu-v6e-8", "--ide", "zed", "-y") as terminal:
        terminal.shows(r"Open in Zed:  zed://ssh/dev/\S+/sky_workdir")
        terminal.shows("Press Ctrl-C to detach")
        assert terminal.interrupt() == 0
    file = tmp_path / "task.dstack.yml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        file.write_text(
            f"type: task\nname: task1\nports: ['{taken}:80']\ncommands: [echo done]\nresources: {{gpu: v2-8}}\n"
        )
        with typed(pod, tmp_path / "2", "apply", "-f", str(file), "-y") as terminal:
            terminal.shows(f"port {taken} of this machine is taken.*nothing is forwarded")
            terminal.shows("Job finished")
            assert terminal.process.wait(LIMIT_S) == 0  # the job is not the port's fault
        with typed(pod, tmp_path / "3", "attach", "task1") as terminal:
            terminal.shows(f"Error: port {taken} of this machine is taken")
            assert terminal.process.wait(LIMIT_S) == 1
    pod.client.down("task1")
    wait_until(lambda: pod.client.cluster("task1").state == "GONE", 60, "the end")
    pod.down("dev")


# In the place of JupyterLab: answers as it does where it is asked whether it is up, and where a token is wanted.
NOTEBOOK = """type: dev-environment
name: lab
ide: zed
init:
  - place=$(python3 -c 'import site; print(site.getsitepackages()[0])')/jupyterlab
  - mkdir -p $place && touch $place/__init__.py && cp {program} $place/__main__.py
resources:
  gpu: v6e-1
"""
PROGRAM = """
import http.server, os, pathlib, sys
given = dict(word.split("=") for word in sys.argv if word.startswith("--ServerApp"))
if pathlib.Path.home().joinpath("broken").exists():
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/api" or self.path.endswith("=" + os.environ["JUPYTER_TOKEN"])
        self.send_response(200 if known else 403)
        self.end_headers()
http.server.HTTPServer((given["--ServerApp.ip"], int(given["--ServerApp.port"])), Handler).serve_forever()
"""


def test_a_notebook_is_shown_when_it_answers(pod: Podway, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    file = tmp_path / "dev.dstack.yml"
    file.write_text(NOTEBOOK.format(program=tmp_path / "program.py"))
    pod.start()
    for number in range(2):  # the second time it is found as it runs, with its token
        with typed(pod, tmp_path / str(number), "dev", "-f", str(file), "-y", "--jupyter") as terminal:
            link = terminal.shows(r"Open JupyterLab:  (http://localhost:\d+/lab\?token=\w+)")[1]
            with urllib.request.urlopen(link, timeout=60) as reply:
                assert reply.status == 200
            assert terminal.interrupt() == 0
    assert [job.name for job in pod.client.jobs("lab")].count("jupyter") == 1
    pod.client.cancel("lab", [2])
    wait_until(lambda: pod.client.job("lab", 2).ended, 60, "its end")
    (pod.home / "local" / "lab" / "host-0" / "broken").touch()
    with typed(pod, tmp_path / "broken", "dev", "-f", str(file), "-y", "--jupyter") as terminal:
        terminal.shows("Error: JupyterLab did not start: .*3")
        terminal.shows("see: podway logs lab 3")
        assert terminal.process.wait(LIMIT_S) == 1
    pod.down("lab")


ASK_KERNEL = """
import json, sys, websocket
channel = websocket.create_connection(sys.argv[1], timeout=200)
header = {"msg_id": "1", "msg_type": "execute_request", "username": "", "session": "1", "version": "5.3"}
content = {"code": "print(6 * 7)", "silent": False}
channel.send(json.dumps({"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}))
while (said := json.loads(channel.recv()))["msg_type"] != "stream":
    pass
print(said["content"]["text"], end="")
"""


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_jupyterlab_from_the_package_index(pod: Podway, tmp_path: Path) -> None:
    """Installed on the simulated host as on any other, with a kernel that starts."""
    pod.start()
    with typed(pod, tmp_path / "1", "dev", "--gpus", "tpu-v6e-1", "-y", "--jupyter") as terminal:
        wait_until(lambda: "token=" in terminal.log.read_text() or terminal.process.poll() is not None, 200, "the link")
        base, token = terminal.shows(r"Open JupyterLab:  (http://localhost:\d+)/lab\?token=(\w+)").groups()

        def call(path: str, body: bytes | None = None) -> str:
            request = urllib.request.Request(f"{base}{path}", data=body, headers={"Authorization": f"token {token}"})
            with urllib.request.urlopen(request, timeout=60) as reply:
                return str(reply.read().decode())

        assert "JupyterLab" in call("/lab")
        kernel = msgspec.json.decode(call("/api/kernels", b'{"name": "python3"}'))["id"]
        address = f"{base.replace('http', 'ws')}/api/kernels/{kernel}/channels?token={token}"
        python = pod.home / "local" / "dev" / "host-0" / ".podway" / "venv" / "bin" / "python"  # has a WebSocket client
        said = subprocess.run([python, "-c", ASK_KERNEL, address], capture_output=True, text=True, timeout=LIMIT_S)
        assert said.stdout == "42\n", said.stderr
        assert terminal.interrupt() == 0
    pod.down("dev")


def test_a_dev_environment_on_the_sandbox_cloud(pod: Podway, tmp_path: Path) -> None:
    """Real hosts with an sshd each: `ssh NAME`, a port, and inactivity that sees a person's session and not Podway's own."""
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    file = tmp_path / "dev.dstack.yml"
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    there = subprocess.run(["/usr/bin/python3", "-c", show], capture_output=True, text=True, check=True).stdout.strip()
    file.write_text(SEED.format(port=8000, inactivity="1h", python=there))
    with running_sandbox(tmp_path / "cloud") as sandbox:
        (pod.home / "gcp.yaml").write_text("ssh_user: root\n")  # the sandbox's hosts have no sudo
        env = sandbox.environment(tmp_path)
        pod.start(**env)
        with typed(pod, tmp_path / "1", "dev", "-f", str(file), "-y", "--infra", "gcp", **env) as terminal:
            terminal.shows(r"Open in VS Code:  vscode://vscode-remote/ssh-remote\+vscode-tpu/\S+")
            local = terminal.shows(r"localhost:(\d+) -> 8000")[1]
            ssh(
                pod,
                "vscode-tpu",
                "cd ~ && setsid -f python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 </dev/null",
            )
            wait_until(lambda: fetched(local) == b"prepared\n", 60, "the forwarded port")
            pod.client.autostop("vscode-tpu", SOON)
            time.sleep(3 * SOON.idle_minutes * 60)  # somebody is attached: it stays
            assert pod.client.cluster("vscode-tpu").state == "UP"
            assert terminal.interrupt() == 0
        wait_until(lambda: pod.client.cluster("vscode-tpu").state == "STOPPED", 90, "inactivity")
        pod.client.down("vscode-tpu")
        wait_until(lambda: pod.client.cluster("vscode-tpu").state == "GONE", 60, "the end")
