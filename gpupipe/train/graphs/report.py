"""What graphs came to."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GraphReport:
    """What an :class:`gpupipe.train.AdaptiveGraph` has done so far."""

    calls: int
    hits: int
    """Calls that were replayed, their captures included."""
    hit_rate: float
    """Of the calls after the warm-up, 0 to 1; 0 before."""
    graphs: int
    segments: int
    """Captured parts, between which something runs as it is; 0 where calls are captured whole."""
    signatures: int
    """Kinds of calls seen."""
    pool_bytes: int
    launches_saved: int
    """Kernels, copies and the like that a replay launched at once instead of one by one."""
    held_up: int = 0
    """Calls that could have been replayed but for an earlier one whose backward had not run, as of losses that are kept."""
    failures: tuple[str, ...] = field(default=())
    """What could not be captured, and where."""
    gpu_bound: tuple[str, ...] = field(default=())
    """Kinds of calls that run as they are, for the GPU is the bottleneck and a graph would gain nothing, with both times."""
    given_up: str | None = None
    """Why nothing is captured any more; None while it is."""

    def __str__(self) -> str:
        lines = [
            f"{self.hits} of {self.calls} calls replayed ({100 * self.hit_rate:.0f} % after the warm-up), {self.graphs} graphs"
            f" for {self.signatures} kinds of calls, {self.pool_bytes / 2**20:.0f} MiB, {self.launches_saved} launches saved"
        ]
        if self.segments:
            lines.append(f"in {self.segments} segments")
        if self.held_up:
            lines.append(f"{self.held_up} calls ran as they are while an earlier one still waited for its backward")
        lines += [f"not captured: {failure}" for failure in self.failures]
        lines += [f"as it is, for a graph would gain nothing: {call}" for call in self.gpu_bound]
        if self.given_up is not None:
            lines.append(f"given up: {self.given_up}")
        return "\n".join(lines)
