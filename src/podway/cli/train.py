"""`podway train`: train or fine-tune a model on this machine, or on every host of a slice when it runs inside a task.

The command checks what can be known without jax, then becomes `python -m podway.train`, which imports it.
"""

import os
import sys

import click

from podway.extras import require


@click.command(name="train")
@click.argument("config", required=False)
@click.argument("settings", nargs=-1)
@click.option("--check", is_flag=True, help="Check the config, print it, and exit.")
@click.option("--candidates", metavar="FILE", help="Run each list of settings in FILE in turn, for `podway tune`.")
@click.option("--candidate-limit", type=float, default=1800.0, show_default=True, help="Seconds for each of them.")
def command(
    config: str | None, settings: tuple[str, ...], check: bool, candidates: str | None, candidate_limit: float
) -> None:
    """Train or fine-tune a language model.

    CONFIG is a YAML file; SETTINGS are key=value overrides, such as schedule.steps=100 or
    mesh.shape=fsdp=4,tensor=2. Inside a task, run it on every host: the hosts find each other.

    \b
    Examples:
      podway train model.name=tiny-llama3 schedule.steps=20
      podway train finetune.yaml lora.rank=16 output=out/first
    """
    if candidates is not None:
        from podway.train.candidates import read_candidates, run_candidates  # no other verb should pay for it

        sys.exit(run_candidates(read_candidates(candidates), candidate_limit))
    words = [word for word in (config, *settings) if word is not None]
    require("train", "podway train")
    from podway.train.checks import check_settings  # numpy comes with it; no other verb should pay for that
    from podway.train.settings import print_config, read_config

    file = words[0] if words and "=" not in words[0] else None
    read = read_config(file, words[1:] if file is not None else words)
    check_settings(read)
    if check:
        click.echo(print_config(read))
        return
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "podway.train", *words])
