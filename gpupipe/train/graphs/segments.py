"""A function cut where something must run on the host, by TorchDynamo, with the parts captured one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gpupipe.train.graphs.adaptive import AdaptiveGraph


def in_segments(
    function: Callable[..., Any], capture: Callable[[Callable[..., Any]], AdaptiveGraph]
) -> tuple[Callable[..., Any], list[AdaptiveGraph]]:
    """(the function, in parts; what stands for each part, filled as parts turn up).

    Nothing is compiled: the operations of a part run as torch has them. What the host was told is free to differ from call to
    call, and so are shapes once two have come; each shape of a part gets a graph of its own.
    """
    parts: list[AdaptiveGraph] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        if not any(node.op == "call_function" or node.op == "call_method" for node in graph.graph.nodes):
            return graph.forward
        part = capture(graph.forward)
        parts.append(part)
        return part

    return torch.compile(function, backend=backend), parts
