"""The rules of the house: who imports whom, how large a room may grow, what is public; and a GPU run refuses to skip."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpupipe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpupipe"

LEVEL = {
    "cli": 6,
    "integrations": 5,
    "observe": 5,
    "data": 4,
    "train": 4,
    "ops": 3,
    "device": 2,
    "types": 1,
    "config": 1,
    "errors": 0,
    "telemetry": 0,
}
"""A room imports only from rooms of a lower level, and from itself."""
HOMES: dict[str, str] = gpupipe._HOMES


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under ``if TYPE_CHECKING:``, which never run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _run_time_nodes(other)
            continue
        yield child
        yield from _run_time_nodes(child)


def imports(source: str, module: str, *, is_package: bool = False) -> set[str]:
    """Full names of what a module imports: ``from gpupipe import VideoLoader`` counts as the home of that name."""
    found: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in _run_time_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found |= {HOMES[a.name] if base == "gpupipe" and a.name in HOMES else f"{base}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


def room(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "gpupipe" and parts[1] in LEVEL else None


def breaches(source: str, module: str, *, is_package: bool = False) -> list[str]:
    here = room(module)
    if here is None:
        return []
    bad = []
    for target in sorted(imports(source, module, is_package=is_package)):
        there = room(target)
        if there is None or there == here:
            continue
        flow = here == "data" and module.startswith("gpupipe.data.flow")
        if LEVEL[there] >= LEVEL[here] or (here == "data" and there == "ops" and not flow):
            bad.append(f"{module} imports {target}")
    return bad


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    assert breaches(path.read_text(encoding="utf-8"), module_name(path), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "caught"),
    [
        ("gpupipe.data.loader", "from gpupipe.train import graphs", True),
        ("gpupipe.data.loader", "import gpupipe.observe.plots", True),
        ("gpupipe.data.loader", "from ..cli import main", True),
        ("gpupipe.data.loader", "def f():\n    from gpupipe.ops import norm", True),
        ("gpupipe.data.loader", "import importlib\nimportlib.import_module('gpupipe.cli')", True),
        ("gpupipe.data.flow.raft", "from gpupipe.ops import correlation", False),
        ("gpupipe.device.module", "from gpupipe import VideoLoader", True),
        ("gpupipe.device.module", "from gpupipe import __version__", False),
        ("gpupipe.types", "if TYPE_CHECKING:\n    from gpupipe.data.transform.params import TransformParams", False),
        ("gpupipe.types", "if TYPE_CHECKING:\n    pass\nelse:\n    import gpupipe.data", True),
        ("gpupipe.errors", "from gpupipe.telemetry import log", True),
        ("gpupipe.observe.doctor", "from gpupipe.data.decode import choose\nfrom gpupipe.device import inventory", False),
        ("gpupipe.observe.doctor", "from gpupipe.integrations import hf", True),
    ],
)
def test_the_rule_catches_what_it_should(module: str, source: str, caught: bool) -> None:
    assert bool(breaches(source, module)) is caught


def test_every_room_has_a_level() -> None:
    rooms = {
        path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__", "__main__"} <= set(LEVEL)


def test_no_room_is_too_large() -> None:
    rooms = [*FILES, *(ROOT / "cuda_src").glob("*.cu*"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "samples").glob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in rooms}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_what_a_trainer_needs_stays_small() -> None:
    """A module of it has at most 120 lines, and its sample fewer than 60; the reference trainer is a trainer itself."""
    samples = [path for path in (ROOT / "samples").glob("train_*.py") if path.name != "train_video_dit.py"]
    limits = {120: (PACKAGE / "integrations").glob("*.py"), 59: samples}
    found = [(path.name, len(path.read_text("utf-8").splitlines()), most) for most, of in limits.items() for path in of]
    assert len(found) >= 14
    assert [one for one in found if one[1] > one[2]] == []


def test_public_names_resolve_and_are_few() -> None:
    assert len(gpupipe.__all__) <= 15
    assert set(gpupipe.__all__) == set(HOMES)
    for name in gpupipe.__all__:
        assert getattr(gpupipe, name).__doc__, f"gpupipe.{name} has no docstring"
    with pytest.raises(AttributeError, match="VideoLoder"):
        getattr(gpupipe, "VideoLoder")  # noqa: B009  (a plain attribute would be a type error)


def test_a_gpu_run_refuses_to_skip(tmp_path: Path) -> None:
    """Runs pytest on a GPU test where no GPU is visible: skipped as it stands, failed under GPUPIPE_REQUIRE_GPU=1."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")  # imports in no time
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_one():\n    pass\n\ndef test_cpu():\n    pass\n"
    )
    (tmp_path / "test_file.py").write_text(
        "import pytest\npytest.importorskip('no_such_package')\n@pytest.mark.gpu\ndef test_two(): ...\n"
    )
    for required, code, summary in (("0", 0, "1 passed, 2 skipped"), ("1", 1, "1 passed, 2 errors")):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment |= {"GPUPIPE_REQUIRE_GPU": required, "PYTHONPATH": str(tmp_path)}
        options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(tmp_path)],
            env=environment,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert run.returncode == code, run.stdout
        assert summary in run.stdout


def test_ci_refuses_to_skip_a_trainer(tmp_path: Path) -> None:
    """Runs pytest on tests of a trainer that is not installed: skipped as it stands, failed where it has to be there."""
    folder = tmp_path / "integrations"
    folder.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_file.py").write_text("import pytest\npytest.importorskip('no_such_trainer')\ndef test_one(): ...\n")
    (folder / "test_one.py").write_text("import pytest\ndef test_one():\n    pytest.importorskip('no_such_trainer')\n")
    (tmp_path / "test_other.py").write_text("import pytest\ndef test_two():\n    pytest.skip('for a reason of its own')\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_") and k not in ("CI", "GPUPIPE_REQUIRE_TRAINERS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", str(tmp_path)]
    for required, code, summary in (({}, 0, "3 skipped"), ({"CI": "true"}, 1, "1 failed, 1 skipped, 1 error")):
        run = subprocess.run(command, env={**kept, **required}, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert run.returncode == code, run.stdout
        assert summary in run.stdout


def test_rooms_that_the_pages_name_are_there_after_import_gpupipe() -> None:
    code = (
        "import gpupipe; print(callable(gpupipe.observe.show), gpupipe.types.Clip, gpupipe.errors, 'observe' in dir(gpupipe))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("True <class")
    code = "import gpupipe, sys; hasattr(gpupipe, 'nothing'); sys.exit('torch' in sys.modules or 'PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
