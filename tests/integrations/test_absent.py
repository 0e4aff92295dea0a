"""Without its trainer a module of gpupipe.integrations says what to install, and nothing else of gpupipe asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gpupipe.integrations

NAMES = sorted(path.stem for path in Path(gpupipe.integrations.__file__).parent.glob("[!_]*.py") if path.stem != "checks")
CODE = """
import importlib, json, sys
for name in ("lightning", "accelerate", "transformers", "torchtitan", "deepspeed", "ray"):
    sys.modules[name] = None
told = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"gpupipe.integrations.{name}")
    except Exception as error:
        told[name] = [type(error).__name__, str(error), error.__cause__ is None]
print(json.dumps(told))
"""


def test_a_missing_trainer_is_one_error_that_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *NAMES], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert sorted(told) == NAMES
    for name, (kind, text, alone) in told.items():
        package = {"hf": "transformers"}.get(name, name)
        assert (kind, alone) == ("DeviceError", True)
        assert f"{package} cannot be used" in text or f"{package}." in text, text
        assert "pip install" in text.splitlines()[-1], text
        assert package in text.splitlines()[-1], text
