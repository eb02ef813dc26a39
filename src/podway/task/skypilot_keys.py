"""Every key of a SkyPilot task file: its shape, its meaning, and whether it has an effect here.

`TASK` is the table `skypilot.py` reads by and `schema.py` prints. A key with a `note` is read and reported as having no
effect; a key with `refuse` would mean something else, or nothing, if it were ignored, so the file is refused.
"""

from podway.task.shapes import Anything, Either, Flag, Key, ListOf, MapOf, Number, Shape, Table, Text, Whole
from podway.task.values import ENV_NAME, SKY_SIZE, SKY_TIME

# `type:` of SkyPilot's volume files, which are not tasks.
VOLUME_TYPES = ("k8s-pvc", "k8s-hostpath", "runpod-network-volume")

_INTERNAL = "SkyPilot writes it for itself"
_SIZE = Text(pattern=SKY_SIZE, form="a size in GB, or with a unit")
_STRATEGIES = ("EAGER_NEXT_REGION", "FAILOVER", "none")
_NO_HOOKS = (
    "Podway runs no lifecycle hooks",
    "trap SIGTERM in `run`: it is sent before a host goes, or save as you go",
)


def _about(shape: Shape, about: str, note: str | None = None, refuse: tuple[str, str] | None = None) -> Key:
    return Key(shape=shape, about=about, note=note, refuse=refuse)


_AUTOSTOP = Either(
    options=(
        Flag(),
        Text(pattern=SKY_TIME, form="minutes, or a time such as 10h"),
        Table(
            keys={
                "idle_minutes": _about(Whole(minimum=0), "Minutes without a job before the cluster stops."),
                "down": _about(Flag(), "Take the cluster down instead of stopping it."),
                "wait_for": _about(Text(choices=("jobs_and_ssh", "jobs", "none")), "What counts as being in use."),
                "hook": _about(Text(), "A script to run before stopping.", refuse=_NO_HOOKS),
                "hook_timeout": _about(Whole(minimum=1), "Seconds the hook may take.", refuse=_NO_HOOKS),
            }
        ),
    )
)

_EXIT_CODE = Whole(minimum=0, maximum=255)
_RECOVERY = Either(
    options=(
        Table(
            keys={
                "strategy": _about(Text(choices=_STRATEGIES), "Where to look for capacity first."),
                "max_restarts_on_errors": _about(Whole(minimum=0), "Restarts when the program itself fails."),
                "recover_on_exit_codes": _about(
                    Either(options=(_EXIT_CODE, ListOf(item=_EXIT_CODE))), "Exit codes that count as an interruption."
                ),
            }
        ),
        Text(choices=_STRATEGIES),
    )
)

_DISK = Table(
    keys={
        "name": _about(Text(), "The existing disk."),
        "path": _about(Text(), "Where it is mounted."),
        "storage_type": _about(Text(choices=("network", "instance")), "A network disk, or one of the host's own."),
        "attach_mode": _about(Text(choices=("read_only", "read_write")), "Whether it is written to."),
        "disk_size": _about(Either(options=(Whole(minimum=1), _SIZE)), "Its size, in GB."),
        "disk_tier": _about(Text(), "Its speed class.", note="the provider's default class is used"),
        "auto_delete": _about(Flag(), "Delete it with the cluster.", note="an existing disk is never deleted"),
    },
    required=("path",),
)

_ACCELERATOR_ARGS = Table(
    keys={
        "runtime_version": _about(Text(), "The TPU software version; the generation's default when absent."),
        "tpu_vm": _about(Flag(), "true (the default): a TPU VM. false: a legacy TPU Node, with a host VM."),
        "tpu_name": _about(Text(), "The name of the TPU Node."),
        "gcp_queued_resource": _about(Flag(), "Ask for the slice as a queued resource."),
        "topology": _about(Text(), "Podway's own: the shape of the slice, such as 4x4 or 4x4x8."),
        "reservation": _about(Text(), "Podway's own: the reservation to take the slice from."),
        "best_effort": _about(Flag(), "Podway's own: idle capacity that may be taken back, as a queued resource."),
    }
)

_ACCELERATORS = Either(
    options=(
        ListOf(item=Text(form="a TPU such as tpu-v6e-8")),
        MapOf(value=Number(), nullable=True),
        Text(form="a TPU such as tpu-v6e-8"),
    )
)

