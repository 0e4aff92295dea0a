"""States of models and optimizers that are split, as those of a whole one, and back: a checkpoint fits any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from gpupipe.errors import ConfigError
from gpupipe.train import arguments
from gpupipe.train.shards import like


def param_groups(parameters: Iterable[torch.Tensor], **settings: Any) -> list[dict[str, Any]]:
    """Parameters as groups for an optimizer, those alike in being split together: torch steps no others in one launch.

    Args:
        parameters: of a model that is partly split, or what :meth:`Precision.prepare` returned.
        settings: of each group, such as ``lr``.
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for value in parameters:
        groups.setdefault(value.device_mesh if isinstance(value, DTensor) else None, []).append(value)
    return [{"params": values, **settings} for values in groups.values()]


def whole(state: Any) -> Any:
    """A state of which this rank has parts alone, with whole tensors. All ranks call it, for it gathers.

    Args:
        state: what ``state_dict()`` gave, or another nest of dicts, lists and tensors.

    Raises:
        ConfigError: for a model or an optimizer itself.
    """
    if isinstance(state, nn.Module | torch.optim.Optimizer):
        kind = "model" if isinstance(state, nn.Module) else "optimizer"
        call = "whole(model.state_dict())" if kind == "model" else "optimizer_state(model, optimizer)"
        raise ConfigError(f"state is {arguments.shown(state)}", fix=f"give its state, not the {kind}: {call}")
    with torch.no_grad():
        return tree_map_only(DTensor, lambda value: value.full_tensor(), state)


def load_whole(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state with whole tensors, the same on all ranks, into a model that is split, or sharded, or neither.

    Raises:
        RuntimeError: of ``load_state_dict``, for other names or shapes.
        ConfigError: for arguments of the wrong kind.
    """
    arguments.a_model(model)
    arguments.a_mapping(state, "state", "call load_whole(model, state), with what whole(model.state_dict()) gave")
    own = model.state_dict()
    model.load_state_dict({name: like(value, own.get(name)) for name, value in state.items()})


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An optimizer's state with whole tensors, by the names of the model's parameters: however it groups them.

    Args:
        model: whose parameters it steps.
        optimizer: torch's, with its state in tensors and numbers.
        names: what it steps in the place of parameters, as :attr:`Precision.masters`.

    Raises:
        ConfigError: for parameters that are not the model's, and arguments of the wrong kind or in another order.
    """
    _in_order(model, optimizer)
    called = _called(model, names)
    found = {}
    for group in optimizer.param_groups:
        for value in group["params"]:
            if id(value) not in called:
                raise ConfigError("the optimizer steps a tensor that is no parameter of the model", fix="give names=…")
            found[called[id(value)]] = whole(dict(optimizer.state.get(value, {})))
    return found


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: Mapping[str, Any] | None = None
) -> None:
    """Takes up what :func:`optimizer_state` gave, under any number of ranks. Learning rates and the like stay this optimizer's.

    Raises:
        ConfigError: for a state of other parameters, and arguments of the wrong kind or in another order.
    """
    _in_order(model, optimizer)
    arguments.a_mapping(state, "state", "give what optimizer_state(model, optimizer) returned")
    called = _called(model, names)
    for group in optimizer.param_groups:
        for value in group["params"]:
            name = called.get(id(value))
            if name is None or name not in state:
                raise ConfigError(f"this state has nothing of {name!r}", fix="make the same model and optimizer")
            on_device = bool(group.get("fused") or group.get("capturable"))  # such optimizers count steps there
            optimizer.state[value] = {key: _taken(kept, value, on_device) for key, kept in state[name].items()}


def _in_order(model: Any, optimizer: Any) -> None:
    arguments.a_model(model)
    arguments.of(torch.optim.Optimizer, optimizer, "optimizer", "give model first, then a torch.optim.Optimizer")


def _called(model: nn.Module, names: Mapping[str, Any] | None) -> dict[int, str]:
    return {id(value): name for name, value in {**dict(model.named_parameters()), **(names or {})}.items()}


def _taken(kept: Any, value: torch.Tensor, on_device: bool) -> Any:
    """One value of a parameter's state, as this rank keeps it."""
    if not isinstance(kept, torch.Tensor):
        return kept
    if kept.dim() == 0 and value.dim() > 0:
        return kept.to(value.device if on_device else kept.device, copy=True)
    own = like(kept, value)
    return own.clone() if own is not kept else kept.to(value.device, copy=True)  # its shard may be a view
