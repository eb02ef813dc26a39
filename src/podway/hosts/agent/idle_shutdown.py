"""Autostop without a server: a head host that idles while no server is running deletes or stops its own machines.

The server sends the autostop policy to the head's agent (`idle_shutdown`) and repeats it as a heartbeat. When no heartbeat came
for `silence_s`, and no job and no shell has run for `idle_s`, the agent makes the calls of the policy, with a token of the
machine's own service account from the cloud's metadata server: no host ever holds a person's credentials. The policy is on disk,
so that it outlives the agent; both times start again when an agent starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time

from .connections import sessions
from .phase import RequestRefused, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .processes import Known
    from .wire import Fields

    Answer = tuple[Fields, bytes]

CHECK_S = 5.0  # at the longest between checks
RETRY_S = 60.0  # between attempts to shut down
CALL_S = 30.0
_POLICY = "idle_shutdown.json"
_DONE = (200, 201, 202, 204, 404, 409)  # done, or already done, or being done


class IdleShutdown:
    """The policy of one host, and whether it applies now. `works` says whether a job runs here."""

    def __init__(self, state: str, works: Callable[[], bool], address: str = "") -> None:
        self._address = address
        self._sessions: Known = set()
        self._path = os.path.join(state, _POLICY)
        self._works = works
        self._policy = self._read()
        self._last_heartbeat = self._last_busy = time.monotonic()
        self._next = 0.0
        self._shutting_down = threading.Lock()

    def operation(self, request: Fields) -> Answer:
        """Store the policy (null: none), and note that a server is running."""
        policy = request.get("policy")
        if policy is not None:
            _check(policy)
        if policy != self._policy:
            self._policy = policy
            self._last_busy = time.monotonic()
            if policy is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            else:
                write_json(self._path, policy)
        self._last_heartbeat = time.monotonic()
        return {"armed": policy is not None}, b""

    def check(self) -> float | None:
        """Shut down if it is time; the seconds until the next check, or None without a policy."""
        policy, now = self._policy, time.monotonic()
        if policy is None:
            return None
        if now < self._next:
            return self._next - now
        self._next = now + min(CHECK_S, max(0.1, policy["silence_s"] / 4))
        if self._works() or (policy.get("shell") and self._someone_is_connected()):
            self._last_busy = now
        if now - self._last_busy >= policy["idle_s"] and now - self._last_heartbeat >= policy["silence_s"]:
            self._next = now + RETRY_S
            threading.Thread(target=self._shut_down, args=(policy,), daemon=True).start()
        return self._next - now

    def _someone_is_connected(self) -> bool:
        """Whether a session that was there at the last check still is."""
        before, self._sessions = self._sessions, sessions(self._address)
        return bool(before & self._sessions)

    def _shut_down(self, policy: Fields) -> None:
        if not self._shutting_down.acquire(blocking=False):
            return
        try:
            for call in policy["calls"]:
                status = _ask(call["method"], call["url"], {"Authorization": f"Bearer {_token(policy['token_url'])}"})[
                    0
                ]
                print(f"idle without a server: {call['method']} {call['url']}: {status}", file=sys.stderr, flush=True)
                if status not in _DONE:
                    break
        except Exception as error:  # whatever it is, it is tried again
            print(f"idle without a server, and the shutdown failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            self._shutting_down.release()

    def _read(self) -> Fields | None:
        try:
            with open(self._path) as file:
                policy: Fields = json.load(file)
            _check(policy)
        except (OSError, ValueError, RequestRefused):
            return None
        return policy


def _check(policy: object) -> None:
    if not isinstance(policy, dict):
        raise RequestRefused("policy must be an object or null")
    for name in ("idle_s", "silence_s"):
        if type(policy.get(name)) not in (int, float) or not 0 <= policy[name] < 1e9:
            raise RequestRefused(f"policy: {name} must be a number of seconds")
    calls = policy.get("calls")
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls) or not _is_url(policy.get("token_url")):
        raise RequestRefused("policy: calls and token_url must say what to ask where")
    if not isinstance(policy.get("shell", ""), str):
        raise RequestRefused("policy: shell must be text: whether people who are logged in count")


def _is_call(call: object) -> bool:
    return isinstance(call, dict) and call.get("method") in ("DELETE", "POST") and _is_url(call.get("url"))


def _is_url(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("https://", "http://"))


def _token(url: str) -> str:
    status, body = _ask("GET", url, {"Metadata-Flavor": "Google"})
    if status != 200:
        raise OSError(f"the metadata server answers {status}")
    return str(json.loads(body)["access_token"])


def _ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    # Imported here: most agents never need it, and it costs more than all the rest of the agent.
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, Request, build_opener

    try:
        with build_opener(ProxyHandler({})).open(Request(url, method=method, headers=headers), timeout=CALL_S) as reply:
            return reply.status, reply.read()
    except HTTPError as error:
        return error.code, error.read()