_RESOURCES_KEYS: dict[str, Key] = {
    "accelerators": _about(
        _ACCELERATORS, "The slice: tpu-v6e-8; a list is tried in order, a set {a, b} cheapest first."
    ),
    "gpus": _about(_ACCELERATORS, "Another name of `accelerators`."),
    "accelerator_args": _about(_ACCELERATOR_ARGS, "More about the slice."),
    "infra": _about(Text(), "Where: cloud[/region[/zone]], `*` for any: gcp/us-east5, local."),
    "cloud": _about(Text(), "The cloud; `infra` says the same."),
    "region": _about(Text(), "The region; `infra` says the same."),
    "zone": _about(Text(), "The zone; `infra` says the same."),
    "use_spot": _about(Flag(), "Spot capacity, which may be taken away."),
    "max_hourly_cost": _about(Number(above=0), "At most this many dollars an hour for one slice."),
    "instance_type": _about(Text(), "The host's machine type: TPU-VM, or n1-... for a TPU Node."),
    "cpus": _about(Text(form="a number or `N+`"), "Host CPUs: 8, or 8+ for at least 8."),
    "memory": _about(Text(form="a number or `N+`"), "Host memory in GB: 32, or 32+."),
    "disk_size": _about(_SIZE, "Disk in GB, or with a unit: 256, 1Ti."),
    "ephemeral_storage": _about(_SIZE, "The old name of disk_size."),
    "disk_tier": _about(
        Text(choices=("low", "medium", "high", "ultra", "best", "none")),
        "Speed class of the disk.",
        note="the boot disk of a TPU host has one class",
    ),
    "network_tier": _about(
        Text(choices=("standard", "best")), "Network class.", note="a TPU host has the network of its slice"
    ),
    "local_disk": _about(Text(), "A local SSD.", note="TPU hosts have none"),
    "image_id": _about(Either(options=(MapOf(value=Text()), Text())), "An image, docker:NAME, or one for each region."),
    "ports": _about(
        Either(options=(ListOf(item=Text(form="a port")), Text(form="a port"))),
        "Ports to open: 8080, 8000-8010, a list.",
    ),
    "labels": _about(MapOf(value=Text()), "Labels put on what is created."),
    "autostop": _about(_AUTOSTOP, "Stop an idle cluster: true (5 minutes), minutes, 10h, or a mapping."),
    "job_recovery": _about(_RECOVERY, "What brings a managed job back."),
    "spot_recovery": _about(_RECOVERY, "The old name of job_recovery."),
    "priority": _about(Whole(minimum=-1000, maximum=1000), "Jobs of higher priority go first."),
    "priority_class": _about(Text(), "The priority class of the pods, on Kubernetes."),
    "volumes": _about(ListOf(item=_DISK), "Existing disks to attach."),
    "hooks": _about(Anything(), "Scripts run before a stop.", refuse=_NO_HOOKS),
    **{
        name: _about(Anything(), "Internal.", note=_INTERNAL)
        for name in (
            "_no_missing_accel_warnings",
            "_docker_login_config",
            "_is_image_managed",
            "_requires_fuse",
            "_cluster_config_overrides",
        )
    },
}
_ONE_OF_SEVERAL = ListOf(item=Table(keys=_RESOURCES_KEYS))
_RESOURCES = Table(
    keys={
        **_RESOURCES_KEYS,
        "any_of": _about(_ONE_OF_SEVERAL, "Alternatives, cheapest first; each inherits the keys beside any_of."),
        "ordered": _about(_ONE_OF_SEVERAL, "Alternatives, in this order; each inherits the keys beside ordered."),
    }
)

