"""`Task`: what a person asked for, whatever dialect they wrote it in.

The two readers (`skypilot.py`, `dstack.py`) end here, and nothing after them knows which one it was. A Task is intent: it
names a slice and says what to run, and nothing in it depends on a provider, a price or the clock. It is frozen, encodes to
JSON (the wire format between CLI and server), and decodes strictly.
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from podway.certificates import CertificateFacts

CONTAINER = "docker:"  # before the name of a container image, as SkyPilot writes one
# The names in Task.secrets of what the endpoint of a service serves HTTPS with.
TLS_CERTIFICATE, TLS_KEY = "PODWAY_ENDPOINT_CERTIFICATE", "PODWAY_ENDPOINT_KEY"


class TaskPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of every part of a Task: immutable, compact in JSON, strict when read."""


class Accelerator(TaskPart, frozen=True):
    """One slice type, as the person may have written it and as the Cloud TPU API spells it."""

    type: str  # canonical accelerator type, e.g. 'v6e-16', 'v5litepod-8'
    topology: str | None = None  # '4x4', when asked for by shape
    runtime_version: str | None = None  # None: the generation's default
    tpu_vm: bool = True  # False: a legacy TPU Node with a host VM
    tpu_name: str | None = None  # the TPU Node's name, where the file fixes it
    queued: bool | None = None  # ask for a queued resource; None: the provider decides
    reservation: str | None = None
    best_effort: bool = False  # capacity that may be taken back, at the price of on demand


class Placement(TaskPart, frozen=True):
    """Where a slice may be: any part that is None is free."""

    provider: str | None = None  # 'gcp', 'local', 'ssh', 'gke'
    region: str | None = None
    zone: str | None = None


class Resources(TaskPart, frozen=True):
    """One acceptable set of resources; a Task holds one or several of them."""

    accelerator: Accelerator | None = None  # None: a task for CPU hosts only
    placement: Placement = Placement()
    spot: Literal["no", "yes", "auto"] = "no"
    max_hourly_cost: float | None = None
    instance_type: str | None = None
    cpus: str | None = None
    memory: str | None = None
    disk_gb: int | None = None
    image: str | None = None
    ports: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    network: str | None = None
    priority_class: str | None = None  # of pods


class LocalDir(TaskPart, frozen=True, tag="dir"):
    """A directory or file on the machine the command is typed on; `path` is absolute after reading."""

    path: str


class Git(TaskPart, frozen=True, tag="git"):
    """A repository cloned on every host."""

    url: str
    ref: str | None = None
    hash: str | None = None


class Bucket(TaskPart, frozen=True, tag="bucket"):
    """Object storage, copied or mounted."""

    uri: str  # gs://name/prefix, or to copy from: s3://name/prefix, hf://org/name@revision/prefix
    mode: Literal["COPY", "MOUNT", "MOUNT_CACHED"] = "MOUNT"
    create: bool = False  # make the bucket when it is absent
    persistent: bool = True
    upload: tuple[str, ...] = ()  # local paths put into the bucket first
    read_only: bool = False
    options: dict[str, str] = {}  # tuning of the mount, under the names of the file: vfs_cache_max_size, ...


class Url(TaskPart, frozen=True, tag="url"):
    """A file fetched over http(s) on every host."""

    url: str


class FileMount(TaskPart, frozen=True):
    """Where on each host something appears, and what."""

    target: str  # absolute, or under the home (`~/x`), or relative to the workdir
    source: LocalDir | Git | Bucket | Url


class Volume(TaskPart, frozen=True):
    """A disk (by name) or a directory of the host itself (by path), seen under `path` on every host.

    The control plane finds a named one and fills in `instance_path`: where on a host it is.
    """

    path: str
    name: str | None = None  # a volume; `${{ dstack.node_rank }}` in it: one for each node
    alternatives: tuple[str, ...] = ()  # other volumes that do as well: the first that exists is taken
    instance_path: str | None = None  # a directory of the host
    sub_path: str | None = None  # only this directory of the volume
    size_gb: int | None = None  # make one of this size; None: it exists
    read_only: bool = False
    optional: bool = False  # go on without it where the provider has none


class Registry(TaskPart, frozen=True):
    """Who pulls the image. The password is in Task.secrets, under the name given here."""

    username: str
    password_secret: str
    server: str | None = None  # None: the registry that the image names


class Autostop(TaskPart, frozen=True):
    """Stop (or take down) a cluster that has been idle this long."""

    idle_minutes: float
    down: bool = False
    wait_for: Literal["jobs", "jobs_and_ssh", "none"] = "jobs_and_ssh"


