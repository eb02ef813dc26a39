"""What makes a dstack run a service: port, model, replicas, probes, limits."""

from collections.abc import Mapping

import msgspec

from podway.task.environment import interpolate
from podway.task.fields import Field, Layers
from podway.task.task import Probe, RateLimit, ReplicaGroup, Scaling, ServedModel, ServiceSpec
from podway.task.values import count_range, duration, port

# A dstack probe never gives a replica up; a day is our end of patience.
_READY_WITHIN_S = 86_400
_WINDOWS_S = (30, 60, 300)


def read_service(
    run: Layers,
    group: Field | None,
    groups: tuple[ReplicaGroup, ...],
    env: Mapping[str, str],
    secrets: Mapping[str, str],
) -> ServiceSpec:
    """`group`: the one group of a file that has one; `groups`: those that are told apart."""
    at = run.get("port")
    assert at is not None  # the shape requires it
    served = read_model(run)
    probes = read_probes(run.get("probes"), env, secrets)
    https, auth, strip = run.get("https"), run.get("auth"), run.get("strip_prefix")
    limits = run.get("rate_limits")
    return ServiceSpec(
        port=port(at),
        probes=default_probes(served) if probes is None else probes,
        scaling=read_scaling(Layers(group) if group else run),
        model=served,
        auth=auth.flag() if auth else True,
        https=https.flag() if https and https.is_flag else None,
        strip_prefix=strip.flag() if strip else True,
        rate_limits=_rate_limits(limits) if limits else (),
        groups=groups,
    )


def read_model(run: Layers) -> ServedModel | None:
    """The model the service offers, if it names one."""
    field = run.get("model")
    if field is None:
        return None
    if not field.is_mapping:
        return ServedModel(name=field.words())
    name, kind, prefix = field.get("name"), field.get("format"), field.get("prefix")
    template, end = field.get("chat_template"), field.get("eos_token")
    assert name is not None  # the shape requires it
    tgi = kind is not None and kind.text().lower() == "tgi"
    for only_tgi in filter(None, (template, end)):
        if not tgi:
            raise only_tgi.error("only models of format tgi have it", "remove it, or set format: tgi")
    if prefix and tgi:
        raise prefix.error("a model of format tgi has no prefix", "remove it, or set format: openai")
    return ServedModel(
        name=name.words(),
        format="tgi" if tgi else "openai",
        prefix="/" + prefix.words().strip("/") if prefix else "/v1",
        chat_template=template.text() if template else None,
        eos_token=end.text() if end else None,
    )


def read_scaling(source: Layers) -> Scaling:
    """How many replicas a service or one of its groups keeps."""
    replicas = source.get("count") or source.get("replicas")
    rules = source.get("scaling")
    wanted = count_range(replicas) if replicas else None
    if replicas and wanted and wanted.high is None:
        raise replicas.error("the most replicas is missing", "write both ends: 0..4")
    low, high = (int(wanted.low or 0), int(wanted.high or 0)) if wanted else (1, 1)
    if low != high and rules is None and replicas:
        raise replicas.error("a range of replicas needs `scaling`", "add scaling with metric: rps and a target")
    if rules is None:
        return Scaling(min_replicas=low, max_replicas=high)
    if low == high:
        raise rules.error("scaling needs a range of replicas", "write replicas: 1..4, or remove scaling")
    target, window = rules.get("target"), rules.get("window")
    up, down = rules.get("scale_up_delay"), rules.get("scale_down_delay")
    assert target is not None  # the shape requires it
    seconds = duration(window) if window else 60
    if window and seconds not in _WINDOWS_S:
        raise window.error(f"{window.found} is not a window requests are counted over", "write 30s, 60s or 300s")
    metric = rules.get("metric")
    assert metric is not None  # the shape requires it
    by_rate = metric.text().lower() == "rps"
    return Scaling(
        min_replicas=low,
        max_replicas=high,
        metric="rps" if by_rate else metric.text().lower(),  # type: ignore[arg-type]  # the shape allows no other
        target=None if by_rate else target.number(),
        target_qps=target.number() if by_rate else None,
        window_s=seconds,
        up_delay_s=duration(up) if up else 300,
        down_delay_s=duration(down) if down else 600,
    )


