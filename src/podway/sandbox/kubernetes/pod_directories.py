"""The directories of this machine that stand for a pod's volumes: its own, those of a ConfigMap, and what outlives pods.

A bucket is one directory for all pods, of which `only-dir` shows a part; a claim is one for all pods that name it.
"""

import base64
from pathlib import Path

from podway.providers.gke.api import Fields, KubernetesApi


def directory_of(api: KubernetesApi, place: Path, pod: Fields, volume: Fields) -> Path:
    """Where a volume of a pod is, with what is in it from the start."""
    namespace = pod["metadata"]["namespace"]
    directory: Path = place / pod["metadata"]["uid"] / "volumes" / str(volume["name"])
    if "csi" in volume:
        attributes = volume["csi"]["volumeAttributes"]
        options = dict(one.partition("=")[::2] for one in attributes.get("mountOptions", "").split(","))
        directory = place / "buckets" / attributes["bucketName"] / options.get("only-dir", "")
    elif "persistentVolumeClaim" in volume:
        directory = place / "claims" / namespace / volume["persistentVolumeClaim"]["claimName"]
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o777)
    if "configMap" in volume:
        found = api.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/{volume['configMap']['name']}")
        for name, text in (found.get("data") or {}).items():
            (directory / name).write_text(text)
        for name, data in (found.get("binaryData") or {}).items():
            (directory / name).write_bytes(base64.b64decode(data))
    return directory
