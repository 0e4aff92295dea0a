"""Decode threads on the cores near their GPU: what a machine tells, when it is heeded, and who keeps to it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.config import LoaderConfig
from gpupipe.data.decode import fleet
from gpupipe.device import numa

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of eight cores, a node of memory alone, and a GPU on each: all cores may be used."""
    for node, cores in ((0, "0-3,8-11"), (1, "4-7,12-15"), (2, "")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for bus, node in ((0x1A, 0), (0x9B, 1), (0xC0, -1)):
        folder = tmp_path / f"bus/pci/devices/0000:{bus:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    buses = {0: 0x1A, 1: 0x9B, 2: 0xC0, 3: 0xD0}

    def properties(index: int) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=buses[index], pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(numa, "cpu_quota", lambda: 16)
    return tmp_path


def test_each_gpu_has_the_cores_of_its_node(machine: Path) -> None:
    assert numa.nodes(machine) == {0: frozenset({0, 1, 2, 3, 8, 9, 10, 11}), 1: frozenset({4, 5, 6, 7, 12, 13, 14, 15})}
    assert numa.cores_near(0, 2, machine) == frozenset({0, 1, 2, 3, 8, 9, 10, 11})
    assert numa.cores_near(1, 2, machine) == frozenset({4, 5, 6, 7, 12, 13, 14, 15})


@pytest.mark.parametrize("gpu", [2, 3], ids=["on no node", "not told"])
def test_a_gpu_of_no_known_node_is_fed_from_anywhere(machine: Path, gpu: int) -> None:
    assert numa.cores_near(gpu, 2, machine) is None


def test_cores_that_may_not_be_used_are_left_out(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5}, raising=False)
    monkeypatch.setattr(numa, "cpu_quota", lambda: 5)
    assert numa.cores_near(0, 2, machine) == frozenset({0, 1, 2})
    assert numa.cores_near(0, 1, machine) is None, "all five are this process's, and it would lose two"
    monkeypatch.setattr(numa, "cpu_quota", lambda: 3)
    assert numa.cores_near(0, 1, machine) == frozenset({0, 1, 2}), "a cgroup leaves it three anyway"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 9}, raising=False)
    assert numa.cores_near(0, 1, machine) is None, "the launcher has bound it already"
    assert numa.cores_near(1, 8, machine) is None, "to the other node"


def test_one_node_is_nothing_to_choose_from(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "devices/system/node/node1/cpulist").write_text("\n")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: pytest.fail("the GPU is not asked for"))
    assert numa.cores_near(0, 2, machine) is None
    assert numa.cores_near(0, 2, machine / "nowhere") is None


def test_the_setting_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "cores_near", lambda gpu, sharing: frozenset({gpu}))
    monkeypatch.setattr(fleet, "local_ranks", lambda device: 1)
    gpu = torch.device("cuda", 3)
    assert fleet.cores_of(LoaderConfig(), gpu) == frozenset({3}), "of the loader's own GPU, not of the first"
    assert fleet.cores_of(LoaderConfig(decode={"numa": False}), gpu) is None
    assert fleet.cores_of(LoaderConfig(), torch.device("cpu")) is None


@needs_affinity
@pytest.mark.parametrize("workers", [0, 1], ids=["threads", "processes"])
def test_threads_and_processes_that_decode_keep_to_their_cores(
    clips: dict[str, Path], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """And the thread that trains runs where it did."""
    everywhere = os.sched_getaffinity(0)
    one = frozenset({min(everywhere)})
    monkeypatch.setattr("gpupipe.data.loader.cores_of", lambda config, device: one)
    seen: list[tuple[str, frozenset[int]]] = []
    children: list[frozenset[int]] = []

    def watch(clip: torch.Tensor) -> torch.Tensor:
        seen.append((threading.current_thread().name, frozenset(os.sched_getaffinity(0))))
        for task in Path(f"/proc/{os.getpid()}/task").iterdir():
            for child in (task / "children").read_text().split():
                children.append(frozenset(os.sched_getaffinity(int(child))))
        return clip

    with VideoLoader(
        list(clips.values())[:2],
        clip={"frames": 2},
        batch=2,
        device="cpu",
        before=watch,
        decode={"threads": 2, "cpu_workers": workers},
    ) as loader:
        next(iter(loader))
    assert {cores for _, cores in seen} == {one}
    assert all(name.startswith("gpupipe-clips") for name, _ in seen)
    assert not workers or one in children
    assert os.sched_getaffinity(0) == everywhere


def test_numbers_are_read_as_the_kernel_writes_them() -> None:
    assert numa.numbers("0-2,7\n") == frozenset({0, 1, 2, 7})
    assert numa.numbers("\n") == frozenset()
    with pytest.raises(ValueError, match="all"):
        numa.numbers("all")
