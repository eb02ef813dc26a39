"""What every provider does, and how one is opened.

A provider turns an `Order` into a `Request` (pure; `--dryrun` prints it), submits it, and from then on answers for it by
the cluster's name alone, so that a server that was killed finds again what it had begun. Every verb is idempotent and
returns at once: submit twice is one cluster, destroy of a missing one is silence, slow things are seen by `observe`.

`Provider` is what every one of them implements. What only some can do is a protocol of its own, asked for with `isinstance`:
`SupportsStop`, `SupportsVolumes`, `SupportsListing`, `SupportsOneShot`, `SupportsPullLogin`, `SupportsSelfTeardown`, `SupportsShell`,
`SupportsPorts`, `SupportsCertificates`.

A provider is one package and one row in `podway.provider_table`; it is imported only when it is named.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from podway.decoding import from_plain
from podway.errors import UserError
from podway.extras import explain
from podway.hosts.link import Connect
from podway.hosts.pod_address import PodAddress
from podway.hosts.ssh.endpoint import Endpoint
from podway.order import Host, Order
from podway.provider_table import ProviderRow, find_row, load, provider_rows, row_of, simulated_names, unknown_provider
from podway.task.task import Registry, Resources, Task
from podway.task.volumes import VolumeSpec

log = logging.getLogger("podway.providers")

Body = TypeVar("Body")

# How people may use providers whose hosts are on the server's own machine: as the server's user, as users of their own, or not.
HostsHere = Literal["as-server", "isolated", "off"]
BlockCode = Literal["not_offered", "quota", "refused", "price", "simulated"]


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """Why an offer is not to be tried: a code for decisions, and a sentence for people."""

    code: BlockCode
    reason: str


class Offer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One way to get what a task asks for; `hourly_cost` is for all slices together, None when no price is known."""

    provider: str
    accelerator_type: str | None
    topology: str | None = None
    slices: int = 1
    region: str | None = None
    zone: str | None = None
    spot: bool = False
    hourly_cost: float | None = None
    note: str = ""
    blocked: Blocked | None = None  # shown, never chosen


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One call to the outside: its verb, what it acts on, and its body."""

    verb: str
    target: str
    body: Mapping[str, Any] = {}

    def read(self, kind: type[Body]) -> Body:
        """The body, as far as `kind` has fields for it."""
        return from_plain(self.body, kind, strict=False)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly what will be sent for an order. Prints as JSON; golden-tested for each provider."""

    provider: str
    name: str
    steps: tuple[Step, ...]


Condition = Literal["absent", "creating", "ready", "stopping", "stopped", "deleting", "preempted", "failed"]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider sees of a cluster now. `hosts` is filled when the condition is ready."""

    condition: Condition
    hosts: tuple[Host, ...] = ()
    reason: str = ""  # why, in plain words: "no capacity for v6e-16 in us-east5-b"
    zone: str | None = None  # where it really is, once that is known
    billed_since: float | None = (
        None  # the cloud asks money for these hosts since then; None: it does not, or does not tell
    )
    elsewhere: bool = False  # failed here, but another zone or offer may do: stock-out, quota, a queue that expired


class OwnedResource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One resource that carries Podway's mark, whether or not any row knows it."""

    cluster: str  # '' for a volume's
    volume: str = ""  # whose disk it is; it holds what people wrote
    owner: str  # which Podway made it; `SupportsListing.owner` is this one
    kind: str  # in the provider's words: "node", "queued resource", "disk", "firewall rule", "simulated slice"
    name: str
    zone: str | None = None
    condition: Condition
    accelerator_type: str | None = None
    created: float | None = None
    hourly_cost: float | None = None  # None: no price is known; 0.0: it bills nothing


class CreatedVolume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A volume as its provider made or found it."""

    disk: str  # what the provider calls it
    directory: str  # where on a host it is seen
    region: str | None = None
    zone: str | None = None
    size_gb: int | None = None
    disk_type: str | None = None
    shared: bool = False  # many hosts may write to it at once


class RunRank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a one-shot run that has begun."""

    rank: int
    source: str  # names its output: a pod
    code: int | None = None  # its exit code, once it has ended
    ended: float | None = None
    phase: Literal["setup", "run"] = "run"  # in which it ended


class RunObservation(msgspec.Struct, frozen=True, kw_only=True):
    """A one-shot run now. `ranks` are those of its latest attempt."""

    state: Literal["absent", "deleting", "waiting", "running", "succeeded", "failed"]
    reason: str = ""
    restarts: int = 0  # how often it began again by itself
    ranks: tuple[RunRank, ...] = ()
    earlier: tuple[RunRank, ...] = ()  # of the attempt before, as long as their output is there


