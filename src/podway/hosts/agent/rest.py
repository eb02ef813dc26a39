"""Rest without a server: a head host that idles while nobody looks after it deletes or stops its own machines.

The server tells the head's agent the rule (`rest`), and again and again that it is there. When it has not been heard for
`silence_s`, and no job and no shell has been there for `idle_s`, the agent makes the calls it was given, with a token of the
machine's own service account from the cloud's metadata server: no host ever holds a person's credentials. The rule is on disk,
so that it outlives the agent; both times count anew from an agent's start.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time

from . import processes
from .phase import Refused, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .wire import Fields

    Answer = tuple[Fields, bytes]

LOOK_S = 5.0  # at the longest between looks
AGAIN_S = 60.0  # between tries to leave
CALL_S = 30.0
_RULE = "rest.json"
_DONE = (200, 201, 202, 204, 404, 409)  # done, or already done, or being done


class Rest:
    """The rule of one host, and whether it is time. `works` says whether a job runs here."""

    def __init__(self, state: str, works: Callable[[], bool]) -> None:
        self._path = os.path.join(state, _RULE)
        self._works = works
        self._rule = self._read()
        self._heard = self._busy = time.monotonic()
        self._next = 0.0
        self._leaving = threading.Lock()

    def operation(self, request: Fields) -> Answer:
        """Take the rule (null: there is none), and note that the server is there."""
        rule = request.get("rule")
        if rule is not None:
            _check(rule)
        if rule != self._rule:
            self._rule = rule
            self._busy = time.monotonic()
            if rule is None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
            else:
                write_json(self._path, rule)
        self._heard = time.monotonic()
        return {"resting": rule is not None}, b""

    def look(self) -> float | None:
        """Leave if it is time; when to look again, in seconds, or None if there is nothing to look for."""
        rule, now = self._rule, time.monotonic()
        if rule is None:
            return None
        if now < self._next:
            return self._next - now
        self._next = now + min(LOOK_S, max(0.1, rule["silence_s"] / 4))
        if self._works() or _someone(rule):
            self._busy = now
        if now - self._busy >= rule["idle_s"] and now - self._heard >= rule["silence_s"]:
            self._next = now + AGAIN_S
            threading.Thread(target=self._leave, args=(rule,), daemon=True).start()
        return self._next - now

    def _leave(self, rule: Fields) -> None:
        if not self._leaving.acquire(blocking=False):
            return
        try:
            for call in rule["calls"]:
                status = _ask(call["method"], call["url"], {"Authorization": f"Bearer {_token(rule['token_url'])}"})[0]
                print(f"idle without a server: {call['method']} {call['url']}: {status}", file=sys.stderr, flush=True)
                if status not in _DONE:
                    break
        except Exception as error:  # whatever it is, it is tried again
            print(f"idle without a server, and cannot leave: {error!r}", file=sys.stderr, flush=True)
        finally:
            self._leaving.release()

    def _read(self) -> Fields | None:
        try:
            with open(self._path) as file:
                rule: Fields = json.load(file)
            _check(rule)
        except (OSError, ValueError, Refused):
            return None
        return rule


def _check(rule: object) -> None:
    if not isinstance(rule, dict):
        raise Refused("rule must be an object or null")
    for name in ("idle_s", "silence_s"):
        if type(rule.get(name)) not in (int, float) or not 0 <= rule[name] < 1e9:
            raise Refused(f"rule: {name} must be a number of seconds")
    calls = rule.get("calls")
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls) or not _is_url(rule.get("token_url")):
        raise Refused("rule: calls and token_url must say what to ask where")
    if not isinstance(rule.get("shell", ""), str):
        raise Refused("rule: shell must be the mark of shells")


def _is_call(call: object) -> bool:
    return isinstance(call, dict) and call.get("method") in ("DELETE", "POST") and _is_url(call.get("url"))


def _is_url(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("https://", "http://"))


def _someone(rule: Fields) -> bool:
    """Whether a shell of the cluster is open, or anybody is logged in at a terminal; only where the rule counts them."""
    if not rule.get("shell"):
        return False
    procs = processes.snapshot()
    if processes.marked(procs, processes.JOB_MARK, rule["shell"]):
        return True
    return any("SSH_TTY" in processes.environ(pid) for pid in procs)


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