def read_probes(field: Field | None, env: Mapping[str, str], secrets: Mapping[str, str]) -> tuple[Probe, ...] | None:
    """The file's probes; None where it says nothing of them."""
    return None if field is None else tuple(_probe(one, env, secrets) for one in field.items())


def default_probes(model: ServedModel | None) -> tuple[Probe, ...]:
    """Without probes in the file, a service with an OpenAI model is asked for one token."""
    if model is None or model.format != "openai":
        return ()
    question = {"model": model.name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return (
        Probe(
            path=f"{model.prefix}/chat/completions",
            method="POST",
            headers={"Content-Type": "application/json"},
            body=msgspec.json.encode(question).decode(),
            timeout_s=30,
            interval_s=15,
            initial_delay_s=_READY_WITHIN_S,
        ),
    )


def _probe(field: Field, env: Mapping[str, str], secrets: Mapping[str, str]) -> Probe:
    def filled(part: Field, *, sealed: bool = False) -> str:
        """`sealed`: secrets stay in the text by name, for the server to fill in when it probes."""

        def known(name: str) -> str | None:
            space, _, variable = name.partition(".")
            if space == "secrets" or (space == "env" and variable in secrets):
                if sealed and variable in secrets:
                    return f"${{{variable}}}"
                if sealed:
                    raise part.error(f"the secret {variable} has no value", f"give it with `--secret {variable}`")
                raise part.error(
                    f"the secret {variable} cannot be used here: this part of a probe is stored and shown",
                    "put it into a header, or give it as a plain variable if it may be seen",
                )
            return env.get(variable) if space == "env" else None

        return interpolate(part, part.text(), known)

    url, method, body = field.get("url"), field.get("method"), field.get("body")
    path = filled(url) if url else "/"
    if url and not path.startswith("/"):
        raise url.error(f"{url.found} is not a path", "begin it with /, such as /health")
    verb = method.text().upper() if method else "GET"
    if body and verb in ("GET", "HEAD"):
        raise body.error(f"a {verb} request has no body", "set method: post")
    headers: dict[str, str] = {}
    listed = field.get("headers")
    for header in listed.items() if listed else ():
        name, value = header.get("name"), header.get("value")
        assert name is not None and value is not None  # the shape requires them
        headers[name.words()] = filled(value, sealed=True)
    timeout, interval = field.get("timeout"), field.get("interval")
    ready, until = field.get("ready_after"), field.get("until_ready")
    return Probe(
        path=path,
        method=verb,
        headers=headers,
        body=filled(body) if body else None,
        timeout_s=_at_least_a_second(timeout, 10),
        interval_s=_at_least_a_second(interval, 15),
        initial_delay_s=_READY_WITHIN_S,
        ready_after=ready.integer() if ready else 1,
        until_ready=until.flag() if until else False,
    )


def _at_least_a_second(field: Field | None, default: int) -> int:
    seconds = duration(field) if field else default
    if field and seconds < 1:
        raise field.error("a probe needs at least a second", "write 1s or more")
    return seconds


def _rate_limits(field: Field) -> tuple[RateLimit, ...]:
    found: dict[str, RateLimit] = {}
    for one in field.items():
        prefix, key, rps, burst = (one.get(name) for name in ("prefix", "key", "rps", "burst"))
        assert rps is not None  # the shape requires it
        kind = key.get("type") if key else None
        header = key.get("header") if key else None
        by_header = kind is not None and kind.text().lower() == "header"
        if key and by_header != (header is not None):
            raise key.error("`type: header` and `header:` go together", "name the header, or use type: ip_address")
        path = prefix.text() if prefix else "/"
        if path in found:
            raise one.error(f"a second limit for {path}", "keep one limit for each prefix")
        found[path] = RateLimit(
            prefix=path,
            key="header" if by_header else "ip_address",
            header=header.text() if header else None,
            rps=rps.number(),
            burst=burst.integer() if burst else 0,
        )
    return tuple(found.values())
