"""What can be wrong around a Kubernetes cluster, each as one sentence with what to do: nothing is made before it is told."""

import asyncio
import base64
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import ProviderError, UserError
from podway.order import Host, Order
from podway.providers.gke.api import KubernetesApi
from podway.providers.gke.diagnose import diagnose
from podway.providers.gke.kubeconfig import credentials, find_context, read_contexts
from podway.providers.gke.provider import GkeProvider
from podway.providers.gke.rights import LEAST, OF_KUEUE
from podway.providers.gke.settings import parse_settings
from podway.providers.gke.streams import frame, read_message
from podway.sandbox.kubernetes.running import RunningKubernetes, running_kubernetes
from podway.task.task import Accelerator, Placement, Registry, Resources, Task

V6E = Resources(accelerator=Accelerator(type="v6e-16"))
ORDER = Order(accelerator_type="v6e-16", topology="4x4", provider="gke", hosts_per_slice=4, chips_per_host=4)


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningKubernetes]:
    """Without nodes: nothing runs."""
    with running_kubernetes(tmp_path, kueue="v1beta1") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        yield running


def submit(provider: GkeProvider) -> None:
    asyncio.run(provider.submit(provider.render("demo", ORDER)))


def test_no_cluster_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="no Kubernetes cluster is set up here") as caught:
        GkeProvider(tmp_path).offers(V6E, 1)
    assert "KUBECONFIG" in caught.value.hint
    assert asyncio.run(GkeProvider(tmp_path).observe("x")).condition == "absent"
    asyncio.run(GkeProvider(tmp_path).destroy("x"))


