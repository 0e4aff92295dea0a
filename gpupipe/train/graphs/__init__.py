"""CUDA graphs for training loops: what repeats is captured and replayed, the rest runs as it is."""

from gpupipe.train.graphs.adaptive import AdaptiveGraph, paused
from gpupipe.train.graphs.report import GraphReport

__all__ = ["AdaptiveGraph", "GraphReport", "paused"]