class Recovery(TaskPart, frozen=True):
    """What brings a job back by itself."""

    events: tuple[Literal["no-capacity", "interruption", "error"], ...] = ("no-capacity", "interruption")
    strategy: Literal["next-region", "failover"] = "next-region"
    max_restarts_on_errors: int = 0
    exit_codes: tuple[int, ...] = ()  # exit codes that count as an interruption
    duration_s: int | None = None  # give up after this long; None: never


class Scaling(TaskPart, frozen=True):
    """How many replicas a service keeps."""

    min_replicas: int = 1
    max_replicas: int = 1
    metric: Literal["rps", "concurrency", "queue_time", "ttft"] = "rps"
    target: float | None = (
        None  # of the metric: requests at once for each replica, or seconds; requests/s: `target_qps`
    )
    target_qps: float | None = None
    target_qps_by_type: dict[str, float] = {}  # accelerator type -> target, where it depends on the slice
    spare_replicas: int = 0  # kept above what the target asks for
    window_s: int = 60
    up_delay_s: int = 300
    down_delay_s: int = 600


class Probe(TaskPart, frozen=True):
    """How to tell that a replica is ready."""

    path: str = "/"
    method: str = "GET"
    headers: dict[str, str] = {}
    body: str | None = None
    timeout_s: float = 15
    interval_s: float = 10
    initial_delay_s: float = 1200
    ready_after: int = 1
    until_ready: bool = False  # stop probing a replica once it is ready
    fail_after_s: float | None = None  # unanswered this long: the replica is replaced; None: the server decides


class ServedModel(TaskPart, frozen=True):
    """The model a service offers to OpenAI clients."""

    name: str
    format: Literal["openai", "tgi"] = "openai"
    prefix: str = "/v1"
    chat_template: str | None = None
    eos_token: str | None = None


class RateLimit(TaskPart, frozen=True):
    """At most `rps` requests a second under a path prefix, for each key."""

    prefix: str = "/"
    key: str = "ip_address"
    header: str | None = None
    rps: float = 1
    burst: int = 0


class RoutedWorker(TaskPart, frozen=True):
    """What a router is told of the replicas of a group, as far as their commands say it."""

    role: Literal["regular", "prefill", "decode"] = "regular"
    protocol: Literal["http", "grpc"] = "http"
    engine: Literal["sglang", "vllm"] | None = None
    bootstrap_port: int | None = None  # of a prefill worker of SGLang
    kv_connector: str | None = None  # of a worker of vLLM
    kv_role: str | None = None


class ReplicaGroup(TaskPart, frozen=True):
    """Replicas of a service that run something of their own, on machines of their own; all else is the task's."""

    name: str
    resources: tuple[Resources, ...]
    run: str
    shell: str = "bash"
    python: str | None = None
    scaling: Scaling = Scaling()
    probes: tuple[Probe, ...] = ()
    # Its replica takes the requests and passes them on. smg: it is told its workers; dynamo: its workers are told its address.
    router: Literal["smg", "dynamo"] | None = None
    worker: RoutedWorker = RoutedWorker()


class ServiceSpec(TaskPart, frozen=True):
    """What makes a task a service: a port, replicas, probes, and perhaps a model name."""

    port: int
    probes: tuple[Probe, ...] = ()
    scaling: Scaling = Scaling()
    model: ServedModel | None = None
    auth: bool = True
    https: bool | None = None
    strip_prefix: bool = True
    rate_limits: tuple[RateLimit, ...] = ()
    spot_fallback: int = 0  # on-demand replicas kept beside spot ones
    dynamic_fallback: bool = False  # on-demand replicas stand in while spot ones are missing
    load_balancing: str | None = None
    groups: tuple[ReplicaGroup, ...] = ()  # (): all replicas run the task itself
    tls: CertificateFacts | None = (
        None  # its endpoint takes HTTPS only, with the pair in Task.secrets (TLS_CERTIFICATE, TLS_KEY)
    )

    @property
    def router(self) -> ReplicaGroup | None:
        """The group whose replica passes requests on to the others."""
        return next((one for one in self.groups if one.router), None)

    def find_group(self, name: str) -> ReplicaGroup | None:
        """By name."""
        return next((one for one in self.groups if one.name == name), None)


class DevEnvironment(TaskPart, frozen=True):
    """An interactive host: an IDE to link to, and what to run first."""

    ide: str | None = None
    version: str | None = None
    inactivity_s: int | None = None


