"""Why no batch comes, in words: which stage the threads are in, for how long, and with which file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpupipe.device.doing import Doing
from gpupipe.errors import StarvedError


class _Stage(NamedTuple):
    words: str
    """With the number of visits in it."""
    fix: str


_STAGES = {
    "index": _Stage(
        "indexing {visits}", "is the disk slow? `gpupipe index` makes all indexes ahead of training; or raise timeout_seconds"
    ),
    "bytes": _Stage(
        "waiting for bytes of {visits}", "does the disk answer? cache={'read_ahead': …} asks it ahead; or raise timeout_seconds"
    ),
    "decode": _Stage("decoding {visits}", "leave such files out, lower decode.limit_seconds, or raise timeout_seconds"),
    "upload": _Stage("uploading {visits} to the GPU", "is the GPU held up by other work? Or raise timeout_seconds"),
    "transform": _Stage("transforming {visits}", "make clips smaller, or raise timeout_seconds"),
    "before": _Stage("your transform before= on {visits}", "does it wait for something? Mend it, or raise timeout_seconds"),
    "after": _Stage("your transform after= on {visits}", "does it wait for something? Mend it, or raise timeout_seconds"),
    "process": _Stage("starting {processes}", "is the machine busy, or short of memory? Or raise timeout_seconds"),
}
_OTHER = _Stage("{stage} of {visits}", "raise timeout_seconds")


def starved(seconds: float, threads: Iterable[Doing | None], now: float) -> StarvedError:
    """The error for a consumer that got no batch within ``seconds``.

    Args:
        threads: what each thread is at; None: nothing that it has told of.
        now: by ``time.monotonic``.

    Returns:
        One that names each stage that a thread is in, that of the thread which has been at it for longest first, with its file.
    """
    late = f"no batch came within {seconds:g} s: "
    stages: dict[str, list[Doing]] = {}
    told = list(threads)
    for one in sorted((one for one in told if one is not None), key=lambda one: one.since):
        stages.setdefault(one.stage, []).append(one)
    if not stages:
        return StarvedError(f"{late}none of the {len(told)} threads is at work", fix="raise timeout_seconds")
    oldest = next(iter(stages.values()))[0]
    parts = [_words(those, now) for those in stages.values()]
    return StarvedError(late + "; ".join(parts), fix=_STAGES.get(oldest.stage, _OTHER).fix, path=oldest.what)


def _words(those: list[Doing], now: float) -> str:
    first, count = those[0], len(those)
    words = _STAGES.get(first.stage, _OTHER).words.format(
        visits="1 visit" if count == 1 else f"{count} visits",
        processes="1 decoding process" if count == 1 else f"{count} decoding processes",
        stage=first.stage,
    )
    where = f", in {first.what}" if first.what else ""
    longest = "the longest " if count > 1 else ""
    return f"{words}, {longest}for {now - first.since:.1f} s{where}"
