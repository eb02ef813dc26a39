"""KUBECONFIG: the clusters a person can reach, and how.

Read as kubectl reads it (Kubernetes, "Organizing Cluster Access Using kubeconfig Files"): the files that KUBECONFIG lists, the first
one that names a thing wins; else ~/.kube/config. Credentials: a token, a token's file, a client certificate, user name and password,
or a program that answers an ExecCredential (GKE's gke-gcloud-auth-plugin is one); what it answers is kept until it expires.
"""

import base64
import json
import os
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from podway.errors import ProviderError, UserError

PLUGIN_S = 60.0
HINT = "see: kubectl config get-contexts"


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """The program that makes credentials."""

    command: str
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    api_version: str = "client.authentication.k8s.io/v1"
    hint: str = ""


class KubeContext(msgspec.Struct, frozen=True, kw_only=True):
    """One context: a server, how to trust it, and who asks."""

    name: str
    server: str
    namespace: str = "default"
    ca: bytes | None = None
    verify: bool = True
    server_name: str | None = None
    token: str | None = None
    token_file: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    login: str | None = None  # user:password
    plugin: Plugin | None = None


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """What a request carries."""

    authorization: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    expires: float | None = None


def kubeconfig_files() -> list[Path]:
    """The files there are to read."""
    named = [word for word in os.environ.get("KUBECONFIG", "").split(os.pathsep) if word]
    return [Path(word) for word in named] if named else [Path("~/.kube/config").expanduser()]


def read_contexts() -> tuple[dict[str, KubeContext], str | None]:
    """Every context by its name, and the current one's name."""
    merged: dict[str, dict[str, Any]] = {"clusters": {}, "users": {}, "contexts": {}}
    current = None
    for path in kubeconfig_files():
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: {error}", "KUBECONFIG names the files of your clusters") from None
        document = _document(path, text)
        current = current or document.get("current-context") or None
        for kind, known in merged.items():
            for entry in _entries(path, document, kind):
                known.setdefault(entry["name"], (path, entry.get(kind[:-1]) or {}))
    found = {name: _context(name, body, path, merged) for name, (path, body) in merged["contexts"].items()}
    return {name: one for name, one in found.items() if one is not None}, current


def find_context(name: str | None) -> KubeContext:
    """The context of that name, or the current one."""
    contexts, current = read_contexts()
    if not contexts:
        files = ", ".join(map(str, kubeconfig_files()))
        raise UserError(
            f"no Kubernetes cluster is set up here: no context in {files}",
            "set KUBECONFIG, or for GKE: gcloud container clusters get-credentials NAME",
        )
    wanted = name or current
    if wanted is None:
        raise UserError("KUBECONFIG has no current context", f"name one: --infra gke/{next(iter(contexts))}")
    if wanted not in contexts:
        raise UserError(f"KUBECONFIG has no context {wanted!r}", f"use one of: {', '.join(sorted(contexts))[:300]}")
    return contexts[wanted]


def credentials(context: KubeContext) -> Credentials:
    """What a request of this context carries now. Runs the plugin, where there is one."""
    if context.plugin is not None:
        return _from_plugin(context, context.plugin)
    token = context.token
    if context.token_file:
        try:
            token = Path(context.token_file).read_text().strip()
        except OSError as error:
            raise UserError(f"the token of context {context.name} cannot be read: {error}", HINT) from None
    authorization = f"Bearer {token}" if token else None
    if context.login:
        authorization = "Basic " + base64.b64encode(context.login.encode()).decode()
    return Credentials(authorization=authorization, certificate=context.certificate, key=context.key)


def tls(context: KubeContext, carried: Credentials) -> ssl.SSLContext | None:
    """How the connection is secured; None where the server's address says http."""
    if not context.server.startswith("https:"):
        return None
    made = ssl.create_default_context(cadata=context.ca.decode() if context.ca else None)
    if not context.verify:
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if carried.certificate and carried.key:
        with _file(carried.certificate) as certificate, _file(carried.key) as key:
            made.load_cert_chain(certificate, key)
    return made


