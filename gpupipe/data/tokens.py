"""A user's tokenisers: columns of text as tensors, made on the thread that completes a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gpupipe.data.source.columns import Kind
from gpupipe.data.transform.custom import Call, CallFailed, Watch, unwatched
from gpupipe.errors import ConfigError, GraphError, noted

Tokenizer = Callable[[list[str]], Mapping[str, Any]]
"""Takes B texts and gives tensors of leading dimension B by name, as Hugging Face's tokenisers do."""

_LOOK_SECONDS = 0.2
"""How often a thread that waits for its turn looks whether anybody still wants its batch."""


class Tokenizers:
    """The tokeniser of each column, called by one thread at a time: those written in Rust refuse a second one.

    Args:
        given: one function, for the only column of text that is asked for; or one for each column by name.
        kinds: of the columns asked for.

    Raises:
        ConfigError: when a column is not there or is no text, or a function cannot be called.
    """

    def __init__(self, given: Tokenizer | Mapping[str, Tokenizer], kinds: Mapping[str, Kind]) -> None:
        texts = [name for name, kind in kinds.items() if kind == "text"]
        if isinstance(given, Mapping):
            self._functions = dict(given)
        elif len(texts) == 1:
            self._functions = {texts[0]: given}
        else:
            raise ConfigError(
                f"tokenize= is one function, and the batch has {', '.join(texts) or 'no column'} of text",
                fix="give tokenize={'caption': function}" if texts else "ask for one: columns=['caption']",
            )
        for name, function in self._functions.items():
            if name not in texts:
                raise ConfigError(
                    f"tokenize= names the column {name!r}, no text of the batch (which has {', '.join(texts) or 'none'})",
                    fix=f"ask for it: columns=[{name!r}]",
                )
            if not callable(function):
                raise ConfigError(f"tokenize={function!r} cannot be called", fix="give a function of a list of texts")
        self._turn = threading.Lock()

    def tokens(
        self,
        text: Mapping[str, list[str]],
        taken: Iterable[str],
        watch: Watch = unwatched,
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, torch.Tensor]:
        """What the tokenisers make of a batch's text.

        Args:
            taken: names that the batch has already.
            watch: told of each call.
            check: raises when the batch is not wanted any more, for a thread that waits for its turn.

        Returns:
            Tensors by the names that the tokeniser gives; of several columns by column and name, ``caption_input_ids``.

        Raises:
            GraphError: when a tokeniser gives what is no mapping of tensors with as many rows as there are texts.
            CallFailed: when it raises.
        """
        names = set(taken)
        result: dict[str, torch.Tensor] = {}
        for column, function in self._functions.items():
            for name, value in self._call(column, function, text[column], watch, check).items():
                name = f"{column}_{name}" if len(self._functions) > 1 else str(name)
                if name in names or name in result:
                    raise GraphError(f"tokenize= of column {column!r} gave {name!r}, which the batch has already")
                result[name] = _tensor(value, name, column, len(text[column]))
        return result

    def _call(
        self, column: str, function: Tokenizer, text: list[str], watch: Watch, check: Callable[[], object]
    ) -> Mapping[str, Any]:
        while not self._turn.acquire(timeout=_LOOK_SECONDS):
            check()
        try:
            watch(Call("tokenize", function, f"column {column!r}", "the tokeniser"))
            try:
                given = function(list(text))
            except Exception as error:
                note = f"raised by tokenize={function!r} for column {column!r}, texts {text!r:.200}"
                raise CallFailed(noted(error, note)) from error
            finally:
                watch(None)
        finally:
            self._turn.release()
        if not isinstance(given, Mapping):
            raise GraphError(
                f"tokenize= of column {column!r} gave a {type(given).__name__}, not a mapping of tensors",
                fix="give {'input_ids': tensor}, say by tokenizer(texts, padding=True, return_tensors='pt')",
            )
        return given


def _tensor(value: Any, name: str, column: str, rows: int) -> torch.Tensor:
    where = f"tokenize= of column {column!r} gave {name!r}"
    fix = "pad texts to one length and give tensors: tokenizer(texts, padding=True, return_tensors='pt')"
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.from_numpy(np.asarray(value))
        except (ValueError, TypeError) as error:  # lists of unlike length, or of what are no numbers
            raise GraphError(f"{where}, which makes no tensor: {error}", fix=fix) from error
    tensor: torch.Tensor = value
    if tensor.ndim == 0 or len(tensor) != rows:
        raise GraphError(f"{where} of shape {tuple(tensor.shape)} for {rows} texts", fix="give one row for each text")
    return tensor.detach()
