"""Which ports of a task are forwarded to a person's machine while they are attached. Pure."""

from podway.task.task import Task

MOST_OF_A_RANGE = 16  # SkyPilot's files open ranges of thousands, for whoever may come


def forwarded_ports(task: Task) -> tuple[str, ...]:
    """`LOCAL:REMOTE`, with `*` for any local port; `8080?:8080` takes another one where 8080 is taken.

    dstack's `ports` say which local port they want. SkyPilot's are opened on the hosts, and forwarded under the same number if it is free.
    """
    found = dict.fromkeys(task.ports)
    remote = {one.rpartition(":")[2] for one in task.ports}
    for resources in task.resources:
        for text in resources.ports:
            first, _, last = text.partition("-")
            numbers = range(int(first), int(last or first) + 1)[:MOST_OF_A_RANGE]
            found |= {f"{number}?:{number}": None for number in numbers if str(number) not in remote}
    return tuple(found)
