"""Service Usage: the quotas of a project, as metrics with limits by zone. Only what reads them is there.

Names of metrics are Google's where they were seen (v5e is `tpu-v5s-litepod`), the others are made after them. As Google's answers do,
a limit of 0 is left out, and -1 means unlimited.
"""

from urllib.parse import quote

from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import project_number
from podway.sandbox.status import ApiError, invalid
from podway.sandbox.tpu.capacity import Capacity, QuotaKind, quota_kinds
from podway.sandbox.tpu.shapes import zones

SERVICE = "tpu.googleapis.com"
_PAGE = 1000
_METRICS = {"v5e": "v5s-litepod", "tpu7x": "7x"}


def list_metrics(capacity: Capacity, project: str, service: str, query: dict[str, str]) -> JsonObject:
    """A page of `services.consumerQuotaMetrics.list`."""
    if service != SERVICE:
        raise ApiError("NOT_FOUND", f"Service '{service}' was not found or is not enabled for project '{project}'.")
    try:
        size, start = int(query.get("pageSize") or _PAGE), int(query.get("pageToken") or 0)
    except ValueError:
        raise invalid("pageSize and pageToken must be numbers.") from None
    kinds = quota_kinds()
    size = size if 0 < size <= _PAGE else _PAGE
    page: JsonObject = {"metrics": [_metric(capacity, project, kind) for kind in kinds[start : start + size]]}
    if start + size < len(kinds):
        page["nextPageToken"] = str(start + size)
    return page


def _metric(capacity: Capacity, project: str, kind: QuotaKind) -> JsonObject:
    short = f"tpu-{_METRICS.get(kind.generation, kind.generation)}{'-pod' * kind.pod}{'-preemptible' * kind.spot}"
    metric = f"{SERVICE}/{short}"
    name = f"projects/{project_number(project)}/services/{SERVICE}/consumerQuotaMetrics/{quote(metric, safe='')}"
    default, places = capacity.limits_of(kind.name)
    buckets = [_bucket(-1 if default is None else default)]
    buckets += [{**_bucket(limit), "dimensions": {"zone": zone}} for zone, limit in sorted(places.items())]
    limit = {
        "name": f"{name}/limits/%2Fproject%2Fzone",
        "metric": metric,
        "unit": "1/{project}/{zone}",
        "isPrecise": True,
        "quotaBuckets": buckets,
        "supportedLocations": list(zones()),
    }
    words = f"{'Preemptible ' * kind.spot}TPU {kind.generation}{' pod' * kind.pod} cores"
    return {"name": name, "metric": metric, "displayName": words, "unit": "1", "consumerQuotaLimits": [limit]}


def _bucket(limit: int) -> JsonObject:
    return {"effectiveLimit": str(limit), "defaultLimit": str(limit)} if limit else {}
