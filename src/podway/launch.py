"""Task + hosts -> `Launch`: what each rank runs and with which environment. Pure.

The environment speaks three dialects with true values: the SKYPILOT_* and DSTACK_* names that people's scripts already
read, the names JAX and libtpu read, and PODWAY_*. A slice that is simulated adds what makes `jax.distributed` find its
peers and show CPU devices as chips (docs/simulated-slices.md); a real one leaves that to the TPU metadata.

A rank counts hosts over all slices; SKYPILOT_NUM_GPUS_PER_NODE and DSTACK_GPUS_PER_NODE count the chips of one host, which
is what every script that reads them wants (the peers say 0, 1 or the number of slices).
"""

import json
import shlex
import zlib

import msgspec

from podway.catalog.slices import find_slice
from podway.order import Host, Order
from podway.task.mounts import WORKDIR_NAME
from podway.task.task import Git, Task, Url

COORDINATOR_PORT = 8476  # the port JAX itself uses for its coordinator on Cloud TPU
MEGASCALE_PORT = 8080  # libtpu's default for multislice
WORKDIR = f"~/{WORKDIR_NAME}"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved intent for one job: a script per phase, and an environment per rank."""

    job: str
    number: int
    cluster: str
    task: Task
    order: Order
    hosts: tuple[Host, ...]
    simulated: bool
    user: str
    submitted: float
    attempt: int = 1  # counts the times the job was begun, for scripts that want to know
    cache_dir: str = ""  # shared by the simulated hosts of one machine

    def script(self, phase: str) -> str:
        """The bash text of a phase; a git workdir or mounts from the network are fetched at the top of setup."""
        if phase == "setup":
            return "\n".join(filter(None, [_fetches(self.task), self.task.setup]))
        return self.task.run

    def env_for(self, host: Host, phase: str) -> dict[str, str]:
        """Everything the command of `phase` finds in its environment on this host, secrets apart."""
        env = _common(self, host)
        env |= _skypilot(self, host, phase) | _dstack(self, host) | _tpu(self, host)
        env |= _simulated(self, host, phase) if self.simulated else {}
        flags = " ".join(filter(None, [env.get("XLA_FLAGS", ""), self.task.env.get("XLA_FLAGS", "")]))
        env |= self.task.env
        return env | {"XLA_FLAGS": flags} if flags else env


def _common(launch: Launch, host: Host) -> dict[str, str]:
    order = launch.order
    chips = order.chips_per_host
    return {
        "PYTHONUNBUFFERED": "1",
        "HOSTNAME": f"{launch.cluster}-{host.rank}",
        "PODWAY_JOB": launch.job,
        "PODWAY_JOB_ID": str(launch.number),
        "PODWAY_ATTEMPT": str(launch.attempt),
        "PODWAY_HOST_ID": host.id,
        "PODWAY_CLUSTER": launch.cluster,
        "PODWAY_RANK": str(host.rank),
        "PODWAY_NUM_HOSTS": str(order.hosts),
        "PODWAY_HOST_IP": host.address,
        "PODWAY_HOST_IPS": "\n".join(h.address for h in launch.hosts),
        "PODWAY_CHIPS_PER_HOST": str(chips),
        "PODWAY_NUM_CHIPS": str(chips * order.hosts),
        "PODWAY_SLICE_ID": str(host.slice),
        "PODWAY_NUM_SLICES": str(order.slices),
        "PODWAY_ACCELERATOR": order.accelerator_type or "cpu",
        "PODWAY_COORDINATOR": _coordinator(launch),
        "PODWAY_SIMULATED": "1" if launch.simulated else "0",
    }


def _coordinator(launch: Launch) -> str:
    address, port = launch.hosts[0].address, COORDINATOR_PORT
    if launch.simulated:
        # JAX's coordinator listens on every address of the machine, so each simulated cluster needs a port of its own; and each
        # job, so that a socket in TIME_WAIT of the last one never blocks the next.
        port += zlib.crc32(f"{address} {launch.number}.{launch.attempt}".encode()) % 20_000
    return f"{address}:{port}"


def _skypilot(launch: Launch, host: Host, phase: str) -> dict[str, str]:
    order = launch.order
    ips = "\n".join(h.address for h in launch.hosts)
    chips = str(order.chips_per_host)
    info = {
        "cluster_name": launch.cluster,
        "cloud": order.provider,
        "region": order.region,
        "zone": order.zone,
    }
    env = {
        "SKYPILOT_NUM_NODES": str(order.hosts),
        "SKYPILOT_TASK_ID": f"podway-{int(launch.submitted)}_{launch.cluster}_{launch.number}",
        "SKYPILOT_CLUSTER_INFO": json.dumps(info),
        "SKYPILOT_USER": launch.user,
        "SKYPILOT_INTERNAL_JOB_ID": str(launch.number),
    }
    names = ("SETUP_NODE_RANK", "SETUP_NODE_IPS", "SETUP_NUM_GPUS_PER_NODE")
    if phase != "setup":
        names = ("NODE_RANK", "NODE_IPS", "NUM_GPUS_PER_NODE")
    values = (str(host.rank), ips, chips)
    return env | {f"SKYPILOT_{name}": value for name, value in zip(names, values, strict=True)}


def _dstack(launch: Launch, host: Host) -> dict[str, str]:
    order = launch.order
    workdir = f"{host.home}/sky_workdir"
    return {
        "DSTACK_RUN_ID": launch.job,
        "DSTACK_JOB_ID": f"{launch.job}-{host.rank}",
        "DSTACK_RUN_NAME": launch.task.name or launch.cluster,
        "DSTACK_REPO_DIR": workdir,
        "DSTACK_WORKING_DIR": workdir,
        "DSTACK_NODES_IPS": "\n".join(h.address for h in launch.hosts),
        "DSTACK_MASTER_NODE_IP": launch.hosts[0].address,
        "DSTACK_NODE_RANK": str(host.rank),
        "DSTACK_NODES_NUM": str(order.hosts),
        "DSTACK_GPUS_PER_NODE": str(order.chips_per_host),
        "DSTACK_GPUS_NUM": str(order.chips_per_host * order.hosts),
    }


def _tpu(launch: Launch, host: Host) -> dict[str, str]:
    order = launch.order
    if order.accelerator_type is None:
        return {}
    tpu = find_slice(order.accelerator_type, order.topology)
    peers = [h.address for h in launch.hosts if h.slice == host.slice]
    env = {
        "TPU_NAME": host.tpu_name or (launch.cluster if order.slices == 1 else f"{launch.cluster}-{host.slice}"),
        "TPU_WORKER_ID": str(host.worker),
        "TPU_WORKER_HOSTNAMES": ",".join(peers),
        "TPU_ACCELERATOR_TYPE": tpu.accelerator_type,
        "PODWAY_TOPOLOGY": tpu.topology_text,
        "JAX_COORDINATOR_ADDRESS": _coordinator(launch),
        "PJRT_DEVICE": "CPU" if launch.simulated else "TPU",
    }
    if order.slices > 1:
        env |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{launch.hosts[0].address}:{MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(order.slices),
            "MEGASCALE_SLICE_ID": str(host.slice),
            "MEGASCALE_PORT": str(MEGASCALE_PORT),
        }
    return env


def _simulated(launch: Launch, host: Host, phase: str) -> dict[str, str]:
    """What shows each chip as a CPU device, and lets JAX find the gang: by itself, or by `jax.distributed.initialize()`."""
    order = launch.order
    env = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    devices = 1
    if order.accelerator_type:
        devices = order.chips_per_host * find_slice(order.accelerator_type).generation_facts.devices_per_chip
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    if launch.cache_dir and devices * order.hosts == 1:  # programs over several CPU devices: see podway.model.compiled
        env["JAX_COMPILATION_CACHE_DIR"] = launch.cache_dir
    if order.hosts > 1:
        # JAX's Open MPI detection is the one it trusts from the environment alone (it reads no rank of its own).
        env |= {
            "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://{_coordinator(launch)}",
            "OMPI_COMM_WORLD_SIZE": str(order.hosts),
            "OMPI_COMM_WORLD_RANK": str(host.rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "PODWAY_RENDEZVOUS": f"{host.home.rpartition('/')[0]}/rendezvous",  # see podway.simulated_devices
            "PODWAY_PHASE": phase,
        }
    return env


def _fetches(task: Task) -> str:
    """Shell lines that bring what is not uploaded from here: a git workdir, git or http mounts."""
    lines = []
    if isinstance(task.workdir, Git):
        lines.append(_clone(WORKDIR, task.workdir.url, task.workdir.ref, task.workdir.hash))
    for mount in task.file_mounts:
        source = mount.source
        if isinstance(source, Git):
            lines.append(_clone(mount.target, source.url, source.ref, source.hash))
        elif isinstance(source, Url):
            target = _quoted(mount.target)
            lines.append(
                f'mkdir -p "$(dirname {target})" && curl -fsSL -o {target} {shlex.quote(source.url)} || exit 1'
            )
    return "\n".join(lines)


def _clone(target: str, url: str, ref: str | None, commit: str | None) -> str:
    into, source = _quoted(target), shlex.quote(url)
    want = shlex.quote(commit or ref or "")
    checkout = (
        f" && git -C {into} fetch -q origin {want} && git -C {into} checkout -q FETCH_HEAD" if want != "''" else ""
    )
    update = f"git -C {into} pull -q" if want == "''" else "true"
    return f"if [ -d {into}/.git ]; then {update}; else git clone -q {source} {into}; fi{checkout} || exit 1"


def _quoted(path: str) -> str:
    """Quoted for bash, with a leading ~ still standing for the home."""
    return '"$HOME"' + shlex.quote(path[1:]) if path.startswith("~/") else shlex.quote(path)