STORES = ("gcs", "s3", "azure", "r2", "ibm", "oci", "nebius", "coreweave", "vastdata", "hf", "volume")
_CACHE_KEYS = {
    "transfers": _about(Whole(minimum=1), "Transfers at once."),
    "vfs_read_chunk_streams": _about(Whole(minimum=0), "Streams of a chunked read."),
    "read_only": _about(Flag(), "Mount it read-only."),
    **{
        name: _about(Text(), "Tuning of the cache.")
        for name in (
            "buffer_size",
            "vfs_cache_max_size",
            "vfs_cache_max_age",
            "vfs_read_ahead",
            "vfs_read_chunk_size",
            "vfs_write_back",
        )
    },
}
_STORAGE = Table(
    keys={
        "name": _about(Text(), "The bucket; created when absent."),
        "source": _about(
            Either(options=(ListOf(item=Text()), Text())),
            "A gs://, s3:// or hf:// address, or local files to put into the bucket.",
        ),
        "store": _about(Text(choices=STORES), "Where the bucket is: gcs; s3 and hf to copy from."),
        "mode": _about(Text(choices=("MOUNT", "COPY", "MOUNT_CACHED")), "How it appears; MOUNT when absent."),
        "persistent": _about(Flag(), "Keep the bucket when the cluster goes (true)."),
        "type": _about(
            Text(choices=("MODEL_CHECKPOINT_RO", "MODEL_CHECKPOINT_RW", "DATASET_RO", "DATASET_RW")),
            "What it holds, which picks a mode.",
        ),
        "mount_options": _about(Text(), "Options of the mount program."),
        "config": _about(
            Table(
                keys={
                    "mount_cached": _about(Table(keys=_CACHE_KEYS), "Tuning of MOUNT_CACHED."),
                    "mount": _about(
                        Table(
                            keys={
                                "read_only": _about(Flag(), "Mount it read-only."),
                                "hf_mount_args": _about(
                                    ListOf(item=Text()),
                                    "For `hf` stores.",
                                    note="a repository of the hub is copied, not mounted",
                                ),
                            }
                        ),
                        "Tuning of MOUNT.",
                    ),
                    "disk_size": _about(_SIZE, "Size of a new volume."),
                    "disk_tier": _about(Text(), "Class of a new volume.", note="the provider's default class is used"),
                    "storage_type": _about(Text(), "Kind of a volume.", note="a volume is a network disk here"),
                    "attach_mode": _about(Text(choices=("read_only", "read_write")), "Whether it is written to."),
                }
            ),
            "Tuning.",
        ),
        **{
            name: _about(Anything(), "Internal.", note=_INTERNAL)
            for name in ("_is_sky_managed", "_bucket_sub_path", "_force_delete")
        },
    }
)

_PROBE = Either(
    options=(
        Table(
            keys={
                "path": _about(Text(), "The path asked for; begins with /."),
                "initial_delay_seconds": _about(Number(minimum=0), "How long a replica may take to start (1200)."),
                "timeout_seconds": _about(Number(above=0), "How long an answer may take (15)."),
                "endpoint_probe_interval_seconds": _about(Number(above=0), "Between two probes (10)."),
                "consecutive_failure_threshold_timeout": _about(
                    Number(above=0), "Unanswered this long, a replica is replaced."
                ),
                "post_data": _about(
                    Either(options=(MapOf(value=Anything(), nullable=True), Text())), "POST this JSON."
                ),
                "headers": _about(MapOf(value=Text()), "Headers to send."),
            },
            required=("path",),
        ),
        Text(form="a path such as /health"),
    )
)
_QPS = Number(above=0)
_REPLICA_POLICY = Table(
    keys={
        "min_replicas": _about(Whole(minimum=0), "At least this many."),
        "max_replicas": _about(Whole(minimum=0), "At most this many."),
        "target_qps_per_replica": _about(
            Either(options=(MapOf(value=_QPS), _QPS)), "Requests a second for a replica, or for each kind of slice."
        ),
        "num_overprovision": _about(Whole(minimum=0), "Replicas kept above that."),
        "upscale_delay_seconds": _about(Number(minimum=0), "Wait before adding (300)."),
        "downscale_delay_seconds": _about(Number(minimum=0), "Wait before removing (1200)."),
        "base_ondemand_fallback_replicas": _about(Whole(minimum=0), "On-demand replicas beside spot ones."),
        "dynamic_ondemand_fallback": _about(Flag(), "On-demand replicas while spot ones are missing."),
        "spot_placer": _about(Text(), "Where spot replicas go.", note="zones are tried by price and past success"),
    },
    required=("min_replicas",),
)
_POOL = (
    "a pool of workers is not a task",
    "make it with: podway apply -f FILE; its jobs take a worker with: podway launch --pool NAME FILE",
)
_SERVICE = Table(
    keys={
        "readiness_probe": _about(_PROBE, "How to tell that a replica is ready."),
        "ports": _about(Whole(minimum=1, maximum=65535), "The port a replica listens on."),
        "replicas": _about(Whole(minimum=0), "A fixed number of replicas."),
        "replica_policy": _about(_REPLICA_POLICY, "A number of replicas that follows the load."),
        "load_balancing_policy": _about(
            Text(choices=("round_robin", "least_load", "instance_aware_least_load")), "Which replica answers."
        ),
        "load_balancer": _about(
            Table(keys={"stream_timeout_seconds": _about(Number(above=0), "Longest silence of a stream.")}),
            "Tuning of the balancer.",
            note="the gateway's own time limits are used",
        ),
        "tls": _about(
            Table(
                keys={
                    "keyfile": _about(Text(), "The private key (PEM), without a passphrase."),
                    "certfile": _about(Text(), "The certificate, followed by those that signed it (PEM)."),
                },
                required=("keyfile", "certfile"),
            ),
            "The endpoint takes HTTPS only, with this key and certificate.",
        ),
        "pool": _about(Anything(), "A pool of workers.", refuse=_POOL),
        "workers": _about(Anything(), "A pool of workers.", refuse=_POOL),
    }
)

