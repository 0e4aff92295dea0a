"""Switches: reference or kernel, and precision, for all ops or one, for a block or for good."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpupipe import ops
from gpupipe.device.jit import interpreted
from gpupipe.errors import ConfigError
from gpupipe.ops import settings
from gpupipe.ops.op import watched


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    with ops.use("kernel"), ops.precision("balanced"):
        yield


def test_use_holds_for_a_block_or_for_good() -> None:
    assert settings.kernel_wanted("rms_norm")
    with ops.use("reference"):
        assert not settings.kernel_wanted("rms_norm")
        with ops.use("kernel", "rms_norm"):
            assert settings.kernel_wanted("rms_norm")
            assert not settings.kernel_wanted("layer_norm")
        assert not settings.kernel_wanted("rms_norm")
    assert settings.kernel_wanted("layer_norm")
    ops.use("reference", "rms_norm")
    assert not settings.kernel_wanted("rms_norm")
    assert settings.kernel_wanted("layer_norm")
    ops.use("kernel")
    assert settings.kernel_wanted("rms_norm"), "all means all"


def test_precision_holds_for_a_block_and_a_call_overrides_it() -> None:
    with ops.precision("conservative"):
        assert settings.mode(None) == "conservative"
        assert settings.mode("fast") == "fast"
    assert settings.mode(None) == "balanced"


def test_unknown_choices_are_named() -> None:
    with pytest.raises(ConfigError, match="'twin'"):
        ops.use("twin")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no op 'rmsnorm'"):
        ops.use("reference", "rmsnorm")
    with pytest.raises(ConfigError, match="'half'"):
        ops.precision("half")  # type: ignore[arg-type]


@pytest.mark.skipif(not interpreted(), reason="Triton does not run here on the CPU")
def test_the_switch_decides_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpupipe.ops import norms

    ran: list[str] = []
    op = norms.norm_op
    monkeypatch.setattr(norms, "norm_op", lambda *args: (ran.append("kernel"), op(*args))[1])
    x = torch.randn(3, 8)
    ops.rms_norm(x)
    with ops.use("reference", "rms_norm"):
        ops.rms_norm(x)
        ops.layer_norm(x)
    assert ran == ["kernel", "kernel"]


@pytest.mark.skipif(not interpreted(), reason="Triton does not run here on the CPU")
def test_a_compiled_function_follows_the_switch() -> None:
    compiled = torch.compile(lambda x: ops.rms_norm(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 8)
    for _ in range(2):  # first they are traced, which calls the ops too
        with torch.profiler.profile() as profile:
            compiled(x)
            with ops.use("reference"):
                compiled(x)
    assert [event.name for event in profile.events() if event.name.startswith("gpupipe::")] == ["gpupipe::norm"]


def test_the_environment_may_choose_and_a_wrong_choice_is_named() -> None:
    code = "from gpupipe.ops import settings; print(settings.kernel_wanted('rms_norm'))"

    def run(value: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"GPUPIPE_OPS": value}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert run("reference").stdout.strip() == "False"
    assert "GPUPIPE_OPS is 'torch'" in run("torch").stderr


def test_every_name_is_an_op_with_a_docstring() -> None:
    assert set(ops.__all__) == ops.NAMES | {"NAMES", "Rope", "precision", "use"}
    for name in ops.NAMES:
        text = getattr(ops, name).__doc__
        assert text, name
        assert "Args:" in text, name
        assert "Returns:" in text, name
    with pytest.raises(AttributeError, match="rmsnorm"):
        ops.rmsnorm  # noqa: B018


def test_ops_work_where_triton_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from gpupipe import ops; from gpupipe.device import jit\n"
        "x = torch.randn(2, 8, requires_grad=True); ops.rms_norm(x).sum().backward()\n"
        "assert x.grad is not None; print(jit.reason)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError" in found.stdout or "ImportError" in found.stdout, found.stderr


def test_who_is_watched() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    x = torch.randn(2)

    class Subclass(torch.Tensor):
        pass

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return function(*args, **(kwargs or {}))

    class FunctionMode(TorchFunctionMode):
        pass

    assert not watched(x, None, torch.nn.Parameter(x))
    assert watched(x.as_subclass(Subclass))
    with Mode():
        assert watched(x)
    with torch.device("cpu"):
        assert not watched(x), "a default device has no say where one is given"
        with FunctionMode():
            assert watched(x)
    assert not watched(x)
    seen: list[bool] = []
    torch.func.vmap(lambda y: (seen.append(watched(y)), y)[1])(torch.randn(3, 2))
    assert seen == [True]


def test_every_op_is_in_the_reference() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "api" / "ops.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"auto(?:function|class):: gpupipe\.ops\.(\w+)", page))
    assert listed == set(ops.__all__) - {"NAMES"}
