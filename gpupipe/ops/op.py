"""One op with two faces: a ``torch.library`` op for whatever traces, and a short way for plain tensors in eager mode.

Dispatch through ``torch.library`` costs tens of microseconds a call in Python. Tensors that nothing watches (no mode, no
subclass, no tracing) need none of it: for them the same body is called at once, inside a plain ``autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_autograd, register_fake
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_library = Library("gpupipe", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def watched(*tensors: torch.Tensor | None) -> bool:
    """True when somebody wants to see the ops called on these tensors: a tracer, a mode, a transform, a subclass."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or (torch._C._len_torch_function_stack() > 0 and not _only_a_default_device())
        or torch._C._are_functorch_transforms_active()
    ):
        return True
    for tensor in tensors:  # noqa: SIM110 - any() over a generator takes a microsecond more, at every call
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return False


def _only_a_default_device() -> bool:
    """True when the only mode is that of ``torch.set_default_device``, which has no say where a device is given."""
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


class Op:
    """An op that allocates its outputs and changes no input.

    Args:
        name: within the namespace ``gpupipe``.
        body: the work, annotated as ``torch.library.infer_schema`` wants it. Its outputs share no memory with its inputs.
        fake: the same signature, returning empty tensors of the right shape, type and strides.
        setup: keeps for the backward what it needs, as ``autograd.Function.setup_context``. None: the op has no gradient.
        backward: as ``autograd.Function.backward``; it must call other ops for its work, so that it can be traced.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        fake: Callable[..., Any],
        setup: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        self._body = body
        _library.define(name + infer_schema(body, mutates_args=()))
        for device in ("CPU", "CUDA"):
            _library.impl(name, body, device)
        register_fake(f"gpupipe::{name}", fake, lib=_library)
        self.library_op = getattr(torch.ops.gpupipe, name).default
        self._function: Any = None
        if backward is None:

            def refuse(ctx: Any, *gradients: Any) -> None:
                raise NotImplementedError(f"gpupipe::{name} cannot be differentiated: gpupipe.ops has no second derivatives")

            register_autograd(f"gpupipe::{name}", refuse, lib=_library)
        if backward is not None and setup is not None:
            register_autograd(f"gpupipe::{name}", backward, setup_context=setup, lib=_library)

            def forward(
                ctx: Any, *args: Any
            ) -> Any:  # with a setup_context of its own, apply() binds a signature at every call
                made = body(*args)
                setup(ctx, args, made)
                return made

            parts = {"forward": forward, "backward": torch.autograd.function.once_differentiable(backward)}
            self._function = type(name, (torch.autograd.Function,), {key: staticmethod(part) for key, part in parts.items()})

    def __call__(self, *args: Any) -> Any:
        """Arguments by position, as the body takes them."""
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if watched(*tensors):
            return self.library_op(*args)
        if self._function is not None and torch.is_grad_enabled():
            for tensor in tensors:
                if tensor.requires_grad:
                    return self._function.apply(*args)
        return self._body(*args)
