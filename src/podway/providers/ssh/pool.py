"""Pools: files that list machines a person has, as `PODWAY_HOME/ssh/NAME.yaml`.

    user: ubuntu                      # these six may stand at the top, for all hosts, or at a host, for that one
    port: 22
    identity_file: ~/.ssh/id_ed25519  # a relative path begins at this file
    jump: admin@bastion.example.com:22
    accelerator: v6e-16               # none: hosts without chips, each for itself
    topology: 4x4
    hosts:
      - 10.0.0.11
      - {address: 10.0.0.12, internal_address: 192.168.0.12, home: /mnt/disk/podway, name: left}

Hosts of one accelerator type make slices in the order they are listed: as many to a slice as the slice has, so four lines
for a v6e-16. What is wrong is said with file, line and column, as for task files.
An inventory is the same file at a path of its own (`--inventory FILE`); its path takes the place of the pool's name.
"""

import re
from pathlib import Path

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.errors import UserError
from podway.hosts.ssh.endpoint import Endpoint
from podway.task.fields import Field, did_you_mean
from podway.task.yamlfile import parse

SHARED_KEYS = ("user", "port", "identity_file", "jump", "accelerator", "topology")
POOL_KEYS = (*SHARED_KEYS, "hosts")
HOST_KEYS = (*SHARED_KEYS, "address", "internal_address", "home", "name")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252}")  # names, IPv4, IPv6; never an option of ssh
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,63}")
_JUMP = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<address>\[[^\]\s]+\]|[^:@\s]+)(?::(?P<port>[0-9]{1,5}))?")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One host of a pool, with everything its line and the pool's head say."""

    name: str
    endpoint: Endpoint
    internal_address: str | None = None  # None: the address at which its sshd was reached
    home: str = "~"


class PoolSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that belong together; without an accelerator, one host."""

    accelerator_type: str | None
    topology: str | None
    machines: tuple[Machine, ...]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's file, read."""

    name: str
    path: Path
    slices: tuple[PoolSlice, ...]
    ref: str = ""  # how an order names it: a pool by its name, an inventory by its path

    def of_kind(self, accelerator_type: str | None, topology: str | None) -> tuple[PoolSlice, ...]:
        """The slices of one kind, in the file's order."""
        return tuple(s for s in self.slices if (s.accelerator_type, s.topology) == (accelerator_type, topology))

    def machine(self, name: str) -> Machine | None:
        """The host of this name, if the file still lists it."""
        return next((m for part in self.slices for m in part.machines if m.name == name), None)


def pool_names(folder: Path) -> list[str]:
    """The pools there are."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read_pool(folder: Path, name: str | None) -> Pool:
    """The pool of that name, or the inventory at that path; without either, the only pool there is."""
    if name is not None and name.startswith("/"):
        return read_inventory(Path(name), name)
    names = pool_names(folder)
    if name is None:
        if len(names) != 1:
            what = f"there are {len(names)} pools of ssh hosts" if names else "there is no pool of ssh hosts"
            hint = f"name one: ssh/{names[0]}, ..." if names else f"list your machines in {folder / 'NAME.yaml'}"
            raise UserError(what, hint)
        name = names[0]
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be the name of a pool", "use letters, digits, '.', '_' and '-'")
    path = folder / f"{name}.yaml"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        hint = f"pools there are: {', '.join(names)}" if names else f"list your machines in {path}"
        raise UserError(f"there is no pool {name!r} of ssh hosts", hint) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "correct its permissions") from None
    return parse_pool(data, name, path)


def read_inventory(path: Path, ref: str) -> Pool:
    """The inventory that orders name by `ref`, from this file: its own, or the copy that a cluster keeps of it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        why = error.strerror or "it cannot be read"
        hint = "give the path of a file on the machine where the Podway server runs"
        raise UserError(f"the inventory {path}: {why}", hint) from None
    return parse_pool(data, Path(ref).stem, path, ref)


def parse_pool(data: bytes, name: str, path: Path, ref: str = "") -> Pool:
    """A pool from the text of its file."""
    documents = parse(data, str(path))
    if len(documents) != 1:
        what = "the file is empty" if not documents else "the file holds several documents"
        raise UserError(f"{path}:1:1: {what}", "write one mapping with `hosts`")
    root = Field(str(path), documents[0])
    _only(root, POOL_KEYS)
    listed = root.get("hosts")
    if listed is None:
        raise root.error("`hosts` is missing", "list the machines' addresses below `hosts:`")
    seen: dict[str, Field] = {}
    kinds: dict[tuple[str | None, str | None], list[tuple[Field, Machine]]] = {}
    for item in listed.items():
        machine = _machine(root, item)
        for key in (f"name {machine.name}", f"address {machine.endpoint.known_as}"):
            if key in seen:
                raise item.error(f"the {key} is listed twice (first at line {seen[key].node.line})", "remove one")
            seen[key] = item
        tpu = _accelerator(root, item)
        kind = (tpu.accelerator_type, tpu.topology_text) if tpu else (None, None)
        kinds.setdefault(kind, []).append((item, machine))
    if not seen:
        raise listed.error("no host is listed", "list the machines' addresses below `hosts:`")
    slices = tuple(part for kind, hosts in kinds.items() for part in _slices(kind, hosts))
    return Pool(name=name, path=path, slices=slices, ref=ref or name)


