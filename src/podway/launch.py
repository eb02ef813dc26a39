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
from podway.provider_table import row_of
from podway.task.environment import fill_secrets
from podway.task.mounts import WORKDIR_NAME
from podway.task.task import Git, Task, Url, Volume, container_image
from podway.task.volumes import NODE_RANK, for_node

COORDINATOR_PORT = 8476  # the port JAX itself uses for its coordinator on Cloud TPU
MEGASCALE_PORT = 8080  # libtpu's default for multislice
WORKDIR = f"~/{WORKDIR_NAME}"
_SIMULATED_DISK = "~/.podway/disk"


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The image a job's scripts run in, whose they are there, and which directories of the host they see besides its home."""

    image: str
    user: str | None = None
    mounts: tuple[tuple[str, str, bool], ...] = ()  # (on the host, in the container, read-only), where they are there
    volumes: tuple[
        tuple[str, str, bool], ...
    ] = ()  # the same, made on the host if need be, and never given to another user


def image_of(task: Task, order: Order) -> str | None:
    """The container image to enter for a job: its task's own, or its cluster's; None where the hosts themselves are made of it."""
    if "hosts-of-image" in row_of(order.provider).capabilities:
        return None
    own = [image for one in task.resources if (image := container_image(one.image))]
    ordered = container_image(order.image)
    return ordered if not own or ordered in own else own[0]


def runs_image_command(task: Task) -> bool:
    """Whether the image's own command is what to run: a dstack file that has an image and no commands."""
    images = [one for one in task.resources if container_image(one.image)]
    return task.dialect == "dstack" and task.dev is None and bool(images) and not task.run.strip()


def does_something(task: Task) -> bool:
    """A task with nothing to run or fetch asks for the cluster alone; a dev environment is remembered by its job."""
    if task.dev is not None or runs_image_command(task):
        return True
    return bool(task.run.strip() or task.setup.strip() or task.workdir or task.file_mounts)


def has_setup(task: Task, order: Order) -> bool:
    """Whether a launch of it has a setup phase: to fetch, to pull an image, or by its own commands."""
    return bool(_setup_script(task, order).strip())


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
        """The shell text of a phase; empty in the run phase of a task that runs its image's own command."""
        script = _setup_script(self.task, self.order) if phase == "setup" else self.task.run
        if not script.strip():
            return script
        first = "" if self.task.first_hosts is None else _FIRST_HOSTS.replace("@COUNT@", str(self.task.first_hosts))
        return first + self._link_prelude() + (_python_prelude(self.task.python) if self.task.python else "") + script

    def container_on(self, host: Host) -> ContainerSpec | None:
        """The same, as one host has it: with the volumes of its own node."""
        found = self.container
        if found is None or not found.volumes:
            return found
        volumes = tuple((for_node(source, host.slice), *more) for source, *more in found.volumes)
        return msgspec.structs.replace(found, volumes=volumes)

    @property
    def container(self) -> ContainerSpec | None:
        """What the scripts run in, where that is not the host's own file system."""
        image = image_of(self.task, self.order)
        if image is None:
            return None
        targets = [WORKDIR, *(mount.target for mount in self.task.file_mounts if mount.target.startswith(("/", "~")))]
        return ContainerSpec(
            image=image,
            user=self.task.user,
            mounts=tuple((path, path, False) for path in targets),
            volumes=tuple((source, volume.path, volume.read_only) for source, volume in self._host_volumes()),
        )

    def _host_volumes(self) -> list[tuple[str, Volume]]:
        """The task's directories of its hosts and its volumes, where the provider shows them."""
        capabilities = row_of(self.order.provider).capabilities
        found = [
            (one.instance_path, one)
            for one in self.task.volumes
            if one.instance_path is not None and ("instance-paths" if one.name is None else "volumes") in capabilities
        ]
        # What a simulated host has of its own is its home: its directories lie there. Volumes do not go with it.
        own = self.simulated
        return [(f"{_SIMULATED_DISK}{path}" if own and one.name is None else path, one) for path, one in found]

    def _link_prelude(self) -> str:
        """Shell lines that link the task's directories of the host, where no image binds them."""
        volumes = [one for one in self._host_volumes() if not self.simulated or one[1].name is not None]
        if not volumes or self.container is not None:
            return ""
        links = []
        for source, volume in volumes:
            words = [source, volume.path]
            if volume.name is not None:  # the directory that all volumes are in: another's link may be replaced
                words.append(source.partition(f"/{volume.name}")[0])
            links.append(" ".join(["podway_link", *map(_shell_path, words)]))
        return "\n".join([_LINK, *links, ""])

    @property
    def cwd(self) -> str:
        """Where scripts start; '' for where the image says, as in a dstack run without files."""
        if self.task.working_dir:
            return self.task.working_dir
        own = self.task.dialect == "dstack" and self.task.workdir is None and self.container is not None
        return "" if own else WORKDIR

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


def _setup_script(task: Task, order: Order) -> str:
    """A git workdir or mounts from the network are fetched at the top; an image is pulled even where there is nothing else to do."""
    script = "\n".join(filter(None, [_fetches(task), task.setup]))
    return script if script.strip() or image_of(task, order) is None else ":"


