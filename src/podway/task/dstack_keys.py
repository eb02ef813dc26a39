"""Every key of a dstack configuration of type task, service or dev-environment.

`TABLES` holds one table for each type; `dstack.py` reads by them and `schema.py` prints them. See `skypilot_keys.py` for
what `note` and `refuse` mean.
"""

from podway.task.shapes import Anything, Either, Flag, Key, ListOf, MapOf, Number, Shape, Table, Text, Whole
from podway.task.values import DURATION

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
_TEXTS = ListOf(item=Text())
_DURATION = Text(pattern=DURATION, form="seconds, or a duration such as 90m")
_OR_OFF = Either(options=(Flag(), Text(pattern=f"{DURATION}|off", form="a duration such as 90m, or off")))
_NO_INSTANCES = "`-c NAME` names a cluster to run on, and `fleets` a pool to take a worker of"
_RANGE = Either(
    options=(
        Table(
            keys={
                "min": Key(shape=Text(form="a number"), about="The least."),
                "max": Key(shape=Text(form="a number"), about="The most."),
            }
        ),
        Text(form="a number or a range such as 2..8"),
    )
)
_PORT = Either(
    options=(
        Table(
            keys={
                "local_port": Key(shape=Whole(minimum=1, maximum=65535), about="The port on this machine."),
                "container_port": Key(shape=Whole(minimum=1, maximum=65535), about="The port the program listens on."),
            },
            required=("container_port",),
        ),
        Text(form="a port such as 8080 or 80:8080"),
    )
)


def _about(shape: Shape, about: str, note: str | None = None, refuse: tuple[str, str] | None = None) -> Key:
    return Key(shape=shape, about=about, note=note, refuse=refuse)


_GPU_KEYS = {
    "vendor": _about(Text(), "google, or tpu."),
    "name": _about(Either(options=(_TEXTS, Text())), "A slice, or several: v5litepod-8."),
    "count": _about(_RANGE, "A slice is one accelerator: 1."),
    "memory": _about(_RANGE, "HBM of the whole slice: 64GB.., 16GB..256GB."),
    "total_memory": _about(_RANGE, "The same as memory, since a slice counts as one."),
    "compute_capability": _about(Text(), "A property of NVIDIA GPUs."),
}
_GPU = Either(options=(Table(keys=_GPU_KEYS), Text(form="a slice such as v5litepod-8")))
RESOURCES = Table(
    keys={
        "gpu": _about(Either(options=(ListOf(item=_GPU), _GPU)), "The slice: v5litepod-8, tpu, google:64GB.."),
        "cpu": _about(
            Either(
                options=(
                    Table(
                        keys={
                            "arch": _about(Text(choices=("x86", "arm")), "The kind of CPU."),
                            "count": _about(_RANGE, "How many."),
                            "min": _about(Text(), "The least."),
                            "max": _about(Text(), "The most."),
                        }
                    ),
                    Text(form="a number or a range such as 2.."),
                )
            ),
            "Host CPUs.",
        ),
        "memory": _about(_RANGE, "Host memory: 8GB.."),
        "shm_size": _about(Text(), "Shared memory.", note="/dev/shm is the host's own"),
        "disk": _about(
            Either(
                options=(
                    Table(
                        keys={
                            "size": _about(_RANGE, "Its size."),
                            "min": _about(Text(), "The least."),
                            "max": _about(Text(), "The most."),
                        }
                    ),
                    Text(form="a size or a range such as 100GB.."),
                )
            ),
            "Disk: 100GB..",
        ),
    }
)

_VOLUME = Either(
    options=(
        Table(
            keys={
                "name": _about(Either(options=(_TEXTS, Text())), "A network volume, or several to choose from."),
                "instance_path": _about(Text(), "A directory of the host."),
                "path": _about(Text(), "Where it is mounted."),
                "optional": _about(Flag(), "Go on where the provider cannot mount it."),
            },
            required=("path",),
        ),
        Text(form="a volume such as name:/path"),
    )
)
_REPO = Either(
    options=(
        Table(
            keys={
                "local_path": _about(Text(), "A directory on this machine, relative to the file."),
                "url": _about(Text(), "A git repository."),
                "branch": _about(Text(), "Its branch."),
                "hash": _about(Text(), "Its commit."),
                "path": _about(Text(), "Where it goes; the working directory when absent."),
                "if_exists": _about(
                    Text(choices=("error", "skip")), "What if there is something.", note="files are brought up to date"
                ),
            }
        ),
        Text(form="a path or address"),
    )
)
_FILE = Either(
    options=(
        Table(
            keys={
                "local_path": _about(Text(), "The path on this machine, relative to the file."),
                "path": _about(Text(), "The path on the host."),
            },
            required=("local_path", "path"),
        ),
        Text(form="a path such as local or local:remote"),
    )
)

