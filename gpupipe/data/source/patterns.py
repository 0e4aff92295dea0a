"""Names that stand for several: ``{000..009}`` and ``{train,val}``."""

from __future__ import annotations

import itertools
import re

from gpupipe.errors import SourceError

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")
_MOST = 1_000_000


def expanded(pattern: str) -> list[str]:
    """The names in the order of their numbers, as shells have it: as many digits as the pattern's first number; the name itself
    where it has no braces.

    Raises:
        SourceError: when there are more than a million.
    """
    places = list(_BRACES.finditer(pattern))
    choices: list[list[str]] = []
    total, end = 1, 0
    for place in places:
        choices += [[pattern[end : place.start()]], _choices(place)]
        total *= len(choices[-1])
        if total > _MOST:
            raise SourceError(f"{pattern!r} stands for more than {_MOST} files", fix="did a digit too many slip in?")
        end = place.end()
    return ["".join(parts) for parts in itertools.product(*choices, [pattern[end:]])]


def _choices(place: re.Match[str]) -> list[str]:
    first, last, names = place.groups()
    if names is not None:
        return [str(name) for name in names.split(",")]
    if abs(int(last) - int(first)) >= _MOST:
        raise SourceError(f"{place[0]} stands for more than {_MOST} files", fix="did a digit too many slip in?")
    step = 1 if int(last) >= int(first) else -1
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + step, step)]