_VOLUME = Either(
    options=(
        Table(
            keys={
                "name": _about(Text(), "The volume."),
                "size": _about(_SIZE, "Make one of this size, for as long as the cluster lives."),
                "sub_path": _about(Text(), "Only this directory of the volume, made if need be."),
                "type": _about(Text(), "Kind of a new volume.", note="the provider's own kind is used"),
                "labels": _about(MapOf(value=Text()), "Labels of a new volume.", note="a volume is not labelled"),
                "config": _about(Anything(), "Tuning of a new volume.", note="the provider's defaults are used"),
            }
        ),
        Text(form="the name of a volume"),
    )
)

TASK = Table(
    keys={
        "name": _about(Text(), "A name for the task; its log lines begin with it."),
        "workdir": _about(
            Either(
                options=(
                    Table(
                        keys={
                            "url": _about(Text(), "The git repository."),
                            "ref": _about(Text(), "A branch, tag or commit."),
                        },
                        required=("url",),
                    ),
                    Text(form="a path"),
                )
            ),
            "A directory (relative to where the command is typed) or git repository, put on every host.",
        ),
        "num_nodes": _about(Whole(minimum=1, maximum=10_000), "How many slices; each has its own hosts."),
        "resources": _about(_RESOURCES, "What to run on."),
        "setup": _about(Text(), "Bash, run on every host at launch, before `run`."),
        "run": _about(Text(), "Bash, run on every host."),
        "envs": _about(
            MapOf(value=Text(), key=ENV_NAME, nullable=True), "Environment variables; null: must be given with --env."
        ),
        "secrets": _about(
            Either(options=(ListOf(item=Text()), MapOf(value=Text(), key=ENV_NAME, nullable=True))),
            "As envs, but hidden; null: must be given with --secret.",
        ),
        "file_mounts": _about(
            MapOf(value=Either(options=(_STORAGE, Text(form="a path or address")))),
            "Files and buckets, by path on the host.",
        ),
        "volumes": _about(MapOf(value=_VOLUME), "Volumes, by path on the host."),
        "service": _about(_SERVICE, "Replicas behind one address."),
        "config": _about(MapOf(value=Anything(), nullable=True), "Settings of SkyPilot for this task."),
        "pool": _about(Anything(), "A pool of workers.", refuse=_POOL),
        "managed_secrets": _about(
            Anything(),
            "Secrets of SkyPilot's server.",
            refuse=(
                "there is no store of managed secrets",
                "list the names under `secrets` and give them with --secret",
            ),
        ),
        "event_callback": _about(
            Text(), "A script run when a job changes state.", note="no callback is run; `podway logs` follows a job"
        ),
        "inputs": _about(MapOf(value=Number()), "Size of the input.", note="it steers SkyPilot's optimizer only"),
        "outputs": _about(MapOf(value=Number()), "Size of the output.", note="it steers SkyPilot's optimizer only"),
        "api_server_access": _about(
            Flag(), "Whether the job may call SkyPilot's server.", note="a job has no access to Podway's server"
        ),
        "experimental": _about(Anything(), "Settings of old SkyPilot versions.", note=_INTERNAL),
        **{
            name: _about(Anything(), "Internal.", note=_INTERNAL)
            for name in ("file_mounts_mapping", "volume_mounts", "_metadata", "_user_specified_yaml")
        },
    }
)
