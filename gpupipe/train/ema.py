"""The moving average of a model's weights, in float32, with no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train.shards import like, locals_of


class Ema:
    """average = decay * average + (1 - decay) * weights, after each step (Polyak and Juditsky 1992).

    torch's ``AveragedModel`` does the same, but copies its counter to the device in each step and waits for it.

    Args:
        model: whose floating parameters are averaged. They are known by their names.
        decay: 0 to 1. Early on it is less, (1 + n) / (10 + n) in step n, so that the first weights do not linger.
        weights: what to average in the place of parameters, by their names: float32 copies of low-precision ones, as
            :attr:`Precision.masters` has them.

    Raises:
        ConfigError: for a decay that is no share.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"decay is {decay}", fix="it is a share, 0 to 1")
        self.decay, self.steps = decay, 0
        self._parameters = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
        self._weights = {**self._parameters, **(weights or {})}
        self.averages = {name: self._weights[name].detach().float().clone() for name in self._parameters}
        """By the names of the parameters, float32, on their device."""

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are now into the average."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        now = [self._weights[name].detach() for name in self.averages]
        if any(value.dtype != torch.float32 for value in now):
            now = [value.float() for value in now]
        torch._foreach_lerp_(locals_of(self.averages.values()), locals_of(now), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averages for weights."""
        kept = {name: value.data for name, value in self._parameters.items()}
        try:
            for name, value in self._parameters.items():
                value.data = self.averages[name].to(value.dtype)
            yield
        finally:
            for name, value in self._parameters.items():
                value.data = kept[name]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave; of a model that is split also with whole tensors.

        Raises:
            ConfigError: for averages of another model.
        """
        theirs = {name: tuple(value.shape) for name, value in state["averages"].items()}
        ours = {name: tuple(value.shape) for name, value in self.averages.items()}
        if theirs != ours:
            odd = sorted(name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name))
            raise ConfigError(
                f"these averages are of another model: {odd[0]} differs", fix="make the model as it was made there"
            )
        self.steps = state["steps"]
        for name, value in self.averages.items():
            value.copy_(like(state["averages"][name], value))
