"""`retrograd inspect`: what a model is and what of it can be trained."""

from __future__ import annotations

from typing import Any

import click

from retrograd.cli.options import model_options
from retrograd_hookspecs import Component, NoConfig, hookimpl


@click.command(name="inspect", help="Show a model: sizes, LoRA targets, tokenizer, template, kernels.")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def inspect(model: str | None, device: str | None, as_json: bool) -> None:
    """Describe the GGUF and how this machine would run it."""
    import json

    from retrograd.cli.document import model_document
    from retrograd.inspection import inspect_model

    if model is None:
        raise click.UsageError("--model is required")
    found = inspect_model(model_document(model, device=device))
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    for section, values in found.items():
        click.echo(f"{section}:")
        for name, value in values.items():
            click.echo(f"  {name}: {value if not isinstance(value, list) else ', '.join(map(str, value))}")


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`inspect`."""
    return [
        Component(
            name="inspect",
            config=NoConfig,
            build=lambda config, context: inspect,
            summary="Show what a model is and what of it can be trained.",
        )
    ]
