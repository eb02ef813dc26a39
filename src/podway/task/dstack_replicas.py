"""The replica groups of a dstack service: replicas that differ, and a router in front of them.

- One group without a router is the service itself.
- Several groups are read each with its own commands, machines and scaling; what a group does not say, the run says.
- A group with `router` has one replica, which takes the requests and passes them to the replicas of the other groups, its workers.
  `smg` (or `sglang`, its older name) is told its workers by the server, at its own API; workers of `dynamo` find it by the address
  in DSTACK_ROUTER_INTERNAL_IP. What a router must know of a worker stands in the worker's commands.
"""

import re
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from podway.task.dstack_resources import read_resources
from podway.task.dstack_service import default_probes, read_probes, read_scaling
from podway.task.environment import Overrides
from podway.task.fields import Field, Layers
from podway.task.task import Probe, ReplicaGroup, RoutedWorker, ServedModel

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_MODE = re.compile(r"--disaggregation-mode[ =](prefill|decode)\b")
_BOOTSTRAP = re.compile(r"--disaggregation-bootstrap-port[ =]([0-9]{1,5})\b")
_KV_ROLE = re.compile(r"[\"']kv_role[\"']\s*:\s*[\"'](\w{1,40})[\"']")
_KV_CONNECTOR = re.compile(r"[\"']kv_connector[\"']\s*:\s*[\"'](\w{1,80})[\"']")
_KV_ROLES: Mapping[str, Literal["prefill", "decode"]] = {"kv_producer": "prefill", "kv_consumer": "decode"}
_GRPC = re.compile(r"--grpc-mode\b|\bgrpc_server\b")
_MOST_GROUPS = 20


class GroupScript(msgspec.Struct, frozen=True):
    """What the replicas of a group run, and with what."""

    run: str
    shell: str
    python: str | None


def read_replica_groups(
    listed: list[Field],
    root: Field,
    overrides: Overrides,
    script: Callable[[Layers], GroupScript],
    probe_words: tuple[ServedModel | None, Mapping[str, str], Mapping[str, str]],
    notes: list[str],
) -> tuple[ReplicaGroup, ...]:
    """() where the service's replicas are all alike. `probe_words`: the model, variables and secrets that probes speak of."""
    routers = [one for one in listed if one.get("router")]
    if len(listed) < 2 and not routers:
        return ()
    if len(listed) > _MOST_GROUPS:
        raise listed[_MOST_GROUPS].error(f"more than {_MOST_GROUPS} groups", "write several services")
    if len(routers) > 1:
        raise routers[1].error("a second router", "keep one group with `router`")
    if routers and len(listed) == 1:
        raise routers[0].error("nothing is behind this router", "add a group of replicas that it sends requests to")
    names = [_name(one, index) for index, one in enumerate(listed)]
    for name, one in zip(names, listed, strict=True):
        if names.count(name) > 1:
            raise one.error(f"several groups are called {name}", "give each a name of its own")
    asks = [_asks_for_chips(one) for one in listed]
    model, env, secrets = probe_words
    groups = []
    for name, one, chips in zip(names, listed, asks, strict=True):
        run, router = Layers(one, root), _router(one)
        # --tpus takes the place of the chips a file asks for; the machine of a router has none.
        takes = chips or (router is None and not any(asks))
        given = overrides if takes or overrides.tpus is None else msgspec.structs.replace(overrides, tpus="none")
        what = script(run)
        worker = RoutedWorker() if router else _worker(what.run)
        if worker.role != "regular" and not routers:
            raise one.error(
                f"replicas that do only the {worker.role} of a request work behind a router only",
                "add a group with `router: {type: smg}` and the command that starts it",
            )
        probes = read_probes(root.get("probes"), env, secrets)
        if probes is None:
            probes = _usual_probes(router, worker, model)
        groups.append(
            ReplicaGroup(
                name=name,
                resources=read_resources(run, given, notes),
                run=what.run,
                shell=what.shell,
                python=what.python,
                scaling=read_scaling(Layers(one)),
                probes=probes,
                router=router,
                worker=worker,
            )
        )
        scaling = groups[-1].scaling
        if router and (scaling.min_replicas, scaling.max_replicas) != (1, 1):
            at = one.get("replicas") or one.get("count") or one
            raise at.error("a service has one router", "write `replicas: 1` in the group with `router`")
    return tuple(groups)


def _name(group: Field, index: int) -> str:
    field = group.get("name")
    if field is None:
        return str(index)
    if not _NAME.fullmatch(field.text()):
        raise field.error(
            f"{field.found} cannot be the name of a group",
            "use small letters, digits and '-', at most 40, and begin with a letter or digit",
        )
    return field.text()


def _asks_for_chips(group: Field) -> bool:
    resources = group.get("resources")
    return resources is not None and resources.get("gpu") is not None


def _router(group: Field) -> Literal["smg", "dynamo"] | None:
    field = group.get("router")
    if field is None:
        return None
    kind = field.get("type") if field.is_mapping else field
    return "dynamo" if kind is not None and kind.text().lower() == "dynamo" else "smg"


def _worker(commands: str) -> RoutedWorker:
    """What a router must know of a worker, by the words of the engine it runs."""
    mode, bootstrap = _MODE.search(commands), _BOOTSTRAP.search(commands)
    kv_role, connector = _KV_ROLE.search(commands), _KV_CONNECTOR.search(commands)
    role = mode[1] if mode else _KV_ROLES.get(kv_role[1], "regular") if kv_role else "regular"
    engine = "sglang" if "sglang" in commands else "vllm" if "vllm" in commands else None
    return RoutedWorker(
        role=role,  # type: ignore[arg-type]  # one of the words of the patterns
        protocol="grpc" if _GRPC.search(commands) else "http",
        engine=engine,  # type: ignore[arg-type]
        bootstrap_port=int(bootstrap[1]) if bootstrap and role == "prefill" else None,
        kv_connector=connector[1] if connector else None,
        kv_role=kv_role[1] if kv_role else None,
    )


def _usual_probes(router: str | None, worker: RoutedWorker, model: ServedModel | None) -> tuple[Probe, ...]:
    """Without probes in the file: only what does a whole request by itself can be asked for a token."""
    whole = router is None and worker.role == "regular" and worker.protocol == "http"
    return default_probes(model) if whole else ()
