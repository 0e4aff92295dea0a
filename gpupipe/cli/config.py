"""``gpupipe config``: what a configuration's file comes to, whether it is one, and its schema for editors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpupipe.cli.console import emit_json, say
from gpupipe.config import LoaderConfig, StageConfig, TrainingConfig
from gpupipe.errors import ConfigError

if TYPE_CHECKING:
    from gpupipe.config.document import Document
    from gpupipe.config.teletron import Place

app = typer.Typer(no_args_is_help=True, help="Show and check configurations, and give editors their schema.")
_LAYOUTS = {"gpupipe": "gpupipe's own layout", "tele_tron": "TeleTron's layout"}


class ShowConfig(StageConfig):
    """Whose values are shown."""

    file: Path | None = None
    """None: the defaults."""


class ValidateConfig(StageConfig):
    """What is checked."""

    files: tuple[Path, ...]


def show(config: ShowConfig) -> dict[str, Any]:
    """A whole configuration, every default included, in gpupipe's own layout; of the training step what a file says.

    Returns:
        ``config``, the fields; ``origin``, where each value is from: ``from`` is ``file``, ``preset`` or ``default``, and those
        of the file have ``key`` and ``line``; ``layout`` and ``others``, keys of the file that are not gpupipe's. JSON types
        only.

    Raises:
        ConfigError: when the file is no configuration; it has all that is wrong.
    """
    from gpupipe.config.document import read

    document = read(config.file, LoaderConfig) if config.file is not None else None
    loader = document.told() if document is not None else LoaderConfig()
    fields = loader.model_dump(mode="json")
    step = document.training if document is not None else TrainingConfig()
    said = {name: value for name, value in step.model_dump(mode="json").items() if name in step.model_fields_set}
    return {
        "command": "config show",
        "file": str(config.file) if config.file is not None else None,
        "layout": document.layout if document is not None else "gpupipe",
        "others": list(document.others) if document is not None else [],
        "config": fields | said,
        "origin": {".".join(place): _origin(loader, place, document) for place, _ in _leaves(fields, ())}
        | {".".join(place): _origin(step, place, document) for place, _ in _leaves(said, ())},
    }


def validate(config: ValidateConfig) -> dict[str, Any]:
    """Checks files.

    Returns:
        ``good``: whether all of them are configurations; ``files``: for each its ``file``, ``layout`` (None where it cannot be
        read) and ``faults``: ``key``, ``line``, ``message`` and ``fix`` of all that is wrong. JSON types only.
    """
    from gpupipe.config.document import read

    found: list[dict[str, Any]] = []
    for file in config.files:
        try:
            document = read(file, LoaderConfig)
        except ConfigError as error:
            fault = {"key": None, "line": None, "where": str(file), "message": error.message, "fix": error.fix}
            found.append({"file": str(file), "layout": None, "others": [], "faults": [fault]})
            continue
        faults = [
            {
                "key": ".".join(fault.place) or None,
                "line": document.line(fault.place),
                "where": document.where(fault.place),
                "message": fault.message,
                "fix": fault.fix,
            }
            for fault in document.faults
        ]
        found.append({"file": str(file), "layout": document.layout, "others": list(document.others), "faults": faults})
    return {"command": "config validate", "good": not any(file["faults"] for file in found), "files": found}


def _leaves(fields: dict[str, Any], above: Place) -> Iterator[tuple[Place, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _origin(config: StageConfig, place: Place, document: Document[LoaderConfig] | None) -> dict[str, Any]:
    from gpupipe.config.document import origin

    source = origin(config, place, document)
    key = document.key(place) if document is not None and source == "file" else None
    if document is None or key is None:
        return {"from": source}
    return {"from": source, "key": ".".join(key), "line": document.line(key)}


def _yaml(report: dict[str, Any]) -> Iterator[str]:
    """The fields as YAML, each with where it is from behind it."""
    import yaml

    lines: list[tuple[str, str]] = []
    seen: Place = ()
    for place, value in _leaves(report["config"], ()):
        for depth in range(len(place) - 1):
            if place[: depth + 1] != seen[: depth + 1]:
                lines.append((f"{'  ' * depth}{place[depth]}:", ""))
        seen = place
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n").removesuffix("\n...")
        lines.append((f"{'  ' * (len(place) - 1)}{place[-1]}: {text}", _said(report, ".".join(place))))
    width = min(48, max(len(line) for line, _ in lines))
    for line, said in lines:
        yield f"{line:<{width}}  # {said}" if said else line


def _said(report: dict[str, Any], name: str) -> str:
    origin = report["origin"][name]
    if origin["from"] == "preset":
        return f"preset {report['config']['transform']['preset']}"
    if "key" not in origin:
        return str(origin["from"])
    at = f"line {origin['line']}" if origin["line"] is not None else "file"
    return at if origin["key"] == name else f"{at}: {origin['key']}"


@app.command("show")
def show_command(
    file: Annotated[Path | None, typer.Argument(help="A configuration; without it, the defaults.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the whole configuration that a file stands for, and where each value is from.

    The output is a file in gpupipe's own layout, also for one in TeleTron's.
    """
    report = show(ShowConfig(file=file))
    if as_json:
        emit_json(report)
        return
    if report["file"] is not None:
        beside = f"; not read: {', '.join(report['others'])}" if report["others"] else ""
        say(f"# {report['file']}, {_LAYOUTS[report['layout']]}{beside}")
    for line in _yaml(report):
        say(line)


@app.command("validate")
def validate_command(
    files: Annotated[list[Path], typer.Argument(help="Configurations.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check configurations, and name all that is wrong by file, line and key.

    Leaves with 0 when nothing is wrong, else with 1.
    """
    report = validate(ValidateConfig(files=tuple(files)))
    if as_json:
        emit_json(report)
    else:
        for file in report["files"]:
            for fault in file["faults"]:
                say(f"{fault['where']}: {fault['message']}")
                say(f"  -> {fault['fix']}")
            if not file["faults"]:
                beside = f"; not read: {', '.join(file['others'])}" if file["others"] else ""
                say(f"{file['file']}: good, {_LAYOUTS[file['layout']]}{beside}")
    if not report["good"]:
        raise typer.Exit(1)


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a configuration's file, for editors that check and complete YAML."""
    from gpupipe.config.schema import schema

    emit_json(schema())
