"""A dstack fleet of machines reached over ssh, as the file in which Podway lists machines (docs/ssh.md)."""

from podway.catalog.slices import find_slice
from podway.task.dstack_resources import read_resources
from podway.task.environment import Overrides
from podway.task.fields import Field, FlagField, Layers
from podway.task.fleet_keys import FLEET
from podway.task.problems import Problems
from podway.task.shapes import check
from podway.task.task import TaskPart
from podway.task.values import dstack_name


class SshFleet(TaskPart, frozen=True):
    """Machines by a name: `machines` is what `PODWAY_HOME/ssh/NAME.yaml` is to say."""

    name: str
    machines: dict[str, object]
    notes: tuple[str, ...] = ()


def read_ssh_fleet(root: Field, overrides: Overrides) -> SshFleet | None:
    """The machines of a fleet with an `ssh_config`; None for one of a cloud."""
    section = root.get("ssh_config")
    if section is None:
        return None
    notes: list[str] = []
    problems = Problems()
    check(root, FLEET, notes, problems)
    problems.raise_any()
    name, nodes = root.get("name"), root.get("nodes")
    if overrides.name is None and name is None:
        raise root.error("the fleet has no name", "add `name:`, or give it with --name")
    if nodes:
        raise nodes.error("ssh_config lists the machines", "remove `nodes`, or `ssh_config`")
    listed = section.get("hosts")
    assert listed is not None  # the shape requires it
    hosts = [_host(one) for one in listed.items()]
    if not hosts:
        raise listed.error("no machine is listed", "list their addresses below `hosts:`")
    called = dstack_name(FlagField("--name", overrides.name)) if overrides.name else dstack_name(name) if name else ""
    first = next((one.accelerator for one in read_resources(Layers(root), overrides, notes)), None)
    if first is None:
        notes.append("resources: no TPU is named: the machines are CPU hosts; --tpus v6e-8 says what each slice is")
    machines: dict[str, object] = {**_login(section)}
    if first is not None:
        machines["accelerator"] = find_slice(first.type, first.topology).accelerator_type
    return SshFleet(name=called, machines={**machines, "hosts": hosts}, notes=tuple(notes))


def _host(field: Field) -> str | dict[str, object]:
    if not field.is_mapping:
        return field.words()
    address, inside = field.get("hostname"), field.get("internal_ip")
    assert address is not None  # the shape requires it
    found: dict[str, object] = {"address": address.words(), **_login(field)}
    return {**found, "internal_address": inside.words()} if inside else found


def _login(field: Field) -> dict[str, object]:
    user, port, key, jump = (field.get(name) for name in ("user", "port", "identity_file", "proxy_jump"))
    found: dict[str, object] = {}
    if user:
        found["user"] = user.words()
    if port:
        found["port"] = port.integer()
    if key:
        found["identity_file"] = key.words()
    if jump:
        address, who, at = (jump.get(name) for name in ("hostname", "user", "port"))
        assert address is not None  # the shape requires it
        before, after = f"{who.words()}@" if who else "", f":{at.integer()}" if at else ""
        found["jump"] = f"{before}{address.words()}{after}"
    return found
