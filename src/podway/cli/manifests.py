"""A request for Kubernetes as the YAML that `kubectl apply -f -` takes."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from podway.task.task import Task, environment_secrets
from podway.terminal import visible


class _Dumper(yaml.SafeDumper):
    """Scripts as blocks, so that people can read them."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def as_yaml(request: dict[str, Any], task: Task) -> str:
    """The request's objects, one document each. Secrets and the ConfigMap with the agent are not among them: comments say so."""
    made = [step["body"] for step in request["steps"] if step["verb"] == "create"]
    bodies = [body for body in made if "binaryData" not in body]
    pools = [step for step in request["steps"] if step["verb"] != "create"]
    secrets = "".join(_secret_comment(body, task) for body in bodies if body["kind"] == "JobSet")
    agents = "".join(
        f"# A launch also makes the ConfigMap {body['metadata']['name']}, with the program that runs jobs in the pods.\n"
        for body in made
        if "binaryData" in body
    )
    return _pool_comment(pools) + agents + secrets + objects_as_yaml(bodies)


def objects_as_yaml(bodies: Sequence[Any]) -> str:
    """One document each."""
    return yaml.dump_all(bodies, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=1000, allow_unicode=True)


def _pool_comment(steps: Sequence[dict[str, Any]]) -> str:
    """Node pools are not Kubernetes' objects: what a launch asks Kubernetes Engine for."""
    if not steps:
        return ""
    lines = [f"#   {step['target']}: {json.dumps(step['body'])}" for step in steps]
    return "\n".join(["# Node pools that a launch makes where the cluster has none for these slices:", *lines, ""])


def _secret_comment(jobset: dict[str, Any], task: Task) -> str:
    pod, registry = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"], task.registry
    name, where = jobset["metadata"]["name"], f"-n {jobset['metadata']['namespace']}"
    commands = []
    if any("envFrom" in one for one in pod["containers"]):  # a cluster's jobs get theirs by the agent
        values = " ".join(f'--from-literal={key}="${key}"' for key in sorted(environment_secrets(task)))
        commands.append(f"kubectl create secret generic {name} {where} {values}")
    own = [one["name"] for one in pod.get("imagePullSecrets") or () if one["name"].startswith(f"{name}-")]
    if registry is not None and own:
        from podway.images.login import login_key  # few tasks have a registry of their own

        server = shlex.quote(login_key(registry.server, pod["containers"][0]["image"]))
        login = f'--docker-username={shlex.quote(registry.username)} --docker-password="${registry.password_secret}"'
        commands.append(f"kubectl create secret docker-registry {own[0]} {where} --docker-server={server} {login}")
    if not commands:
        return ""
    # One line each, whatever a name holds: what follows a line break would be read as a part of the YAML.
    return "# Secrets are not printed; make them first:\n" + "".join(f"#   {visible(one)}\n" for one in commands)