_BASE: dict[str, Key] = {
    "type": _about(Text(), "task, service or dev-environment."),
    "name": _about(Text(), "The name of the run."),
    "image": _about(Text(), "A container image to run in."),
    "python": _about(Text(choices=("3.1", *PYTHONS)), "The Python to run with; not together with image."),
    "nvcc": _about(Flag(), "The CUDA compiler.", note="there is no CUDA on a TPU host"),
    "docker": _about(Flag(), "Docker for the commands.", note="commands use the host's own Docker"),
    "privileged": _about(
        Flag(), "Privileged container.", note="commands have the host's devices and rights in any case"
    ),
    "user": _about(Text(), "The user in the image: a name or number, perhaps with :GROUP."),
    "shell": _about(Text(), "sh, bash or the path of a shell."),
    "entrypoint": _about(Text(), "A program that gets the commands as its arguments."),
    "working_dir": _about(Text(), "Where to start: an absolute path, or one below the repository."),
    "home_dir": _about(Text(), "Of old versions.", note="dstack ignores it too"),
    "registry_auth": _about(
        Table(
            keys={
                "username": _about(Text(), "Who pulls the image."),
                "password": _about(Text(), "Password or token; better ${{ secrets.NAME }}."),
            },
            required=("username", "password"),
        ),
        "Credentials for a private image.",
    ),
    "env": _about(
        Either(options=(ListOf(item=Text()), MapOf(value=Text(), nullable=True))),
        "Variables: a list of NAME=VALUE, or NAME to take it from your environment; or a mapping.",
    ),
    "resources": _about(RESOURCES, "What to run on."),
    "volumes": _about(ListOf(item=_VOLUME), "Volumes: name:/path or /host/path:/path."),
    "repos": _about(ListOf(item=_REPO), "At most one repository, put into the working directory."),
    "files": _about(ListOf(item=_FILE), "Files and directories to bring along, relative to the file."),
    "priority": _about(Whole(minimum=0, maximum=100), "Runs of higher priority go first."),
    "dstack": _about(
        Flag(), "Whether the run may call dstack's server.", note="a run has no access to Podway's server"
    ),
    "single_branch": _about(Flag(), "Clone one branch only.", note="the one asked for is cloned"),
    "setup": _about(_TEXTS, "Of old versions: commands before init."),
}

PROFILE: dict[str, Key] = {
    "backends": _about(_TEXTS, "Clouds to use: gcp."),
    "regions": _about(_TEXTS, "Regions to use."),
    "availability_zones": _about(_TEXTS, "Zones to use."),
    "instance_types": _about(_TEXTS, "Machine types; for TPUs, slices."),
    "reservation": _about(Text(), "The reservation to take the slice from."),
    "spot_policy": _about(Text(choices=("spot", "on-demand", "auto")), "Spot capacity or not (on-demand)."),
    "retry": _about(
        Either(
            options=(
                Flag(),
                Table(
                    keys={
                        "on_events": _about(
                            ListOf(item=Text(choices=("no-capacity", "interruption", "error"))), "When to try again."
                        ),
                        "duration": _about(_DURATION, "For how long (1h)."),
                    }
                ),
            )
        ),
        "Try again: true, or when and for how long.",
    ),
    "max_duration": _about(_OR_OFF, "Stop the run after this long (off)."),
    "stop_duration": _about(_OR_OFF, "How long a run may take to stop (5m)."),
    "max_price": _about(Number(above=0), "At most this many dollars an hour."),
    "creation_policy": _about(Text(choices=("reuse", "reuse-or-create")), "Whether to make a slice when none is idle."),
    "idle_duration": _about(_OR_OFF, "Keep an idle slice this long (5m)."),
    "termination_idle_time": _about(_DURATION, "The old name of idle_duration."),
    "termination_policy": _about(Text(choices=("dont-destroy", "destroy-after-idle")), "Of old versions."),
    "utilization_policy": _about(
        Table(
            keys={
                "min_gpu_utilization": _about(Whole(minimum=0, maximum=100), "Percent."),
                "time_window": _about(_DURATION, "For how long."),
            }
        ),
        "Stop a run that does not use its accelerators.",
        note="a run is not stopped for using little",
    ),
    "startup_order": _about(Text(choices=("any", "master-first", "workers-first")), "Which nodes start first."),
    "stop_criteria": _about(Text(choices=("all-done", "master-done")), "When the run is done."),
    "schedule": _about(
        Table(
            keys={"cron": _about(Either(options=(_TEXTS, Text())), 'One or several: "15 23 * * *".')},
            required=("cron",),
        ),
        "Start at these times, in UTC.",
    ),
    "fleets": _about(_TEXTS, "Pools to take a worker of: the first that exists."),
    "instances": _about(Anything(), "Instances to use.", note=_NO_INSTANCES),
    "tags": _about(MapOf(value=Text()), "Tags put on what is created."),
    "backend_options": _about(Anything(), "Settings of a cloud.", note="they set up dstack's own backends"),
    "pool_name": _about(Text(), "Of old versions.", note=_NO_INSTANCES),
    "instance_name": _about(Text(), "Of old versions.", note=_NO_INSTANCES),
}

