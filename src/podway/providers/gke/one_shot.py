"""Task + Order -> a JobSet that runs the task and ends, with nothing of Podway's in its pods. Pure; golden-tested.

This is what XPK submits: an image with everything in it, a command on every host, restarts by JobSet. It goes on without a server; one
that is there follows it (`runs.py`). Each rank's environment is the one a job has everywhere (`podway.launch`): what all ranks have
alike is in the container's `env`; what differs, and lists of hosts, are in files of the ConfigMap beside the scripts (`_files`), small
enough for 2,048 hosts.

Secrets are not in the manifests: the pods take them from a Secret of the same name, which is made when the run is sent, or by a person
(the CLI prints how), so that nothing secret is printed.
"""

import shlex

from podway.errors import UserError
from podway.launch import Launch, quoted_path
from podway.order import Host, Order
from podway.providers import Request
from podway.providers.gke.manifests import (
    GRACE_S,
    JOB_INDEX,
    ONE_SHOT,
    POD_INDEX,
    SLICE,
    Container,
    JobSetContext,
    Manifest,
    Restarts,
    image_of,
    jobset,
    metadata,
    object_name,
)
from podway.providers.gke.pod_volumes import pod_volumes
from podway.providers.gke.render import HOME, request_of
from podway.task.task import Bucket, LocalDir, Task, environment_secrets

FOLDER = "/podway/run"
# Exit codes that restart, as XPK has them: 42 is a program's own wish, 127 and above are signals and commands that were not found.
RESTART_CODES = (42, *range(127, 256))
RESTARTS = 10  # for a task that comes back from interruptions and names no number: JobSet counts both alike
LONG = 1000  # characters of a value that is not repeated in every pod's own object
KEPT_S = 12 * 3600  # an ended JobSet is kept so long for its logs
# A pod that fails lives at least so long: JobSet deletes it at once when it begins again, and what it printed with it. A server looks
# every second for pods whose output it does not read yet.
SHORTEST_LIFE_S = 5
IN_SETUP = "setup"  # what a pod whose setup failed leaves as its termination message

START = """\
child= began=$SECONDS
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null; told=1' TERM
step() {{
  "$@" &
  child=$!
  while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || return $code
  done
}}
trap 'code=$?; [ $code = 0 ] || while [ $((SECONDS - began)) -le {life} ]; do sleep 0.5; done; exit $code' EXIT
slice=$PODWAY_SLICE_ID worker=$PODWAY_WORKER
rank=$((slice * {hosts} + worker)) address=$PODWAY_JOBSET-slice-$slice-$worker.$PODWAY_JOBSET
set -a
. {folder}/hosts
. {folder}/slice-$slice
. {folder}/rank
set +a
mkdir -p "$HOME/sky_workdir" && cd {cwd} || exit 1
if [ -s {folder}/setup ]; then
  step {shell} {folder}/setup || {{ code=$?; echo {in_setup} > /dev/termination-log; exit $code; }}
fi
[ -z "$told" ] || exit 143
step {shell} {folder}/run
"""


