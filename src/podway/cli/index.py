"""The table of verbs, and the group that imports a verb only when it is called.

`podway --help` is drawn from the table alone: it costs the import of click and nothing else. To add a verb, write its file and
add its row; an alias of another tool's verb is a row too.
"""

import importlib
import os

import click

from podway.version import __version__

RUN, CLUSTERS, FACTS, MODELS, SERVER = "Jobs", "Clusters", "Planning", "Models", "Server and tools"

# verb -> (where its command is, what it does in one line, the section of --help)
VERBS: dict[str, tuple[str, str, str]] = {
    "launch": ("podway.cli.launch:command", "Run a task on a cluster, creating it if needed.", RUN),
    "exec": ("podway.cli.execute:command", "Run a task on a cluster that is up, without its setup.", RUN),
    "queue": ("podway.cli.queue:command", "Show the jobs of clusters.", RUN),
    "logs": ("podway.cli.logs:command", "Show the output of a job, and follow it until it ends.", RUN),
    "top": ("podway.cli.top:command", "Show the CPU time and memory of each rank of a job.", RUN),
    "cancel": ("podway.cli.cancel:command", "Cancel jobs, and wait until all their processes have ended.", RUN),
    "run": ("podway.cli.run:command", "Run a command on every host at once, bypassing the queue.", RUN),
    "apply": (
        "podway.cli.apply:command",
        "Make or update the service or volume of a file; launch any other task.",
        RUN,
    ),
    "dev": ("podway.cli.dev:command", "Work on a slice: launch it, prepare it once, forward its ports.", RUN),
    "attach": (
        "podway.cli.attach:command",
        "Forward the ports of a cluster to this machine, and follow the log of its job.",
        RUN,
    ),
    "status": ("podway.cli.status:command", "Show clusters.", CLUSTERS),
    "ui": ("podway.cli.ui:command", "Open the web page: clusters, jobs, logs, plans and costs.", CLUSTERS),
    "ps": ("podway.cli.status:command", "The same as status (as in dstack).", CLUSTERS),
    "ssh": ("podway.cli.ssh:command", "Open a shell on a host of a cluster.", CLUSTERS),
    "stop": ("podway.cli.stop:command", "Stop clusters and keep their disks.", CLUSTERS),
    "start": ("podway.cli.start:command", "Start stopped clusters.", CLUSTERS),
    "down": ("podway.cli.down:command", "Delete clusters and everything that belongs to them.", CLUSTERS),
    "autostop": ("podway.cli.autostop:command", "Stop or delete a cluster once it is idle.", CLUSTERS),
    "share": ("podway.cli.share:command", "Let another user of the server view or use a cluster or service.", CLUSTERS),
    "cost": ("podway.cli.cost:command", "Show what clusters cost, including deleted ones.", CLUSTERS),
    "volume": ("podway.cli.volume:command", "Create, list and delete disks that outlive clusters.", CLUSTERS),
    "pool": ("podway.cli.pool:command", "Keep workers up, and run each job on a free one.", CLUSTERS),
    "group": ("podway.cli.group:command", "Look at job groups, and cancel them.", RUN),
    "schedule": ("podway.cli.schedule:command", "List and end runs that start by the clock.", CLUSTERS),
    "tpus": ("podway.cli.tpus:command", "Show TPU types: sizes, memory, speed and price.", FACTS),
    "check": (
        "podway.cli.check:command",
        "Read the task in FILE (- for standard input) and print what it means.",
        FACTS,
    ),
    "plan": ("podway.cli.plan:command", "Find the slice, mesh and batch for a model, with speed and cost.", FACTS),
    "rehearse": (
        "podway.cli.rehearse:command",
        "Compile the real step for a slice on this machine, without a TPU.",
        FACTS,
    ),
    "tune": ("podway.cli.tune:command", "Measure the best plans on the slice itself.", FACTS),
    "calibrate": ("podway.cli.calibrate:command", "Keep measured runs, and plan by them.", FACTS),
    "train": ("podway.cli.train:command", "Train or fine-tune a language model.", MODELS),
    "serve": ("podway.cli.serve:command", "Serve a model with an OpenAI-compatible API.", MODELS),
    "bench": ("podway.cli.bench:command", "Measure running systems.", MODELS),
    "services": ("podway.cli.services:command", "Show services.", MODELS),
    "service": ("podway.cli.service:command", "Look at a service, and change it.", MODELS),
    "gateway": ("podway.cli.gateway:command", "Pass requests for models and services to their replicas.", MODELS),
    "login": ("podway.cli.login:command", "Log in to a team's server.", SERVER),
    "logout": ("podway.cli.logout:command", "Log out, and use the server of this machine again.", SERVER),
    "server": ("podway.cli.server:command", "Run a server, or manage the one on this machine.", SERVER),
    "gke": ("podway.cli.gke:command", "Prepare a Kubernetes cluster for TPU tasks, and make node pools there.", SERVER),
    "image": ("podway.cli.image:command", "Build container images without Docker.", SERVER),
    "sandbox": ("podway.cli.sandbox:command", "A pretend TPU cloud on this machine.", SERVER),
    "doctor": (
        "podway.cli.doctor:command",
        "Check what launches need: credentials, project, APIs, quota, keys, each with its fix.",
        SERVER,
    ),
    "completion": ("podway.cli.completion:command", "Print a shell completion script.", SERVER),
    "version": ("podway.cli.version:command", "Show the version.", SERVER),
}

