"""What to provision, and what came of it: `Order` and `Host`.

Apart from `launch.py` so that whoever only reads them (every CLI command does) does not load the catalog.
"""

import msgspec


class OrderVolume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A volume that the hosts of a cluster have from the start."""

    name: str
    disk: str = ""  # what the provider calls it
    size_gb: int = 0
    disk_type: str | None = None
    blank: bool = False  # it may be formatted when it holds nothing; False: it was registered, and is only ever mounted
    slice: int | None = None  # of this slice alone; None: of all
    shared: bool = False  # many hosts, of several clusters, may have it at once
    read_only: bool = False


class OrderBucket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bucket that the hosts of a cluster have mounted from the start."""

    uri: str
    target: str  # absolute, or under the home (`~/x`), or relative to the workdir
    read_only: bool = False
    arguments: str = ""  # more of the tool's, as a command line has them
    create: bool = False  # make the bucket when it is absent


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to provision, resolved: one slice type, how many of it, where, and how it is paid for."""

    accelerator_type: str | None  # None: one CPU host
    topology: str | None = None
    slices: int = 1
    provider: str
    region: str | None = None
    zone: str | None = None
    spot: bool = False
    runtime_version: str | None = None
    hosts_per_slice: int = 1
    chips_per_host: int = 0
    hourly_cost: float | None = None
    disk_gb: int | None = None
    image: str | None = None
    labels: dict[str, str] = {}
    ports: tuple[str, ...] = ()
    tpu_vm: bool = True
    queued: bool | None = None  # ask for a queued resource; None: the provider decides
    reservation: str | None = None
    best_effort: bool = False  # capacity that may be taken back, at the price of on demand
    zones: tuple[str, ...] = ()  # queue in all of these at once and keep the first that comes; `zone` is the first
    valid_until_s: float | None = None  # give up a queued request after this long
    instance_type: str | None = None  # of the host VM of a legacy TPU Node, or of a CPU host
    tpu_name: str | None = None  # of a legacy TPU Node, where the task fixes it
    network: str | None = None  # these four: None or () is what the provider's own settings say
    subnetwork: str | None = None
    service_account: str | None = None
    tags: tuple[str, ...] = ()
    volumes: tuple[OrderVolume, ...] = ()  # of a provider that attaches them when it makes the hosts
    buckets: tuple[OrderBucket, ...] = ()  # of a provider that mounts them when it makes the hosts
    priority_class: str | None = None  # of the pods, where hosts are pods; None: what the provider's own settings say
    pull_login: bool = (
        False  # where hosts are containers: their image is pulled with a login that is sent with the order
    )
    grace_s: int | None = None  # between SIGTERM and SIGKILL, where hosts are containers; None: the platform's own
    isolated: bool = False  # hosts on the server's machine, as an operating-system user of their own
    own_network: bool = False  # simulated hosts whose ports are their own, as those of machines are

    @property
    def hosts(self) -> int:
        """Hosts over all slices: the size of the gang."""
        return self.slices * self.hosts_per_slice


class Host(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One machine of a slice. `rank` runs over all slices; `worker` is the TPU worker id inside its slice."""

    cluster: str = ""
    rank: int
    slice: int
    worker: int
    address: str
    external_address: str | None = None
    home: str
    id: str
    tpu_name: str | None = None  # what the cloud calls its TPU, where that is not the cluster's name
    ssh_port: int = 22