def render_one_shot(context: JobSetContext, name: str, order: Order, task: Task, user: str) -> Request:
    """The ConfigMap with the scripts, and the JobSet."""
    _check(task)
    ident = object_name(context.owner, name)
    envs = _environments(context, name, order, task, user)
    alike = {key: value for key, value in envs[0].items() if all(env.get(key) == value for env in envs)}
    # Kubernetes replaces $(NAME) and $$ in `env`: what has a $ is left to the shell, which is told not to.
    short = {key: value for key, value in alike.items() if not {"\n", "$"} & set(value) and len(value) < LONG}
    scripts = {"setup": _script(name, order, task, user, "setup"), "run": _script(name, order, task, user, "run")}
    files = scripts | _files(envs, short, order, ident)
    config: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(context, name), "data": files}
    seen = pod_volumes(context, order, HOME)
    container = Container(
        image=image_of(context, order),
        command=("bash", "-c", _start(order, task)),
        env=(
            *({"name": key, "value": value} for key, value in sorted({"HOME": HOME, **short}.items())),
            {"name": "PODWAY_JOBSET", "value": ident},
            {"name": "PODWAY_SLICE_ID", "valueFrom": _field(f"metadata.labels['{JOB_INDEX}']")},
            {"name": "PODWAY_WORKER", "valueFrom": _field(f"metadata.annotations['{POD_INDEX}']")},
        ),
        env_from=({"secretRef": {"name": ident}},) if environment_secrets(task) else (),
        mounts=({"name": "run", "mountPath": FOLDER}, {"name": "home", "mountPath": HOME}, *seen.mounts),
        volumes=(
            {"name": "run", "configMap": {"name": ident}},
            {"name": "home", "emptyDir": {}},
            *seen.volumes,
        ),
        annotations=seen.annotations,
        grace_s=GRACE_S if task.stop_duration_s is None else task.stop_duration_s,
    )
    made = jobset(context, name, order, container, restarts_of(task))
    made["metadata"]["annotations"][ONE_SHOT] = "true"
    made["spec"]["ttlSecondsAfterFinished"] = KEPT_S
    if task.max_duration_s is not None:
        made["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] = task.max_duration_s
    return request_of(context, name, [config, made])


def _files(envs: list[dict[str, str]], short: dict[str, str], order: Order, ident: str) -> dict[str, str]:
    """What pods read at their start: `hosts` is every pod's, `slice-N` a slice's, and `rank` says the rest by the pod's numbers."""
    hosts = order.hosts_per_slice
    names = ["hosts", "rank", *(f"slice-{one}" for one in range(order.slices))]
    files: dict[str, dict[str, str]] = {name: {} for name in names}
    for key in sorted({key for env in envs for key in env} - set(short)):
        values = [env[key] for env in envs]
        if len(set(values)) == 1:
            files["hosts"][key] = shlex.quote(values[0])
        elif (rule := _rule(values, hosts, ident)) is not None:
            files["rank"][key] = rule
        else:
            for one in range(order.slices):
                (value,) = set(values[one * hosts : (one + 1) * hosts])  # nothing else differs within a slice
                files[f"slice-{one}"][key] = shlex.quote(value)
    return {name: "".join(f"{key}={value}\n" for key, value in lines.items()) for name, lines in files.items()}


def _rule(values: list[str], hosts: int, ident: str) -> str | None:
    """How the shell makes a rank's value of its numbers, where one way makes them all."""
    numbers = {
        "rank": [str(rank) for rank in range(len(values))],
        "worker": [str(rank % hosts) for rank in range(len(values))],
        "slice": [str(rank // hosts) for rank in range(len(values))],
        "address": [_address(ident, rank, hosts) for rank in range(len(values))],
    }
    for name, ends in numbers.items():
        start = values[0].removesuffix(ends[0])
        if all(value == start + end for value, end in zip(values, ends, strict=True)):
            return f"{shlex.quote(start) if start else ''}$" + name
    return None


def _address(ident: str, rank: int, hosts: int) -> str:
    """The host name that JobSet gives the pod."""
    return f"{ident}-{SLICE}-{rank // hosts}-{rank % hosts}.{ident}"


def restarts_of(task: Task) -> Restarts:
    """How often JobSet restarts it all, and after which exit codes."""
    back = task.recovery
    most = 0 if back is None else back.max_restarts_on_errors or RESTARTS
    return Restarts(most=most, exit_codes=(*RESTART_CODES, *(back.exit_codes if back else ())))


def _check(task: Task) -> None:
    """What such a run cannot do, in one sentence each."""
    if task.kind != "task":
        raise UserError(
            "--one-shot runs a task to its end; this file is a service or a dev environment", "leave it out"
        )
    local = [mount.target for mount in task.file_mounts if isinstance(mount.source, LocalDir)]
    if isinstance(task.workdir, LocalDir) or local:
        what = "workdir" if isinstance(task.workdir, LocalDir) else f"file_mounts {local[0]}"
        raise UserError(
            f"--one-shot: nothing syncs {what} to the pods",
            "put them into the image (--push REPOSITORY does so with the workdir), take them from git or a bucket, or leave --one-shot out",
        )
    for mount in task.file_mounts:
        if isinstance(mount.source, Bucket) and (mount.source.mode == "COPY" or mount.source.upload):
            raise UserError(
                f"--one-shot: {mount.source.uri} can be mounted, not copied", "use mode: MOUNT, or leave --one-shot out"
            )


def _environments(context: JobSetContext, name: str, order: Order, task: Task, user: str) -> list[dict[str, str]]:
    ident = object_name(context.owner, name)
    hosts = tuple(
        Host(
            cluster=name,
            rank=rank,
            slice=rank // order.hosts_per_slice,
            worker=rank % order.hosts_per_slice,
            address=_address(ident, rank, order.hosts_per_slice),
            home=HOME,
            id=f"{context.owner}/{name}-{rank}",
        )
        for rank in range(order.hosts)
    )
    launch = _launch(name, order, task, user, hosts)
    envs = [launch.env_for(host, "setup") | launch.env_for(host, "run") for host in hosts]
    for env in envs:
        env.pop("PODWAY_SLICE_ID")  # the pod's own label says it
    return envs


def _launch(name: str, order: Order, task: Task, user: str, hosts: tuple[Host, ...]) -> Launch:
    return Launch(
        job=name,
        number=1,
        cluster=name,
        task=task,
        order=order,
        hosts=hosts,
        simulated=False,
        user=user,
        submitted=0.0,
    )


def _script(name: str, order: Order, task: Task, user: str, phase: str) -> str:
    return _launch(name, order, task, user, ()).script(phase)


def _start(order: Order, task: Task) -> str:
    cwd = '"$HOME/sky_workdir"' if task.working_dir is None else quoted_path(task.working_dir)
    return START.format(
        hosts=order.hosts_per_slice,
        folder=FOLDER,
        cwd=cwd,
        shell=shlex.quote(task.shell),
        life=SHORTEST_LIFE_S,
        in_setup=IN_SETUP,
    )


def _field(path: str) -> Manifest:
    return {"fieldRef": {"fieldPath": path}}
