"""JupyterLab on a cluster's first host: a job that bypasses the queue, whose token only the person who started it has."""

import secrets

from podway.control.records import ENDED
from podway.home import home
from podway.hosts.ssh.config import write_private
from podway.server.api import ClusterView
from podway.server.client import Client
from podway.task.task import Task

NAME = "jupyter"
PORT = 8888
LINK = "Open JupyterLab:  http://localhost:{port_%d}/lab?token=%s"
# Simulated hosts share this machine's loopback, so that theirs is at their own address.
SCRIPT = """[ "$PODWAY_RANK" = 0 ] || exit 0
python3 -c 'import jupyterlab' 2>/dev/null || python3 -m pip install -q jupyterlab || exit
ip=127.0.0.1
[ "$PODWAY_SIMULATED" = 0 ] || ip=$PODWAY_HOST_IP
mkdir -p ~/sky_workdir && cd ~/sky_workdir || exit
exec python3 -m jupyterlab --no-browser --allow-root --ServerApp.ip="$ip" --ServerApp.port=%d --ServerApp.port_retries=0 %s
"""


def start_notebook(client: Client, cluster: ClusterView) -> tuple[str, str]:
    """Have it run; the port to forward, and a line with its address (`{port_8888}` stands for the local port)."""
    path = home() / "jupyter" / cluster.id
    runs = any(job.name == NAME and job.state not in ENDED for job in client.jobs(cluster.name))
    if not runs or not path.exists():
        token = secrets.token_hex(24)
        write_private(path, token)
        # Only what people do in it counts: without this, an idle notebook would keep a dev environment up for ever.
        idle = int(cluster.autostop.idle_minutes * 60) if cluster.autostop else 0
        ends = f"--ServerApp.shutdown_no_activity_timeout={idle} --MappingKernelManager.cull_idle_timeout={idle}"
        task = Task(name=NAME, run=SCRIPT % (PORT, ends if idle else ""), secrets={"JUPYTER_TOKEN": token})
        client.exec(cluster.name, task)
    return f"*:{PORT}", LINK % (PORT, path.read_text())
