"""Slices on Kubernetes: a cluster is a JobSet whose pods run Podway's agent and stay until it is taken down.

JobSet makes the pods, Kueue (where the settings name a queue) decides when, the scheduler where; Podway reads what they say. The
agent of a pod is reached through the API server, by `exec`: nothing listens on a network, and whoever may not exec may not run jobs.

    submit     create the ConfigMap and the JobSet, once, and the node pools that it lacks where the settings allow it
    observe    the JobSet, its pods, Kueue's Workload and events, read in that order of importance (state.py)
    stop       suspend the JobSet: its pods go, and their quota is free; what was on their disks goes with them
    destroy    delete the JobSet, and when its pods are gone the rest, node pools last
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from podway.errors import ProviderError, UserError
from podway.hosts.link import AgentLink, Connect, Reader, Writer, needs_start
from podway.hosts.pod_address import PodAddress
from podway.order import Host, Order
from podway.providers import (
    CreatedVolume,
    Observation,
    Offer,
    OutputLine,
    OwnedResource,
    Request,
    RunObservation,
    Shell,
)
from podway.providers.gke.api import Conflict, Fields, KubernetesApi, NotFound
from podway.providers.gke.bucket_driver import check_driver
from podway.providers.gke.claims import CLAIM_KIND, Claims
from podway.providers.gke.clusters import CONFIG_MAPS, JOBSETS, PODS, SECRETS, Clusters, Where, created_at
from podway.providers.gke.launch_pools import NODE_POOL_KIND, LaunchPools
from podway.providers.gke.manifests import (
    ACCELERATOR,
    CONTAINER,
    JOB_INDEX,
    JOBSET_NAME,
    NAME,
    OWNER,
    JobSetContext,
    object_name,
    pull_secret_name,
)
from podway.providers.gke.offers import find_offers
from podway.providers.gke.one_shot import render_one_shot
from podway.providers.gke.pod_logs import follow_log
from podway.providers.gke.pod_ports import ACCEPTED, relay_words
from podway.providers.gke.pod_volumes import uses_driver
from podway.providers.gke.pool_render import CREATE_POOL, grows_from_zero, plan_pools, with_pools
from podway.providers.gke.render import AGENT_FILE, HOME, render, with_agent
from podway.providers.gke.runs import (
    belongs_to,
    has_pull_secret,
    is_one_shot,
    one_shot_observation,
    pull_secret_of,
    run_observation,
    secret_of,
)
from podway.providers.gke.state import condition_of, observation, waits_for_admission, worker_of
from podway.providers.gke.streams import OPEN_S, run_in_pod
from podway.task.task import Registry, Resources, Task
from podway.task.volumes import VolumeSpec

_PATHS = {"ConfigMap": CONFIG_MAPS, "Secret": SECRETS, "JobSet": JOBSETS}
_REPLACE = """\
import os, sys
path = sys.argv[1]
data = sys.stdin.buffer.read(int(sys.argv[2]))
with open(path + ".new", "wb") as file:
    file.write(data)
