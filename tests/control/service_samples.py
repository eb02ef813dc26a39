"""Services and replicas for tests."""

from typing import Any

import msgspec

from podway.control.service_records import Replica, ReplicaState, Revision, Service
from podway.order import Host
from podway.task.task import Scaling, ServedModel, ServiceSpec, Task

HOST = Host(rank=0, slice=0, worker=0, address="127.20.0.1", home="/h/0", id="x/web-1-0")


def spec(**changes: Any) -> ServiceSpec:
    plain = ServiceSpec(port=8000, model=ServedModel(name="tiny"), scaling=Scaling())
    return msgspec.structs.replace(plain, **changes)


def revision(number: int = 1, run: str = "serve", **changes: Any) -> Revision:
    task = Task(name="web", kind="service", run=run, service=spec(**changes))
    return Revision(number=number, task=task, created=1000.0, user="ann")


def service(**changes: Any) -> Service:
    plain = Service(id="5e41ce", name="web", user="ann", created=1000.0, revisions=(revision(),))
    return msgspec.structs.replace(plain, **changes)


def replica(number: int = 1, **changes: Any) -> Replica:
    plain = Replica(
        service_id="5e41ce",
        number=number,
        revision=1,
        cluster=f"web-{number}",
        state=ReplicaState.READY,
        host=HOST,
        port=8000,
        created=1000.0,
    )
    return msgspec.structs.replace(plain, **changes)
