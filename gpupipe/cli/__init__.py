"""The command line. Every command is a function that takes a config; what is heavy is imported inside the commands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gpupipe import __version__
from gpupipe.cli import bench, cache, config, demo, doctor, index, probe, view
from gpupipe.cli.console import is_terminal, say, tell
from gpupipe.errors import GpupipeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="gpupipe",
    help="Video files in, ready training batches on the GPU out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if is_terminal(sys.stdout) else None,
)
app.command("demo")(demo.command)
app.command("bench")(bench.command)
app.command("probe")(probe.command)
app.command("index")(index.command)
app.command("cache")(cache.command)
app.add_typer(config.app, name="config")
app.command("view")(view.command)
app.command("doctor")(doctor.command)

_DEBUG_VARIABLE = "GPUPIPE_DEBUG"


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"gpupipe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")] = False,
) -> None:
    if debug:
        os.environ[_DEBUG_VARIABLE] = "1"
    if os.environ.get(_DEBUG_VARIABLE) == "1":
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("gpupipe").setLevel(logging.DEBUG)


def main(arguments: Sequence[str] | None = None) -> None:
    """The ``gpupipe`` command.

    Leaves by SystemExit: 0 for success, 1 for an error that gpupipe explains or a target that was missed, 2 for a wrong
    command line, 130 after Ctrl-C.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="gpupipe")
    except GpupipeError as error:
        if os.environ.get(_DEBUG_VARIABLE) == "1":
            raise
        tell(f"gpupipe: {error}")
        sys.exit(1)
    except KeyboardInterrupt:  # one that falls outside of what typer guards
        sys.exit(130)
    except OSError as error:  # files are told of by errors of their own: mostly this is the standard output
        if os.environ.get(_DEBUG_VARIABLE) == "1":
            raise
        where = f" to {error.filename}" if error.filename is not None else ""
        tell(f"gpupipe: the result cannot be written{where}: {error.strerror or error}")
        os._exit(1)  # the interpreter's own attempt to write the rest would fail in the same way, with a traceback
    finally:
        # An interrupt that hits code evaluated from a string (a namedtuple, while a module loads) makes ``python -m`` end by
        # the signal, whatever the exit status, unless another string is evaluated after it.
        eval("None")
