"""A launch, from a task to the end of its job.

1. the server is asked what it would do: the offers, the one it takes, and the exact request (`--dryrun` ends here);
2. the user confirms (a new cluster only, and only at a terminal) to exactly that: when the server would do something else by
   the time it is told to, it refuses, and what it would do now is shown and asked again;
3. files go up, and then the launch itself: from here on everything goes on without this command;
4. the job is followed to its end, whose state is the exit code; of a pipeline, job after job to the first that does not succeed.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence

import click
import msgspec

from podway.cli.choosing import last_event, until
from podway.cli.confirmation import proceed
from podway.cli.screen import LAST, MORE, Screen
from podway.cli.sizing import warn_misfit
from podway.cli.tables import table
from podway.cli.watching import ProgressPrinter, exit_code, follow, show_end
from podway.control.capability_check import check_places
from podway.control.records import ENDED, JobState
from podway.errors import UserError
from podway.home import home
from podway.launch_options import FollowingTask, LaunchOptions, LaunchRequest
from podway.provider_table import find_row
from podway.quantities import format_count
from podway.server.api import Frame, JobView, LaunchReply, OfferView, PreviewReply
from podway.server.client import Client
from podway.server.uploading import upload
from podway.task.task import Task

OFFERS_SHOWN = 10
OFFERS_ASKED = 5  # times a changed offer is shown before giving up


class Interaction(msgspec.Struct, frozen=True, kw_only=True):
    """How the command interacts with the user."""

    yes: bool = False
    detach: bool = False
    dryrun: bool = False
    raw: bool = False
    json: bool = False
    jupyter: bool = False  # for a dev environment


def launch(task: Task, options: LaunchOptions, interaction: Interaction, then: Sequence[Task] = ()) -> int:
    """Run the launch of a task and of those that follow it; the exit code."""
    client = Client()
    if client.own_server:  # another one may have settings that this machine does not
        check_places(task, home())
    with Screen(err=interaction.json or interaction.dryrun) as screen:
        for one in (task, *then):
            show_notes(one, one.name if then else None)
        request = LaunchRequest(task=task, options=options, then=tuple(FollowingTask(task=one) for one in then))
        preview = client.preview(request)
        if interaction.dryrun:
            _show(screen, task, preview)
            click.echo(_request_text(preview, task).rstrip("\n"))
            return 0
        if task.dev is not None and preview.exists and was_prepared(client, preview.cluster):
            return _go_on(client, screen, preview, interaction)
        uploaded = False
        for _ in range(OFFERS_ASKED):
            _show(screen, task, preview)
            if not preview.exists:
                what = "the run" if options.one_shot else "a new cluster"
                proceed(f"Launching {what} {preview.cluster!r}.", yes=interaction.yes)
            if not uploaded:
                request, uploaded = _with_files(client, screen, request), True
            screen.step(_doing(preview, options))
            named = msgspec.structs.replace(options, cluster=preview.cluster)
            request = msgspec.structs.replace(request, options=named, agreed=preview.digest)
            try:
                reply = client.submit(request)
            except UserError as error:
                if error.code != "offer_changed":
                    raise
                click.echo(f"Note: {error.what}", err=True)
                preview = client.preview(request)
                continue
            return _see_through(client, screen, (task, *then), reply, interaction, one_shot=options.one_shot)
        raise UserError("the offers keep changing", "name one place, e.g. with --zone, and run the command again")


def _request_text(preview: PreviewReply, task: Task) -> str:
    steps = [step for step in preview.request.get("steps") or () if isinstance(step, dict)]
    if any("apiVersion" in (step.get("body") or ()) for step in steps):  # Kubernetes' objects
        from podway.cli.manifests import as_yaml  # few launches print YAML

        return as_yaml(preview.request, task)
    return msgspec.json.format(msgspec.json.encode(preview.request)).decode()


def _show(screen: Screen, task: Task, preview: PreviewReply) -> None:
    """What the launch would do."""
    for note in preview.notes:
        click.echo(f"Note: {note}", err=True)
    warn_misfit(task, preview.order)
    if not preview.exists:
        screen.line(offers_page(preview))


def submit(cluster: str, task: Task, interaction: Interaction) -> int:
    """Queue the task on a cluster that is up, and follow it to its end; the exit code."""
    client = Client()
    with Screen(err=interaction.json) as screen:
        show_notes(task)
        files = upload(client, screen, task, mounts=False)
        reply = client.exec(cluster, task, files=files)
        for note in reply.notes:
            click.echo(f"Note: {note}", err=True)
        return _see_through(client, screen, (task,), reply, interaction)


def _with_files(client: Client, screen: Screen, request: LaunchRequest) -> LaunchRequest:
    """The request with what its tasks bring of this machine, which is on the server then."""
    then = tuple(msgspec.structs.replace(one, files=upload(client, screen, one.task)) for one in request.then)
    return msgspec.structs.replace(request, files=upload(client, screen, request.task), then=then)


def show_notes(task: Task, name: str | None = None) -> None:
    """What the file says that has no effect; of several tasks, with the name of the one it is about."""
    for note in task.notes:
        click.echo(f"Note: {name}: {note}" if name else f"Note: {note}", err=True)


def offers_page(preview: PreviewReply) -> str:
    """The offers for the task, and the chosen one."""
    shown = preview.offers[:OFFERS_SHOWN]
    # What is taken, and that it could be simulated instead, are told however many there are.
    shown += [offer for offer in preview.offers[OFFERS_SHOWN:] if offer.chosen or offer.blocked_code == "simulated"]
    rows = [
        (
            f"{offer.provider} ({offer.zone})" if offer.zone else offer.provider,
            _accelerator(offer) + ("[spot]" if offer.spot else ""),
            offer.topology,
            offer.hosts,
            offer.chips or None,
            None if offer.hourly_cost is None else f"{offer.hourly_cost:,.2f}",
            offer.blocked or offer.note or None,
            "✔" if offer.chosen else "",
        )
        for offer in shown
    ]
    headers = ("INFRA", "TPU", "TOPOLOGY", "HOSTS", "CHIPS", "COST ($/h)", "NOTE", "CHOSEN")
    title = f"Considered resources ({format_count(preview.order.slices, 'slice')}):"
    left = len(preview.offers) - len(shown)
    more = f"\n... and {left} more" if left else ""
    shown_table = table(headers, rows, right=("HOSTS", "CHIPS", "COST ($/h)"), drop=("TOPOLOGY", "CHIPS", "HOSTS"))
    return f"{title}\n{shown_table}{more}\n"


def _accelerator(offer: OfferView) -> str:
    kind = offer.accelerator_type or "cpu"
    return f"{offer.slices}x {kind}" if offer.slices > 1 else kind


def _doing(preview: PreviewReply, options: LaunchOptions) -> str:
    if preview.exists:
        return f"Using the existing cluster {preview.cluster}."
    offer = next((offer for offer in preview.offers if offer.chosen), None)
    what = "run" if options.one_shot else "cluster"
    if offer is None:
        return f"Launching {what} {preview.cluster}."
    place = f"{offer.provider} ({offer.zone})" if offer.zone else offer.provider
    hosts = format_count(offer.hosts, "host")
    note = f" {offer.note[:1].upper()}{offer.note[1:]}." if offer.note else ""
    return f"Launching {what} {preview.cluster}: {_accelerator(offer)} ({hosts}) on {place}.{note}"


def _see_through(
    client: Client,
    screen: Screen,
    tasks: Sequence[Task],
    reply: LaunchReply,
    interaction: Interaction,
    *,
    one_shot: bool = False,
) -> int:
    """Follow what was started, unless detached; then list useful commands."""
    end, task, last = Frame(kind="end"), tasks[0], reply.job
    code, shell = 0, f"podway ssh {reply.cluster}"
    if reply.job is None:
        if not interaction.detach:
            screen.wait(f"Launching cluster {reply.cluster}")
            before = last_event(client, reply.cluster)
            until(client, client.cluster(reply.cluster), "UP", screen, "Launching", before)
            screen.done(f"Cluster up: {reply.cluster}.")
    elif interaction.detach:
        numbers = ", ".join(map(str, (reply.job, *reply.then)))
        screen.step(f"Jobs submitted, IDs: {numbers}" if reply.then else f"Job submitted, ID: {numbers}")
    else:
        last, end = _follow_jobs(client, screen, tasks, reply, raw=interaction.raw)
        code = exit_code(end.state)
    if task.dev is not None and code == 0 and not (interaction.detach or interaction.json):
        return _attach(client, screen, reply.cluster, interaction)
    new_cluster = reply.created and not one_shot
    if new_cluster and not interaction.detach:
        shell = _offer_ssh(client, screen, reply.cluster, ask=not interaction.yes)
    job = None if end.state in ENDED else last
    if new_cluster or job is not None:  # who runs the tenth command on a cluster knows the others
        screen.line(useful_commands(reply.cluster, job, shell if new_cluster else None))
    if interaction.json:
        document = {**msgspec.to_builtins(reply), "state": end.state or None, "reason": end.reason}
        click.echo(msgspec.json.format(msgspec.json.encode(document)))
    if reply.job is None and not interaction.detach and not interaction.yes and screen.live and sys.stdin.isatty():
        _offer_shell(client, screen, reply.cluster)
    return code


def _follow_jobs(
    client: Client, screen: Screen, tasks: Sequence[Task], reply: LaunchReply, *, raw: bool
) -> tuple[int, Frame]:
    """Follow the job, or those of a pipeline to the first that does not succeed: its number, and how it ended."""
    assert reply.job is not None
    for task, number in zip(tasks, (reply.job, *reply.then), strict=True):
        first = number == reply.job
        if len(tasks) > 1:
            screen.step(f"Task {number - reply.job + 1} of {len(tasks)}: {task.name or 'without a name'}")
        new = reply.created and first
        printer = ProgressPrinter(screen, reply.cluster, number, waiting_for_cluster=new, follows=not first)
        if first and not new:
            _show_queue(client, screen, reply.cluster, number)
        with _ports_forwarded(client, screen, task, reply.cluster):
            end = follow(client, screen, reply.cluster, number, printer, raw=raw)
        if show_end(screen, number, end) != 0:
            break
    return number, end


def was_prepared(client: Client, cluster: str) -> bool:
    """Whether a dev environment is there whose `init` commands have run: they run once, and files edited there stay as they are."""
    return any(job.kind == "dev-environment" and job.state == "SUCCEEDED" for job in client.jobs(cluster))


def _go_on(client: Client, screen: Screen, preview: PreviewReply, interaction: Interaction) -> int:
    """Back to a dev environment that is there, started again if it was stopped."""
    name = preview.cluster
    screen.step(f"Using the dev environment {name} as it is: its init commands have run, its files stay as they are.")
    if (found := client.cluster(name)).state != "UP":
        before = last_event(client, name)
        asked = client.start(name) if found.goal == "stopped" else found
        until(client, asked, "UP", screen, "Starting", before)
        screen.done(f"Cluster up: {name}.")
    return 0 if interaction.detach or interaction.json else _attach(client, screen, name, interaction)


def _attach(client: Client, screen: Screen, name: str, interaction: Interaction) -> int:
    from podway.cli.attaching import attach  # only dev environments need it
    from podway.cli.notebook import start_notebook

    environments = [job for job in client.jobs(name) if job.kind == "dev-environment"]
    notebook = start_notebook(client, client.cluster(name)) if interaction.jupyter else None
    job = environments[-1] if environments else None
    return attach(client, screen, name, job, ask=not interaction.yes, notebook=notebook)


@contextlib.contextmanager
def _ports_forwarded(client: Client, screen: Screen, task: Task, cluster: str) -> Iterator[None]:
    """The ports that the task's file forwards, while its log is followed. One that is taken here does not end the job."""
    if not task.ports or task.dev is not None:
        yield
        return
    from podway.cli.forwarding import PortForwarding, choose_ports  # few tasks forward ports

    try:
        forwards = choose_ports(task.ports)
    except UserError as error:
        click.echo(f"Note: {error.what}; nothing is forwarded: {error.hint}, then: podway attach {cluster}", err=True)
        yield
        return
    with PortForwarding(client, cluster, forwards, screen.line):
        yield


