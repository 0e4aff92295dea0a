"""``gpupipe doctor``: what is here, what was tried, and what to do about what is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpupipe.cli.console import Progress, emit_json, is_terminal, say, say_facts, say_table

if TYPE_CHECKING:
    from gpupipe.observe.doctor import Diagnosis

_COLOURS = {
    "ok": typer.colors.GREEN,
    "warn": typer.colors.YELLOW,
    "missing": typer.colors.RED,
    "not needed": typer.colors.BRIGHT_BLACK,
}


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Check this machine and try out its parts.

    Looks at packages and driver, compiles a kernel, decodes a clip, and shows which decoder serves which kind of video.
    Leaves with 0 when videos can be loaded, if only on the CPU.
    """
    from gpupipe.observe.doctor import diagnose

    with Progress("looking", None):
        diagnosis = diagnose()
    if as_json:
        emit_json({"command": "doctor", **diagnosis.to_dict()})
    else:
        _say(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(1)


def _say(diagnosis: Diagnosis) -> None:
    width = max(len(check.name) for check in diagnosis.checks)
    for check in diagnosis.checks:
        state = f"{check.state:<10}"
        if is_terminal(sys.stdout):
            state = typer.style(state, fg=_COLOURS[check.state])
        say(f"{state}  {check.name:<{width}}  {check.detail}")
        if check.fix and check.state != "ok":
            say(f"{'':<10}  {'':<{width}}  -> {check.fix}")
    say()
    say_table(
        ("codec", "chroma", "bits", "decoder", "sizes, or why not NVDEC"),
        (
            (row.codec, row.chroma, row.bits, row.decoder, row.reason if row.min_size is None or row.max_size is None else
             f"{row.min_size[0]}x{row.min_size[1]} to {row.max_size[0]}x{row.max_size[1]}, {row.engines} engines")
            for row in diagnosis.support
        ),
    )  # fmt: skip
    say()
    say_facts([
        ("device auto is", diagnosis.device),
        ("decoder auto takes for H.264", f"{diagnosis.decoder} ({diagnosis.decoder_reason})"),
        ("videos can be loaded", "yes" if diagnosis.ok else "no: see the checks above"),
    ])  # fmt: skip
