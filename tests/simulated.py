"""A machine on paper, on which a schedule runs with a clock of its own: no threads, no waiting, the same each time."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count

from gpupipe.data.decode import Decoder, Helping, Schedule
from gpupipe.data.depth import DepthControl
from gpupipe.data.jitter import JitterBuffer
from gpupipe.telemetry import Telemetry


@dataclass(frozen=True)
class Clip:
    number: int
    decoder: Decoder = "nvdec"
    kind: str = "h264"
    cost: float = 1.0
    decoded: bool = False


@dataclass
class Machine:
    """Hardware engines that share one rate, helpers beside them, and a consumer. Times are in seconds."""

    rate: float = 54.0
    """Clips of cost 1 that all hardware engines do in a second, with no helper at work."""
    engines: int = 10
    helpers: int = 7
    helper_seconds: Callable[[Clip, float], float] = lambda clip, now: 0.4 * clip.cost
    """What a helper takes for a clip that it begins now; infinity: it is stuck."""
    dies: Callable[[Clip], bool] = lambda clip: False
    drag: float = 0.0
    """Part of the hardware's rate that each helper at work costs."""
    ready_after: float = 0.4
    """What a process takes to start."""
    consumer_seconds: float = 0.0
    """What the consumer does with a batch before it takes the next."""
    batch: int = 8
    depth: int = 4
    control: DepthControl | None = None
    """Sets the depth in its place."""
    further: int = 26
    in_order: bool = True
    seed: int = 0
    delivered: list[float] = field(default_factory=list)
    """When each batch went out."""
    by_helpers: list[int] = field(default_factory=list)
    """Numbers of the clips that helpers did."""
    twice: int = 0
    """Clips that the hardware took back from a helper that was at them."""
    most_ahead: int = 0
    """Most batches under construction or ready at a time."""
    most_helping: int = 0
    """Most helpers at work at a time."""
    _now: float = 0.0

    def run(self, clips: list[Clip], helping: Helping | None = None) -> float:
        """Delivers all clips of an epoch; the seconds that took. ``helping`` must have this machine's :meth:`clock`."""
        start = self._now
        control = self.control or DepthControl.fixed(self.depth)
        jitter: JitterBuffer[int] = JitterBuffer(
            control, Telemetry(), lambda: schedule.room(), in_order=self.in_order, clock=self.clock
        )
        jitter.finish(math.ceil(len(clips) / self.batch))
        left = {number: len(clips[number * self.batch : (number + 1) * self.batch]) for number in range(len(clips))}

        def tasks() -> Generator[Clip | None]:
            for first in range(0, len(clips), self.batch):
                while jitter.reserve(self.further if schedule.far else None) is None:
                    yield None
                yield from clips[first : first + self.batch]

        schedule: Schedule[Clip, Clip] = Schedule(
            tasks(),
            lambda clip: clip,
            hardware=self.engines,
            helping=helping,
            window=control.lowest * self.batch,
            further=self.further * self.batch,
            reach=lambda: jitter.reach * self.batch,
            behind=lambda: jitter.behind,
        )
        events: list[tuple[float, int, Callable[[], None]]] = []
        turn = count()
        idle: dict[tuple[Decoder, int], tuple[float, bool]] = {}
        """Engines with nothing to do: since when, and whether the consumer was the slow one."""
        ready: set[int] = set()
        done: set[int] = set()
        busy = 0

        def after(seconds: float, what: Callable[[], None]) -> None:
            if math.isfinite(seconds):
                heapq.heappush(events, (self._now + seconds, next(turn), what))

        def finished(clip: Clip) -> None:
            assert clip.number not in done, clip
            done.add(clip.number)
            number = clip.number // self.batch
            left[number] -= 1
            if not left[number]:
                jitter.put(number, number)

        def free(decoder: Decoder, place: int) -> None:
            idle[decoder, place] = (self._now, not jitter.behind)

        def hardware_done(clip: Clip, place: int) -> None:
            schedule.done(clip, "nvdec", 0.0)
            finished(clip)
            free("nvdec", place)

        def helper_done(clip: Clip, place: int, seconds: float) -> None:
            nonlocal busy
            busy -= 1
            if self.dies(clip):
                schedule.give_back(clip)
                ready.discard(place)
            elif schedule.is_lent(clip, "cpu") and not schedule.claim(clip, seconds):
                self.twice += 1
            else:
                schedule.done(clip, "cpu", seconds)
                self.by_helpers.append(clip.number)
                finished(clip)
            free("cpu", place)

        def begin(decoder: Decoder, place: int) -> bool:
            nonlocal busy
            if decoder == "cpu" and place not in ready:
                if helping is None or place >= helping.count:
                    return False
                ready.add(place)
                after(self.ready_after, lambda: free("cpu", place))
                return True
            since, held_up = idle[decoder, place]
            if helping is not None and held_up and decoder == "nvdec" and self._now > since:
                helping.held_up(self._now - since)
                idle[decoder, place] = (self._now, not jitter.behind)
            clip = schedule.take(decoder, place, wait=False)
            if clip is None:
                return False
            spread = random.Random(f"{self.seed} {decoder} {clip.number}").uniform(0.7, 1.3)  # so that two runs compare
            if decoder == "nvdec":
                jitter.begin(clip.number // self.batch)
                slowed = max(0.1, 1 - self.drag * busy)
                after(clip.cost * spread * self.engines / (self.rate * slowed), lambda: hardware_done(clip, place))
            else:
                busy += 1
                seconds = self.helper_seconds(clip, self._now) * spread
                after(seconds, lambda: helper_done(clip, place, seconds))
            self.most_helping = max(self.most_helping, busy)
            return True

        consumer_free = start

        def consume() -> None:
            nonlocal consumer_free
            while consumer_free <= self._now and not jitter.behind:
                jitter.take()
                self.delivered.append(self._now)
                if self.consumer_seconds:
                    consumer_free = self._now + self.consumer_seconds
                    after(self.consumer_seconds, lambda: None)

        for decoder, engines in (("nvdec", self.engines), ("cpu", self.helpers)):
            for place in range(engines):
                free(decoder, place)  # type: ignore[arg-type]
        while len(done) < len(clips) or jitter.occupancy:
            begun = True
            while begun:
                consume()
                self.most_ahead = max(self.most_ahead, jitter.in_flight)
                begun = False
                for engine in list(idle):
                    if begin(*engine):
                        del idle[engine]
                        begun = True
            if len(done) == len(clips) and not jitter.occupancy:
                break
            assert events, f"nothing goes on, {len(done)} of {len(clips)} clips done"
            self._now, _, what = heapq.heappop(events)
            what()
        return self._now - start

    def clock(self) -> float:
        """Seconds on this machine."""
        return self._now
