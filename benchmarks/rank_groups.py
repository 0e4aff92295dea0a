"""Groups of ranks on this machine, started by torchrun: to wait for, to kill a part of, and to end whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parent.parent
_MARK = "GPUPIPE_RANK_GROUP"
"""In the environment of every process of a group, however far down."""
_POLL = 0.1
_TOLD = 12
"""Lines of the log in an error."""


class GroupError(RuntimeError):
    """A group that did not do what it was there for; says how it ended and what it said last."""


class Group:
    """``ranks`` processes of a Python script under ``torch.distributed.run`` and all that they start. A context manager, which
    leaves none of them behind.

    Args:
        ranks: processes to start.
        script: a path, with its arguments.
        log: file for what they print; made anew.
        threads: of torch, in each of them.
        variables: more for their environment.
    """

    def __init__(
        self, ranks: int, script: Sequence[str], log: Path, *, threads: int = 1, variables: dict[str, str] | None = None
    ) -> None:
        self._name, self._log = uuid.uuid4().hex, log
        paths = [str(ROOT), str(ROOT / "samples"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        own = {_MARK: self._name, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *script]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as out:
            self._launcher = subprocess.Popen(
                command, env={**os.environ, **(variables or {}), **own}, stdout=out, stderr=out, start_new_session=True
            )

    @property
    def text(self) -> str:
        """What has been printed so far, by all of them."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def told(self) -> str:
        """The last lines of it."""
        return "\n".join(self.text.splitlines()[-_TOLD:])

    def members(self) -> list[psutil.Process]:
        """The processes of the group that live, the launcher among them."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._name and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):  # it ended, or is another user's
                continue
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank.

        Raises:
            GroupError: when there is none.
        """
        for process in self.members():
            try:
                parent, variables = process.ppid(), process.environ()
            except psutil.Error:
                continue
            if parent == self._launcher.pid and variables.get("RANK") == str(number):
                return process
        raise GroupError(f"no process is rank {number}: {self.told()}")

    def wait_for(self, text: str, seconds: float) -> None:
        """Waits until that has been printed.

        Raises:
            GroupError: when the group ends before, or so many seconds pass.
        """
        until = time.monotonic() + seconds
        while text not in self.text:
            if (status := self._launcher.poll()) is not None and text not in self.text:
                raise GroupError(f"ended with status {status} before it said {text!r}: {self.told()}")
            if time.monotonic() > until:
                raise GroupError(f"{text!r} not said after {seconds:.0f} s: {self.told()}")
            time.sleep(_POLL)

    def wait(self, seconds: float) -> int:
        """Waits for the launcher's end; its status.

        Raises:
            GroupError: when so many seconds pass.
        """
        try:
            return self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise GroupError(f"not done after {seconds:.0f} s: {self.told()}") from None

    def left(self, seconds: float) -> int:
        """How many processes of the group live on for so many seconds."""
        until = time.monotonic() + seconds
        while (count := len(self.members())) and time.monotonic() < until:
            time.sleep(_POLL)
        return count

    def close(self) -> None:
        """Kills what is left. May be called again."""
        for process in self.members():
            try:
                process.kill()
            except psutil.Error:
                continue
        self._launcher.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def answers_of(
    ranks: int,
    script: str,
    part: str,
    given: dict[str, Any],
    folder: Path,
    seconds: float,
    *,
    threads: int,
    variables: dict[str, str],
) -> list[dict[str, Any]]:
    """What each rank of a group found, in the order of ranks.

    Args:
        script: of this folder; it gets the part and the group's folder, and writes ``rank<N>.json`` there.
        given: what it is to do, for ``task.json``: lists of files are too long for a command line.
        folder: made, and of this group alone.
        seconds: after which it is given up.

    Raises:
        GroupError: when one of them gave no answer.
    """
    folder.mkdir(parents=True)
    (folder / "task.json").write_text(json.dumps(given), encoding="utf-8")
    command = [str(ROOT / "benchmarks" / script), part, str(folder)]
    with Group(ranks, command, folder / "log.txt", threads=threads, variables=variables) as group:
        status = group.wait(seconds)
        files = [folder / f"rank{number}.json" for number in range(ranks)]
        if not all(file.exists() for file in files):  # threads of gloo abort a process that has done all, now and then
            raise GroupError(f"ended with status {status}: {group.told()}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]
