"""The HTTP API over the stored objects: the part of Kubernetes' that Podway, kubectl's verbs and the nodes use.

Paths, selectors, merge patches and the bodies of errors are the real server's. `exec` and `log` of a pod are passed to its node, as
the real server passes them to the kubelet.
"""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from podway.sandbox.kubernetes.admission import (
    MOST_DATA,
    UNCHECKED,
    jobset_problems,
    listed,
    metadata_problems,
    too_large,
    with_defaults,
)
from podway.sandbox.kubernetes.objects import Fields, Objects, Refused, merged, now
from podway.sandbox.kubernetes.schemas import problems, schema
from podway.sandbox.kubernetes.server_side_apply import applied, established, with_status

# plural -> (group, kind, whether it belongs to a namespace)
KINDS = {
    "nodes": ("", "Node", False),
    "namespaces": ("", "Namespace", False),
    "pods": ("", "Pod", True),
    "configmaps": ("", "ConfigMap", True),
    "secrets": ("", "Secret", True),
    "events": ("", "Event", True),
    "serviceaccounts": ("", "ServiceAccount", True),
    "services": ("", "Service", True),
    "deployments": ("apps", "Deployment", True),
    "roles": ("rbac.authorization.k8s.io", "Role", True),
    "rolebindings": ("rbac.authorization.k8s.io", "RoleBinding", True),
    "clusterroles": ("rbac.authorization.k8s.io", "ClusterRole", False),
    "clusterrolebindings": ("rbac.authorization.k8s.io", "ClusterRoleBinding", False),
    "customresourcedefinitions": ("apiextensions.k8s.io", "CustomResourceDefinition", False),
    "mutatingwebhookconfigurations": ("admissionregistration.k8s.io", "MutatingWebhookConfiguration", False),
    "validatingwebhookconfigurations": ("admissionregistration.k8s.io", "ValidatingWebhookConfiguration", False),
    "apiservices": ("apiregistration.k8s.io", "APIService", False),
    "persistentvolumeclaims": ("", "PersistentVolumeClaim", True),
    "storageclasses": ("storage.k8s.io", "StorageClass", False),
    "csidrivers": ("storage.k8s.io", "CSIDriver", False),
    "priorityclasses": ("scheduling.k8s.io", "PriorityClass", False),
    "jobsets": ("jobset.x-k8s.io", "JobSet", True),
    "workloads": ("kueue.x-k8s.io", "Workload", True),
    "localqueues": ("kueue.x-k8s.io", "LocalQueue", True),
    "clusterqueues": ("kueue.x-k8s.io", "ClusterQueue", False),
    "resourceflavors": ("kueue.x-k8s.io", "ResourceFlavor", False),
}
BUILT_IN = dict.fromkeys(
    (
        "scheduling.k8s.io",
        "storage.k8s.io",
        "apps",
        "rbac.authorization.k8s.io",
        "apiextensions.k8s.io",
        "admissionregistration.k8s.io",
        "apiregistration.k8s.io",
    ),
    "v1",
)
REVIEWS = ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"]
METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}
COPY = 64 << 10
_NODE_NAMES = {"stdin": "input", "stdout": "output", "stderr": "error", "tty": "tty"}
APPLY = "APPLY"  # a PATCH of the kind that is a server-side apply
NO_PAGE = "404 page not found\n"  # the answer, not in JSON, to a path of which nobody knows the kind