class OutputLine(msgspec.Struct, frozen=True):
    """One line of output, with its newline."""

    time_ns: int
    text: bytes


class HttpCall(msgspec.Struct, frozen=True, kw_only=True):
    """One plain HTTP call."""

    method: Literal["DELETE", "POST"]
    url: str


class SelfTeardown(msgspec.Struct, frozen=True, kw_only=True):
    """How a cluster's own head host ends it while no server looks after it: these calls, with the machine's own token."""

    token_url: str  # of the cloud's metadata server: no host ever holds a person's credentials
    calls: tuple[HttpCall, ...]


class Shell(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to open a shell on a host. It makes the command line by itself: no client runs what a server sends."""

    home: str
    env: dict[str, str]  # of the shell: as a job there has it
    endpoint: Endpoint | None = (
        None  # where to log in; None, and no pod: the host is a part of the server's own machine
    )
    pod: PodAddress | None = None  # a host without sshd, which is a pod of Kubernetes
    known_hosts: tuple[str, ...] = ()  # lines of OpenSSH's file of that name, for the endpoint and the way to it


class Provider(Protocol):
    """The verbs all providers implement."""

    @property
    def name(self) -> str:
        """As its row in the table says."""

    def offers(self, resources: Resources, slices: int) -> list[Offer]:
        """Ways to get these resources here, cheapest known price first, unknown prices last."""

    def render(self, name: str, order: Order) -> Request:
        """What `submit` would send. Pure: no clock, no randomness, no I/O."""

    async def submit(self, request: Request) -> None:
        """Begin to create the cluster, or go on with it. UserError: it will never work as asked; ProviderError: try again.

        What another place may do better is not an error: `observe` then says failed, with `elsewhere`.
        """

    async def observe(self, name: str) -> Observation:
        """The cluster's condition, from the outside world and not from memory."""

    async def destroy(self, name: str) -> None:
        """Begin to delete everything the cluster ever made; silence when nothing is left."""

    async def ensure_agent(self, host: Host) -> None:
        """Make sure the host's agent runs, starting it if it does not; one of another version is replaced when no job runs there."""

    def connect(self, host: Host) -> Connect:
        """Opens streams to the host's agent."""


@runtime_checkable
class SupportsVolumes(Protocol):
    """Directories that outlive clusters, by the names that people give them."""

    async def create_volume(self, spec: VolumeSpec) -> CreatedVolume:
        """Make it, or find what an interrupted call made; with a `disk_id`, look at the existing disk."""

    async def delete_volume(self, spec: VolumeSpec) -> None:
        """Delete it and what it holds; silence when it is gone."""


@runtime_checkable
class SupportsStop(Protocol):
    """Hosts that can be stopped and started again, keeping their disks."""

    async def stop(self, name: str) -> None:
        """Begin to stop the hosts, keeping their disks."""

    async def start(self, name: str) -> None:
        """Begin to start stopped hosts."""

    def refuse_stop(self, order: Order) -> str | None:
        """Why such a cluster cannot be stopped, or None when it can."""


@runtime_checkable
class SupportsListing(Protocol):
    """Resources that carry Podway's mark, found and deleted without any row of ours."""

    @property
    def owner(self) -> str:
        """Marks what this Podway makes, apart from what another one makes with the same account."""

    async def list_resources(self) -> list[OwnedResource]:
        """Every resource out there that carries Podway's mark, whoever made it."""

    async def purge(self, resource: OwnedResource) -> None:
        """Begin to delete one of them; silence when it is gone already."""


@runtime_checkable
class SupportsOneShot(Protocol):
    """Places that can run a task to its end by themselves. `observe` and `destroy` are as for a cluster: it is ready once every rank
    has begun, and stays so when it has ended.
    """

    def render_one_shot(self, name: str, order: Order, task: Task, user: str) -> Request:
        """What has to be created for it. Pure."""

    async def submit_one_shot(self, request: Request, secrets: Mapping[str, str]) -> None:
        """Begin to create it, or go on with it, with these secrets in its environment."""

    async def observe_run(self, name: str) -> RunObservation:
        """How far the run is."""

    def run_output(self, name: str, source: str, since: int) -> AsyncIterator[list[OutputLine]]:
        """What a `RunRank.source` wrote since that second, as it comes, until it has ended."""


@runtime_checkable
class SupportsPullLogin(Protocol):
    """Places whose hosts are containers, and pull the image themselves."""

    async def keep_login(self, request: Request, registry: Registry, password: str) -> None:
        """Keep this login for the image of the request, until the cluster is destroyed. Before the request is submitted."""


@runtime_checkable
class SupportsSelfTeardown(Protocol):
    """Clusters whose head host can end them while no server looks after them."""

    def self_teardown(self, name: str, order: Order, *, down: bool) -> SelfTeardown | None:
        """How the head host deletes the cluster (or stops it) by itself; None where there is no way."""


@runtime_checkable
class SupportsOwnNetwork(Protocol):
    """Hosts that share one machine's ports, and that may have a network of their own instead (`Order.own_network`)."""

    def refuse_own_network(self) -> str | None:
        """Why they cannot have one here, or None when they can."""


@runtime_checkable
class SupportsShell(Protocol):
    """Hosts that a person can log in to."""

    def shell(self, host: Host, env: dict[str, str]) -> Shell:
        """Where a shell on the host is, with this environment."""


@runtime_checkable
class SupportsPorts(Protocol):
    """Hosts whose TCP ports the server can reach, also those that listen on the host's loopback alone."""

    def connect_port(self, host: Host, port: int) -> Connect:
        """Opens streams to a port of the host."""


@runtime_checkable
class SupportsCertificates(Protocol):
    """Hosts whose sshd can be told to let in people with a certificate."""

    async def trust(self, host: Host, line: str) -> None:
        """Have this line in authorized_keys of the host's login, as long as the cluster lives."""


def stoppable(provider: Provider) -> SupportsStop:
    """The provider, as one whose hosts can be stopped."""
    if isinstance(provider, SupportsStop):
        return provider
    raise UserError(
        f"{provider.name} cannot stop hosts: {row_of(provider.name).no_stop}", "take the cluster down instead"
    )


def refuse_stop(provider: Provider, order: Order) -> str | None:
    """Why a cluster of this order cannot be stopped, or None when it can."""
    return provider.refuse_stop(order) if isinstance(provider, SupportsStop) else row_of(provider.name).no_stop


def open_provider(name: str, root: Path) -> Provider:
    """The provider of that name, with its state under `root`."""
    row = find_row(name)
    if row is None or not row.opens:
        raise unknown_provider(name)
    try:
        opens: Callable[[Path], Provider] = load(row.opens)
        return opens(root)
    except UserError:
        raise
    except Exception as error:
        missing = explain(error, f"provider {name}", row.extra, "on the server")
        if missing is not None:
            raise missing from None
        if row.opens.startswith("podway."):
            raise
        # Whatever somebody else's package does wrong is told, and breaks nothing else.
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"provider {name} ({row.opens}) cannot be opened: {why}", "repair or uninstall it") from None


