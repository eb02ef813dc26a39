"""`podway gke prepare` on the small Kubernetes: what is shown, what is made, that a second run finds nothing, and what is left alone."""

import hashlib
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from podway.cli.manifests import objects_as_yaml
from podway.errors import UserError
from podway.providers.gke.prepare import applying, changes, releases
from podway.providers.gke.prepare.wanted import ClusterFacts, objects
from podway.providers.gke.settings import GkeSettings
from podway.sandbox.kubernetes.running import RunningKubernetes, running_kubernetes
from podway.sandbox.kubernetes.server import ApiServer
from tests.cli.conftest import Run, home, run

__all__ = ["home", "run"]  # fixtures
GOLDEN = Path(__file__).parent.parent / "golden" / "gke" / "prepare.yaml"
UPDATE = bool(os.environ.get("PODWAY_UPDATE_GOLDEN"))
V6E = ("tpu-v6e-slice", "4x4")


def release_text(name: str, group: str, version: str) -> str:
    """A file of the shape that JobSet and Kueue publish, in another order than it can be applied in."""
    place, labels = f"{name}-system", {"app.kubernetes.io/name": name}
    versions = [{"name": version, "served": True, "storage": True}]
    kinds = {"plural": "things", "kind": "Thing"}
    listed: list[dict[str, Any]] = [
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": f"{name}-webhook"},
            "webhooks": [{"name": "v.kb.io", "clientConfig": {"service": {"name": "webhook", "namespace": place}}}],
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": f"{name}-controller-manager", "namespace": place, "labels": labels},
            "spec": {"replicas": 1},
        },
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"things.{group}"},
            "spec": {"group": group, "names": kinds, "versions": versions},
        },
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": place, "labels": labels}},
    ]
    return yaml.safe_dump_all(listed)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The options that name the two files."""
    found = []
    for name, group, version in (("jobset", "jobset.x-k8s.io", "v1alpha2"), ("kueue", "kueue.x-k8s.io", "v1beta2")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(release_text(name, group, version))
        found += ["--from", str(path)]
    return found


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningKubernetes]:
    """A cluster with two slices of v6e-16 and nothing installed."""
    with running_kubernetes(tmp_path, jobset=False) as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        monkeypatch.setattr(applying, "PAUSE_S", 0.01)
        add_nodes(running, 8)
        yield running


def add_nodes(running: RunningKubernetes, count: int) -> None:
    labels = {"cloud.google.com/gke-tpu-accelerator": V6E[0], "cloud.google.com/gke-tpu-topology": V6E[1]}
    for _ in range(count):
        name = f"node-{len(running.objects.find('nodes'))}"
        status = {"capacity": {"google.com/tpu": "4"}, "allocatable": {"google.com/tpu": "4"}}
        running.objects.create("nodes", "", {"metadata": {"name": name, "labels": labels}, "status": status})


def quota(running: RunningKubernetes) -> dict[str, str]:
    spec = running.objects.get("clusterqueues", "", "podway")["spec"]
    return {one["name"]: one["resources"][0]["nominalQuota"] for one in spec["resourceGroups"][0]["flavors"]}


def test_the_objects_are_the_golden_ones() -> None:
    settings = GkeSettings(namespace="team-a", queue="training", service_account="trainer")
    chips = {V6E: 32, ("tpu-v5-lite-podslice", "2x4"): 8}
    seen = ClusterFacts(namespace="team-a", settings=settings, kueue_version="v1beta2", chips=chips)
    text = objects_as_yaml(objects(seen))
    if UPDATE:
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_manual_names_the_versions() -> None:
    named = [f"{one.name} {one.version}" for one in releases.RELEASES]
    assert f"| {', '.join(named)} |" in (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()


def test_a_bare_cluster_is_prepared_once(run: Run, bare: RunningKubernetes, files: list[str]) -> None:
    shown = run("gke", "prepare", *files, "--dryrun")
    assert shown.code == 0 and "JobSet" in shown.err and "+ ClusterQueue podway" in shown.err
    printed = list(yaml.safe_load_all(shown.out))
    assert [one["kind"] for one in printed[:3]] == ["Namespace", "CustomResourceDefinition", "Deployment"]
    assert bare.objects.count() == {"nodes": 8}

    refused = run("gke", "prepare", *files)
    assert refused.code == 1 and "no terminal" in refused.err and "--yes" in refused.err
    assert bare.objects.count() == {"nodes": 8}

    done = run("gke", "prepare", *files, "--yes")
    assert done.code == 0, done.err
    assert "JobSet of a file that is not the release Podway knows" in done.out and "queue: podway" in done.out
    assert quota(bare) == {"tpu-v6e-slice-4x4": "32"}
    assert bare.objects.get("localqueues", "default", "podway")["spec"] == {"clusterQueue": "podway"}
    counted = {kind: count for kind, count in bare.objects.count().items() if kind != "nodes"}
    assert counted["priorityclasses"] == 5 and counted["deployments"] == 2 and counted["roles"] == 1

    version = bare.objects.version
    again = run("gke", "prepare")  # without --yes, files or a network: nothing is to be done
    assert again.code == 0 and "Nothing to do" in again.out
    assert "JobSet is installed" in again.out
    assert {kind: count for kind, count in bare.objects.count().items() if kind != "nodes"} == counted
    assert bare.objects.version == version


def test_more_nodes_are_a_change_that_is_shown_and_fewer_are_none(
    run: Run, bare: RunningKubernetes, files: list[str]
) -> None:
    assert run("gke", "prepare", *files, "--yes").code == 0
    add_nodes(bare, 4)
    result = run("gke", "prepare", "--yes")
    assert result.code == 0 and "~ ClusterQueue podway" in result.out
    assert "-        nominalQuota: '32'" in result.out and "+        nominalQuota: '48'" in result.out
    for node in bare.objects.find("nodes"):
        bare.objects.remove("nodes", "", node["metadata"]["name"])
    assert "Nothing to do" in run("gke", "prepare").out and quota(bare) == {"tpu-v6e-slice-4x4": "48"}
    assert run("gke", "prepare", "--yes", "--quota", "v6e-16=16", "--quota", "v5litepod-16=16").code == 0
    assert quota(bare) == {"tpu-v5-lite-podslice-4x4": "16", "tpu-v6e-slice-4x4": "16"}


def test_a_person_may_say_no(run: Run, bare: RunningKubernetes, files: list[str]) -> None:
    result = run("gke", "prepare", *files, typed="n\n", terminal=True)
    assert result.code == 1 and "Nothing was done." in result.err
    assert bare.objects.count() == {"nodes": 8}


def test_what_others_made_stays_as_it_is(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JobSet and Kueue of XPK, its queue, and a priority class of the same name with another value."""
    with running_kubernetes(tmp_path, kueue="v1beta1") as running:
        monkeypatch.setenv("KUBECONFIG", str(running.kubeconfig))
        running.set_quota(64)
        add_nodes(running, 4)
        running.objects.create("priorityclasses", "", {"metadata": {"name": "high"}, "value": 7})
        before = running.objects.get("clusterqueues", "", "cluster-queue")["spec"]
        result = run("gke", "prepare", "--yes")
        assert result.code == 0, result.err
        assert "JobSet is installed (v1alpha2), not by Podway: left as it is" in result.out
        assert "ClusterQueue cluster-queue has quota for TPUs, not by Podway: no other queue is made" in result.out
        assert "left as they are: PriorityClass high" in result.out
        assert running.objects.get("priorityclasses", "", "high")["value"] == 7
        assert running.objects.get("clusterqueues", "", "cluster-queue")["spec"] == before
        assert [one["metadata"]["name"] for one in running.objects.find("clusterqueues")] == ["cluster-queue"]
        assert "Nothing to do" in run("gke", "prepare").out


