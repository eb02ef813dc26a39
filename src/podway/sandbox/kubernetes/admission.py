"""What the real server refuses besides the schema, in its words: names, labels, sizes, and what JobSet's own webhooks fill in and deny."""

import re
from typing import Any

Fields = dict[str, Any]

LONGEST = 63  # of a label, and of a host's name
MOST_DATA = 1 << 20
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_NAMES = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an "
    f"alphanumeric character (e.g. 'example.com', regex used for validation is '{_SUBDOMAIN.pattern}')"
)
_LABELS = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an "
    "alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)
# A kind with rules of its own (CEL) is told of when they could not be asked.
UNCHECKED = (
    "<nil>: Invalid value: null: some validation rules were not checked because the object was invalid; correct the existing errors "
    "to complete validation"
)


def with_defaults(plural: str, body: Fields) -> Fields:
    """JobSet's webhook gives rules a name."""
    policy = (body.get("spec") or {}).get("failurePolicy") if plural == "jobsets" else None
    if not policy or not policy.get("rules"):
        return body
    rules = [{"name": f"failurePolicyRule{number}", **rule} for number, rule in enumerate(policy["rules"])]
    return {**body, "spec": {**body["spec"], "failurePolicy": {**policy, "rules": rules}}}


def metadata_problems(body: Fields) -> list[str]:
    """A name and labels that Kubernetes cannot have."""
    metadata = body.get("metadata") or {}
    found = []
    name = metadata.get("name")
    if not name:
        found.append("metadata.name: Required value: name or generateName is required")
    elif not _SUBDOMAIN.fullmatch(name):
        found.append(f'metadata.name: Invalid value: "{name}": {_NAMES}')
    for value in (metadata.get("labels") or {}).values():
        if not _LABEL.fullmatch(value):
            found.append(f'metadata.labels: Invalid value: "{value}": {_LABELS}')
    return found


def too_large(plural: str, body: Fields) -> bool:
    """More than a ConfigMap can hold: what it holds is counted, not how it is written."""
    if plural != "configmaps":
        return False
    plain = sum(len(value.encode()) for value in (body.get("data") or {}).values())
    packed = sum(len(value) * 3 // 4 for value in (body.get("binaryData") or {}).values())
    return plain + packed > MOST_DATA


def jobset_problems(body: Fields) -> list[str]:
    """What JobSet's webhook denies of a JobSet that its schema allows."""
    spec, name = body["spec"], body["metadata"]["name"]
    found = []
    for index, job in enumerate(spec["replicatedJobs"]):
        last = int(job.get("replicas", 1)) - 1
        longest = f"{name}-{job['name']}-{last}"
        field = f'spec.replicatedJobs[{index}].name: Invalid value: "{longest}": JobSet name is too long,'
        if len(longest) > LONGEST:
            found.append(f"{field} job names generated for this JobSet will exceed {LONGEST} characters")
        completions = job["template"]["spec"].get("completions")
        if completions is not None and len(f"{longest}-{int(completions) - 1}-abcde") > LONGEST:
            found.append(f"{field} pod names generated for this JobSet will exceed {LONGEST} characters")
    for rule in (spec.get("failurePolicy") or {}).get("rules") or ():
        if not _RULE.fullmatch(rule["name"]):
            found.append(
                f"<nil>: Internal error: invalid failure policy rule name '{rule['name']}', a failure policy rule name must start "
                "with an alphabetic character, optionally followed by a string of alphanumeric characters or '_,:', and must end "
                "with an alphanumeric character or '_'"
            )
    return found


def listed(found: list[str]) -> str:
    """Several stand in brackets."""
    return found[0] if len(found) == 1 else f"[{', '.join(found)}]"