os.rename(path + ".new", path)
print("replaced", flush=True)
"""


def open_provider(root: Path) -> "GkeProvider":
    """The provider of the Podway home `root`, for the clusters that KUBECONFIG names."""
    return GkeProvider(root)


class GkeProvider:
    """See the module docstring; each verb's contract is in `podway.providers.Provider`."""

    name = "gke"

    def __init__(self, root: Path) -> None:
        self.clusters = Clusters(root)
        self.pools = LaunchPools(root, lambda: self.owner)
        self.claims = Claims(self.clusters)
        self._pods: dict[tuple[str, int, str], str] = {}  # (cluster, rank, address) -> pod

    @property
    def owner(self) -> str:
        """Marks what this Podway makes in a namespace that others use too."""
        return self.clusters.owner

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        """One for each context."""
        return find_offers(self.clusters, self.pools, resources, slices)

    def render(self, name: str, order: Order) -> Request:
        """The ConfigMap and the JobSet."""
        context = self.clusters.render_context(order.region)
        return self._with_pools(render(context, name, order), context, order)

    def render_one_shot(self, name: str, order: Order, task: Task, user: str) -> Request:
        """A JobSet that runs the task and ends."""
        context = self.clusters.render_context(order.region)
        return self._with_pools(render_one_shot(context, name, order, task, user), context, order)

    def _with_pools(self, request: Request, context: JobSetContext, order: Order) -> Request:
        name = request.name
        return with_pools(request, plan_pools(context, name, order), object_name(context.owner, name))

    async def submit(self, request: Request) -> None:
        """Create what is not there yet."""
        where = _where(request)
        await self._create(request.name, where, [with_agent(body) for body in _objects(request)])
        await self._make_pools(request, where)

    async def keep_login(self, request: Request, registry: Registry, password: str) -> None:
        """A pull secret of the cluster's own, after the ConfigMap that marks it. One that is there gets the password of today."""
        where, (*first, jobset) = _where(request), _objects(request)
        await self._create(request.name, where, [with_agent(body) for body in first])
        api, body = self.clusters.api(where.context), pull_secret_of(jobset, registry, password)
        try:
            await api.create(SECRETS.format(where.namespace), body)
        except Conflict:
            path = f"{SECRETS.format(where.namespace)}/{body['metadata']['name']}"
            await api.patch(path, {"data": body["data"]})

    async def submit_one_shot(self, request: Request, secrets: Mapping[str, str]) -> None:
        """Create the Secret too, and have all of it go with the JobSet."""
        where, bodies = _where(request), _objects(request)
        jobset = bodies[-1]
        parts = [*bodies[:-1], *([secret_of(jobset, secrets)] if secrets else [])]
        await self._create(request.name, where, [*parts, jobset])
        api, ident = self.clusters.api(where.context), jobset["metadata"]["name"]
        made = await api.get(f"{JOBSETS.format(where.namespace)}/{ident}")
        for body in parts:
            await api.patch(f"{_PATHS[body['kind']].format(where.namespace)}/{ident}", belongs_to(made))
        if has_pull_secret(jobset):
            await api.patch(f"{SECRETS.format(where.namespace)}/{pull_secret_name(ident)}", belongs_to(made))
        await self._make_pools(request, where)

    async def _make_pools(self, request: Request, where: Where) -> None:
        """Not before Kueue lets the JobSet run, unless a pool costs nothing until then: its nodes may be what Kueue waits for."""
        bodies = [dict(step.body) for step in request.steps if step.verb == CREATE_POOL]
        if not bodies:
            return
        billed = not all(map(grows_from_zero, bodies))
        if billed and await self.clusters.kueue_version(where.context) is not None:
            seen = await self.clusters.look(request.name, where)
            if waits_for_admission(seen):
                return
        settings = self.clusters.settings.node_pools
        await self.pools.ensure(request.name, where.pools, bodies, settings.most if settings is not None else None)

    async def _create(self, name: str, where: Where, bodies: list[Fields]) -> None:
        api = self.clusters.api(where.context)
        if any(body["kind"] == "JobSet" and uses_driver(body) for body in bodies):
            await check_driver(api)
        self.clusters.remember(name, where)
        for body in bodies:
            with contextlib.suppress(Conflict):  # submitted before
                await api.create(_PATHS[body["kind"]].format(where.namespace), body)

    async def observe(self, name: str) -> Observation:
        """From the API alone."""
        where = await self.clusters.where(name)
        if where is None:
            return Observation(condition="absent")
        seen = await self.clusters.look(name, where)
        if seen.jobset is not None and is_one_shot(seen.jobset):
            return await self.pools.with_pools(name, where.pools, one_shot_observation(seen, self.owner, HOME))
        found = await self.pools.with_pools(name, where.pools, observation(seen, self.owner, HOME))
        for pod in seen.pods if found.condition == "ready" and seen.jobset is not None else ():
            self._pods[name, _rank(pod, found), pod["status"]["podIP"]] = pod["metadata"]["name"]
        return found

    async def observe_run(self, name: str) -> RunObservation:
        """From the JobSet and its pods."""
        where = await self.clusters.where(name)
        return (
            RunObservation(state="absent") if where is None else run_observation(await self.clusters.look(name, where))
        )

    async def run_output(self, name: str, source: str, since: int) -> AsyncIterator[list[OutputLine]]:
        """The pod's log."""
        where = await self.clusters.where(name)
        if where is None:
            return
        with contextlib.suppress(NotFound):
            api = self.clusters.api(where.context)
            async for lines in follow_log(api, where.namespace, source, CONTAINER, since):
                yield lines

    async def stop(self, name: str) -> None:
        """Suspend it; node pools of its own, which would cost money all the while, go."""
        where = await self.clusters.where(name)
        if where is not None:
            await self.clusters.suspend(name, where, stopped=True)
            if where.pools and not (await self.clusters.look(name, where)).pods:
                await self.pools.remove(name, where.pools)

    async def start(self, name: str) -> None:
        """Let it run again, on whatever nodes there are then."""
        where = await self.clusters.where(name)
        if where is not None:
            await self.clusters.suspend(name, where, stopped=False)

    def refuse_stop(self, order: Order) -> str | None:
        """A JobSet can always be suspended."""
        return None

    async def destroy(self, name: str) -> None:
        """Delete the JobSet, then what it used."""
        where = await self.clusters.where(name)
        if where is None:
            return
        await self.clusters.remove(name, where)
        seen = await self.clusters.look(name, where)
        if seen.jobset is None and not seen.pods and not seen.leftovers:
            if where.pools and not await self.pools.remove(name, where.pools):
                return
            self.clusters.forget(name)
            for key in [key for key in self._pods if key[0] == name]:
                del self._pods[key]

    async def create_volume(self, spec: VolumeSpec) -> CreatedVolume:
        """A claim, or an existing one to register."""
        return await self.claims.create(spec)

    async def delete_volume(self, spec: VolumeSpec) -> None:
        """The claim, and what it holds as its storage class says."""
        await self.claims.delete(spec)

    async def list_resources(self) -> list[OwnedResource]:
        """Every JobSet with Podway's mark, in every context that may hold one; and every node pool that a launch made."""
        places = await asyncio.to_thread(self.clusters.everywhere)
        found = await self.pools.owned(await asyncio.to_thread(self.clusters.gke_clusters))
        for where in places:
            found += [_owned(one, pods, where) for one, pods in await self.clusters.owned(where)]
            found += await self.claims.owned(where)
        return found

    async def purge(self, resource: OwnedResource) -> None:
        """The JobSet and what it used go, whoever made them; or the node pool."""
        if resource.kind == NODE_POOL_KIND:
            await self.pools.purge(resource)
            return
        if resource.kind == CLAIM_KIND:
            await self.claims.purge(resource)
            return
        for where in await asyncio.to_thread(self.clusters.everywhere):
            if where.context != resource.zone:
                continue
            api = self.clusters.api(where.context)
            ident = object_name(resource.owner, resource.cluster)
            for path in (JOBSETS, SECRETS, CONFIG_MAPS):
                await api.delete(f"{path.format(where.namespace)}/{ident}")
            await api.delete(f"{SECRETS.format(where.namespace)}/{pull_secret_name(ident)}")

    async def ensure_agent(self, host: Host) -> None:
        """The pod starts its agent by itself. One of another version gives way to this one's when no job runs there."""
        link = AgentLink(self.connect(host))
        try:
            if not await needs_start(link, timeout=20.0):
                return
            await self._replace_agent(host)
            with contextlib.suppress(ProviderError):
                await link.call("shutdown", keep_jobs=True)
        finally:
            link.close()

    def connect(self, host: Host) -> Connect:
        """Streams to the agent's socket, by a relay in the pod."""
        return self._run(host, ["python3", "-S", "-E", AGENT_FILE, "call", "--home", HOME])

    def connect_port(self, host: Host, port: int) -> Connect:
        """A port of the pod, by a relay in it."""
        opened = self._run(host, relay_words("127.0.0.1", port))

        async def connect() -> tuple[Reader, Writer]:
            reader, writer = await opened()
            try:
                async with asyncio.timeout(OPEN_S):
                    if await reader.read(1) == ACCEPTED:
                        return reader, writer
                raise ConnectionRefusedError(f"nothing listens on port {port} of {host.id}")
            except BaseException:
                writer.close()
                raise

        return connect

    def shell(self, host: Host, env: dict[str, str]) -> Shell:
        """A process in the pod, by `exec` with the person's own rights."""
        where = self.clusters.remembered(host.cluster)
        if where is None:
            raise ProviderError(f"cluster {host.cluster} is gone")
        pod = PodAddress(
            context=where.context,
            namespace=where.namespace,
            jobset=object_name(self.owner, host.cluster),
            slice=host.slice,
            worker=host.worker,
        )
        return Shell(home=host.home, env=env, pod=pod)

    def _run(self, host: Host, command: list[str]) -> Connect:
        async def connect() -> tuple[Reader, Writer]:
            where = await self.clusters.where(host.cluster)
            if where is None:
                raise ProviderError(f"cluster {host.cluster} is gone")
            api, key = self.clusters.api(where.context), (host.cluster, host.rank, host.address)
            try:
                pod = await self._pod(api, where, host)
                return await run_in_pod(api, where.namespace, pod, CONTAINER, command)()
            except (ProviderError, UserError, OSError, TimeoutError) as error:
                pod = self._pods.pop(key, f"of {host.id}")
                what = error.what if isinstance(error, UserError) else str(error)
                raise ConnectionError(f"pod {pod}: {what}") from None

        return connect

    async def _pod(self, api: KubernetesApi, where: Where, host: Host) -> str:
        """The pod that is this host now."""
        key = (host.cluster, host.rank, host.address)
        if key not in self._pods:
            ident = object_name(self.owner, host.cluster)
            selector = f"{JOBSET_NAME}={ident},{JOB_INDEX}={host.slice}"
            pods = await api.items(PODS.format(where.namespace), labelSelector=selector)
            fitting = [pod for pod in pods if worker_of(pod) == host.worker]
            if not fitting:
                raise ConnectionError("it is gone")
            self._pods[key] = fitting[0]["metadata"]["name"]
        return self._pods[key]

    async def _replace_agent(self, host: Host) -> None:
        from podway.hosts.bundle import bundle

        data = bundle().data
        try:
            reader, writer = await self._run(host, ["python3", "-c", _REPLACE, AGENT_FILE, str(len(data))])()
            try:
                writer.write(data)
                await writer.drain()
                async with asyncio.timeout(60):
                    answer = await reader.read(100)
            finally:
                writer.close()
        except (OSError, TimeoutError) as error:  # the pod is going, or gone
            raise ProviderError(f"the agent of {host.id} does not answer and cannot be replaced: {error}") from None
        if not answer.startswith(b"replaced"):
            raise ProviderError(f"the agent of {host.id} could not be replaced")