def test_without_rights_nothing_is_changed(run: Run, bare: RunningKubernetes, files: list[str]) -> None:
    bare.api.forbidden = lambda method, plural: method != "GET" and plural in ("clusterroles", "namespaces")
    result = run("gke", "prepare", *files, "--yes")
    assert result.code == 1
    said = "you may not create clusterroles, create namespaces, patch clusterroles, patch namespaces"
    assert f"{said} in the cluster of context pretend" in result.err and len(result.err.splitlines()) == 2
    assert bare.objects.count() == {"nodes": 8}
    bare.api.forbidden = lambda method, plural: plural == "nodes"
    result = run("gke", "prepare", *files, "--yes")
    assert result.code == 1 and 'cannot list resource "nodes"' in result.err
    assert "ask its administrator to run podway gke prepare" in result.err


def test_an_installation_that_was_interrupted_goes_on(
    run: Run, bare: RunningKubernetes, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed once the kinds are served: nobody else installed them, so the rest follows."""
    sent: list[str] = []
    real = changes.applied

    def applied(api: Any, body: Any, *, dry_run: bool = False) -> Any:
        if not dry_run:
            sent.append(body["kind"])
            if sent.count("Deployment"):
                raise UserError("interrupted", "")
        return real(api, body, dry_run=dry_run)

    monkeypatch.setattr(applying, "applied", applied)
    assert run("gke", "prepare", *files, "--yes").code == 1
    monkeypatch.setattr(applying, "applied", real)
    assert "jobset.x-k8s.io" in bare.api.groups and not bare.objects.find("deployments")
    result = run("gke", "prepare", *files, "--yes")
    assert result.code == 0 and len(bare.objects.find("deployments")) == 2
    assert "Nothing to do" in run("gke", "prepare").out


def test_a_controller_that_does_not_start_is_told(
    run: Run, bare: RunningKubernetes, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from podway.sandbox.kubernetes import server

    monkeypatch.setattr(applying, "AVAILABLE_S", 0.05)
    monkeypatch.setattr(
        server, "with_status", lambda plural, body: {**body, "status": {}} if plural == "deployments" else body
    )
    monkeypatch.setattr(applying, "_wait_served", lambda api, change: None)
    result = run("gke", "prepare", *files, "--yes")
    assert result.code == 1 and "the controller of JobSet is not available" in result.err
    assert "kubectl describe pods -n jobset-system" in result.err


def test_a_cluster_that_does_not_answer(run: Run, bare: RunningKubernetes) -> None:
    bare.server.close()
    result = run("gke", "prepare", "--yes")
    assert result.code == 1 and "the cluster of context pretend cannot be reached" in result.err
    bare.server = ApiServer(bare.api)  # for the fixture to close
    bare.server.start()


def test_without_kueue(run: Run, bare: RunningKubernetes, files: list[str], podway_home: Path) -> None:
    (podway_home / "gke.yaml").write_text("namespace: team-a\nservice_account: trainer\n")
    result = run("gke", "prepare", "--no-kueue", *files[:2], "--yes")
    assert result.code == 0, result.err
    assert "kueue.x-k8s.io" not in bare.api.groups
    names = [one["metadata"]["name"] for one in bare.objects.find("serviceaccounts", "team-a")]
    assert names == ["podway", "trainer"]
    rules = bare.objects.get("roles", "team-a", "podway")["rules"]
    assert all(rule["apiGroups"] != ["kueue.x-k8s.io"] for rule in rules)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "not YAML"),
        ("- 1", "document 1 is not a Kubernetes object"),
        ("{apiVersion: v1, kind: Pod, metadata: {}}", "document 1 is not a Kubernetes object"),
        ("", "neither JobSet nor Kueue is in this file"),
        ("\x00", "not YAML"),
        (
            "{apiVersion: v1, kind: CustomResourceDefinition, metadata: {name: x}, spec: {group: jobset.x-k8s.io}}",
            "it has no Namespace jobset-system",
        ),
    ],
)
def test_files_that_are_no_release(run: Run, bare: RunningKubernetes, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    result = run("gke", "prepare", "--from", str(tmp_path / "x.yaml"), "--no-kueue", "--yes")
    assert result.code == 1 and said in result.err, result.err
    assert "Traceback" not in result.err and bare.objects.count() == {"nodes": 8}


@pytest.mark.parametrize("word", ["v6e-16", "v6e-16=", "v6e-16=-1", "v6e-16=x", "nope=4", "=4", "v6e-16=99999999999"])
def test_quotas_that_are_none(run: Run, bare: RunningKubernetes, word: str) -> None:
    result = run("gke", "prepare", "--quota", word, "--yes")
    assert result.code == 1 and len(result.err.splitlines()) <= 3 and "Traceback" not in result.err


class _Files(http.server.BaseHTTPRequestHandler):
    """Answers each file of the folder; 404 for any other."""

    folder: Path

    def do_GET(self) -> None:
        path = self.folder / self.path.strip("/")
        data = path.read_bytes() if path.exists() else b""
        self.send_response(200 if data else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where the files of the test's folder are downloaded from."""
    handler = type("Handler", (_Files,), {"folder": tmp_path})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(60)


def test_a_download_must_be_the_known_file(
    run: Run, bare: RunningKubernetes, files: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pin(url: str, sha256: str) -> None:
        one = msgspec.structs.replace(releases.JOBSET, url=url, sha256=sha256)
        monkeypatch.setattr(changes, "RELEASES", (one, releases.KUEUE))

    digest = hashlib.sha256(Path(files[1]).read_bytes()).hexdigest()
    for url, sha256, said in (
        (f"{address}/jobset.yaml", "0" * 64, f"is not the file Podway knows: its sha256 is {digest}"),
        (f"{address}/gone", digest, "answers 404"),
        ("http://127.0.0.1:9/", digest, "JobSet cannot be downloaded"),
    ):
        pin(url, sha256)
        result = run("gke", "prepare", "--no-kueue", "--yes")
        assert result.code == 1 and said in result.err and "--from FILE" in result.err
        assert bare.objects.count() == {"nodes": 8}
    pin(f"{address}/jobset.yaml", digest)
    result = run("gke", "prepare", "--no-kueue", "--yes")
    assert result.code == 0 and f"JobSet {releases.JOBSET_VERSION} from {address}/jobset.yaml" in result.out
