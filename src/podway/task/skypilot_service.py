"""The `service` section of a SkyPilot task file: probe, replicas, port, certificate."""

import msgspec

from podway.catalog.slices import find_slice, is_tpu_name
from podway.errors import UserError
from podway.task.endpoint_tls import read_tls
from podway.task.fields import Field
from podway.task.paths import LocalMachine
from podway.task.task import Probe, Resources, Scaling, ServiceSpec

# SkyServe's defaults, where they differ from the record's.
_DOWN_DELAY_S = 1200


def read_service(
    field: Field, resources: tuple[Resources, ...], local: LocalMachine, secrets: dict[str, str], notes: list[str]
) -> ServiceSpec:
    tls, policy = field.get("tls"), field.get("replica_policy")
    balancing = field.get("load_balancing_policy")
    fallback = policy.get("base_ondemand_fallback_replicas") if policy else None
    dynamic = policy.get("dynamic_ondemand_fallback") if policy else None
    return ServiceSpec(
        port=_port(field, resources),
        probes=(_probe(field.get("readiness_probe")),),
        scaling=_scaling(field, policy, notes),
        auth=False,  # SkyServe's endpoint asks for no token
        load_balancing=balancing.text().lower() if balancing else None,
        spot_fallback=fallback.integer() if fallback else 0,
        dynamic_fallback=dynamic.flag() if dynamic else False,
        tls=read_tls(tls, local, secrets) if tls else None,
    )


def _port(field: Field, resources: tuple[Resources, ...]) -> int:
    own = field.get("ports")
    if own:
        return own.integer()
    opened = {port for one in resources for port in one.ports}
    if len(opened) != 1 or "-" in next(iter(opened)):
        raise field.error(
            f"a service listens on one port, and {len(opened) or 'none'} is given",
            "add `ports: 8080` to service, with the port the program listens on",
        )
    return int(opened.pop())


def _probe(field: Field | None) -> Probe:
    if field is None:
        return Probe()
    if not field.is_mapping:
        return Probe(path=_probe_path(field))
    path = field.get("path")
    assert path is not None  # the shape requires it
    headers, data = field.get("headers"), field.get("post_data")
    given = {
        "timeout_s": field.get("timeout_seconds"),
        "interval_s": field.get("endpoint_probe_interval_seconds"),
        "initial_delay_s": field.get("initial_delay_seconds"),
        "fail_after_s": field.get("consecutive_failure_threshold_timeout"),
    }
    probe = Probe(
        path=_probe_path(path),
        method="POST" if data else "GET",
        headers={key: value.text() for key, value in headers.entries().items()} if headers else {},
        body=_json(data) if data else None,
    )
    return msgspec.structs.replace(probe, **{key: value.number() for key, value in given.items() if value})


def _probe_path(field: Field) -> str:
    path = field.words()
    if not path.startswith("/"):
        raise field.error(f"{field.found} is not a path", "begin it with /, such as /health")
    return path


def _json(field: Field) -> str:
    if field.is_mapping:
        return msgspec.json.encode(field.plain()).decode()
    try:
        return msgspec.json.encode(msgspec.json.decode(field.text())).decode()
    except (msgspec.DecodeError, RecursionError):
        raise field.error("the text is not JSON", "write JSON, or a mapping") from None


def _scaling(field: Field, policy: Field | None, notes: list[str]) -> Scaling:
    replicas = field.get("replicas")
    if policy is None:
        count = replicas.integer() if replicas else 1
        return Scaling(min_replicas=count, max_replicas=count)
    if replicas:
        raise replicas.error("replica_policy is given too", "keep one: replicas (fixed) or replica_policy")
    low, high, target = (policy.get(key) for key in ("min_replicas", "max_replicas", "target_qps_per_replica"))
    assert low is not None  # the shape requires it
    least = low.integer()
    most = high.integer() if high else least
    if high and most < least:
        raise high.error(f"max_replicas {most} is below min_replicas {least}", "raise the one or lower the other")
    if target and not high:
        raise target.error("max_replicas is missing", "say how many replicas there may be")
    if most != least and not target:
        raise policy.error("nothing says when to add replicas", "add target_qps_per_replica, or make min and max equal")
    up, down, spare = (
        policy.get(key) for key in ("upscale_delay_seconds", "downscale_delay_seconds", "num_overprovision")
    )
    return Scaling(
        min_replicas=least,
        max_replicas=most,
        target_qps=target.number() if target and not target.is_mapping else None,
        target_qps_by_type=_by_type(target, notes) if target and target.is_mapping else {},
        up_delay_s=int(up.number()) if up else 300,
        down_delay_s=int(down.number()) if down else _DOWN_DELAY_S,
        spare_replicas=spare.integer() if spare else 0,
    )


def _by_type(field: Field, notes: list[str]) -> dict[str, float]:
    """Targets by accelerator type; a GPU's is noted, since no replica here has one."""
    found: dict[str, float] = {}
    for name, target in field.entries().items():
        if not is_tpu_name(name):
            notes.append(f"{target.path}: {name} is not a TPU, so no replica is one")
            continue
        try:
            found[find_slice(name).accelerator_type] = target.number()
        except UserError as error:
            raise target.error(error.what.rstrip("."), error.hint) from None
    if not found:
        raise field.error("no target for a TPU", "add a line such as `tpu-v6e-8: 5`")
    return found
