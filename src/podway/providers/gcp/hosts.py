"""Nodes that are ready become hosts: log in, pin host keys, mount the data disk, start the agent. As for any machine over ssh.

A host is found again from its `Host` record alone, on whichever server: its id begins with the number that the cloud gave its node, so
that an address which another node had before is never taken for that one, nor its host key.
"""

import asyncio
import contextlib
import hashlib
import shlex
from collections.abc import Iterable, Sequence

import asyncssh
import msgspec

from podway.errors import ProviderError
from podway.hosts.link import Connect
from podway.hosts.ssh.connections import SshConnections
from podway.hosts.ssh.endpoint import Endpoint
from podway.order import Host
from podway.providers import Shell
from podway.providers.gcp.account import Account
from podway.providers.gcp.api import Cloud
from podway.providers.gcp.errors import GcpError
from podway.providers.gcp.resources import Resource, VolumeMount
from podway.providers.ssh.machine import Held, MachineWork, Unable, who_am_i
from podway.providers.ssh.pool import Machine

DATA_HOME = (
    "/mnt/podway"  # `~` of jobs where there is a data disk: datasets, caches and environments go to the large one
)
DISK_LABEL = "podway"
HOST_KEY = "hostkeys/ssh-ed25519"  # a guest attribute, as Google's guest agent writes it
PORT = "sandbox/ssh-port"  # another, of the sandbox's hosts where they cannot have port 22
MOUNT_S = 120.0
NO_SUDO = 3  # how the mounting ends where the login may not do it


class Hosts:
    """The hosts of clusters, over the process' connections."""

    def __init__(self, account: Account, cloud: Cloud) -> None:
        self._account = account
        self._cloud = cloud
        self.connections = SshConnections(account.folder / "known_hosts")
        self._work = MachineWork(self.connections)

    async def place(
        self,
        cluster: str,
        nodes: tuple[Resource, ...],
        disk_gb: int,
        tpu_name: str | None,
        volumes: Sequence[VolumeMount] = (),
    ) -> tuple[Host, ...]:
        """Have an agent answer on every worker of every node, and say who they are, slice by slice."""
        told = await asyncio.gather(*(self._cloud.in_thread(self._attributes, node) for node in nodes))
        hosts: list[Host] = []
        for which, (node, workers) in enumerate(zip(nodes, told, strict=True)):
            for worker, ((inside, outside), said) in enumerate(zip(node.addresses, workers, strict=True)):
                host = Host(
                    cluster=cluster,
                    rank=len(hosts),
                    slice=which,
                    worker=worker,
                    address=inside,
                    external_address=outside or inside,
                    home=DATA_HOME if disk_gb else "~",
                    id=f"{node.number}.{worker}/{cluster}-{len(hosts)}",
                    tpu_name=tpu_name or node.id,
                    ssh_port=int(said.get(PORT, "22")),
                )
                self._pin(host, said)
                hosts.append(host)
        answers = await asyncio.gather(*(self._start(host, disk_gb, volumes) for host in hosts), return_exceptions=True)
        wrong = [answer for answer in answers if isinstance(answer, BaseException)]
        if wrong:  # what no waiting mends first: another host may only be slow
            raise next((answer for answer in wrong if isinstance(answer, Unable)), wrong[0])
        return tuple(answer for answer in answers if isinstance(answer, Host))

    async def ensure_agent(self, host: Host, volumes: Sequence[VolumeMount] = ()) -> None:
        """Have the agent answer: it may have been killed, or the machine restarted."""
        await self._work.ensure_agent(self.connect(host), lambda: self._start(host, volumes=volumes))

    def connect(self, host: Host) -> Connect:
        """Streams to the agent's socket."""
        return self._work.connect(self._machine(host), host.home)

    def shell(self, host: Host, env: dict[str, str]) -> Shell:
        """The person's own ssh."""
        return self._work.shell(self._machine(host), host.home, env)

    async def trust(self, host: Host, line: str) -> None:
        """In authorized_keys of the login."""
        await self._work.trust(self._machine(host), host.id, line)

    def endpoint(self, host: Host) -> Endpoint:
        """Where to log in."""
        return Endpoint(
            address=host.external_address or host.address,
            port=host.ssh_port,
            user=self._account.settings.ssh_user,
            identity_file=str(self._account.identity_file),
            alias=f"podway-{host.id.partition('/')[0]}",
        )

    def disconnect(self, hosts: tuple[Host, ...]) -> None:
        """They are off: no more connections to them."""
        for host in hosts:
            self.connections.drop(self.endpoint(host))

    def forget(self, numbers: Iterable[str]) -> None:
        """The nodes of these numbers are no more: nor any keys of theirs."""
        self.connections.pins.forget(tuple(f"podway-{number}." for number in numbers if number))

    def _machine(self, host: Host) -> Machine:
        return Machine(name=host.id, endpoint=self.endpoint(host), internal_address=host.address, home=host.home)

    async def _start(self, host: Host, disk_gb: int = 0, volumes: Sequence[VolumeMount] = ()) -> Host:
        """Have its agent run; the host, with the home it really has. Done again, it changes nothing."""
        machine = self._machine(host)
        if host.home == DATA_HOME:  # a machine that was restarted has not mounted it
            await self._mount(machine.endpoint, mount_command(disk_gb), "the data disk")
        for volume in volumes:
            if volume.slice == host.slice:
                await self._mount(machine.endpoint, volume_command(volume), f"volume {volume.volume}")
        lease = {"owner": self._account.owner, "cluster": host.cluster, "who": who_am_i()}
        try:
            claimed = await self._work.claim(machine, host.id, lease)
        except Held as held:
            raise ProviderError(str(held)) from None
        host = msgspec.structs.replace(host, home=claimed.home)
        await self._work.start(machine, host, claimed, self._work.connect(machine, host.home))
        return host

    def _attributes(self, node: Resource) -> list[dict[str, str]]:
        """What each worker says of itself through the cloud; nothing where it says nothing (yet)."""
        said: list[dict[str, str]] = []
        if node.kind == "node":
            with contextlib.suppress(GcpError):
                said = self._cloud.guest_attributes(node.path)
        return [*said, *({} for _ in node.addresses)][: len(node.addresses)]

    def _pin(self, host: Host, said: dict[str, str]) -> None:
        """Pin the key that the cloud shows for the host; where it shows none, the first one seen is pinned."""
        if HOST_KEY in said:
            kind = HOST_KEY.rpartition("/")[2]
            with contextlib.suppress(asyncssh.KeyImportError):
                self.connections.pins.pin(self.endpoint(host), asyncssh.import_public_key(f"{kind} {said[HOST_KEY]}"))

    async def _mount(self, endpoint: Endpoint, command: str, what: str) -> None:
        """Have a disk formatted if it is blank, mounted, and the login's own."""
        done = await self.connections.run(endpoint, command, timeout=MOUNT_S)
        if done.code == NO_SUDO:
            raise Unable(
                f"{what} of {endpoint} cannot be mounted: the login {endpoint.user} may not use sudo there",
                "let it (roles/compute.osAdminLogin where OS Login is on), or leave disk_size and volumes out",
            )
        if done.code:
            said = (done.err or done.out.decode(errors="replace")).strip().splitlines()
            raise ProviderError(f"{what} of {endpoint} cannot be mounted: {said[-1] if said else done.code}")


