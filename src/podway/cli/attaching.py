"""Being attached to a cluster: its ports on this machine, how to get in, its log; Ctrl-C detaches, and the cluster goes on."""

import time
from collections.abc import Sequence

from podway.cli.forwarding import PortForwarding, choose_ports
from podway.cli.ide_links import NAMES, ide_link
from podway.cli.notebook import Notebook
from podway.cli.screen import Screen
from podway.cli.ssh_names import offer_ssh_name
from podway.cli.watching import follow
from podway.control.records import ENDED
from podway.errors import UserError
from podway.launch import WORKDIR
from podway.quantities import format_duration
from podway.server.api import ClusterView, JobView
from podway.server.client import Client

LOOK_S = 5.0
CONNECT_S = 60.0


def attach(
    client: Client,
    screen: Screen,
    name: str,
    job: JobView | None,
    *,
    ask: bool,
    notebook: Notebook | None = None,
) -> int:
    """Until Ctrl-C, or until the cluster is no longer up; the exit code."""
    cluster = client.cluster(name)
    if cluster.state != "UP":
        hint = f"start it: podway start {name}" if cluster.state == "STOPPED" else f"see: podway status {name}"
        raise UserError(f"cluster {name} is {cluster.state}", hint)
    forwards = choose_ports([*(job.ports if job else ()), *([f"*:{notebook.port}"] if notebook else ())])
    local = {str(one.remote): str(one.local) for one in forwards}
    shell = offer_ssh_name(client, screen, cluster, ask=ask)
    with PortForwarding(client, name, forwards, screen.line) as attachment:
        try:
            screen.wait(f"Connecting to {name}")
            attachment.up.wait(CONNECT_S)
            screen.wait("")
            links = []
            if notebook is not None:
                notebook.wait(client, screen, local[str(notebook.port)])
                links = [notebook.link(local[str(notebook.port)])]
            screen.line(_page(cluster, job, shell, links))
            if job is not None and job.state not in ENDED:
                follow(client, screen, name, job.number)
            return _stay(client, screen, cluster)
        except KeyboardInterrupt:
            screen.wait("")
            screen.line(
                f"Detached; {name} keeps running. Attach again: podway attach {name}   Delete it: podway down {name}"
            )
            return 0


def _page(cluster: ClusterView, job: JobView | None, shell: str, links: Sequence[str]) -> str:
    name = shell.removeprefix("ssh ") if shell.startswith("ssh ") else cluster.name
    path = (job.working_dir if job else "") or WORKDIR
    path = cluster.hosts[0].home + path[1:] if path.startswith("~") else path
    lines = [f"Attached to {cluster.name}."]
    if job is not None and (link := ide_link(job.ide, name, path)):
        lines.append(f"Open in {NAMES[job.ide]}:  {link}")
    lines += [*links, f"Open a shell:  {shell}"]
    if cluster.autostop is not None:
        end = "is deleted" if cluster.autostop.down else "stops"
        idle = format_duration(cluster.autostop.idle_minutes * 60)
        lines.append(f"It {end} {idle} after the last connection and job have ended.")
    return "\n".join([*lines, "Press Ctrl-C to detach."])


def _stay(client: Client, screen: Screen, cluster: ClusterView) -> int:
    while True:
        found = client.cluster(cluster.name)
        if found.id != cluster.id or found.state != "UP":
            why = f": {found.reason}" if found.reason else ""
            screen.line(f"Cluster {cluster.name} is {found.state}{why}")
            return 0
        time.sleep(LOOK_S)
