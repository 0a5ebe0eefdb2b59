"""`retrograd chat`: talk to the tuned model, alone or beside its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import config_argument, model_options, set_option
from retrograd_hookspecs import Component, NoConfig, hookimpl

HELP = "/reset forgets the conversation, /exit ends; Ctrl-C stops an answer"


@click.command(name="chat", help="Talk to the model of CONFIG with its adapter. /reset forgets, /exit ends.")
@config_argument
@click.option(
    "--adapter", type=click.Path(path_type=Path), help="LoRA GGUF; default [output].path if it exists."
)
@click.option("--compare", is_flag=True, help="Answer with the base model and with the adapter.")
@click.option("--base-only", is_flag=True, help="Answer with the base model alone.")
@click.option("--system", help="System message.")
@click.option(
    "--temp", type=click.FloatRange(min=0), default=0.7, show_default=True, help="Temperature; 0 is greedy."
)
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="Nucleus."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Longest answer in tokens.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the sampler.")
@model_options
@set_option
def chat(
    config: Path,
    adapter: Path | None,
    compare: bool,
    base_only: bool,
    system: str | None,
    temp: float,
    top_p: float,
    max_new_tokens: int,
    seed: int,
    model: str | None,
    device: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Read lines from stdin, answer on stdout, until /exit or the end of input."""
    import sys

    from retrograd.answers import Chat
    from retrograd.cli.document import open_document
    from retrograd_hookspecs import RetrogradError, SamplingParams

    if compare and base_only:
        raise click.UsageError("--compare and --base-only exclude each other")
    params = SamplingParams(temperature=temp, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed)
    document = open_document(config, model=model, device=device, overrides=overrides)
    sides = {"base": False, "adapter": True} if compare else {"": not base_only}
    conversation = Chat.open(document, None if base_only else adapter, params, system=system, sides=sides)
    interactive = sys.stdin.isatty()
    if interactive:
        click.echo(HELP, err=True)
    while True:
        if interactive:
            click.echo("> ", nl=False)
        line = sys.stdin.readline()
        text = line.strip()
        if not line or text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/") and " " not in text:
            click.echo(HELP, err=True)
        elif text:
            for name in sides:
                click.echo(f"{name}: " if name else "", nl=False)
                try:
                    conversation.say(name, text, lambda piece: click.echo(piece, nl=False))
                except RetrogradError as error:
                    click.echo(f"error: {error}", err=True)
                except KeyboardInterrupt:
                    if not interactive:
                        raise
                    click.echo(" [stopped]", nl=False)
                click.echo()


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`chat`."""
    return [
        Component(
            name="chat",
            config=NoConfig,
            build=lambda config, context: chat,
            summary="Talk to the tuned model, alone or beside its base.",
        )
    ]
