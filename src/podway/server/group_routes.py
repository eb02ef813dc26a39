"""The functions of the routes about job groups, and their rows."""

from podway.control.access import Right
from podway.control.group_store import GroupMember, GroupRecord
from podway.server.group_api import GroupBody, GroupsReply, GroupTaskView, GroupView
from podway.server.routing import ApiCall, Route
from podway.task.job_groups import GroupTask


def groups(call: ApiCall) -> GroupsReply:
    """Job groups you may see: open ones, and those that ended within a week."""
    return GroupsReply(groups=[_view(call, one) for one in call.services.groups.list_for(call.caller)])


def group(call: ApiCall) -> GroupView:
    """One job group."""
    return _view(call, call.services.groups.find_for(call.path["group"], call.caller, Right.VIEW))


def launch_group(call: ApiCall) -> GroupView:
    """Launch a cluster for each task, and run all when every host is up; their files have been uploaded."""
    body: GroupBody = call.body
    tasks = tuple(
        (GroupTask(task=one.request.task, primary=one.primary, delay_s=one.delay_s), one.request) for one in body.tasks
    )
    return _view(call, call.services.groups.launch(call.path["group"], tasks, call.caller))


def cancel_group(call: ApiCall) -> GroupView:
    """Cancel every job of a group."""
    call.services.groups.cancel(call.path["group"], call.caller)
    return group(call)


def _view(call: ApiCall, record: GroupRecord) -> GroupView:
    tasks = [_task(call, record, one) for one in record.members]
    ends = [one.state for one in tasks if one.primary]
    state = "RUNNING" if record.released else "STARTING"
    if record.ended is not None:
        failed = next((end for end in ends if end.startswith("FAILED")), None)
        state = failed or ("SUCCEEDED" if set(ends) == {"SUCCEEDED"} else "CANCELLED")
    return GroupView(
        name=record.name,
        user=record.user,
        project=record.project,
        state=state,
        reason=record.reason,
        created=record.created,
        tasks=tasks,
    )


def _task(call: ApiCall, record: GroupRecord, one: GroupMember) -> GroupTaskView:
    job = call.services.groups.job_of(one)
    unmade = "CANCELLED" if record.cancel else "PENDING"
    return GroupTaskView(
        name=one.name,
        cluster=one.cluster,
        job=one.job,
        primary=one.primary,
        state=job.state.value if job is not None else unmade,
        reason=job.reason if job is not None else "",
    )


_G = "/v1/groups/{group}"
GROUP_ROUTES: tuple[Route, ...] = (
    Route(method="GET", path="/v1/groups", function=groups, access="anyone", summary="Job groups", reply=GroupsReply),
    Route(method="GET", path=_G, function=group, access="anyone", summary="One job group", reply=GroupView),
    Route(
        method="PUT",
        path=_G,
        function=launch_group,
        access="create",
        audited=True,
        summary="Launch a job group",
        body=GroupBody,
        reply=GroupView,
        slow=True,
    ),
    Route(
        method="POST",
        path=f"{_G}/cancel",
        function=cancel_group,
        access="create",
        audited=True,
        summary="Cancel a job group",
        reply=GroupView,
    ),
)
