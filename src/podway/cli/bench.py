"""`podway bench`: measure what runs."""

import click

from podway.cli.options import CommandGroup


@click.group(name="bench", cls=CommandGroup)
def command() -> None:
    """Measure running systems."""


@command.command(name="serve")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="URL of the server.")
@click.option("--model", help="The model's name at the server (default: its first).")
@click.option(
    "--dataset",
    type=click.Choice(["synthetic", "sharegpt", "file"]),
    default="synthetic",
    show_default=True,
    help="Source of the prompts.",
)
@click.option("--dataset-path", type=click.Path(dir_okay=False), help="For sharegpt and file.")
@click.option(
    "--num-prompts", type=click.IntRange(1), metavar="N", default=100, show_default=True, help="Number of requests."
)
@click.option(
    "--input-len", type=click.IntRange(1), metavar="N", default=128, show_default=True, help="Tokens, for synthetic."
)
@click.option(
    "--output-len", type=click.IntRange(1), metavar="N", default=128, show_default=True, help="Tokens, for synthetic."
)
@click.option(
    "--spread", type=click.FloatRange(0, 0.99), metavar="FRACTION", default=0.0, help="Vary lengths by this fraction."
)
@click.option(
    "--request-rate",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Requests a second (default: all at once).",
)
@click.option("--concurrency", type=click.IntRange(1), metavar="N", help="Concurrent requests.")
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Ask for answers of full length.")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed of prompts, lengths and arrivals.")
@click.option("--slo", type=(float, float), help="TTFT and TPOT limits in ms for goodput.", metavar="TTFT TPOT")
@click.option("--api-key-file", type=click.Path(dir_okay=False), help="A file with the API key.")
@click.option(
    "--wait", type=click.FloatRange(0), metavar="SECONDS", help="Seconds to wait for the server to become ready."
)
@click.option("--save-result", type=click.Path(dir_okay=False), help="Write all results as JSON.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), help="Write a plot (SVG).")
def serve(
    url: str,
    model: str | None,
    dataset: str,
    dataset_path: str | None,
    num_prompts: int,
    input_len: int,
    output_len: int,
    spread: float,
    request_rate: float | None,
    concurrency: int | None,
    chat: bool,
    ignore_eos: bool,
    seed: int,
    slo: tuple[float, float] | None,
    api_key_file: str | None,
    wait: float | None,
    save_result: str | None,
    plot_path: str | None,
) -> None:
    """Send load to any server with OpenAI's API, and report times and throughput."""
    # asyncio and the load client cost start-up time that other verbs should not pay.
    import asyncio
    import os
    from pathlib import Path

    import msgspec

    from podway.bench import serve as bench
    from podway.bench.sse import target_of
    from podway.errors import UserError

    if dataset != "synthetic" and not dataset_path:
        raise UserError(f"--dataset {dataset} needs a file", "add --dataset-path FILE")
    if request_rate and concurrency:
        raise UserError("--request-rate and --concurrency together", "give one of them")
    key = os.environ.get("OPENAI_API_KEY")
    if api_key_file:
        key = bench.read_text(Path(api_key_file)).strip()
    target = target_of(url, key)

    async def measure() -> tuple[list[bench.Outcome], float, str]:
        if wait is not None:
            await bench.until_ready(target, wait)
        name = model or await bench.model_name(target)
        if dataset == "synthetic":
            prompts = bench.synthetic(num_prompts, input_len, output_len, seed, spread)
        elif dataset == "file":
            prompts = bench.from_lines(Path(dataset_path or ""), num_prompts)
        else:
            prompts = await bench.from_sharegpt(Path(dataset_path or ""), num_prompts, seed, target)
        load = bench.Load(
            prompts=prompts, model=name, rate=request_rate, concurrency=concurrency, seed=seed, chat=chat,
            ignore_eos=ignore_eos,
        )  # fmt: skip
        outcomes, seconds = await bench.run(target, load)
        return outcomes, seconds, name

    outcomes, seconds, name = asyncio.run(measure())
    summary = bench.summary(outcomes, seconds, slo)
    click.echo(bench.report(summary, slo))
    if save_result:
        saved = {**summary, "model": name, "dataset": dataset, "seed": seed, "requests": outcomes}
        Path(save_result).write_bytes(msgspec.json.format(msgspec.json.encode(saved)))
    if plot_path:
        bench.plot(outcomes, Path(plot_path))
    if not summary["successful"]:
        raise UserError("no request succeeded", "; ".join(summary["errors"]) or "look at the server's log")
