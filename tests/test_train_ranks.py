"""Training steps over two ranks of gloo: gradients of float32 copies, and a step that is not finite on one rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import reports

COPIES = """
from torch import nn
from gpupipe.train import Precision

def run(rank):
    torch.manual_seed(0)
    model, precision = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), Precision({"master_weights": True})
    trained = precision.prepare(model)
    optimizer = torch.optim.SGD(trained, lr=0.5)
    x = torch.arange(32.0).view(8, 4).sin()
    with precision.autocast():  # a rank with all rows in two parts has the same mean
        for rows in (x[:4], x[4:]) if rank is None else (x[4 * rank : 4 * rank + 4],):
            precision.backward(model(rows).float().square().mean() / (2 if rank is None else 1))
    norm = precision.step(optimizer)
    return float(norm), torch.cat([value.flatten() for value in precision.masters.values()]).tolist()

alone = run(None)
start()
together = run(dist.get_rank())
report(alone=alone, together=together)
"""

OTHER_WAYS = """
from torch import nn
from gpupipe.train import Precision

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.empty, self.never = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))

    def forward(self, x, dropped):
        made = self.first(x)
        return self.empty * made if dropped else made

start()
torch.manual_seed(0)
model, precision = Model(), Precision({"master_weights": True})
optimizer = torch.optim.AdamW(precision.prepare(model), lr=0.1, weight_decay=0.1)
found = []
for dropped in (dist.get_rank() == 1, False):
    with precision.autocast():
        precision.backward(model(torch.ones(2, 4), dropped).float().square().mean())
    precision.step(optimizer)
    found.append({name: value.tolist() for name, value in precision.masters.items()})
report(found=found)
"""

ONE_RANK = """
import train_video_dit
from pathlib import Path
from test_train_video_dit import options

start()
whole, calls = train_video_dit.drawn, [0]

def once(part, seed):
    noise, time = whole(part, seed)
    calls[0] += 1
    return (noise * float("nan") if calls[0] == 3 and dist.get_rank() == 1 else noise), time

train_video_dit.drawn = once
trainer = train_video_dit.Trainer(options(Path(sys.argv[1]) / "train.csv", Path(sys.argv[2]), steps=5, dtype="float16"))
reports = []
note = trainer.note
trainer.note = lambda seen, took: (reports.append(str(seen.report)) if seen.report else None, note(seen, took))
with trainer.loader:
    trainer.run()
state = trainer.optimizer.state_dict()["state"]
report(
    reports=reports, steps=sorted({int(one["step"]) for one in state.values()}),
    weights=sum(float(value.double().sum()) for value in trainer.net.parameters()),
)
"""

COMMON = """
import json, os, sys
import torch
import torch.distributed as dist
from gpupipe import ops

ops.use("reference")

def start():
    dist.init_process_group("gloo")

def report(**found):
    print("FOUND" + json.dumps(found), flush=True)
    os._exit(0)  # gloo's threads abort a process that ends by itself now and then
"""


def ranks(code: str, *arguments: Path) -> list[dict[str, Any]]:
    """What each of two processes reports."""
    return [lines[0] for lines in reports(2, ["-c", COMMON + code, *map(str, arguments)])]


def test_gradients_of_float32_copies_are_averaged() -> None:
    first, second = ranks(COPIES)
    assert first["together"] == second["together"], "all ranks take the same step"
    alone, together = first["alone"], first["together"]
    assert together[0] == pytest.approx(alone[0], rel=1e-6)
    assert together[1] == pytest.approx(alone[1], rel=1e-6)


def test_ranks_may_take_other_ways_through_a_model() -> None:
    """A branch for dropped text, say: the rank without it sent less than the other waited for, which ended both."""
    first, second = ranks(OTHER_WAYS)
    assert first == second
    one, two = first["found"]
    assert one["empty"] != [1.0] * 4, "one rank's gradient counts"
    assert two["empty"] == one["empty"], "where no rank has one, the optimizer leaves it alone: no decay, no momentum"
    assert two["never"] == [1.0] * 3


def test_what_is_not_finite_on_one_rank_is_done_again_by_all(tmp_path: Path) -> None:
    """They would wait for each other for ever otherwise. The rank that has it names it; the other says that it has not."""
    from gpupipe.cli.demo_data import make_clips

    made = make_clips(tmp_path / "videos", train=3, val=1, size=32, frames=12)
    first, second = ranks(ONE_RANK, made.folder, tmp_path / "out")
    assert first["steps"] == second["steps"] == [5]
    assert first["weights"] == second["weights"]
    assert [len(each["reports"]) for each in (first, second)] == [1, 1]
    assert "step 2 is not finite" in first["reports"][0]
    assert "another rank" in first["reports"][0]
