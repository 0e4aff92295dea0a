"""Models over several GPUs: split by heads and columns (tensor parallel), or by tokens (sequence parallel)."""

from __future__ import annotations

from gpupipe.train.parallel.balance import Balance, balance
from gpupipe.train.parallel.sequence import SequenceParallel, sequence_parallel
from gpupipe.train.parallel.split import SplitReport, tensor_parallel
from gpupipe.train.parallel.states import load_optimizer_state, load_whole, optimizer_state, param_groups, whole
from gpupipe.train.parallel.weights import data_ranks, fsdp_placement, kept_within, split_columns, split_rows

__all__ = [
    "Balance",
    "SequenceParallel",
    "SplitReport",
    "balance",
    "data_ranks",
    "fsdp_placement",
    "kept_within",
    "load_optimizer_state",
    "load_whole",
    "optimizer_state",
    "param_groups",
    "sequence_parallel",
    "split_columns",
    "split_rows",
    "tensor_parallel",
    "whole",
]
