"""Whether a cluster has the CSI driver that mounts buckets."""

from podway.errors import UserError
from podway.providers.gke.api import FORBIDDEN, KubernetesApi
from podway.providers.gke.pod_volumes import DRIVER

PATH = f"/apis/storage.k8s.io/v1/csidrivers/{DRIVER}"
ENABLE = "gcloud container clusters update CLUSTER --update-addons GcsFuseCsiDriver=ENABLED"


async def check_driver(api: KubernetesApi) -> None:
    """Refuse pods that would wait for ever for it. Whoever may not see drivers is not refused: the pods' events tell."""
    try:
        there = await api.exists(PATH)
    except UserError as error:
        if error.code != FORBIDDEN:
            raise
        return
    if not there:
        raise UserError(
            f"context {api.context.name} has no {DRIVER} driver, which mounts buckets",
            f"enable it: {ENABLE}; or use mode: COPY",
        )
