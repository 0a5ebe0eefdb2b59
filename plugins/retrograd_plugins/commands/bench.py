"""`retrograd bench`: evaluate without training, base against adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import config_argument, model_options, set_option
from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="bench", help="Evaluate CONFIG's task without training: base model against adapter.")
@config_argument
@click.option("--data", type=click.Path(path_type=Path), help="Held-out file; default [evaluation].data.")
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="LoRA GGUF; default [output].path if it exists."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Evaluate at most N examples: of sft the first N, of algorithms that draw answers N prompts spread"
    " evenly over the file.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1, max=256),
    default=1,
    show_default=True,
    help="Answers drawn for each prompt (ppo, grpo, agent_grpo); more than one adds avg@k and pass@k.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@model_options
@set_option
def bench(
    config: Path,
    data: Path | None,
    adapter: Path | None,
    limit: int | None,
    samples: int,
    as_json: bool,
    model: str | None,
    device: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Print the held-out metrics of both on the same examples."""
    import json
    import sys

    from retrograd.bench import bench_config
    from retrograd.cli.document import open_document
    from retrograd.progress import PlainReporter

    document = open_document(config, model=model, device=device, overrides=overrides)
    reporter = PlainReporter(sys.stderr)
    rows = bench_config(document, data=data, adapter=adapter, limit=limit, samples=samples, reporter=reporter)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    names = sorted({name for metrics in rows.values() for name in metrics})
    width = max(len(name) for name in names)
    click.echo(" " * width + "".join(f"{side:>14}" for side in rows))
    for name in names:
        values = "".join(f"{metrics[name]:>14.5g}" for metrics in rows.values())
        click.echo(f"{name:<{width}}{values}")


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`bench`."""
    return [
        Component(
            name="bench",
            config=NoConfig,
            build=lambda config, context: bench,
            summary="Evaluate without training, base against adapter.",
        )
    ]
