"""tokenize=: columns of text as tensors of the batch, and errors of a tokeniser that end the loop and name it."""

from __future__ import annotations

import threading
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpupipe import VideoLoader
from gpupipe.data.tokens import Tokenizers
from gpupipe.data.transform.custom import CallFailed
from gpupipe.errors import ConfigError, GpupipeError, GraphError

SMALL: dict[str, Any] = {"clip": {"frames": 2}, "transform": {"size": 16}, "batch": 2, "device": "cpu"}


def letters(texts: list[str]) -> dict[str, Any]:
    """Codes of the letters, padded to the longest, as a tokeniser's input_ids and attention_mask."""
    longest = max(map(len, texts))
    ids = torch.tensor([[ord(c) for c in text.ljust(longest, "\0")] for text in texts])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.fixture
def rows(clips: dict[str, Path]) -> list[dict[str, Any]]:
    """Four rows of different captions and titles."""
    return [
        {"path": str(clips[name]), "caption": name * (k + 1), "title": name[0], "label": k}
        for k, name in enumerate(("h264", "vp9", "mpeg4", "h264_odd"))
    ]


def test_text_becomes_tensors_of_its_own_batch(rows: list[dict[str, Any]]) -> None:
    with VideoLoader(rows, **SMALL, columns="caption", tokenize=letters) as loader:
        batches = [batch for _ in range(3) for batch in loader]
    assert len(batches) == 6
    for batch in batches:
        captions = [rows[label]["caption"] for label in batch["label"].tolist()]
        assert batch.text["caption"] == captions
        assert torch.equal(batch["input_ids"], letters(captions)["input_ids"])
        assert torch.equal(batch["attention_mask"], letters(captions)["attention_mask"])
        assert {tensor.device for tensor in batch.values()} == {loader.device}


def test_a_tokeniser_for_each_of_several_columns(rows: list[dict[str, Any]]) -> None:
    functions = {"caption": letters, "title": lambda texts: {"first": [ord(text) for text in texts]}}
    with VideoLoader(rows, **SMALL, columns=["caption", "title"], tokenize=functions, shuffle=False) as loader:
        batch = next(iter(loader))
    assert list(batch)[4:] == ["caption_input_ids", "caption_attention_mask", "title_first"]
    assert batch["title_first"].tolist() == [ord("h"), ord("v")]
    with VideoLoader(rows, **SMALL, columns=["caption", "title"], tokenize={"caption": letters}) as loader:
        assert "input_ids" in next(iter(loader)), "one of them alone keeps the tokeniser's own names"