def _where(request: Request) -> Where:
    context, namespace, _ = request.steps[-1].target.split("/", 2)
    pools = [step.target.partition("/nodePools/")[0] for step in request.steps if step.verb == CREATE_POOL]
    return Where(context=context, namespace=namespace, pools=pools[0] if pools else "")


def _objects(request: Request) -> list[Fields]:
    """What Kubernetes itself is sent."""
    return [dict(step.body) for step in request.steps if step.verb != CREATE_POOL]


def _rank(pod: Fields, seen: Observation) -> int:
    """Its host's rank, of those that were observed."""
    slice_id, worker = int(pod["metadata"]["labels"].get(JOB_INDEX, 0)), worker_of(pod)
    return next((host.rank for host in seen.hosts if (host.slice, host.worker) == (slice_id, worker)), -1)


def _owned(found: Fields, pods: list[Fields], where: Where) -> OwnedResource:
    metadata = found["metadata"]
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    return OwnedResource(
        cluster=annotations.get(NAME, metadata["name"]),
        owner=labels.get(OWNER, ""),
        kind=found["kind"],
        name=metadata["name"],
        zone=where.context,
        condition=condition_of(found, pods) if found["kind"] == "JobSet" else "deleting",
        accelerator_type=annotations.get(ACCELERATOR),
        created=created_at(metadata),
    )
