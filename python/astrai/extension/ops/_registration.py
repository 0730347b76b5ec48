"""Registers the kernels as operators of torch, ``torch.ops.astrai.<name>``.

Eager calls do not come this way. The operators serve what has to see an operator: torch.compile and
torch.export, fake and meta tensors, vmap, tensor subclasses, dispatch modes and function modes. On
CPU tensors they compute the definition (``ops.reference``), so that what holds them can be traced
and tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Kept for the life of the process: an operator is gone with its Library.
_LIBRARY = torch.library.Library("astrai", "DEF")


def _plain(value: object) -> object:
    """A tensor of a subclass without a dispatch of its own as the torch.Tensor beneath it."""
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value.as_subclass(torch.Tensor)
    return value


def _on_plain_tensors(run: Callable[..., object]) -> Callable[..., object]:
    def run_plain(*args: object, **kwargs: object) -> object:
        return run(*map(_plain, args), **{key: _plain(value) for key, value in kwargs.items()})

    return run_plain


def define(
    schema: str,
    run: Callable[..., object],
    fake: Callable[..., object],
    reference: Callable[..., object],
) -> None:
    """Defines the operator ``astrai::<schema>``.

    Args:
        schema: torch's schema language, with the arguments that are written marked, such as
            ``"rotary_emb_(Tensor(a!) x, Tensor freqs_cis) -> ()"``.
        run: Called with plain CUDA tensors.
        fake: Called with tensors that have no memory; returns outputs of the right shape, dtype and
            device.
        reference: Called with plain CPU tensors.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.split("(", 1)[0]
    operator = getattr(torch.ops.astrai, name).default

    def refuse_autograd(*args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"{name}: an argument requires grad, but this kernel has no autograd "
                        "formula; call it under torch.no_grad() or detach the arguments"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    _LIBRARY.impl(name, _on_plain_tensors(run), "CUDA")
    _LIBRARY.impl(name, _on_plain_tensors(reference), "CPU")
    _LIBRARY.impl(name, refuse_autograd, "Autograd")
    torch.library.register_fake(f"astrai::{name}", fake, lib=_LIBRARY)
