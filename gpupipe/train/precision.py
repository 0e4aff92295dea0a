"""The types of a training step: autocast, float32 copies of weights, a loss scale, and steps left out on the device."""

from __future__ import annotations

import fnmatch
import functools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from gpupipe.config.training import PrecisionConfig
from gpupipe.device.inventory import resolve_device
from gpupipe.errors import ConfigError
from gpupipe.ops.sharded import is_sharded
from gpupipe.train.arguments import a_device, a_mapping, a_model, a_number, a_tensor, of, shown
from gpupipe.train.loading import Taken, on_load, renamed, unwrapped
from gpupipe.train.made import MADE, reduced
from gpupipe.train.shards import MARGIN, Scaler, average, is_fully_sharded, like, locals_of, total_norm
from gpupipe.train.shards import clip as shrink
from gpupipe.train.stepping import divides, known_to_the_host, share_what_was_found, step_if_finite

_LOW = (torch.bfloat16, torch.float16)


class Precision:
    """Runs training steps as a :class:`gpupipe.config.PrecisionConfig` says::

        precision = Precision({"dtype": "float16"}, device)
        optimizer = torch.optim.AdamW(precision.prepare(model), lr=1e-4, fused=True)
        for batch in loader:
            with precision.autocast():
                loss = loss_of(model, batch)
            precision.backward(loss)
            norm = precision.step(optimizer, clip=1.0)

    A step whose gradients are not finite changes neither weights nor the optimizer's state. torch's fused optimizers leave it
    out on the device; for others the host waits in each step to know.

    Args:
        config: a PrecisionConfig, a dict of its fields, or the name of a type: ``"bfloat16"``, or ``"bf16"`` for short.
        device: where the model is; default the current CUDA device, or the CPU where there is none.
        group: the ranks over whose batches ``master_weights`` averages gradients; default all. For a model that is split
            between some ranks (:mod:`gpupipe.train.parallel`): those that have the same part of it.

    Attributes:
        config: the settings.
        masters: float32 copies of the parameters that the model keeps in low precision, by name.
    """

    def __init__(
        self,
        config: PrecisionConfig | dict[str, Any] | str | None = None,
        device: torch.device | str | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.config = PrecisionConfig.parse(config)
        self.device = a_device(device) if device is not None else resolve_device("auto")
        if self.device.type == "cuda":
            self.device = resolve_device(str(self.device))
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self.masters: dict[str, torch.Tensor] = {}
        self._low: list[torch.Tensor] = []
        self._trained: dict[int, tuple[str, torch.Tensor]] = {}
        """What :meth:`prepare` returned, by identity, with the parameters' names."""
        self._taken = Taken()
        self._went_back = self._stepping = False
        """Whether there was a :meth:`backward` since the last step; whether it is :meth:`step` that steps an optimizer."""
        self._one = torch.ones((), device=self.device)
        self._wide = self._prepared = False
        self.used_scale = self._one
        """The loss scale of the last step, float32 on the device; 1 without one."""
        self._scaler: Scaler | None = None
        if self.dtype == torch.float16:
            self._scaler = Scaler(
                self.device.type, init_scale=self.config.initial_scale, growth_interval=self.config.growth_interval
            )

    def prepare(self, model: nn.Module) -> list[torch.Tensor]:
        """Readies a model, once, before it is wrapped or compiled: float32 for the modules that ``keep_float32`` names, and
        with ``master_weights`` low precision for all other parameters.

        Gradients of parameters in low precision go into the float32 ones of their copies as soon as they are complete, one
        backward added to the other. Where torch.distributed is set up, :meth:`step` averages them over its ranks, in float32:
        such a model must not be in DistributedDataParallel too.

        Returns:
            What the optimizer is to step.

        Raises:
            ConfigError: for names in ``keep_float32`` that no module has, a second call, or parameters that are not float32
                without ``master_weights``.
        """
        model = _not_parallel(a_model(model))
        if self._prepared:
            raise ConfigError("prepare() a second time", fix="give it the whole model, once; make a Precision for each")
        self._prepared = True
        if self.config.master_weights and is_fully_sharded(model):
            raise ConfigError(
                "master_weights under fully_shard, whose float32 shards are just that",
                fix="leave master_weights out, and shard with mp_policy=precision.fsdp_policy()",
            )
        for name, value in model.named_parameters():
            if value.device.type != self.device.type:
                raise ConfigError(
                    f"the parameter {name!r} is on {value.device}, this Precision on {self.device}",
                    fix="move the model first, and give Precision(…, device=…) the same device",
                )
        kept: set[int] = set()
        for pattern in self.config.keep_float32:
            found = [module for name, module in model.named_modules() if name and fnmatch.fnmatchcase(name, pattern)]
            if not found:
                raise ConfigError(
                    f"keep_float32 names {pattern!r}, which no module is", fix="see the names in model.named_modules()"
                )
            for module in found:
                if self.dtype != torch.float32 and not isinstance(module, _InFloat32):
                    module.__class__ = _in_float32(type(module), self.device.type)  # type: ignore[arg-type]
                for value in module.parameters():
                    kept.add(id(value))
                    value.data = value.data.float() if value.dtype in _LOW else value.data
        trained: list[torch.Tensor] = []
        for name, value in model.named_parameters():
            if not value.requires_grad:
                continue
            if self.config.master_weights and id(value) not in kept:
                master = value.detach().to(torch.float32, copy=True)
                value.data = value.data.to(self.dtype)
                value.register_post_accumulate_grad_hook(_add_to(master))  # type: ignore[no-untyped-call]
                self.masters[name] = master
                self._low.append(value)
                trained.append(master)
                self._trained[id(master)] = (name, master)
            elif value.dtype in _LOW:
                raise ConfigError(
                    f"the parameter {name!r} is {str(value.dtype).removeprefix('torch.')}: small steps would not add up in it",
                    fix="use master_weights=True, or make it float32: model.float()",
                )
            else:
                trained.append(value)
                self._trained[id(value)] = (name, value)
        self._taken = Taken(model, "Precision.prepare")
        if self.masters:
            on_load(model, self._follow)
        if self._scaler is not None:
            hook = register_optimizer_step_pre_hook(functools.partial(_not_alone, weakref.ref(self)))
            weakref.finalize(self, hook.remove)
        return trained

    @torch.no_grad()
    def _follow(self, model: nn.Module) -> None:
        """Takes weights that were loaded into the model without this one's own: its copies would overwrite them in the next
        step. Those that are the copies rounded stay as they are, exact."""
        parameters = dict(model.named_parameters())
        for (name, master), own in zip(self.masters.items(), self._low, strict=True):
            value = parameters.get(name)
            if value is not own:
                raise ConfigError(
                    f"{name!r} is another tensor now: the gradients of the one that was prepared go into its float32 copy",
                    fix="load without assign=True, or before prepare()",
                )
            master.copy_(torch.where(master.to(value.dtype) == value, master, value.float()))

    def fsdp_policy(self) -> Any:
        """What ``fully_shard`` takes as ``mp_policy``: parameters are gathered in this precision's type, gradients reduced in
        float32, and the shards that the optimizer steps stay float32. Beside :meth:`autocast`, not in its place."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        low = self.dtype if self.dtype != torch.float32 else None
        return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False)

    def autocast(self) -> AbstractContextManager[object]:
        """For the forward pass and the loss."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32 and not self._wide)

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Within the block :meth:`autocast` does nothing."""
        self._wide = True
        try:
            yield
        finally:
            self._wide = False

    def backward(self, loss: torch.Tensor, *, scale: torch.Tensor | float | None = None) -> None:
        """Adds the gradients of a loss to those that are there, times the loss scale where there is one.

        Args:
            scale: another one than that of this step: to do an earlier step again.

        Raises:
            ConfigError: for a loss that is no scalar, or has no gradient.
        """
        if not a_tensor(loss, "loss").requires_grad or loss.numel() != 1:
            raise ConfigError(
                f"loss is {shown(loss)}" + ("" if loss.requires_grad else " that nothing which is trained went into"),
                fix="give one number that the model's outputs went into: loss.mean()",
            )
        if isinstance(scale, torch.Tensor) and scale.numel() != 1:
            raise ConfigError(f"scale is {shown(scale)}", fix="give a number, or a tensor of one element")
        if scale is not None and not isinstance(scale, torch.Tensor):
            a_number(scale, "scale", "a number, or a tensor of one element")
        self._went_back = True
        if scale is not None:
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        elif self._scaler is not None:
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    @property
    def scale(self) -> torch.Tensor:
        """The loss scale of the next backward, float32 on the device; 1 without one."""
        return self._one if self._scaler is None else self._scaler.scale(self._one)

    @property
    def scales(self) -> bool:
        """Whether there is a loss scale, so that gradients that overflow now and then are no fault."""
        return self._scaler is not None

    def step(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], *, clip: float | None = None
    ) -> torch.Tensor:
        """Takes a step by the gradients that have been added up, and forgets them: each ``.grad`` is None behind it, and there
        is no ``zero_grad()`` to call. What looks at gradients does so before. The host waits for nothing.

        Args:
            optimizer: over what :meth:`prepare` returned; or several, each over a part of it, which take their step together:
                all of them leave it out where one has gradients that are not finite.
            clip: gradients are shrunk to this L2 norm over all of them, where theirs is greater.

        Returns:
            The gradients' norm before that, a float32 scalar on the device. Where it is not finite the step was left out.

        Raises:
            ConfigError: for an optimizer over other tensors, or over those that were the model's before it was given others, no
                gradients at all, a ``clip`` that is no norm, or under a loss scale a step without a :meth:`backward` of its
                own: gradients of ``loss.backward()`` have no scale, those of another step one that is gone.
        """
        if clip is not None and not (isinstance(clip, int | float) and clip is not True and 0 < clip <= sys.float_info.max):
            raise ConfigError(f"clip={shown(clip)} is no norm", fix="give a number above 0, or None to shrink nothing")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(_several(optimizer))
        self._check(optimizers)
        of_each = [[value for group in each.param_groups for value in group["params"]] for each in optimizers]
        values = [value for own in of_each for value in own if value.grad is not None]
        if not values:
            raise ConfigError("step() without gradients", fix=self._why_none())
        if self._scaler is not None and not self._went_back:
            raise ConfigError(
                "step() with gradients that lack this loss scale: there was no precision.backward() since the last step()",
                fix="call precision.backward(loss) in place of loss.backward(); for a second step() behind one backward() give "
                "both optimizers to one call, step([one, other])",
            )
        self._went_back = False
        if self.config.master_weights:
            average([value for own in of_each for value in own], self.group)
            values = [value for own in of_each for value in own if value.grad is not None]
        stepping = [each for each, own in zip(optimizers, of_each, strict=True) if any(one.grad is not None for one in own)]
        self.used_scale = self.scale
        if self._scaler is not None:
            self._scaler.forget()
            for each in stepping:
                self._scaler.unscale_(each)
        grads = [value.grad for value in values]
        norm = self._norm(values, grads)
        divisor: torch.Tensor | None = None
        if clip is not None and self._scaler is None and all(map(divides, stepping)) and not any(map(is_sharded, grads)):
            divisor = ((norm + MARGIN) / clip).clamp(min=1.0)  # by the optimizer's own pass: one over the gradients less
        elif clip is not None:
            shrink(grads, clip, norm)
        if self._scaler is not None:
            share_what_was_found(self._scaler, stepping)
            self._stepping = True
            try:
                for each in stepping:
                    with known_to_the_host(each):
                        self._scaler.step(each)
            finally:
                self._stepping = False
            self._scaler.update()
            self._bound_scale()
        else:
            for each in stepping:
                step_if_finite(each, norm, divisor)
        for each in optimizers:
            each.zero_grad(set_to_none=True)
        if self._low:
            with torch.no_grad():
                torch._foreach_copy_(locals_of(self._low), locals_of(self.masters.values()))
        return norm

    def _norm(self, values: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the gradients of ``values``.

        Raises:
            ConfigError: for sparse ones, of which torch has none.
        """
        try:
            return total_norm(grads)
        except RuntimeError as error:
            sparse = next((value for value, grad in zip(values, grads, strict=True) if grad.layout != torch.strided), None)
            if sparse is None:
                raise
            name = self._trained[id(sparse)][0] if id(sparse) in self._trained else f"a tensor {tuple(sparse.shape)}"
            raise ConfigError(
                f"the gradient of {name!r} is sparse, which has no norm to clip by or to tell a step by that is not finite",
                fix="make its module without sparse=True, or step it with an optimizer of its own",
            ) from error

    def _check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuses optimizers that would not move what was prepared, before anything is changed."""
        if not self._prepared:
            raise ConfigError("step() before prepare()", fix="make the optimizer over what precision.prepare(model) returns")
        own = dict(zip(self.masters, self._low, strict=True))
        low = {id(value): name for name, value in own.items()}
        taken: set[int] = set()
        for number, each in enumerate(optimizers):
            values = [value for group in each.param_groups for value in group["params"]]
            for value in values:
                if id(value) in low:
                    raise ConfigError(
                        f"{type(each).__name__} is over the model's own {low[id(value)]!r}, whose gradients go into its float32"
                        " copy",
                        fix="make it over what precision.prepare(model) returned, not over model.parameters()",
                    )
            known = any(id(value) in self._trained or type(value) not in (torch.Tensor, nn.Parameter) for value in values)
            if not known or any(each is other for other in optimizers[:number]):
                raise ConfigError(
                    f"{type(each).__name__} is given twice"
                    if known
                    else f"{type(each).__name__} is over nothing of what was prepared",
                    fix="make it over what precision.prepare(model) returned; weights that are assigned later are other ones",
                )
            shared = [id(value) for value in values if id(value) in taken]
            if shared:
                name = self._trained[shared[0]][0] if shared[0] in self._trained else "one that was not prepared"
                raise ConfigError(
                    f"two of the optimizers are over one tensor, {name!r}",
                    fix="give each optimizer a part of its own of what precision.prepare(model) returned",
                )
            taken |= {id(value) for value in values}
            names = [(self._trained[id(value)][0], value) for value in values if id(value) in self._trained]
            self._taken.check((name, own.get(name, value)) for name, value in names)
        self._check_shards(taken, [value for each in optimizers for group in each.param_groups for value in group["params"]])

    def _check_shards(self, taken: set[int], values: Sequence[torch.Tensor]) -> None:
        """Refuses tensors of an optimizer that are what shards were made of, where it does not have those."""
        lost = {value.shape: name for name, value in self._trained.values() if is_sharded(value) and id(value) not in taken}
        for value in values if lost else ():
            if value.shape in lost and not is_sharded(value) and id(value) not in self._trained:
                raise ConfigError(
                    f"an optimizer is over a tensor {tuple(value.shape)} that was split since, as {lost[value.shape]!r} is",
                    fix="make the optimizer after tensor_parallel and fully_shard, over what precision.prepare(model) returned",
                )

    def _why_none(self) -> str:
        return (
            "call backward() before, on a loss of what the optimizer steps; where the model has been given other tensors since"
            " prepare(), as by load_state_dict(assign=True), do that first"
        )

    def _bound_scale(self) -> None:
        """Between floor and ceiling, on the device. A loss that is not finite by itself halves the scale, too, as if it were
        too high: without a floor a bad clip now and then would bring it to nothing, and all gradients with it."""
        assert self._scaler is not None
        self._scaler.update(self.scale.clamp(self.config.min_scale, self.config.max_scale))

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and the float32 weights, for a checkpoint. Waits for the device."""
        scaler = self._scaler.state_dict() if self._scaler is not None else {}
        kept = {name: scaler[name] for name in ("scale", "_growth_tracker") if name in scaler}
        return {"scaler": kept, "masters": dict(self.masters)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Takes up what :meth:`state_dict` gave, after ``model`` and optimizer have loaded theirs; also with another precision.

        Args:
            model: the one that was prepared, unwrapped: it gets the float32 weights of the file, rounded where it keeps others.

        Raises:
            ConfigError: for float32 weights that ``model`` does not have, or something that is no such state.
        """
        a_mapping(state, "state", "give what state_dict() returned")
        if missing := {"scaler", "masters"} - set(state):
            raise ConfigError(f"this state has no {sorted(missing)[0]!r}", fix="give what Precision.state_dict() returned")
        model = unwrapped(a_model(model))
        self._went_back = False
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(self._scaler.state_dict() | dict(state["scaler"]))
            self._bound_scale()
        parameters = dict(model.named_parameters())
        masters = renamed(state["masters"], parameters)
        for name, value in masters.items():
            if name not in parameters or parameters[name].shape != value.shape:
                raise ConfigError(
                    f"this state has weights of {name!r} {tuple(value.shape)}, which the model does not have",
                    fix="make the same model",
                )
        for name, value in masters.items():
            parameters[name].copy_(like(value, parameters[name]))
        for name, master in self.masters.items():
            master.copy_(like(masters.get(name, parameters[name]), master))


def _not_alone(known: weakref.ref[Precision], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses an optimizer's own step by gradients that are times the loss scale. Called before every optimizer's."""
    precision = known()
    if precision is None or precision._stepping or not precision._went_back:
        return
    if any(id(value) in precision._trained for group in optimizer.param_groups for value in group["params"][:1]):
        raise ConfigError(
            f"{type(optimizer).__name__}.step() by itself, while gradients are times the loss scale of precision.backward()",
            fix="call precision.step(optimizer) in place of optimizer.step()",
        )


def _not_parallel(model: nn.Module) -> nn.Module:
    """The model within ``torch.compile``."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError("the model is in DistributedDataParallel already", fix="prepare() it first, and wrap it then")
    return unwrapped(model)


def _several(optimizers: Any) -> Sequence[torch.optim.Optimizer]:
    fix = "give an optimizer, or a list of several"
    if not isinstance(optimizers, list | tuple) or not optimizers:
        raise ConfigError(f"optimizer is {shown(optimizers)}", fix=fix)
    return [of(torch.optim.Optimizer, each, "one of the optimizers", fix) for each in optimizers]


def _add_to(master: torch.Tensor) -> Any:
    def add(parameter: torch.Tensor) -> None:
        """Called in a backward, when a parameter's gradient is complete."""
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return add


class _InFloat32(nn.Module):
    """Marks modules that compute in float32."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Classes made here have no place that pickle could name."""
        return reduced(super().__reduce_ex__(max(2, int(protocol))), type(self))


@functools.cache
def _in_float32(kind: type[nn.Module], device: str) -> type[nn.Module]:
    """A class of modules that compute in float32 under autocast. A class, not hooks: copies and ``torch.compile`` take it."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        with torch.autocast(device, enabled=False):
            return kind.forward(self, *args, **kwargs)

    names = {"forward": forward, "__doc__": kind.__doc__, MADE: (_in_float32, (kind, device))}
    return type(kind.__name__, (_InFloat32, kind), names)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.is_floating_point() and value.dtype != torch.float64 else value
