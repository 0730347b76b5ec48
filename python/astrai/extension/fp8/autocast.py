"""``fp8_autocast``: the region in which linear layers take fp8."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

import torch

from astrai.extension.fp8 import cache, override, region, sharding
from astrai.extension.fp8.recipes import DynamicScaling, FP8Format, FP8Recipe
from astrai.extension.fp8.region import LOCAL, Config, Filter


class fp8_autocast(ContextDecorator):
    """Context or decorator: inside it, linear layers multiply in fp8, forward and backward.

    ``with fp8_autocast(recipe=DelayedScaling()): loss = model(x)``. Every ``aten::linear`` takes
    part whose input [..., K] and weight [N, K] are plain tensors of one dtype, bf16 or fp16;
    modules need no change. Under torch.autocast that is what the layer gets. Backward passes take
    fp8 for what was computed in the region, wherever they run. All other layers are torch's own.

    Regions nest, the innermost one decides; they belong to their thread. An outermost region is one
    training step for delayed scaling, see ``DelayedScaling``: amaxes of inputs and weights are
    entered when it is left, those of gradients when the next one is entered. Layers that autograd
    does not record read the scales and leave no amax, so that evaluation does not disturb training.
    A checkpointed function (torch.utils.checkpoint) that is computed again has the regions and
    scales of its first run, and leaves no amax a second time.

    With torch.compile the region encloses the compiled call. Regions that are opened in compiled
    code break its graph.

    Args:
        enabled: False: linear layers inside are torch's own.
        recipe: ``DynamicScaling()`` if None.
        fp8_format: "hybrid" (e4m3, gradients e5m2), "e4m3" or "e5m2", or an ``FP8Format``.
        fp8_group: Process group over which delayed scaling takes the largest amaxes: its ranks must
            run the same layers in the same order. None: each rank for itself. The first step of a
            ring is each rank's own in any case.
        cache_weights: Keep the casts of weights between two optimizer steps, for the
            micro-batches of gradient accumulation. See ``fp8_weights_changed`` for what has to be
            told. In compiled code and while a CUDA graph is captured casts are made anew.
        bf16_weight_grad: Multiply for the gradients of weights in the layer's own dtype.
        filter: ``filter(name, m, n, k)`` says whether a layer [m, k] x [n, k] takes fp8; name is
            that of its weight if ``fp8_name_weights`` gave it one, else "".

    Raises:
        ValueError: An unknown format.
        TypeError: A recipe that is none.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: FP8Recipe | None = None,
        fp8_format: FP8Format | str = FP8Format.HYBRID,
        fp8_group: Any = None,
        cache_weights: bool = False,
        bf16_weight_grad: bool = False,
        filter: Filter | None = None,
    ) -> None:
        recipe = DynamicScaling() if recipe is None else recipe
        if not isinstance(recipe, FP8Recipe):
            raise TypeError(
                "fp8_autocast: recipe must be DynamicScaling, DelayedScaling, RowwiseScaling or "
                f"BlockScaling, got {recipe!r}"
            )
        self._config = Config(
            bool(enabled),
            recipe,
            FP8Format(fp8_format),
            fp8_group,
            bool(cache_weights),
            bool(bf16_weight_grad),
            filter,
        )

    @torch._disable_dynamo
    def __enter__(self) -> fp8_autocast:
        if self._config.enabled:
            override.fp8_linear_enable()
            sharding.watch()
            if self._config.cache_weights:
                cache.watch()
        region.enter(self._config)
        return self

    @torch._disable_dynamo
    def __exit__(self, exc_type: type | None, *exc_info: object) -> None:
        region.leave(fold=exc_type is None)


def fp8_enabled() -> bool:
    """Whether this thread is in a region that is enabled."""
    frame = LOCAL.frame
    return frame is not None and frame.config.enabled
