"""Models over several ranks, called in a wrong order or with wrong things: one clear error, on all ranks, nothing silent.

What the ranks do is in parallel_misuse.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import reports
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train import Ema, Precision

CASES = ("refused", "accepted", "late", "inputs", "meshes", "documented")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    everyone = reports(2, ["tests/parallel_misuse.py", *CASES], 100)
    for lines in everyone:
        broken = [line["error"] for line in lines if "error" in line]
        assert not broken, broken[0]
    return {line["case"]: line for line in everyone[0]}


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("prepared", "Precision.prepare has been given '0."),
        ("averaged", "Ema has been given '0."),
        ("graphs", "0 has graphs installed"),
        ("ddp", "in DistributedDataParallel, which does not take DTensors"),
        ("weights", "'0.attn.qkv.weight' has other values on rank 1"),
        ("larger", "rank 1 of the mesh has a model of"),
        ("tokens too", "sequence_parallel has split the tokens of blocks.0.spatial between the same ranks"),
        ("layers too", "tensor_parallel has split 'blocks.0."),
        ("whole state", "load_whole(model, state)"),
        ("in a larger one", "a part of '0."),
        ("no own frames", "did you forget own(x, dim)"),
        ("no own rows", "did you forget own(x, dim)"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused_on_all_ranks(found: dict[str, Any], what: str, says: str) -> None:
    """Weights that are not trained, sums of unlike parts, one rank that waits for another that has given up."""
    for said in found["refused"][what]:
        assert says in said
        assert "What to do" in said


@pytest.mark.timeout(150)
@pytest.mark.parametrize("what", ["copy", "recompute", "own state", "whole state", "whole state of a copy"])
def test_what_is_right_is_not_refused(found: dict[str, Any], what: str) -> None:
    assert set(found["accepted"][what]) == {"nothing"}


@pytest.mark.timeout(150)
def test_an_optimizer_made_before_the_split_is_refused(found: dict[str, Any]) -> None:
    """It stepped tensors that the model had no more, and training went on without a word."""
    assert found["late"]["split"]
    assert all("an optimizer is over a tensor" in said for said in found["late"]["stale"])
    assert all("another tensor now than Precision.prepare was given" in said for said in found["late"]["sharded"])
    assert all("another tensor now than Ema was given" in said for said in found["late"]["averages"])


@pytest.mark.timeout(150)
def test_the_documented_checkpoint_of_a_split_model_goes_on(found: dict[str, Any]) -> None:
    assert found["documented"]["trained"] > 1e-4
    assert found["documented"]["further"] < 1e-5


@pytest.mark.timeout(150)
def test_a_failed_check_names_unlike_ranks_as_a_cause(found: dict[str, Any]) -> None:
    assert found["inputs"]["lines"]
    assert "inputs or weights may differ between the ranks" in found["inputs"]["lines"][0]


@pytest.mark.timeout(150)
def test_tokens_that_nobody_shared_out_are_told_of_once(found: dict[str, Any]) -> None:
    """Without rotary tables nothing else shows that all ranks have the same tokens."""
    assert found["inputs"]["own"] == ["each of 2 ranks has all tokens of the grid (4, 2, 2): did you forget own(x, dim)?"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("data", "mesh['dp']"),
        ("layers", "mesh['tp']"),
        ("tokens", "whose ranks share a clip: mesh[…] of 'dp', 'tp'"),
        ("model", "whole(model.state_dict())"),
        ("order", "give model a torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_told_what_fits(found: dict[str, Any], call: str, says: str) -> None:
    assert all(says in said for said in found["meshes"][call])


@pytest.mark.parametrize("master_weights", [False, True])
def test_a_step_on_tensors_that_the_model_has_no_more_is_an_error(master_weights: bool) -> None:
    """As fully_shard and tensor_parallel leave them behind; the model stayed as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = Precision({"dtype": "bfloat16", "master_weights": master_weights}, "cpu")
    optimizer = torch.optim.AdamW(precision.prepare(model), lr=1e-3)
    precision.backward(model(torch.ones(2, 4, dtype=model[0].weight.dtype)).sum())  # type: ignore[union-attr, arg-type]
    precision.step(optimizer)
    averages = Ema(model, weights=precision.masters)
    averages.update()
    copied = copy.deepcopy(averages)
    precision.backward(model(torch.ones(2, 4, dtype=model[0].weight.dtype)).sum())  # type: ignore[union-attr, arg-type]
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    with pytest.raises(ConfigError, match=r"'1\.weight' is another tensor now than Precision\.prepare was given"):
        precision.step(optimizer)
    with pytest.raises(ConfigError, match=r"'1\.weight' is another tensor now than Ema was given"):
        averages.update()
    copied.update()  # of other tensors: nobody's


def test_a_parameter_that_has_moved_within_the_model_is_still_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    precision = Precision({"dtype": "float32"}, "cpu")
    optimizer = torch.optim.AdamW(precision.prepare(model), lr=1e-3)
    kept = model[0].weight
    del model[0].weight
    model[0].register_parameter("other", kept)  # type: ignore[arg-type]
    model[0].weight = kept.detach()  # type: ignore[assignment]
    precision.backward((kept * 2).sum())  # type: ignore[arg-type, operator]
    before = kept.detach().clone()  # type: ignore[operator]
    precision.step(optimizer)
    assert not torch.equal(before, kept)  # type: ignore[arg-type]
