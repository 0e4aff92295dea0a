"""A notebook's cell that is interrupted amid an epoch and run again: a whole epoch, and nothing that the first run left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

MAKE = """
import gc, threading, time, psutil
from gpupipe import VideoLoader
options = dict(clip={"frames": 2}, transform={"size": 16}, batch=2, device="cpu", shuffle=False)
loader = VideoLoader([PATH] * 20, **options)
runs = 0
"""
IN_THE_STEP = """
runs += 1
taken = []
for batch in loader:
    taken.append(batch.index)
    if len(taken) == 3 and runs == 1:
        print("amid", flush=True)
        threading.Event().wait(60)
print("whole", taken == list(range(10)))
"""
IN_THE_LOADER = """
runs += 1
def slow(clip):
    if runs == 1:
        print("amid", flush=True)
        time.sleep(0.3)
    return clip
taken = []
for batch in VideoLoader([PATH] * 20, **options, before=slow, decode={"cpu_workers": 1}):
    taken.append(batch.index)
print("whole", taken == list(range(10)))
"""
LEFT = """
def left():
    gc.collect()
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpupipe")]
    for child in psutil.Process().children():
        try:
            found += [str(child)] if "gpupipe" in " ".join(child.cmdline()) else []
        except psutil.Error:
            pass
    return found
until = time.monotonic() + 5
while left() and time.monotonic() < until:
    time.sleep(0.05)
print("left", left())
"""


def said(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs if output.output_type == "stream").strip()


def errors(cell: Any) -> list[str]:
    return [output.ename for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("epoch", [IN_THE_STEP, IN_THE_LOADER])
def test_a_cell_is_interrupted_and_run_again(clips: dict[str, Path], epoch: str) -> None:
    """IPython keeps the traceback of the interrupt, and by it whatever its frames held: that must keep nothing at work."""
    path = repr(str(clips["h264"]))
    cells = [nbformat.v4.new_code_cell(source.replace("PATH", path)) for source in (MAKE, epoch, LEFT)]
    make, again, left = cells
    reached = threading.Event()

    class Client(nbclient.NotebookClient):
        def process_message(self, message: Any, cell: Any, number: int) -> Any:
            if message["header"]["msg_type"] == "stream" and "amid" in message["content"]["text"]:
                reached.set()
            return super().process_message(message, cell, number)

    client = Client(nbformat.v4.new_notebook(cells=cells), timeout=100, kernel_name="python3", allow_errors=True)
    with client.setup_kernel():
        client.execute_cell(make, 0)
        assert not errors(make), make.outputs

        def interrupt() -> None:
            if reached.wait(100):
                asyncio.run(client.km.interrupt_kernel())

        other = threading.Thread(target=interrupt)
        other.start()
        client.execute_cell(again, 1)
        other.join()
        assert errors(again) == ["KeyboardInterrupt"], again.outputs
        client.execute_cell(again, 1)
        assert said(again) == "whole True"
        client.execute_cell(left, 2)
        assert said(left) == "left []", left.outputs
