"""dstack's groups: the nodes of a task, or the replicas of a service, by what they run.

- One group, or several that are alike, are the run itself.
- A task's groups that differ in their commands are one gang all the same: the script of each node is chosen by the number of its
  slice. All get the same slice, that of the file or of `--tpus`.
- A service's groups are told apart by `dstack_replicas.py`.
"""

import re
from typing import NamedTuple

from podway.errors import UserError
from podway.task.fields import Field

_NODE_ADDRESS = re.compile(r"groups\[([0-9]{1,4})\]\.nodes\[([0-9]{1,4})\]\.IP_ADDRESS")


class NodeGroup(NamedTuple):
    """Nodes (of a task) that run the same; `first` is the number of its first node in the run."""

    field: Field
    first: int
    nodes: int


def listed_groups(root: Field, kind: str) -> list[Field]:
    """The groups as they stand in the file; none for a file without groups."""
    field = root.get("groups")
    replicas = root.get("replicas")
    if kind == "service" and replicas and replicas.is_list:
        if field is not None:
            raise replicas.error("`groups` is given too", "keep one of them")
        field = replicas
    if field is None:
        return []
    if not field.items():
        raise field.error("no group is listed", "list one, or remove the key")
    own = ("nodes", "commands", "resources") if kind == "task" else ("commands", "resources", "scaling")
    for key in own:
        beside = root.get(key)
        if beside:
            raise beside.error("it is given beside groups", "put it into the group, or remove the groups")
    return field.items()


def read_groups(listed: list[Field], kind: str) -> tuple[NodeGroup, ...]:
    """The groups of a task that must be told apart, in the order of the file; the one group that says what a service's task is."""
    if not listed:
        return ()
    if kind == "service":
        return (NodeGroup(listed[0], 0, 1),)
    groups: list[NodeGroup] = []
    for one in listed:
        nodes = one.get("nodes")
        first = groups[-1].first + groups[-1].nodes if groups else 0
        groups.append(NodeGroup(one, first, nodes.integer() if nodes else 1))
    alike = [{key: value for key, value in _plain(one.field).items() if key not in ("name", "nodes")} for one in groups]
    if all(one == alike[0] for one in alike):
        return (NodeGroup(groups[0].field, 0, sum(one.nodes for one in groups)),)
    return tuple(groups)


def _plain(field: Field) -> dict[str, object]:
    return {key: value.plain() for key, value in field.entries().items()}


def node_address(word: str, groups: tuple[NodeGroup, ...], at: Field) -> str | None:
    """The shell expression for dstack's `groups[G].nodes[N].IP_ADDRESS`; None for another word."""
    match = _NODE_ADDRESS.fullmatch(word)
    if match is None:
        return None
    group, node = int(match[1]), int(match[2])
    nodes = groups[group].nodes if group < len(groups) else 0
    if (group, node) == (0, 0):
        return "$DSTACK_MASTER_NODE_IP"
    if node >= nodes:
        raise at.error(f"`{word}` is not a node of this run", "count groups and nodes from 0; or use $DSTACK_NODES_IPS")
    slices = groups[-1].first + groups[-1].nodes
    line = f"$(({groups[group].first + node} * DSTACK_NODES_NUM / {slices} + 1))"
    return f'$(printf \'%s\\n\' "$DSTACK_NODES_IPS" | sed -n "{line}p")'


def by_slice(groups: tuple[NodeGroup, ...], scripts: list[str]) -> str:
    """One script for the whole gang: each node runs that of its group."""
    lines: list[str] = []
    for group, script in zip(groups, scripts, strict=True):
        word = "elif" if lines else "if"
        lines.append(f'{word} [ "$PODWAY_SLICE_ID" -lt {group.first + group.nodes} ]; then\n{script.rstrip()}')
    return "\n".join([*lines, "fi", ""])


def differing_slices(group: NodeGroup) -> UserError:
    """The error for groups on machines of their own."""
    return group.field.error(
        "groups on different machines cannot be one run here",
        "--tpus v6e-8 gives all of them the same slice; or write a file for each group",
    )