# Commands that entries of an ssh config run (hosts/ssh/config.py), not people.
FOR_SSH = {
    "ssh-proxy": "podway.cli.ssh_hooks:proxy",
    "ssh-login": "podway.cli.ssh_hooks:login",
}

COMPLETE_VARIABLE = "_PODWAY_COMPLETE"


class VerbTable(click.Group):
    """A group whose commands are the rows of `VERBS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's file, now that it is needed."""
        where = VERBS[cmd_name][0] if cmd_name in VERBS else FOR_SSH.get(cmd_name)
        if where is None:
            return None
        module, _, name = where.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, by the words of other tools too, with the nearest verb in the message: click knows only what is imported."""
        while args[0] not in VERBS and args[0] not in FOR_SSH and not ctx.resilient_parsing:
            from podway.cli import habits  # only a word that is no verb needs it

            known = habits.translated(args)
            if known is None:
                raise click.UsageError(_unknown(args, habits.answer(args)), ctx)
            if known == ["--help"]:
                click.echo(ctx.get_help())
                ctx.exit()
            args = known
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A list for each section."""
        width = max(len(verb) for verb in VERBS)
        for section in dict.fromkeys(row[2] for row in VERBS.values()):
            with formatter.section(section):
                rows = [(verb.ljust(width), text) for verb, (_, text, its) in VERBS.items() if its == section]
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list["click.shell_completion.CompletionItem"]:
        """Verbs from the table; click itself would import every file for its help line."""
        from click.shell_completion import CompletionItem  # only a shell that completes needs it

        verbs = [CompletionItem(verb, help=row[1]) for verb, row in VERBS.items() if verb.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]


def _unknown(args: list[str], answer: str) -> str:
    if answer:
        return f"Podway has no command {args[0]!r}. {answer}"
    from difflib import get_close_matches  # only a mistake needs it

    near = get_close_matches(args[0], VERBS, n=1, cutoff=0.75)
    return f"No such command {args[0]!r}." + "".join(f" Did you mean {verb!r}?" for verb in near)


def _print_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"podway {__version__}")
        ctx.exit()


@click.command(
    cls=VerbTable,
    name="podway",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    invoke_without_command=True,
    epilog="""With no cloud account, a slice is simulated on this machine. Try:

\b
  podway launch --tpus v6e-16 'echo host $PODWAY_RANK'
""",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_context
def podway(ctx: click.Context) -> None:
    """From a laptop to a TPU pod in one command."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def complete(instruction: str) -> int:
    """Answer a shell that asks for completions; the scripts of `podway completion` call this through the environment."""
    from click.shell_completion import shell_complete  # only a shell that completes needs it

    return shell_complete(podway, {}, "podway", COMPLETE_VARIABLE, instruction)


def completion_asked() -> str:
    """What a completing shell asks for, or nothing."""
    return os.environ.get(COMPLETE_VARIABLE, "")