def _python_prelude(version: str) -> str:
    """Shell lines that make `python` the interpreter asked for: the host's own environment if it is that, else one made of the
    host's interpreter of that version, or by uv, which brings it."""
    return _PYTHON.replace("@VERSION@", version)


# The others have nothing to do; the first see themselves alone.
_FIRST_HOSTS = """if [ "$PODWAY_RANK" -ge @COUNT@ ]; then exit 0; fi
SKYPILOT_NODE_IPS=$(printf '%s\\n' "$PODWAY_HOST_IPS" | head -n @COUNT@)
export SKYPILOT_NODE_IPS SKYPILOT_SETUP_NODE_IPS="$SKYPILOT_NODE_IPS" SKYPILOT_NUM_NODES=@COUNT@
"""


# The link is made once and found by every later script; what is there already is never replaced.
def _shell_path(path: str) -> str:
    """A path as a word of the shell: `~` is the home, and the number of the node is known there."""
    begin = '"$HOME"/' if path.startswith("~/") else ""
    parts = NODE_RANK.split(path.removeprefix("~/"))
    return begin + '"$PODWAY_SLICE_ID"'.join(shlex.quote(part) if part else "" for part in parts)


_LINK = """podway_link() {
  if [ ! -e "$1" ] && ! mkdir -p "$1" 2>/dev/null && ! sudo -n install -d -o "$(id -u)" "$1" 2>/dev/null; then
    echo "podway: volumes: the directory $1 cannot be made on this host"
    exit 1
  fi
  if [ "$(readlink -f "$2")" = "$(readlink -f "$1")" ]; then return 0; fi
  if [ -n "${3:-}" ] && [ -L "$2" ]; then
    case "$(readlink "$2")" in "$3"/*) rm -f "$2" 2>/dev/null || sudo -n rm -f "$2" 2>/dev/null || true ;; esac
  fi
  if [ -e "$2" ] || [ -L "$2" ]; then
    echo "podway: volumes: $2 is on this host already and is not $1: choose another path"
    exit 1
  fi
  if ! { mkdir -p "$(dirname "$2")" && ln -sT "$1" "$2"; } 2>/dev/null &&
    ! { sudo -n mkdir -p "$(dirname "$2")" && sudo -n ln -sT "$1" "$2"; } 2>/dev/null; then
    echo "podway: volumes: $2 cannot be made on this host: it takes a login that may write there, or may sudo"
    exit 1
  fi
}"""

# In one function, so that nothing of it is left in the script but the environment it activates.
_PYTHON = """podway_python() {
  if [ -n "${VIRTUAL_ENV:-}" ] && [ "$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "@VERSION@" ]; then
    return 0
  fi
  local made="$HOME/.podway/python-@VERSION@" own
  if [ ! -x "$made/bin/python" ]; then
    rm -rf "$made"
    own=$(command -v "python@VERSION@" || true)
    if ! PATH="$PATH:$HOME/.local/bin:$HOME/.podway/uv/bin" command -v uv >/dev/null &&
      ! { [ -n "$own" ] && "$own" -m venv "$made" >/dev/null 2>&1; }; then
      rm -rf "$made"
      echo "podway: installing uv, which brings Python @VERSION@"
      python3 -m pip install -q --disable-pip-version-check --target "$HOME/.podway/uv" uv >/dev/null 2>&1 ||
        curl -LsSf https://astral.sh/uv/install.sh 2>/dev/null | UV_UNMANAGED_INSTALL="$HOME/.podway/uv/bin" sh >/dev/null 2>&1
    fi
    if [ ! -x "$made/bin/python" ] &&
      ! PATH="$PATH:$HOME/.local/bin:$HOME/.podway/uv/bin" uv venv -q --seed -p "@VERSION@" "$made" &&
      ! { [ -n "$own" ] && rm -rf "$made" && "$own" -m venv --without-pip "$made"; }; then
      echo "podway: python @VERSION@ is not on this host, and uv could not bring it: install it there, or give the host a way to PyPI"
      rm -rf "$made"
      exit 1
    fi
  fi
  . "$made/bin/activate"
}
podway_python
"""


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
            target = quoted_path(mount.target)
            address = shlex.quote(source.url)
            if task.secrets:  # the shell has them in its environment
                names = {name: f"'\"${{{name}}}\"'" for name in task.secrets}
                address = fill_secrets(address, names)
            lines.append(f'mkdir -p "$(dirname {target})" && curl -fsSL -o {target} {address} || exit 1')
    return "\n".join(lines)


def _clone(target: str, url: str, ref: str | None, commit: str | None) -> str:
    into, source = quoted_path(target), shlex.quote(url)
    want = shlex.quote(commit or ref or "")
    checkout = (
        f" && git -C {into} fetch -q origin {want} && git -C {into} checkout -q FETCH_HEAD" if want != "''" else ""
    )
    update = f"git -C {into} pull -q" if want == "''" else "true"
    return f"if [ -d {into}/.git ]; then {update}; else git clone -q {source} {into}; fi{checkout} || exit 1"


def quoted_path(path: str) -> str:
    """Quoted for bash, with a leading ~ still standing for the home."""
    return '"$HOME"' + shlex.quote(path[1:]) if path.startswith("~/") else shlex.quote(path)