def test_a_context_that_is_not_there(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    wanted = Resources(accelerator=V6E.accelerator, placement=Placement(provider="gke", region="west"))
    with pytest.raises(UserError, match="KUBECONFIG has no context 'west'") as caught:
        GkeProvider(tmp_path).offers(wanted, 1)
    assert caught.value.hint == "use one of: pretend"


def test_a_server_that_does_not_answer_is_a_blocked_offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_kubernetes(tmp_path) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
    (offer,) = GkeProvider(tmp_path).offers(V6E, 1)
    assert offer.blocked is not None and "context pretend cannot be reached" in offer.blocked.reason
    with pytest.raises(ProviderError, match="cannot be reached"):
        submit(GkeProvider(tmp_path))


def test_credentials_that_are_not_accepted(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    kubernetes.api.token = "another"
    (offer,) = GkeProvider(tmp_path).offers(V6E, 1)
    assert offer.blocked is not None and "does not accept your credentials" in offer.blocked.reason


def test_jobset_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_kubernetes(tmp_path, jobset=False) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        provider = GkeProvider(tmp_path)
        (offer,) = provider.offers(V6E, 1)
        assert offer.blocked is not None and "JobSet is not installed" in offer.blocked.reason
        assert "podway gke prepare" in offer.blocked.reason


def test_no_rights(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    """To create: refused with what is missing. To see nodes: the offer only says less."""
    kubernetes.api.forbidden = lambda method, plural: (method, plural) in [("POST", "jobsets"), ("GET", "nodes")]
    provider = GkeProvider(tmp_path)
    (offer,) = provider.offers(V6E, 1)
    assert offer.blocked is None and offer.note == "no right to see the nodes"
    with pytest.raises(UserError, match='cannot create resource "jobsets" in API group') as caught:
        submit(provider)
    assert "docs/kubernetes.md" in caught.value.hint
    asyncio.run(provider.destroy("demo"))
    asyncio.run(provider.destroy("demo"))
    assert kubernetes.objects.count() == {}
    assert asyncio.run(provider.observe("demo")).condition == "absent"


@pytest.mark.parametrize("kueue", ["v1beta1", "v1beta2", None])
def test_kueue_of_either_version_or_none(kueue: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota that is too small is known before a launch; without Kueue the name of a queue has no quota to tell."""
    with running_kubernetes(tmp_path, kueue=kueue) as running:
        running.set_quota(16)
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        (tmp_path / "gke.yaml").write_text("queue: multislice-queue\n")
        provider = GkeProvider(tmp_path)
        (one,), (two,) = provider.offers(V6E, 1), provider.offers(V6E, 2)
        if kueue is None:
            assert one.blocked is None and two.blocked is None
            return
        assert one.blocked is None and "queue multislice-queue: 16 of 16 chips are free" in one.note
        assert two.blocked is not None and two.blocked.code == "quota"
        assert two.blocked.reason == "queue multislice-queue has a quota of 16 such chips, and 32 are asked for"


def test_a_queue_that_is_not_there(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    """Known before anything is made."""
    kubernetes.set_quota(16)
    (tmp_path / "gke.yaml").write_text("queue: nobodys\n")
    (offer,) = GkeProvider(tmp_path).offers(V6E, 1)
    said = "Kueue has no queue nobodys in namespace default (name one of these in gke.yaml: multislice-queue)"
    assert offer.blocked is not None and offer.blocked.reason == said


def test_labels_that_kubernetes_cannot_have(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be a label"):
        GkeProvider(tmp_path).render("demo", msgspec.structs.replace(ORDER, labels={"team": "a b"}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("que: x", "unknown key"),
        ("queue: A_b", "cannot be a name in Kubernetes"),
        ("host_network: maybe", "host_network"),
        ("contexts: {a: b}", "contexts"),
        ("a\n---\nb", "several documents"),
    ],
)
def test_settings(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_settings(text.encode(), "gke.yaml")


# kubeconfig


def write(path: Path, *, user: object, cluster: object | None = None, context: str = "c") -> Path:
    document = {
        "current-context": context,
        "clusters": [{"name": "k", "cluster": cluster or {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": context, "context": {"cluster": "k", "user": "u", "namespace": "team"}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_credentials_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    (tmp_path / "token").write_text("from-a-file\n")
    plugin = tmp_path / "plugin"
    answer = {"kind": "ExecCredential", "status": {"token": "fresh", "expirationTimestamp": "2999-01-01T00:00:00Z"}}
    plugin.write_text(f"#!/bin/sh\n[ \"$WHO\" = me ] && echo '{json.dumps(answer)}'\n")
    plugin.chmod(0o755)
    login = base64.b64encode(b"ada:pass").decode()
    for user, expected in (
        ({"token": "t"}, "Bearer t"),
        ({"tokenFile": "token"}, "Bearer from-a-file"),
        ({"username": "ada", "password": "pass"}, f"Basic {login}"),
        ({"exec": {"command": str(plugin), "env": [{"name": "WHO", "value": "me"}]}}, "Bearer fresh"),
        ({}, None),
    ):
        write(path, user=user)
        found = find_context(None)
        assert (found.namespace, credentials(found).authorization) == ("team", expected)


def test_a_plugin_that_is_not_installed_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))
    write(path, user={"exec": {"command": "no-such-plugin", "installHint": "install it\nso"}})
    with pytest.raises(UserError, match="needs no-such-plugin, which is not installed") as caught:
        credentials(find_context(None))
    assert caught.value.hint == "install it so"
    plugin = tmp_path / "plugin"
    plugin.write_text("#!/bin/sh\necho 'log in first' >&2\nexit 3\n")
    plugin.chmod(0o755)
    write(path, user={"exec": {"command": str(plugin)}})
    with pytest.raises(UserError, match="log in first"):
        credentials(find_context(None))


def test_several_files_are_one_and_the_first_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write(tmp_path / "one", user={"token": "1"}, context="a")
    two = write(tmp_path / "two", user={"token": "2"}, context="b")
    monkeypatch.setenv("KUBECONFIG", f"{one}{os.pathsep}{tmp_path / 'missing'}{os.pathsep}{two}")
    contexts, current = read_contexts()
    assert sorted(contexts) == ["a", "b"] and current == "a"
    assert contexts["b"].token == "1"  # both files name the user u


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "clusters: 3", "contexts: [x]", "\x00", "users: {a: b}"])
def test_files_that_are_no_kubeconfig(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(UserError):
        find_context(None)


# the stream


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=70_000), min_size=1, max_size=4), st.booleans())
def test_messages_come_back_as_they_were_sent(messages: list[bytes], masked: bool) -> None:
    async def both() -> list[tuple[int, bytes]]:
        reader = asyncio.StreamReader()
        for data in messages:
            reader.feed_data(frame(2, data, masked=masked))
        return [await read_message(reader) for _ in messages]

    assert asyncio.run(both()) == [(2, data) for data in messages]


def test_a_server_that_answers_nonsense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that speaks no HTTP, and one that answers something else than JSON."""
    answers = [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n",
    ]
    for answer in answers:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=_answer_once, args=(listener, answer), daemon=True)
            thread.start()
            write(tmp_path / "config", user={}, cluster={"server": f"http://127.0.0.1:{listener.getsockname()[1]}"})
            monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
            api = KubernetesApi(find_context(None))
            if b"200" in answer:
                assert api.call("GET", "/api/v1/pods", timeout=10) == {"message": "no"}
            else:
                with pytest.raises(ProviderError):
                    api.call("GET", "/api/v1/pods", timeout=10)
            thread.join()


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(answer)


def findings(root: Path) -> dict[str, tuple[bool, str]]:
    return {one.what: (one.ok, one.note) for one in diagnose(root)}


def test_doctor_says_what_a_launch_would_miss(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    """Rights, the queue, and whatever else gke.yaml names; nothing wrong where all of it is there."""
    (tmp_path / "gke.yaml").write_text(
        "queue: multislice-queue\npriority_class: high\nservice_account: trainer\npull_secret: login\n"
    )
    found = findings(tmp_path)
    assert found["Kueue"] == (False, "namespace default has no LocalQueue multislice-queue")
    for what in ("priority class high", "service account trainer", "pull secret login"):
        assert found[what] == (False, "gke.yaml names it, and it is not there")
    assert found["rights"] == (True, "those that are needed in namespace default") and found["JobSet"][0]
    kubernetes.set_quota(16)
    for plural, namespace, name in (
        ("priorityclasses", "", "high"),
        ("serviceaccounts", "default", "trainer"),
        ("secrets", "default", "login"),
    ):
        kubernetes.objects.create(plural, namespace, {"metadata": {"name": name}})
    found = findings(tmp_path)
    assert all(ok for ok, _ in found.values()), found
    assert found["Kueue"][1] == "v1beta1, queue multislice-queue of cluster-queue"
    kubernetes.api.forbidden = lambda method, plural: (
        plural in ("pods/exec", "priorityclasses") or (method, plural) == ("PATCH", "workloads")
    )
    found = findings(tmp_path)
    assert found["rights"] == (
        False,
        "you may not create pods/exec, get pods/exec, patch workloads in namespace default",
    )
    assert found["priority class high"] == (True, "no right to see whether it is there")


def test_the_role_that_is_written_down_is_what_is_checked() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "kubernetes.md").read_text()
    role = yaml.safe_load(text[text.index("apiVersion: rbac") : text.index("```", text.index("apiVersion: rbac"))])
    written = {
        (group, kind, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
    }
    checked = {(group, kind, verb) for group, kind, verbs in (*LEAST, *OF_KUEUE) for verb in verbs}
    assert checked <= written


def test_the_least_rights_that_are_written_down_are_enough(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    """The Role of docs/kubernetes.md, and nothing else: the life of a cluster and of a one-shot run, their list and their end."""
    text = (Path(__file__).parent.parent.parent / "docs" / "kubernetes.md").read_text()
    role = yaml.safe_load(text[text.index("apiVersion: rbac") : text.index("```", text.index("apiVersion: rbac"))])
    allowed = {(verb, kind) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    verbs = {"GET": {"get", "list"}, "POST": {"create"}, "PATCH": {"patch"}, "DELETE": {"delete"}}
    used: set[tuple[str, str]] = set()

    def forbidden(method: str, plural: str) -> bool:
        used.add((method, plural))
        return not any((verb, plural) in allowed for verb in verbs[method])

    kubernetes.set_quota(64)
    (tmp_path / "gke.yaml").write_text("queue: multislice-queue\n")
    kubernetes.api.forbidden = forbidden
    provider = GkeProvider(tmp_path)

    async def life() -> None:
        (offer,) = provider.offers(V6E, 1)
        assert offer.blocked is None and offer.note == "no right to see the nodes"
        private = provider.render("demo", msgspec.structs.replace(ORDER, pull_login=True))
        for password in ("old", "new"):
            await provider.keep_login(private, Registry(username="ada", password_secret="P"), password)
        await provider.submit(private)
        (login,) = kubernetes.objects.find("secrets")
        assert b'"password": "new"' in base64.b64decode(login["data"][".dockerconfigjson"])
        async with asyncio.timeout(60):
            while "no node fits" not in (seen := await provider.observe("demo")).reason:
                assert seen.condition == "creating"
                await asyncio.sleep(0.05)
            await provider.stop("demo")
            while (await provider.observe("demo")).condition != "stopped":
                await asyncio.sleep(0.05)
            await provider.start("demo")
            assert [one.cluster for one in await provider.list_resources()] == ["demo"]
            registry = Registry(username="ada", password_secret="P")
            task = Task(run="x", secrets={"KEY": "", "P": ""}, registry=registry)
            order = msgspec.structs.replace(ORDER, pull_login=True)
            for _ in range(2):
                request = provider.render_one_shot("run", order, task, "ada")
                await provider.keep_login(request, registry, "secret")
                await provider.submit_one_shot(request, {"KEY": "value"})
            assert (await provider.observe_run("run")).state == "waiting"
            secrets = [
                one
                for one in kubernetes.objects.find("secrets")
                if one is not None and "run" in one["metadata"]["name"]
            ]
            assert [one["type"] for one in secrets] == ["Opaque", "kubernetes.io/dockerconfigjson"]
            assert {one["metadata"]["ownerReferences"][0]["kind"] for one in secrets} == {"JobSet"}
            for name in ("demo", "run"):
                while (await provider.observe(name)).condition != "absent":
                    await provider.destroy(name)

    asyncio.run(life())
    assert {("POST", "jobsets"), ("DELETE", "configmaps"), ("PATCH", "workloads"), ("GET", "pods")} <= used
    assert not {"jobsets", "configmaps", "secrets"} & set(kubernetes.objects.count())


def test_an_api_server_that_has_just_started_takes_no_rights_away(
    kubernetes: RunningKubernetes, tmp_path: Path
) -> None:
    """It refuses everybody until it has read who may do what: that passes, and ends no job."""
    provider = GkeProvider(tmp_path)
    submit(provider)
    kubernetes.api.ready = False
    with pytest.raises(ProviderError, match="is starting"):
        asyncio.run(provider.observe("demo"))
    host = Host(cluster="demo", rank=0, slice=0, worker=0, address="127.0.0.1", home="/", id="x/demo-0")
    with pytest.raises(ConnectionError, match="is starting"):
        asyncio.run(provider.connect(host)())  # type: ignore[arg-type]
    kubernetes.api.ready = True
    assert asyncio.run(provider.observe("demo")).condition == "creating"


def test_an_agent_whose_pod_is_gone(kubernetes: RunningKubernetes, tmp_path: Path) -> None:
    """Whoever drives a job on it is told so as of any host that cannot be reached."""
    provider = GkeProvider(tmp_path)
    submit(provider)
    host = Host(cluster="demo", rank=1, slice=0, worker=1, address="10.0.0.1", home="/podway/home", id="x/demo-1")
    with pytest.raises(ProviderError, match="x/demo-1 does not answer and cannot be replaced: pod "):
        asyncio.run(provider.ensure_agent(host))