_COMMANDS = {"commands": _about(_TEXTS, "Shell commands, run one after the other; a failing one stops the run.")}
_PORTS = {"ports": _about(ListOf(item=_PORT), "Ports forwarded to this machine: 8080, 80:8080, *:8080.")}
_GROUP_NOTE = "a group runs under the run's name"

DEV_ENVIRONMENT = Table(
    keys={
        **_BASE,
        **PROFILE,
        **_PORTS,
        "ide": _about(Text(choices=("vscode", "cursor", "windsurf", "zed")), "The editor to print a link for."),
        "version": _about(Text(), "The version of the editor."),
        "init": _about(_TEXTS, "Commands to run first."),
        "inactivity_duration": _about(_OR_OFF, "Stop after this long without a connection (off)."),
    },
    required=("type",),
)

TASK = Table(
    keys={
        **_BASE,
        **PROFILE,
        **_COMMANDS,
        **_PORTS,
        "nodes": _about(Whole(minimum=1, maximum=10_000), "How many slices; each has its own hosts."),
        "groups": _about(
            ListOf(
                item=Table(
                    keys={
                        "name": _about(Text(), "The group.", note=_GROUP_NOTE),
                        "nodes": _about(Whole(minimum=1, maximum=10_000), "How many slices."),
                        "resources": _about(RESOURCES, "What to run on."),
                        **_COMMANDS,
                        **_PORTS,
                    }
                )
            ),
            "Groups of nodes, each with its own commands; all on the same slice.",
        ),
    },
    required=("type",),
)