def test_what_comes_like_a_mapping_of_arrays_is_taken() -> None:
    """Hugging Face gives a UserDict, of lists where no tensors are asked for."""
    made = Tokenizers(lambda texts: UserDict(a=np.ones((2, 3), np.int32), b=[[1, 2], [3, 4]], c=(0.5, 1)), {"t": "text"})
    tokens = made.tokens({"t": ["x", "y"]}, ())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tokens.items()} == {
        "a": (torch.int32, (2, 3)), "b": (torch.int64, (2, 2)), "c": (torch.float64, (2,)),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gives", "says"),
    [
        (lambda texts: torch.zeros(2), "tokenize= of column 't' gave a Tensor, not a mapping"),
        (lambda texts: {"ids": torch.zeros(3, 4)}, "gave 'ids' of shape (3, 4) for 2 texts"),
        (lambda texts: {"ids": torch.tensor(3)}, "gave 'ids' of shape () for 2 texts"),
        (lambda texts: {"ids": [[1, 2], [3]]}, "gave 'ids', which makes no tensor"),
        (lambda texts: {"ids": texts}, "gave 'ids', which makes no tensor"),
        (lambda texts: {"video": torch.zeros(2)}, "gave 'video', which the batch has already"),
    ],
)
def test_what_is_no_mapping_of_tensors_is_named(gives: Any, says: str) -> None:
    with pytest.raises(GraphError) as caught:
        Tokenizers(gives, {"t": "text"}).tokens({"t": ["x", "y"]}, ("video", "mask"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("tokenize", "columns", "says"),
    [
        (letters, [], "tokenize= is one function, and the batch has no column of text"),
        (letters, ["caption", "title"], "tokenize= is one function, and the batch has caption, title of text"),
        ({"titel": letters}, ["title"], "tokenize= names the column 'titel', no text of the batch (which has title)"),
        ({"label": letters}, ["title"], "tokenize= names the column 'label', no text"),
        ({"title": "bert"}, ["title"], "tokenize='bert' cannot be called"),
    ],
)
def test_what_cannot_be_tokenised_is_told_when_the_loader_is_made(
    rows: list[dict[str, Any]], tokenize: Any, columns: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        VideoLoader(rows, **SMALL, columns=columns, tokenize=tokenize)
    assert says in str(caught.value)


@pytest.mark.parametrize("raised", [KeyError("vocabulary"), StopIteration()])
def test_an_error_of_the_tokeniser_ends_the_loop_with_its_column_and_text(
    rows: list[dict[str, Any]], raised: Exception
) -> None:
    """It is no fault of a video: nothing is substituted."""

    def fails(texts: list[str]) -> dict[str, Any]:
        raise raised

    with VideoLoader(rows, **SMALL, columns="caption", tokenize=fails) as loader:
        with pytest.raises(RuntimeError if isinstance(raised, StopIteration) else KeyError) as caught:
            next(iter(loader))
        assert loader.stats()["substituted"] == 0
    told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert "tokenize=" in told
    assert "column 'caption', texts ['" in told


def test_one_thread_at_a_time_is_in_a_tokeniser() -> None:
    """Hugging Face's fast ones raise "Already borrowed" where two threads pad at once."""
    inside, entered, waits = [], threading.Event(), threading.Event()

    def slow(texts: list[str]) -> dict[str, Any]:
        inside.append(texts[0])
        entered.set()
        assert waits.wait(60)
        return {"ids": torch.zeros(1)}

    asked = threading.Event()
    tokenizers = Tokenizers(slow, {"t": "text"})
    first = threading.Thread(target=tokenizers.tokens, args=({"t": ["a"]}, ()))
    second = threading.Thread(target=tokenizers.tokens, args=({"t": ["b"]}, ()), kwargs={"check": asked.set})
    first.start()
    assert entered.wait(60)
    second.start()
    assert asked.wait(60), "the second one waits, and looks whether it is still wanted"
    assert inside == ["a"]
    waits.set()
    first.join(60)
    second.join(60)
    assert inside == ["a", "b"]


def test_a_thread_whose_batch_is_not_wanted_any_more_does_not_wait() -> None:
    class Unwanted(Exception):
        pass

    def unwanted() -> None:
        raise Unwanted

    tokenizers = Tokenizers(letters, {"t": "text"})
    assert tokenizers._turn.acquire()
    with pytest.raises(Unwanted):
        tokenizers.tokens({"t": ["a"]}, (), check=unwanted)
    tokenizers._turn.release()
    with pytest.raises(CallFailed):
        Tokenizers(lambda texts: {}[0], {"t": "text"}).tokens({"t": ["a"]}, ())


def test_a_tokeniser_that_hangs_is_named(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpupipe.data.pipeline._GRACE_SECONDS", 0.0)
    free = threading.Event()

    def hangs(texts: list[str]) -> dict[str, Any]:
        free.wait(60)
        return letters(texts)

    loader = VideoLoader(
        rows, **SMALL, columns="caption", tokenize=hangs, decode={"limit_seconds": 2.0, "threads": 2}, on_bad_file="raise"
    )
    try:
        with pytest.raises(
            GpupipeError, match=r"the tokeniser tokenize=.* at work on column 'caption' has not come to an end within 2 s"
        ):
            next(iter(loader))
    finally:
        free.set()
        loader.close()


def test_a_tokeniser_of_hugging_face(rows: list[dict[str, Any]]) -> None:
    library = pytest.importorskip("tokenizers")
    words = library.Tokenizer(library.models.WordLevel({"[UNK]": 0, "h": 1, "v": 2, "[PAD]": 3}, unk_token="[UNK]"))
    words.enable_padding(pad_id=3, pad_token="[PAD]")

    def tokenize(texts: list[str]) -> dict[str, Any]:
        found = words.encode_batch(texts)
        return {"input_ids": [each.ids for each in found], "attention_mask": [each.attention_mask for each in found]}

    with VideoLoader(rows, **SMALL, columns="title", tokenize=tokenize, shuffle=False) as loader:
        one, two = loader
    assert one["input_ids"].tolist() == [[1], [2]]
    assert two["attention_mask"].tolist() == [[1], [1]]
