"""Every key of a dstack configuration of type fleet; see `dstack_keys.py`."""

from podway.task.dstack_keys import PROFILE, RESOURCES
from podway.task.shapes import Anything, Either, Key, ListOf, Table, Text, Whole

_RUN_ONLY = "it is about a run, not about a fleet"
_NOT_SPLIT = "the chips of a host are not divided among jobs"
_PORT = Whole(minimum=1, maximum=65535)


def _about(shape: Table | Text | Whole | ListOf | Either | Anything, about: str, note: str | None = None) -> Key:
    return Key(shape=shape, about=about, note=note)


_JUMP = Table(
    keys={
        "hostname": _about(Text(), "Its address."),
        "user": _about(Text(), "Who logs in there."),
        "port": _about(_PORT, "Of its sshd (22)."),
        "identity_file": _about(Text(), "The key.", note="the key for a jump host is that of your ssh config or agent"),
    },
    required=("hostname",),
)
_LOGIN = {
    "user": _about(Text(), "Who logs in."),
    "port": _about(_PORT, "Of sshd (22)."),
    "identity_file": _about(Text(), "The private key, on the machine where the Podway server runs."),
    "proxy_jump": _about(_JUMP, "The host through which the machines are reached."),
}
_HOST = Either(
    options=(
        Table(
            keys={
                "hostname": _about(Text(), "The machine's address."),
                **_LOGIN,
                "internal_ip": _about(Text(), "Its address among the others."),
                "blocks": _about(Anything(), "Parts to divide it into.", note=_NOT_SPLIT),
            },
            required=("hostname",),
        ),
        Text(form="an address"),
    )
)
SSH_CONFIG = Table(
    keys={
        **_LOGIN,
        "hosts": _about(ListOf(item=_HOST), "The machines."),
        "network": _about(Text(), "The network they share.", note="hosts talk at the address each is reached at"),
    },
    required=("hosts",),
)

FLEET = Table(
    keys={
        **PROFILE,
        **{
            name: _about(Anything(), "About runs.", note=_RUN_ONLY)
            for name in (
                "max_duration",
                "stop_duration",
                "creation_policy",
                "startup_order",
                "stop_criteria",
                "schedule",
            )
        },
        "type": _about(Text(), "fleet."),
        "name": _about(Text(), "Its name, by which runs name it under `fleets`."),
        "nodes": _about(
            Either(
                options=(
                    Table(
                        keys={
                            "min": _about(Whole(minimum=0), "How many are always kept."),
                            "target": _about(Whole(minimum=0), "How many are made at once."),
                            "max": _about(Whole(minimum=1), "How many there may be."),
                        }
                    ),
                    Text(form="a number or a range such as 0..2"),
                )
            ),
            "How many slices: each is a worker.",
        ),
        "placement": _about(Text(choices=("any", "cluster")), "cluster: all nodes are one worker."),
        "resources": _about(RESOURCES, "What each node is."),
        "ssh_config": _about(SSH_CONFIG, "Machines reached over ssh, instead of nodes of a cloud."),
        "blocks": _about(Anything(), "Parts to divide each node into.", note=_NOT_SPLIT),
        "env": _about(Anything(), "Variables of the runs.", note="give them to the runs, with env or --env"),
        "description": _about(Text(), "About it."),
    },
    required=("type",),
)
