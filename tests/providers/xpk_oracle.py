"""XPK as an oracle: what `xpk workload create --dry-run` writes for a table of command lines, reduced to the fields that matter.

    python -m tests.providers.xpk_oracle PATH-OF-XPK     rewrites tests/golden/gke/xpk.json

XPK 1.16.0 from PyPI, in an environment of its own, works without gcloud and without a cluster. `facts` reduces a JobSet, whoever wrote
it, to what decides where and how it runs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parent.parent / "golden" / "gke" / "xpk.json"
CASES = {
    "v4-8": ("--tpu-type=v4-8",),
    "v4-16": ("--tpu-type=v4-16",),
    "v4-128": ("--tpu-type=v4-128",),
    "v5litepod-32": ("--tpu-type=v5litepod-32",),
    "v5litepod-64x4": ("--tpu-type=v5litepod-64", "--num-slices=4"),
    "v5litepod-8": ("--tpu-type=v5litepod-8",),
    "v5litepod-16": ("--tpu-type=v5litepod-16",),
    "v5litepod-256x2": ("--tpu-type=v5litepod-256", "--num-slices=2"),
    "v5p-8": ("--tpu-type=v5p-8",),
    "v5p-128": ("--tpu-type=v5p-128",),
    "v6e-1": ("--tpu-type=v6e-1",),
    "v6e-4": ("--tpu-type=v6e-4",),
    "v6e-8": ("--tpu-type=v6e-8",),
    "v6e-16": ("--tpu-type=v6e-16", "--max-restarts=3", "--priority=high"),
    "v6e-16x2": ("--tpu-type=v6e-16", "--num-slices=2"),
    "v6e-256": ("--tpu-type=v6e-256",),
    "grace": ("--tpu-type=v6e-16", "--termination-grace-period-seconds=300"),
    "codes": ("--tpu-type=v6e-16", "--max-restarts=2", "--restart-on-exit-codes=3,4"),
    "pull": ("--tpu-type=v6e-16", "--docker-image-pull-secret=regcred"),
    "low": ("--tpu-type=v6e-16", "--priority=very-low"),
}


def facts(jobset: dict[str, Any]) -> dict[str, Any]:
    """What decides where and how a JobSet runs."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    (rule,) = job["podFailurePolicy"]["rules"]
    secrets = [one["name"] for one in pod.get("imagePullSecrets") or () if one["name"] != "None"]  # XPK writes "None"
    return {
        "queue": jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"],
        "exclusive": jobset["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"],
        "ttl": jobset["spec"]["ttlSecondsAfterFinished"],
        "restarts": jobset["spec"]["failurePolicy"]["maxRestarts"],
        "rules": [
            [one["action"], one["onJobFailureReasons"]] for one in jobset["spec"]["failurePolicy"].get("rules") or ()
        ],
        "slices": replicated["replicas"],
        "hosts": [job["parallelism"], job["completions"]],
        "backoff": job["backoffLimit"],
        "exit_codes": [rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]],
        "restart_policy": pod["restartPolicy"],
        "nodes": pod["nodeSelector"],
        "tolerations": [[one["key"], one["operator"]] for one in pod["tolerations"]],
        "priority": pod["priorityClassName"],
        "network": [pod["hostNetwork"], pod["dnsPolicy"]],
        "grace": pod["terminationGracePeriodSeconds"],
        "privileged": container["securityContext"]["privileged"],
        "chips": int(container["resources"]["limits"]["google.com/tpu"]),
        "pull_secrets": secrets,
        "shared_memory": "/dev/shm" in [one["mountPath"] for one in container["volumeMounts"]],
    }


def ask(xpk: str, words: tuple[str, ...]) -> dict[str, Any]:
    """The JobSet that XPK would submit."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        fixed = ["--dry-run", "--skip-validation", "--cluster=c", "--project=p", "--zone=us-east5-b", "--workload=demo"]
        run = ["--command=python3 train.py", "--docker-image=img:1", f"--output-manifest-file={file.name}"]
        subprocess.run([xpk, "workload", "create", *fixed, *run, *words], check=True, capture_output=True)
        found = list(yaml.safe_load_all(Path(file.name).read_text()))
    return next(one for one in found if one and one["kind"] == "JobSet")


if __name__ == "__main__":
    answers = {name: facts(ask(sys.argv[1], words)) for name, words in CASES.items()}
    GOLDEN.write_text(json.dumps(answers, indent=1) + "\n")
