"""What entries of an ssh config run (hosts/ssh/config.py): `ssh-proxy` serves a simulated host or a pod, `ssh-login` fetches a certificate.

Their standard output belongs to ssh; what goes wrong is one line on stderr.
"""

import click

from podway.errors import UserError
from podway.home import home
from podway.server.client import Client


@click.command(name="ssh-proxy", hidden=True)
@click.argument("cluster")
@click.argument("rank", type=click.IntRange(min=0))
def proxy(cluster: str, rank: int) -> None:
    """Speak ssh on stdin and stdout, for one simulated host or pod."""
    from podway.extras import load

    login = Client().host_login(cluster, rank)
    if login.endpoint is not None:
        raise UserError(f"cluster {cluster} has an sshd by now", "run the ssh command again")
    if login.pod is not None:
        pods = load("podway.providers.gke.pod_ssh", "ssh", "ssh to a pod")
        pods.run(login.pod, login.home, login.env, home() / "ssh")
        return
    module = load("podway.hosts.ssh.stdio_server", "ssh", "ssh to a simulated host")
    module.run(login.home, login.env, home() / "ssh")


@click.command(name="ssh-login", hidden=True)
@click.argument("cluster")
@click.argument("rank", type=click.IntRange(min=0))
def login(cluster: str, rank: int) -> None:
    """Write where a host of a team's server is, with a certificate for a few minutes, before ssh reads it."""
    from podway.hosts.ssh.config import SshFiles
    from podway.server.shell import write_login

    try:
        write_login(Client().host_login(cluster, rank), cluster, rank)
    except UserError as error:
        if error.status == 404:  # the cluster is no more, and so is its entry
            SshFiles(home()).remove_entry(cluster)
        raise
