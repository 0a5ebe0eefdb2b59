"""`retrograd export`: an adapter merged into its base as a standalone GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrograd.cli.options import model_options
from retrograd_hookspecs import Component, NoConfig, hookimpl


def export_command(name: str) -> click.Command:
    """The command under one of its two names."""

    @click.command(name=name, help="Merge an adapter into its base model as a standalone GGUF.")
    @model_options
    @click.option("--adapter", required=True, type=click.Path(path_type=Path), help="LoRA GGUF.")
    @click.option("--out", required=True, type=click.Path(path_type=Path), help="File to write.")
    @click.option(
        "--type",
        "dtype",
        type=click.Choice(["f16", "bf16", "f32", "q8_0"]),
        default="f16",
        show_default=True,
        help="Type of the weight matrices.",
    )
    @click.option(
        "--text", type=click.Path(path_type=Path), help="Text to compare the models on; default a short one."
    )
    @click.option("--no-compare", is_flag=True, help="Do not measure the KL against the unmerged model.")
    @click.option("--modelfile", is_flag=True, help="Also write a Modelfile for Ollama beside the GGUF.")
    def export(
        model: str | None,
        device: str | None,
        adapter: Path,
        out: Path,
        dtype: str,
        text: Path | None,
        no_compare: bool,
        modelfile: bool,
    ) -> None:
        """Write the merged model; report its KL against base plus adapter."""
        import sys

        from retrograd.cli.document import model_document
        from retrograd.export import export_model
        from retrograd.progress import PlainReporter

        if model is None:
            raise click.UsageError("--model is required")
        lines = export_model(
            model_document(model, device=device),
            adapter=adapter,
            out=out,
            dtype=dtype,
            text=text,
            compare=not no_compare,
            modelfile=modelfile,
            reporter=PlainReporter(sys.stderr),
        )
        for line in lines:
            click.echo(line)

    return export


@hookimpl
def retrograd_commands() -> list[Component[NoConfig, Any]]:
    """`export`."""
    return [
        Component(
            name="export",
            config=NoConfig,
            build=lambda config, context: export_command("export"),
            summary="Merge an adapter into its base model as a standalone GGUF.",
        )
    ]