class Api:
    """What is installed, who may do what, and the verbs on objects."""

    def __init__(self, objects: Objects, *, token: str, groups: dict[str, str]) -> None:
        self.objects = objects
        self.token = token
        self.groups = BUILT_IN | groups  # group -> its version, for those that are installed
        self.node_token = ""  # what the nodes know this API by
        self.ready = True  # whether it has read who may do what; until then everything is forbidden
        self.forbidden: Callable[[str, str], bool] = lambda method, plural: False

    def answer(self, method: str, path: str, query: dict[str, str], body: Fields) -> Fields:
        """One request, past its authentication."""
        if path == "/readyz":
            if not self.ready:
                raise Refused(403, "Forbidden", 'forbidden: User "podway" cannot get path "/readyz"')
            return {}
        words = [unquote(word) for word in path.strip("/").split("/")]
        if words[:1] == ["apis"] and len(words) in (2, 3):
            return self._group(words[1], words[2] if len(words) == 3 else None)
        if words == REVIEWS:
            return self._review(body["spec"]["resourceAttributes"])
        if words == ["version"]:
            return {"gitVersion": "v1.36.4"}
        plural, namespace, name, part = self._target(words)
        if not self.ready or self.forbidden("PATCH" if method == APPLY else method, plural):
            verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete"}.get(method, "patch")
            group = KINDS[plural][0]
            what = f'{plural} is forbidden: User "podway" cannot {verb} resource "{plural}" in API group "{group}"'
            raise Refused(403, "Forbidden", f'{what} in the namespace "{namespace}"', kind=plural)
        try:
            return self._do(method, plural, namespace, name, part, query, body)
        except Refused as error:  # a kind is called with its group
            group = KINDS[plural][0]
            if group and error.message.startswith(f'{plural} "'):
                error.message = f"{plural}.{group}{error.message.removeprefix(plural)}"
            raise

    def _do(
        self, method: str, plural: str, namespace: str, name: str, part: str, query: dict[str, str], body: Fields
    ) -> Fields:
        if method == "GET":
            return self.objects.get(plural, namespace, name) if name else self._list(plural, namespace, query)
        if method == "POST":
            return self._create(plural, namespace, body)
        if method == "PATCH":
            return self._patch(plural, namespace, name, part, body)
        if method == APPLY:
            return self._apply(plural, namespace, name, query, body)
        if method == "DELETE":
            return self._delete(plural, namespace, name, body)
        raise Refused(405, "MethodNotAllowed", f"{method} is not supported")

    def _review(self, asked: Fields) -> Fields:
        """Whether the caller may do it."""
        plural = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        return {"status": {"allowed": self.ready and not self.forbidden(METHODS[asked["verb"]], plural)}}

    def _group(self, group: str, version: str | None) -> Fields:
        if group not in self.groups or version not in (None, self.groups[group]):
            raise Refused(404, "", NO_PAGE)
        version = self.groups[group]
        return {
            "kind": "APIGroup",
            "name": group,
            "preferredVersion": {"groupVersion": f"{group}/{version}", "version": version},
        }

    def _target(self, words: list[str]) -> tuple[str, str, str, str]:
        missing = Refused(404, "", NO_PAGE)
        if words[:2] == ["api", "v1"]:
            group, rest = "", words[2:]
        elif words[0] == "apis" and len(words) > 3 and self.groups.get(words[1]) == words[2]:
            group, rest = words[1], words[3:]
        else:
            raise missing
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        if not rest or KINDS.get(rest[0], ("none",))[0] != group:
            raise missing
        return rest[0], namespace, rest[1] if len(rest) > 1 else "", rest[2] if len(rest) > 2 else ""

    def _list(self, plural: str, namespace: str, query: dict[str, str]) -> Fields:
        found = self.objects.find(plural, namespace or None)
        found = [one for one in found if _selected(one, query)]
        kind = f"{KINDS[plural][1]}List"
        return {"kind": kind, "metadata": {"resourceVersion": str(self.objects.version)}, "items": found}

    def _create(self, plural: str, namespace: str, body: Fields) -> Fields:
        group, kind, _ = KINDS[plural]
        body = with_defaults(plural, body)
        what = f'{kind}{f".{group}" if group else ""} "{(body.get("metadata") or {}).get("name") or ""}" is invalid'
        against = schema(plural)
        wrong = metadata_problems(body)
        broken = problems(body, against) if against is not None else []
        if against is not None and (broken or not (body.get("metadata") or {}).get("name")):
            broken = [*broken, UNCHECKED]
        if wrong or broken:
            raise Refused(422, "Invalid", f"{what}: {listed([*wrong, *broken])}")
        if too_large(plural, body):
            raise Refused(422, "Invalid", f"{what}: []: Too long: may not be more than {MOST_DATA} bytes")
        denied = jobset_problems(body) if plural == "jobsets" else []
        if denied:
            webhook = 'admission webhook "vjobset.kb.io" denied the request'
            raise Refused(422, "Invalid", f"{webhook}: {what}: {listed(denied)}")
        return self.objects.create(plural, namespace, body)

    def _patch(self, plural: str, namespace: str, name: str, part: str, body: Fields) -> Fields:
        def change(old: Fields) -> Fields:
            if part == "status":
                return {**old, "status": merged(old.get("status") or {}, body.get("status") or {})}
            new: Fields = merged(old, {key: value for key, value in body.items() if key != "status"})
            return new

        return self.objects.change(plural, namespace, name, change)

    def _apply(self, plural: str, namespace: str, name: str, query: dict[str, str], body: Fields) -> Fields:
        if namespace and namespace != "default" and not self._is_there("namespaces", "", namespace):
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found', name=namespace, kind="namespaces")
        if wrong := metadata_problems(body):
            raise Refused(422, "Invalid", f'{KINDS[plural][1]} "{name}" is invalid: {listed(wrong)}')
        old = self.objects.get(plural, namespace, name) if self._is_there(plural, namespace, name) else None
        new = with_status(plural, applied(old, body, query.get("fieldManager", "")))
        if query.get("dryRun") == "All":
            return new
        if plural == "customresourcedefinitions":
            group, version = established(body)
            self.groups[group] = version
        if old is None:
            return self.objects.create(plural, namespace, new)
        return self.objects.change(plural, namespace, name, lambda found: new)

    def _is_there(self, plural: str, namespace: str, name: str) -> bool:
        return any(one["metadata"]["name"] == name for one in self.objects.find(plural, namespace))

    def _delete(self, plural: str, namespace: str, name: str, body: Fields) -> Fields:
        found = self.objects.get(plural, namespace, name)
        grace = body.get("gracePeriodSeconds")
        if plural == "pods" and grace != 0 and (found.get("spec") or {}).get("nodeName"):
            self.objects.change(plural, namespace, name, _marked)  # its node ends it, and then removes it
        elif plural == "jobsets":
            self.objects.change(plural, namespace, name, _marked)  # the controller removes what belongs to it first
        else:
            self.objects.remove(plural, namespace, name)
        return {"kind": "Status", "status": "Success"}


