"""JupyterLab on a cluster's first host: a job that bypasses the queue, whose token only the person who started it has.

`start_notebook` submits the job, unless it runs. It installs JupyterLab where it is missing, which takes a minute: `Notebook.wait`
returns when it answers through the forwarded port, and its address is shown only then.
"""

import contextlib
import http.client
import secrets

import msgspec

from podway.cli.screen import Screen
from podway.control.records import ENDED
from podway.errors import UserError
from podway.home import home
from podway.hosts.ssh.config import write_private
from podway.server.api import ClusterView
from podway.server.client import Client
from podway.task.task import Task

NAME = "jupyter"
PORT = 8888
LOOK_S = 0.5
# Simulated hosts share this machine's loopback, so that theirs is at their own address.
SCRIPT = """[ "$PODWAY_RANK" = 0 ] || exit 0
has() { python3 -c 'import jupyterlab' 2>/dev/null; }
has || python3 -m pip install -q jupyterlab
# Where the system's Python is managed by its packages (PEP 668), beside them: in this user's home.
has || python3 -m pip install -q --user --break-system-packages jupyterlab || exit
ip=127.0.0.1
[ "$PODWAY_SIMULATED" = 0 ] || ip=$PODWAY_HOST_IP
mkdir -p ~/sky_workdir && cd ~/sky_workdir || exit
exec python3 -m jupyterlab --no-browser --allow-root --ServerApp.ip="$ip" --ServerApp.port=%d --ServerApp.port_retries=0 %s
"""


class Notebook(msgspec.Struct, frozen=True, kw_only=True):
    """A JupyterLab that runs, or is about to."""

    cluster: str
    job: int
    token: str
    port: int = PORT

    def link(self, local: str) -> str:
        """A line with its address, by the port of this machine that leads there."""
        return f"Open JupyterLab:  http://localhost:{local}/lab?token={self.token}"

    def wait(self, client: Client, screen: Screen, local: str) -> None:
        """Until it answers; a UserError when its job ends instead."""
        screen.wait("Starting JupyterLab, which is installed first where it is missing")
        while not _answers(int(local)):
            job = client.job(self.cluster, self.job, wait=LOOK_S)
            if job.state in ENDED:
                why = job.reason or f"its job is {job.state}"
                raise UserError(f"JupyterLab did not start: {why}", f"see: podway logs {self.cluster} {self.job}")
        screen.wait("")


def start_notebook(client: Client, cluster: ClusterView) -> Notebook:
    """Have it run; one that runs already is found again by the token that is kept here."""
    path = home() / "jupyter" / cluster.id
    runs = [job.number for job in client.jobs(cluster.name) if job.name == NAME and job.state not in ENDED]
    if runs and path.exists():
        return Notebook(cluster=cluster.name, job=runs[-1], token=path.read_text())
    token = secrets.token_hex(24)
    write_private(path, token)
    # Only what people do in it counts: without this, an idle notebook would keep a dev environment up for ever.
    idle = int(cluster.autostop.idle_minutes * 60) if cluster.autostop else 0
    ends = f"--ServerApp.shutdown_no_activity_timeout={idle} --MappingKernelManager.cull_idle_timeout={idle}"
    task = Task(name=NAME, run=SCRIPT % (PORT, ends if idle else ""), secrets={"JUPYTER_TOKEN": token})
    job = client.exec(cluster.name, task).job
    assert job is not None
    return Notebook(cluster=cluster.name, job=job, token=token)


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/api")  # its version, which it tells everybody
        return connection.getresponse().status == 200
    return False