def _slices(kind: tuple[str | None, str | None], hosts: list[tuple[Field, Machine]]) -> list[PoolSlice]:
    accelerator_type, topology = kind
    size = find_slice(accelerator_type, topology).hosts if accelerator_type else 1
    if len(hosts) % size:
        raise hosts[-1][0].error(
            f"{len(hosts)} hosts of {accelerator_type} make no whole slices: each has {size}",
            f"list {size} hosts for each slice, workers in their order",
        )
    machines = [machine for _, machine in hosts]
    return [
        PoolSlice(accelerator_type=accelerator_type, topology=topology, machines=tuple(machines[at : at + size]))
        for at in range(0, len(machines), size)
    ]


def _machine(root: Field, item: Field) -> Machine:
    if item.is_mapping:
        _only(item, HOST_KEYS)
        where = item.get("address")
        if where is None:
            raise item.error("`address` is missing", "write `address: NAME-OR-IP`")
    else:
        where = item
    address = _address(where)
    port = _shared(root, item, "port")
    name, home, inside = item.get("name"), item.get("home"), item.get("internal_address")
    endpoint = Endpoint(
        address=address,
        port=_port(port) if port else 22,
        user=_user(root, item),
        identity_file=_identity(root, item),
        jump=_jump(root, item),
    )
    return Machine(
        name=_host_name(name) if name else endpoint.known_as,
        endpoint=endpoint,
        internal_address=_address(inside) if inside else None,
        home=_home(home) if home else "~",
    )


def _shared(root: Field, item: Field, key: str) -> Field | None:
    return item.get(key) or root.get(key)


def _only(field: Field, keys: tuple[str, ...]) -> None:
    for key, value in field.entries().items():
        if key not in keys:
            raise value.error("unknown key", did_you_mean(key, keys))


def _text(field: Field | None) -> str | None:
    return field.words() if field is not None else None


def _address(field: Field) -> str:
    text = field.words()
    if not _ADDRESS.fullmatch(text):
        raise field.error(
            f"{field.found} is not an address", "write a host name or an IP; user and port have their keys"
        )
    return text


def _port(field: Field) -> int:
    port = field.integer()
    if not 0 < port < 65536:
        raise field.error(f"{port} is not a port", "write a number from 1 to 65535")
    return port


def _user(root: Field, item: Field) -> str | None:
    field = _shared(root, item, "user")
    if field is not None and not _USER.fullmatch(field.words()):
        raise field.error(f"{field.found} is not a user", "write the login name alone")
    return _text(field)


def _home(field: Field) -> str:
    text = field.words()
    if not text.startswith(("/", "~")):
        raise field.error(f"{field.found} is not an absolute path", "begin it with / or ~/")
    return text


def _host_name(field: Field) -> str:
    text = field.words()
    if not _NAME.fullmatch(text):
        raise field.error(f"{field.found} cannot be a name", "use letters, digits, '.', '_' and '-'")
    return text


def _jump(root: Field, item: Field) -> Endpoint | None:
    field = _shared(root, item, "jump")
    if field is None:
        return None
    match = _JUMP.fullmatch(field.words())
    address = match["address"].strip("[]") if match else ""
    user = match["user"] if match else None
    port = int(match["port"] or 22) if match else 0
    if not _ADDRESS.fullmatch(address) or (user and not _USER.fullmatch(user)) or not 0 < port < 65536:
        raise field.error(f"{field.found} is not a jump host", "write [USER@]ADDRESS[:PORT]")
    identity = _identity(root, item)
    return Endpoint(address=address, port=port, user=user or _user(root, item), identity_file=identity)


def _identity(root: Field, item: Field) -> str | None:
    """The key's path; a relative one begins at the file that names it."""
    text = _text(_shared(root, item, "identity_file"))
    return text if text is None or text.startswith(("/", "~")) else str(Path(root.file).parent / text)


def _accelerator(root: Field, item: Field) -> Slice | None:
    field = _shared(root, item, "accelerator")
    if field is None:
        return None
    topology = _shared(root, item, "topology")
    try:
        return find_slice(field.words(), _text(topology))
    except UserError as error:
        raise field.error(error.what, error.hint) from None