class ProviderSet:
    """The providers of one Podway home, each opened when it is first asked for.

    `hosts_here`: how people may launch on providers whose hosts are on the server's own machine. What is there already is looked
    after in any case.
    """

    def __init__(self, root: Path, *, hosts_here: Callable[[], HostsHere] = lambda: "as-server") -> None:
        self._root = root
        self.hosts_here = hosts_here
        self._opened: dict[str, Provider] = {}

    def __call__(self, name: str) -> Provider:
        """The provider of that name."""
        if name not in self._opened:
            self._opened[name] = open_provider(name, self._root)
        return self._opened[name]

    def for_people(self, name: str) -> Provider:
        """The provider of that name, where people who have a token may use it."""
        if row_of(name).on_server and self.hosts_here() == "off":
            raise UserError(
                f"{name} is off on this server: its jobs would run as the server's own user",
                "choose another --infra; an administrator turns it on with: podway server run --allow-local",
                status=403,
            )
        return self(name)

    def usual(self) -> list[str]:
        """Whom to ask where a task names no provider: those that are set up, and the simulated ones last."""
        rows = provider_rows().values()
        real = [row.name for row in rows if row.configured and not row.simulated and self._is_set_up(row)]
        off = real and self.hosts_here() == "off"  # with nothing else to ask, its refusal is the answer
        return [*real, *(name for name in simulated_names() if not (off and row_of(name).on_server))]

    def _is_set_up(self, row: ProviderRow) -> bool:
        try:
            return bool(load(row.configured)(self._root))
        except Exception as error:  # somebody else's code; asking for it by name tells more
            log.warning("provider %s: %s: %s", row.name, type(error).__name__, error)
            return False


__all__ = [
    "BlockCode",
    "Blocked",
    "Condition",
    "CreatedVolume",
    "HostsHere",
    "HttpCall",
    "Observation",
    "Offer",
    "OutputLine",
    "OwnedResource",
    "Provider",
    "ProviderSet",
    "Request",
    "RunObservation",
    "RunRank",
    "SelfTeardown",
    "Shell",
    "Step",
    "SupportsCertificates",
    "SupportsListing",
    "SupportsOneShot",
    "SupportsOwnNetwork",
    "SupportsSelfTeardown",
    "SupportsShell",
    "SupportsStop",
    "SupportsVolumes",
    "open_provider",
    "refuse_stop",
    "stoppable",
]