def _marked(found: Fields) -> Fields:
    found["metadata"].setdefault("deletionTimestamp", now())
    return found


def _selected(found: Fields, query: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, equal, value = term.partition("=")
        if key not in labels or (equal and labels[key] != value.removeprefix("=")):
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        unequal = key.endswith("!")
        at: Any = found
        for word in key.removesuffix("!").split("."):
            at = (at or {}).get(word)
        if (str(at or "") == value) == unequal:
            return False
    return True


class ApiServer(ThreadingHTTPServer):
    """Serves the API on a port of 127.0.0.1."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, api: Api) -> None:
        self.api = api
        super().__init__(("127.0.0.1", 0), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is not an error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PATCH = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read what they ask for."""

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size)
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        api = self.server.api
        try:
            if self.headers.get("Authorization") != f"Bearer {api.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            words = url.path.strip("/").split("/")
            if len(words) == 7 and words[4] == "pods" and words[6] in ("exec", "log"):
                self._pass_on(words[3], unquote(words[5]), words[6], url.query)
                return
            kind = self.headers.get("Content-Type") or ""
            method = APPLY if self.command == "PATCH" and kind.startswith("application/apply-patch") else self.command
            answer = api.answer(method, url.path, query, json.loads(data) if data else {})
            self._send(201 if self.command == "POST" else 200, answer)
        except Refused as error:
            if not error.reason:
                self._send_bytes(error.status, "text/plain; charset=utf-8", error.message.encode())
                return
            details = error.details or None
            self._send(
                error.status,
                {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "message": error.message,
                    "reason": error.reason,
                    "code": error.status,
                    **({"details": details} if details else {}),
                },
            )

    def _send(self, status: int, body: Fields) -> None:
        self._send_bytes(status, "application/json", json.dumps(body).encode())

    def _send_bytes(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _pass_on(self, namespace: str, name: str, part: str, query: str) -> None:
        """To the pod's node, byte for byte in both directions."""
        api = self.server.api
        if api.forbidden("POST", f"pods/{part}"):
            what = f'pods "{name}" is forbidden: User "podway" cannot create resource "pods/{part}" in API group ""'
            raise Refused(403, "Forbidden", f'{what} in the namespace "{namespace}"', name=name)
        pod = api.objects.get("pods", namespace, name)
        node = api.objects.get("nodes", "", (pod.get("spec") or {}).get("nodeName") or "")
        address = next(one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP")
        port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"]
        container = pod["spec"]["containers"][0]["name"]
        kubelet = {"exec": "exec", "log": "containerLogs"}[part]
        try:
            raw = socket.create_connection((address, port), 10)
        except OSError as error:
            raise Refused(500, "InternalError", f"error dialing backend: {error}") from None
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        with trusting.wrap_socket(raw) as node_side:
            node_side.settimeout(None)
            asked = _exec_query(query) if part == "exec" else query
            head = f"GET /{kubelet}/{namespace}/{name}/{container}?{asked} HTTP/1.1\r\n"
            kept = "".join(f"{key}: {value}\r\n" for key, value in self.headers.items() if key != "Authorization")
            node_side.sendall(f"{head}{kept}X-Node-Token: {api.node_token}\r\n\r\n".encode())
            _both_ways(self.connection, node_side)
        self.close_connection = True


def _exec_query(query: str) -> str:
    """As nodes are asked: streams have other names there."""
    found = parse_qs(query)
    streams = [(_NODE_NAMES[name], "1") for name in _NODE_NAMES if found.get(name, [""])[0] in ("true", "1")]
    return urlencode([*streams, *(("command", word) for word in found.get("command", []))])


def _both_ways(client: socket.socket, node: socket.socket) -> None:
    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(COPY):
                target.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    up = threading.Thread(target=copy, args=(client, node), daemon=True)
    up.start()
    copy(node, client)
    up.join()