def _offer_shell(client: Client, screen: Screen, name: str) -> None:
    """A cluster without a job is there to be used: a shell on its first host, if the person wants one."""
    screen.wait("")
    if click.confirm(f"Open a shell on {name} now?", default=True, err=True):
        from podway.cli.ssh import open_shell

        open_shell(client, name, 0, None)


def _offer_ssh(client: Client, screen: Screen, name: str, *, ask: bool) -> str:
    """How to open a shell on the cluster, if it is still up; '' where nobody can log in to its hosts."""
    from podway.cli.ssh_names import offer_ssh_name  # only a launch needs it

    cluster = client.cluster(name)
    row = find_row(cluster.order.provider)
    if row is not None and row.opens and "dev" not in row.capabilities:  # `ssh NAME` leads nowhere
        return ""
    return offer_ssh_name(client, screen, cluster, ask=ask) if cluster.state == "UP" else f"podway ssh {name}"


def _show_queue(client: Client, screen: Screen, cluster: str, job: int) -> None:
    queue = [one for one in client.jobs(cluster, limit=100) if one.exclusive]
    own = next((one for one in queue if one.number == job), None)
    if own is None:
        return  # a job that bypasses the queue waits for no other
    ahead = [one for one in queue if one.state not in ENDED and _is_ahead(one, own)]
    if ahead:
        screen.line(f"{MORE} Waiting for {format_count(len(ahead), 'job')} ahead of this one.")


