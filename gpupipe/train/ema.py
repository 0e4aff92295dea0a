"""The moving average of a model's weights, in float32, with no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gpupipe.errors import ConfigError
from gpupipe.train.arguments import a_mapping, a_model, a_number, of
from gpupipe.train.loading import Taken, on_load, renamed, unwrapped
from gpupipe.train.shards import like, locals_of


class Ema:
    """average = decay * average + (1 - decay) * weights, after each step (Polyak and Juditsky 1992).

    torch's ``AveragedModel`` does the same, but copies its counter to the device in each step and waits for it.

    Args:
        model: whose floating parameters are averaged. They are known by their names, without what DistributedDataParallel or
            ``torch.compile`` put before them. Where ``load_state_dict(assign=True)`` gives it other ones, those are averaged.
        decay: 0 to 1. Early on it is less, (1 + n) / (10 + n) in step n, so that the first weights do not linger.
        weights: what to average in the place of parameters, by their names: float32 copies of low-precision ones, as
            :attr:`Precision.masters` has them.

    Raises:
        ConfigError: for a decay that is no share, a model without parameters, or ``weights`` of other ones.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, weights: Mapping[str, torch.Tensor] | None = None) -> None:
        a_number(decay, "decay", "a share, 0 to 1")
        if not 0 <= decay <= 1:
            raise ConfigError(f"decay is {decay}", fix="it is a share, 0 to 1")
        model = unwrapped(a_model(model))
        if weights is not None:
            fix = "give tensors by the names of parameters, as Precision.masters has them"
            for value in a_mapping(weights, "weights", fix).values():
                of(torch.Tensor, value, "a value of weights", fix)
        self.decay, self.steps = decay, 0
        self._given: dict[str, torch.Tensor] = {}
        self._take(model)
        if not self._parameters:
            raise ConfigError(
                f"this {type(model).__name__} has no floating parameters to average", fix="give the model that is trained"
            )
        self._given = renamed(weights or {}, self._parameters)
        self._weights |= self._given
        for name, value in self._given.items():
            if name not in self._parameters or self._parameters[name].shape != value.shape:
                raise ConfigError(
                    f"weights has {name!r} {tuple(value.shape)}, which is no parameter of the model",
                    fix="give Precision.masters of the Precision that prepared this model",
                )
        self.averages = {name: self._weights[name].detach().float().clone() for name in self._parameters}
        """By the names of the parameters, float32, on their device."""
        on_load(model, self._take)

    def _take(self, model: nn.Module) -> None:
        """Takes a model's parameters as those to average."""
        self._parameters = {name: value for name, value in model.named_parameters() if value.is_floating_point()}
        self._weights = {**self._parameters, **self._given}
        self._taken = Taken(model, "Ema")

    @torch.no_grad()
    def update(self) -> None:
        """Takes the weights as they are now into the average.

        Raises:
            ConfigError: where the model has other tensors for its parameters than it had when this was made.
        """
        self._taken.check(self._parameters.items())
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        now = [self._weights[name].detach() for name in self.averages]
        if any(value.dtype != torch.float32 for value in now):
            now = [value.float() for value in now]
        torch._foreach_lerp_(locals_of(self.averages.values()), locals_of(now), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averages for weights: what changes these there changes the averages."""
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

        Names may have what wrappers put before them.

        Raises:
            ConfigError: for averages of another model, or something that is no such state.
        """
        a_mapping(state, "state", "give what Ema.state_dict() returned")
        if missing := {"steps", "averages"} - set(state):
            raise ConfigError(f"this state has no {sorted(missing)[0]!r}", fix="give what Ema.state_dict() returned")
        found = renamed(state["averages"], self.averages)
        theirs = {name: tuple(value.shape) for name, value in found.items()}
        ours = {name: tuple(value.shape) for name, value in self.averages.items()}
        if theirs != ours:
            odd = sorted(name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name))[0]
            there, here = theirs.get(odd, "not there"), ours.get(odd, "not there")
            raise ConfigError(
                f"these averages are of another model: {odd!r} differs, {there} in them and {here} here",
                fix="make the model as it was made there",
            )
        self.steps = state["steps"]
        for name, value in self.averages.items():
            value.copy_(like(found[name], value))
