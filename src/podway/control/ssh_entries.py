"""Keeps the files behind `ssh NAME` (hosts/ssh/config.py) as clusters come, move, stop and go, on the server's own machine.

For whoever runs this server; a person at a team's server has files of their own, which their own commands write.
"""

import asyncio
import logging
import os
from pathlib import Path

from podway.control.records import Cluster, ClusterState
from podway.errors import ProviderError, UserError
from podway.hosts.agent.connections import ATTACHED_VARIABLE
from podway.hosts.ssh.config import (
    SshFiles,
    endpoint_options,
    entry_text,
    names_taken,
    proxied_alias,
    proxied_options,
    user_config,
)
from podway.hosts.ssh.keys import proxied_host_key
from podway.order import Host
from podway.providers import Provider, SupportsShell

log = logging.getLogger("podway.ssh")


class SshEntries:
    """Those of one cluster; `publish` is cheap where nothing has changed."""

    def __init__(self, home: Path) -> None:
        self._files = SshFiles(home)
        self._written: tuple[Host, ...] | None = None

    async def publish(self, provider: Provider, cluster: Cluster) -> None:
        """Write the entries of its hosts, or remove them where it has none that are up."""
        up = cluster.state is ClusterState.UP and cluster.goal == "up" and not cluster.one_shot
        hosts = cluster.hosts if up else ()
        if hosts == self._written or not isinstance(provider, SupportsShell):
            return
        try:
            await asyncio.to_thread(self._write, provider, cluster.name, hosts)
            self._written = hosts
        except UserError as error:  # its hosts have no shell for anybody here, and will have none
            self._written = hosts
            log.info("ssh %s: %s", cluster.name, error.what)
        except (OSError, ValueError, ProviderError) as error:  # a full disk stops nobody's jobs
            log.warning("ssh %s: its entry cannot be written: %s", cluster.name, error)

    def _write(self, provider: SupportsShell, name: str, hosts: tuple[Host, ...]) -> None:
        files = self._files
        if not hosts:
            files.remove_entry(name)
            return
        known, blocks, keys = files.known_hosts(name), [], dict[str, None]()
        for host in hosts:
            shell = provider.shell(host, {})
            if shell.endpoint is not None:
                blocks.append(endpoint_options(shell.endpoint, known))
                keys |= dict.fromkeys(shell.known_hosts)
            else:
                # A pod is asked for with the rights that made it, wherever ssh is called.
                kept = {key: value for key in ("KUBECONFIG",) if (value := os.environ.get(key))}
                variables = {ATTACHED_VARIABLE: host.id} if shell.pod is None else kept
                blocks.append(proxied_options(name, host.rank, files.home, known, variables))
                keys[f"{proxied_alias(name)} {proxied_host_key(files.folder).public}"] = None
        files.write_entry(name, entry_text(name, blocks, names_taken(user_config(), files.config)), list(keys))