def _is_ahead(other: JobView, own: JobView) -> bool:
    """As the server decides: what has begun keeps the chips, then the oldest of the highest priority."""
    if other.state != JobState.PENDING:
        return other.number != own.number
    return (-other.priority, other.number) < (-own.priority, own.number)


def useful_commands(cluster: str, job: int | None, shell: str | None) -> str:
    """Commands to type next; `shell` opens one on a cluster that is new to its user, '' where none can be opened."""
    blocks = []
    if job is not None:
        blocks.append(
            (
                f"Job ID: {job}",
                [("follow it", f"podway logs {cluster} {job}"), ("cancel it", f"podway cancel {cluster} {job}")],
            )
        )
    on_cluster = [
        ("run more on it", f"podway exec {cluster} FILE"),
        ("see its jobs", f"podway queue {cluster}"),
        *([("open a shell on it", shell)] if shell else []),
        ("delete it", f"podway down {cluster}"),
    ]
    if shell is not None:
        blocks.append((f"Cluster name: {cluster}", on_cluster))
    lines = ["", "Useful commands"]
    for title, items in blocks:
        lines.append(title)
        for index, (what, how) in enumerate(items):
            branch = LAST if index == len(items) - 1 else MORE
            lines.append(f"{branch} To {what + ':':<20} {how}")
    return "\n".join(lines)