@contextmanager
def _file(data: bytes) -> Iterator[str]:
    """OpenSSL reads a chain from files alone; mkstemp's are readable by this user only."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.name


def _document(path: Path, text: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise UserError(f"{path}:{where.line + 1 if where else 1}: not YAML", "check the file") from None
    if document is not None and not isinstance(document, dict):
        raise UserError(f"{path}: not a kubeconfig file", "KUBECONFIG names the files of your clusters")
    return document or {}


def _entries(path: Path, document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    entries = document.get(kind) or []
    if not isinstance(entries, list) or not all(isinstance(one, dict) and "name" in one for one in entries):
        raise UserError(f"{path}: {kind} is not a list of named entries", "KUBECONFIG names the files of your clusters")
    return entries


def _context(name: str, body: dict[str, Any], path: Path, merged: dict[str, dict[str, Any]]) -> KubeContext | None:
    cluster_path, cluster = merged["clusters"].get(str(body.get("cluster")), (path, {}))
    user_path, user = merged["users"].get(str(body.get("user")), (path, {}))
    if not cluster.get("server"):
        return None
    login = f"{user['username']}:{user.get('password', '')}" if user.get("username") else None
    token_file = user.get("tokenFile")
    return KubeContext(
        name=name,
        server=str(cluster["server"]).rstrip("/"),
        namespace=body.get("namespace") or "default",
        ca=_bytes(cluster, "certificate-authority", cluster_path),
        verify=not cluster.get("insecure-skip-tls-verify"),
        server_name=cluster.get("tls-server-name"),
        token=user.get("token"),
        token_file=str(user_path.parent / token_file) if token_file else None,
        certificate=_bytes(user, "client-certificate", user_path),
        key=_bytes(user, "client-key", user_path),
        login=login,
        plugin=_plugin(user.get("exec")),
    )


def _bytes(body: dict[str, Any], key: str, path: Path) -> bytes | None:
    """From the file itself (KEY-data), or from the file it names."""
    try:
        if body.get(f"{key}-data"):
            return base64.b64decode(body[f"{key}-data"])
        return (path.parent / body[key]).read_bytes() if body.get(key) else None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {key}: {error}", HINT) from None


def _plugin(body: dict[str, Any] | None) -> Plugin | None:
    if not body:
        return None
    return Plugin(
        command=str(body.get("command")),
        args=tuple(body.get("args") or ()),
        env={one["name"]: one["value"] for one in body.get("env") or ()},
        api_version=body.get("apiVersion") or "client.authentication.k8s.io/v1",
        hint=body.get("installHint") or "",
    )


def _from_plugin(context: KubeContext, plugin: Plugin) -> Credentials:
    if shutil.which(plugin.command) is None:
        hint = " ".join(plugin.hint.split())[:200] or "install it, or use another context"
        raise UserError(f"context {context.name} needs {plugin.command}, which is not installed", hint)
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
    try:
        done = subprocess.run(
            [plugin.command, *plugin.args],
            env={**os.environ, **plugin.env, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PLUGIN_S,
        )
        answer = json.loads(done.stdout)["status"] if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        raise ProviderError(f"{plugin.command} gave no credentials for context {context.name}: {error}") from None
    if answer is None:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(
            f"{plugin.command} gave no credentials for context {context.name}: {said[-1] if said else done.returncode}",
            "log in again; for GKE: gcloud auth login",
        )
    until = answer.get("expirationTimestamp")
    expires = datetime.fromisoformat(until.replace("Z", "+00:00")).timestamp() if until else time.time() + 300
    token = answer.get("token")
    certificate, key = answer.get("clientCertificateData"), answer.get("clientKeyData")
    return Credentials(
        authorization=f"Bearer {token}" if token else None,
        certificate=certificate.encode() if certificate else None,
        key=key.encode() if key else None,
        expires=expires,
    )
