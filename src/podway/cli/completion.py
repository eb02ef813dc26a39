"""`podway completion`: a script for the shell, made by click."""

import click
from click.shell_completion import get_completion_class

from podway.cli.index import COMPLETE_VARIABLE, podway


@click.command(name="completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a shell completion script.

    \b
    bash:  podway completion bash >> ~/.bashrc
    zsh:   podway completion zsh >> ~/.zshrc
    fish:  podway completion fish | source   (in config.fish)
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    click.echo(kind(podway, {}, "podway", COMPLETE_VARIABLE).source())