_SCALING = Table(
    keys={
        "metric": _about(
            Text(choices=("rps", "concurrency", "queue_time", "ttft")),
            "rps: requests a second; concurrency: requests at once; queue_time, ttft: seconds (90th percentile).",
        ),
        "target": _about(Number(above=0), "Of them, for each replica; seconds, for a time."),
        "window": _about(_DURATION, "The time they are counted over: 30s, 60s or 300s."),
        "scale_up_delay": _about(_DURATION, "Wait before adding (5m)."),
        "scale_down_delay": _about(_DURATION, "Wait before removing (10m)."),
    },
    required=("metric", "target"),
)
_ROUTER = Text(choices=("smg", "sglang", "dynamo"))
_REPLICA_GROUP = Table(
    keys={
        "name": _about(Text(), "The group (its number, from 0)."),
        "count": _about(_RANGE, "How many replicas."),
        "replicas": _about(_RANGE, "How many replicas."),
        "scaling": _about(_SCALING, "When to add and remove replicas."),
        "resources": _about(RESOURCES, "What to run on."),
        "spot_policy": PROFILE["spot_policy"],
        "reservation": PROFILE["reservation"],
        **{name: _BASE[name] for name in ("image", "python", "docker", "nvcc", "privileged")},
        **_COMMANDS,
        "router": _about(
            Either(options=(Table(keys={"type": _about(_ROUTER, "smg (the default) or dynamo.")}), _ROUTER)),
            "The one replica of this group takes the requests and passes them to the other groups.",
        ),
    }
)
_MODEL = Either(
    options=(
        Table(
            keys={
                "type": _about(Text(choices=("chat",)), "chat."),
                "name": _about(Text(), "The name clients ask for."),
                "format": _about(Text(choices=("openai", "tgi")), "What the program speaks (openai)."),
                "prefix": _about(Text(), "Where its API begins (/v1)."),
                "chat_template": _about(Text(), "For tgi: the chat template."),
                "eos_token": _about(Text(), "For tgi: the end token."),
            },
            required=("name",),
        ),
        Text(form="the name of a model"),
    )
)
_PROBE = Table(
    keys={
        "type": _about(Text(choices=("http",)), "http."),
        "url": _about(Text(), "The path asked for (/)."),
        "method": _about(Text(choices=("get", "post", "put", "delete", "patch", "head")), "get when absent."),
        "headers": _about(
            ListOf(
                item=Table(
                    keys={
                        "name": _about(Text(), "The header."),
                        "value": _about(Text(), "Its value."),
                    },
                    required=("name", "value"),
                )
            ),
            "Headers to send.",
        ),
        "body": _about(Text(), "What to send."),
        "timeout": _about(_DURATION, "How long an answer may take (10s)."),
        "interval": _about(_DURATION, "Between two probes (15s)."),
        "ready_after": _about(Whole(minimum=1), "Good answers before a replica is ready (1)."),
        "until_ready": _about(Flag(), "Stop probing once ready."),
    },
    required=("type",),
)
_RATE_LIMIT = Table(
    keys={
        "prefix": _about(Text(pattern=r"/[^\s\\{}]*", form="a path that begins with /"), "Where it holds (/)."),
        "key": _about(
            Table(
                keys={
                    "type": _about(Text(choices=("ip_address", "header")), "What tells clients apart."),
                    "header": _about(Text(pattern=r"[A-Za-z0-9_-]+", form="a header name"), "Which header."),
                },
                required=("type",),
            ),
            "What tells clients apart (ip_address).",
        ),
        "rps": _about(Number(above=0), "Requests a second."),
        "burst": _about(Whole(minimum=0), "Requests let through ahead of that (0)."),
    },
    required=("rps",),
)
SERVICE = Table(
    keys={
        **_BASE,
        **PROFILE,
        **_COMMANDS,
        "port": _about(_PORT, "The port the program listens on."),
        "model": _about(_MODEL, "The model offered to OpenAI clients."),
        "gateway": _about(Text(), "The gateway to use.", note="Podway's server is the gateway"),
        "https": _about(Either(options=(Flag(), Text(choices=("auto",)))), "Serve over HTTPS."),
        "auth": _about(Flag(), "Ask clients for a token (true)."),
        "strip_prefix": _about(Flag(), "Hide the service's own path from the program (true)."),
        "replicas": _about(
            Either(options=(ListOf(item=_REPLICA_GROUP), _RANGE)), "How many: 2, or 0..4 together with scaling."
        ),
        "groups": _about(ListOf(item=_REPLICA_GROUP), "Groups of replicas, each with its own commands and machines."),
        "router": _about(
            Anything(),
            "A router of a gateway.",
            refuse=(
                "a gateway of dstack's ran this router",
                "give the router a group of its own: `router: {type: smg}`",
            ),
        ),
        "scaling": _about(_SCALING, "When to add and remove replicas."),
        "rate_limits": _about(ListOf(item=_RATE_LIMIT), "Limits on requests."),
        "probes": _about(ListOf(item=_PROBE), "How to tell that a replica is ready."),
    },
    required=("type", "port"),
)

TABLES: dict[str, Table] = {"task": TASK, "service": SERVICE, "dev-environment": DEV_ENVIRONMENT}

# Types of dstack files that are no runs, and what does their work here.
OTHER_TYPES = {
    "fleet": ("it is a pool of workers for runs", "make it with: podway apply -f FILE"),
    "gateway": ("Podway needs no gateway of its own", "its server publishes services: apply the service"),
    "volume": ("it is a disk for runs", "create it with: podway apply -f FILE"),
    "preset": ("Podway has no presets", "apply a file of type service"),
}

# Keys that only a dstack run has, and the type each gives away: what `read.py` knows a file without `type` by.
TELLING_KEYS = {
    "ide": "dev-environment",
    "init": "dev-environment",
    "inactivity_duration": "dev-environment",
    "port": "service",
    "model": "service",
    "replicas": "service",
    "probes": "service",
    "commands": "task",
    "nodes": "task",
}