def mount_command(disk_gb: int) -> str:
    """Shell text that mounts the data disk, the first of the node's; 0 takes no disk that is not ours already."""
    return _mount_script(DATA_HOME, DISK_LABEL, disk_gb, blank=True)


def volume_command(volume: VolumeMount) -> str:
    """Shell text that mounts a volume; a registered disk is never formatted."""
    # ext4 has room for 16 bytes of a label.
    label = "pw" + hashlib.sha256(volume.volume.encode()).hexdigest()[:14]
    return _mount_script(volume.directory, label, volume.size_gb, blank=volume.format_if_blank)


def _mount_script(at: str, label: str, size_gb: int, *, blank: bool) -> str:
    """Mount the disk with this label; else the one disk of this size that is blank, which is formatted (or, where it may not be,
    the one that holds a file system of somebody else's). It may be run again and does nothing then.

    Two disks that nothing tells apart are refused: each must be found again when it is attached without the other.
    """
    fits = '[ -z "$(run blkid -p "/dev/$name")" ]'
    if not blank:
        ours = 'run blkid -o value -s LABEL "/dev/$name" | grep -qE "^pw[0-9a-f]{14}$|^podway$"'
        fits = f'[ -n "$(run blkid -p -o value -s TYPE "/dev/$name")" ] && ! {ours}'
    script = f"""set -e
at={shlex.quote(at)}
if mountpoint -q "$at"; then exit 0; fi
run() {{ if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }}
run true 2>/dev/null || exit {NO_SUDO}
disks() {{ lsblk -bdno NAME,SIZE,TYPE | awk '$3 == "disk" || $3 == "loop" {{print $1, $2}}'; }}
found=
for name in $(disks | cut -d' ' -f1); do
  if [ "$(run blkid -o value -s LABEL "/dev/$name")" = {label} ]; then found=/dev/$name; fi
done
if [ -z "$found" ]; then
  for name in $(disks | awk '$2 == {size_gb} * 1073741824 {{print $1}}'); do
    if [ "$(lsblk -no NAME "/dev/$name" | wc -l)" = 1 ] && [ -z "$(lsblk -no MOUNTPOINT "/dev/$name" | tr -d ' \\n')" ] && {fits}; then
      if [ -n "$found" ]; then
        echo "two disks of {size_gb} GB cannot be told apart: give disk_size and volumes sizes of their own" >&2
        exit 1
      fi
      found=/dev/$name
    fi
  done
  if [ -z "$found" ]; then echo "no {"blank " if blank else ""}disk of {size_gb} GB is attached" >&2; exit 1; fi
  {f'run mkfs.ext4 -q -m 0 -L {label} "$found"' if blank else ":"}
fi
run mkdir -p "$at"
run mount -o discard,defaults "$found" "$at"
run chown "$(id -u):$(id -g)" "$at"
"""
    return f"bash -c {shlex.quote(script)}"