class Task(TaskPart, frozen=True):
    """All that a task file says, resolved: no null environment, no unset variable, no relative path."""

    name: str | None = None
    kind: Literal["task", "service", "dev-environment"] = "task"
    dialect: Literal["skypilot", "dstack"] = "skypilot"
    resources: tuple[Resources, ...] = (Resources(),)  # alternatives
    ordered: bool = False  # True: try alternatives in this order; False: the cheapest first
    slices: int = 1  # num_nodes / nodes: each is one slice
    first_hosts: int | None = None  # run on so many hosts of the cluster only; None: on all
    setup: str = ""
    run: str = ""
    shell: str = "bash"
    python: str | None = None  # '3.11': the interpreter asked for
    user: str | None = None  # of the image, in place of the one it names itself
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    workdir: LocalDir | Git | None = None
    working_dir: str | None = None  # cwd on the host, where the file fixes it
    file_mounts: tuple[FileMount, ...] = ()
    volumes: tuple[Volume, ...] = ()
    registry: Registry | None = None
    ports: tuple[str, ...] = ()  # forwarded to this machine while attached: 'local:remote', '*' for any local one
    pools: tuple[str, ...] = ()  # run on a free worker of the first of these pools that exists
    reuse_only: bool = False  # run on an existing cluster, never make one
    stop_when: Literal["all-done", "head-done"] = "all-done"
    autostop: Autostop | None = None
    recovery: Recovery | None = None
    max_duration_s: int | None = None
    stop_duration_s: int | None = None  # grace between SIGTERM and SIGKILL
    priority: int = 0
    schedule: tuple[str, ...] = ()  # cron expressions, in UTC: when to start it; (): now
    service: ServiceSpec | None = None
    dev: DevEnvironment | None = None
    tags: dict[str, str] = {}
    notes: tuple[str, ...] = ()  # fields understood but without effect here, each with the reason


def takes_chips(task: Task) -> bool:
    """Whether its jobs wait in their cluster's queue for the chips. What prepares a dev environment does not wait for the jobs
    that run in it.
    """
    return task.dev is None and any(one.accelerator is not None for one in task.resources)


def group_task(task: Task, group: ReplicaGroup) -> Task:
    """The task as the replicas of one of its groups run it."""
    assert task.service is not None  # groups are a service's
    spec = msgspec.structs.replace(task.service, scaling=group.scaling, probes=group.probes, groups=())
    return msgspec.structs.replace(
        task, run=group.run, shell=group.shell, python=group.python, resources=group.resources, service=spec
    )


def group_tasks(task: Task) -> dict[str, Task]:
    """By the name of each group; a task without groups is its own, under ''."""
    groups = task.service.groups if task.service else ()
    return {one.name: group_task(task, one) for one in groups} or {"": task}


def container_image(image: str | None) -> str | None:
    """The name of a container image, `docker:NAME` in a task; None for an image of a virtual machine."""
    return image.removeprefix(CONTAINER) if image and image.startswith(CONTAINER) else None


def change_resources(task: Task, change: Callable[[Resources], Resources]) -> Task:
    """The task with all that it may run on changed, in its groups too."""
    service = task.service
    if service is not None and service.groups:
        groups = (msgspec.structs.replace(one, resources=tuple(map(change, one.resources))) for one in service.groups)
        service = msgspec.structs.replace(service, groups=tuple(groups))
    return msgspec.structs.replace(task, resources=tuple(map(change, task.resources)), service=service)


def without_image(task: Task) -> Task:
    """The task in its hosts' own environment (--ignore-image), and a note of it."""
    every = [one for each in group_tasks(task).values() for one in each.resources]
    images = sorted({image for one in every if (image := container_image(one.image))})
    if not images:
        return task
    note = f"image {', '.join(images)}: ignored, as --ignore-image says; the task runs in the hosts' own environment"
    bare = change_resources(
        task, lambda one: msgspec.structs.replace(one, image=None) if container_image(one.image) else one
    )
    return msgspec.structs.replace(bare, user=None, notes=(*task.notes, note))


def job_secrets(task: Task) -> dict[str, str]:
    """What its jobs are given: all but the key pair of a service's endpoint, which the gateways use."""
    return {name: value for name, value in task.secrets.items() if name not in (TLS_CERTIFICATE, TLS_KEY)}


def environment_secrets(task: Task) -> set[str]:
    """Names of the secrets that its processes have in their environment: not the password that its image is pulled with."""
    return set(job_secrets(task)) - ({task.registry.password_secret} if task.registry is not None else set())


def without_secrets(task: Task) -> Task:
    """The task as it may be stored or shown: secret names stay, values go."""
    return msgspec.structs.replace(task, secrets=dict.fromkeys(task.secrets, ""))
