"""A shell in a pod, or one command there: what `kubectl exec -it` is, with the rights that the caller's own KUBECONFIG gives.

    python -m podway.providers.gke.pod_shell ADDRESS [--tty] -- COMMAND...

ADDRESS is a `PodAddress` as JSON. With --tty the terminal here is passed through as it is, and its size as it changes; without, stdin,
stdout and stderr are. Exits with the command's own code.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator

from podway.decoding import from_json
from podway.errors import ProviderError, UserError
from podway.hosts.pod_address import PodAddress
from podway.providers.gke.api import Fields, KubernetesApi
from podway.providers.gke.kubeconfig import find_context
from podway.providers.gke.manifests import CONTAINER, JOB_INDEX, JOBSET_NAME
from podway.providers.gke.state import is_ready, worker_of
from podway.providers.gke.streams import CHUNK, ERROR, STDERR, STDIN, STDOUT, PodSession, open_session

RESIZE = 4
MOST_UNSENT = 1 << 20
STOPPED = 255  # as ssh exits when the connection is lost


def main(words: list[str]) -> int:
    """Run it; the exit code."""
    address, *rest = words
    terminal = rest[0] == "--tty"
    command = rest[rest.index("--") + 1 :]
    try:
        target = from_json(address, PodAddress)
        return asyncio.run(_run(target, command, terminal=terminal))
    except (UserError, ProviderError, OSError, TimeoutError) as error:
        hint = f"\n  {error.hint}" if isinstance(error, UserError) else ""
        print(f"Error: {error.what if isinstance(error, UserError) else error}{hint}", file=sys.stderr)
        return STOPPED


def find_pod(api: KubernetesApi, target: PodAddress) -> str:
    """The pod that is there now."""
    path, selector = f"/api/v1/namespaces/{target.namespace}/pods", f"{JOBSET_NAME}={target.jobset}"
    pods: list[Fields] = api.read_items(path, {"labelSelector": f"{selector},{JOB_INDEX}={target.slice}"})
    fitting = [pod for pod in pods if worker_of(pod) == target.worker and is_ready(pod)]
    if not fitting:
        raise UserError(
            f"no pod of {target.jobset} runs for worker {target.worker} of slice {target.slice}", "see: podway status"
        )
    return str(fitting[0]["metadata"]["name"])


async def _run(target: PodAddress, command: list[str], *, terminal: bool) -> int:
    api = KubernetesApi(find_context(target.context))
    pod = await asyncio.to_thread(find_pod, api, target)
    session = await open_session(api, target.namespace, pod, CONTAINER, command, terminal=terminal)
    try:
        with _raw() if terminal else contextlib.nullcontext():
            if terminal:
                _send_sizes(session)
            loop = asyncio.get_running_loop()
            threading.Thread(target=_send_input, args=(session, loop), daemon=True).start()
            return await _show(session)
    finally:
        session.close()


async def _show(session: PodSession) -> int:
    """What it writes, until it ends; its exit code."""
    while True:
        message = await session.read()
        if message is None:
            print("\nError: the connection to the pod is lost", file=sys.stderr)
            return STOPPED
        channel, data = message
        if channel in (STDOUT, STDERR):
            _write(1 if channel == STDOUT else 2, data)
        elif channel == ERROR:
            return exit_code(data)


def exit_code(data: bytes) -> int:
    """Of the status that ends an exec."""
    try:
        status = json.loads(data)
    except ValueError:
        return STOPPED
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
            return int(cause["message"])
    print(f"Error: {' '.join(str(status.get('message')).split())[:300]}", file=sys.stderr)
    return STOPPED


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _send_input(session: PodSession, loop: asyncio.AbstractEventLoop) -> None:
    """In a thread: stdin may be a file, which no event loop waits for."""
    with contextlib.suppress(OSError, RuntimeError):  # the loop is closed: the command has ended
        while session.is_open() and (data := os.read(0, CHUNK)):
            loop.call_soon_threadsafe(_quietly, session.write, STDIN, data)
            while session.is_open() and session.unsent() > MOST_UNSENT:
                time.sleep(0.01)
        loop.call_soon_threadsafe(_quietly, session.end_input)


def _quietly(call: Callable[..., None], *what: object) -> None:
    """What cannot be sent any more does not matter: the end of the connection is seen where it is read."""
    with contextlib.suppress(OSError):
        call(*what)


def _send_sizes(session: PodSession) -> None:
    def send() -> None:
        size = os.get_terminal_size(0)
        _quietly(session.write, RESIZE, json.dumps({"Width": size.columns, "Height": size.lines}).encode())

    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, send)
    send()


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """The terminal passes every key on, Ctrl-C too."""
    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed meanwhile is for the shell
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.stdout.flush()
    code = main(sys.argv[1:])
    os._exit(code)  # the thread that reads stdin may wait for a key for ever
