"""The documentation builds without a warning, says what there is, and names nothing that is not there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpupipe
from gpupipe.config import PRESETS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "gpupipe" / "README.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    if not all(importlib.util.find_spec(name) for name in ("sphinx", "furo", "myst_parser")):
        pytest.skip("the extra docs is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs"), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    text = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "api").glob("*.html"))
    for name in gpupipe.__all__:
        assert f".{name}" in text, f"{name} is not in the API reference"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_setting_is_explained() -> None:
    """docs/configuration.md is made of the fields' own words: each has some, and its row in the tables."""
    spec = importlib.util.spec_from_file_location("fields", ROOT / "docs" / "fields.py")
    assert spec is not None
    assert spec.loader is not None
    fields = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fields)
    assert fields.page() == fields.PAGE.read_text(encoding="utf-8"), "run python docs/fields.py"
    assert fields.presets_page() == fields.PRESETS_PAGE.read_text(encoding="utf-8"), "run python docs/fields.py"
    assert all(f"`{name}`" in fields.presets_table() for name in PRESETS)
    rows = [line for line in fields.tables().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []
    assert all(":class:" not in row for row in rows)


def test_pages_of_the_reference_say_what_is_on_them() -> None:
    """As they lie in a repository they would be directives alone."""
    spec = importlib.util.spec_from_file_location("names", ROOT / "docs" / "names.py")
    assert spec is not None
    assert spec.loader is not None
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    assert {file.stem for file in names.PAGES} == {file.stem for file in (ROOT / "docs" / "api").glob("*.md")} - {"index"}
    for file in names.PAGES:
        text = file.read_text(encoding="utf-8")
        assert names.page(file) == text, "run python docs/names.py"
        listed = re.findall(r"^- `(\S+?)(?:\(\))?`: (.+)$", text, re.MULTILINE)
        assert len(listed) >= len(re.findall(r"^\.\. auto", text, re.MULTILINE))
        assert [name for name, line in listed if len(line) < 10] == [], "it has no docstring"


def test_the_map_of_the_rooms_is_complete() -> None:
    """gpupipe/README.md names every module and folder of the package, and none that is not there."""
    text = (ROOT / "gpupipe" / "README.md").read_text(encoding="utf-8")
    block = text.split("```")[1]
    named, folder = set(), {0: ""}
    for line in block.splitlines()[1:]:
        match = re.match(r"( *)([\w.]+/?)", line)
        if not match or len(match[1]) % 2 or len(match[1]) > 6:
            continue
        depth = len(match[1]) // 2
        path = folder[depth] + match[2]
        named.add(path.rstrip("/"))
        folder[depth + 1] = path
    package = ROOT / "gpupipe"
    there = {str(p.relative_to(package)) for p in package.rglob("*.py") if p.name != "__init__.py"}
    there |= {str(p.parent.relative_to(package)) for p in package.rglob("__init__.py")} - {"."}
    assert there - named == set(), "rooms that the map does not show"
    assert named - there - {"__init__.py", "README.md", "py.typed"} == set(), "rooms on the map that do not exist"


def test_every_trainer_s_sample_is_shown() -> None:
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    text += (ROOT / "docs" / "reference_trainer.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\{literalinclude\} \.\./samples/(train_\S+)", text))
    assert shown == {path.name for path in (ROOT / "samples").glob("train_*.py")}
    linked = set(re.findall(r"\]\(\.\./samples/(\S+)\)", text))
    assert shown <= linked, "a code host shows no literalinclude: there the link leads to the sample"
    modules = {path.stem for path in (ROOT / "gpupipe" / "integrations").glob("[!_]*.py")} - {"checks"}
    assert set(re.findall(r"`gpupipe\.integrations\.(\w+)`", text)) == modules


def test_the_examples_of_draws_and_of_what_moves_along_run(clips: dict[str, Path]) -> None:
    """As they stand on the page, one after the other, on a loader's batch."""
    text = (ROOT / "docs" / "transforms.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with gpupipe.VideoLoader(str(clips["h264"]), clip={"frames": 3}, batch=1, device="cpu") as loader:
        batch = next(iter(loader))
        known: dict[str, Any] = {
            "loader": loader,
            "batch": batch,
            "boxes": torch.tensor([[0.0, 0, 320, 240], [-9, -9, -1, -1]]),
            "points": torch.zeros(3, 5, 2),
            "masks": torch.ones(3, 240, 320, dtype=torch.uint8),
            "flow": torch.zeros(3, 2, 240, 320),
        }
        run = [example for example in examples if "loader.replay(record)" in example or "move.boxes(" in example]
        assert len(run) == 2
        for example in run:
            exec(example, known)
    assert torch.equal(known["clip"], batch.video[0])
    assert gpupipe.TransformParams.from_json(known["text"]) == batch.params[0]
    assert known["boxes"].tolist() == [[0, 0, 224, 224]], "the frame fills the clip, and what lies outside of it is gone"
    assert (known["points"].shape, known["masks"].shape, known["flow"].shape) == ((3, 5, 2), (3, 224, 224), (3, 2, 224, 224))


@pytest.mark.parametrize("page", ["README.md", "docs/transforms.md"])
def test_python_examples_compile(page: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        compile(example, page, "exec")
        for name in re.findall(r"from gpupipe import (.*)", example):
            assert {part.strip() for part in name.split(",")} <= set(gpupipe.__all__)
