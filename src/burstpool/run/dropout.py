"""Exact dropout: masks that do not depend on who runs a layer.

Takes the place of the dropout operators, and of attention with dropout. For every layer, step and minibatch the mask of
the whole minibatch is drawn from a generator seeded by (seed, step, minibatch, layer, place in the layer), and each
device keeps the part of its own samples. Costs as many random numbers on every device as one device would draw.
Masks differ between types of devices (a CPU's and a GPU's streams), not between plans.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from burstpool.model.code import Fold, Site
from burstpool.run.moment import Moment
from burstpool.run.seeds import mix

aten = torch.ops.aten
_ALPHA = 1.7580993408473766
"""Minus the value that SELU saturates at, which alpha dropout sets dropped elements to."""
_RATE, _TRAIN = 1, 2
"""Positions of the arguments of the dropout operators."""
_ATTENTION_RATE = 4
"""Position of the dropout rate among the arguments of attention."""


class Masks:
    """Draws masks. One a device; keeps one generator for each place that draws."""

    def __init__(self, *, seed: int, device: torch.device, moment: Moment) -> None:
        self._seed, self._device, self._moment = seed, device, moment
        self.generators: dict[tuple[str, int, int], torch.Generator] = {}
        """(layer, place, minibatch) → the generator that was used for it."""

    def draw(self, layer: str, place: int, keep: float, shape: Sequence[int], samples: Fold | None) -> torch.Tensor:
        """True for what is kept, for the samples at hand: the device's part of the whole minibatch's mask.

        `samples` says which dimension of `shape` they are; None for a mask that is the same for all.
        """
        moment = self._moment
        whole = list(shape)
        if samples is not None:
            whole[samples.dim] = samples.before * moment.batch * samples.after
        mask = torch.empty(whole, dtype=torch.bool, device=self._device)
        mask.bernoulli_(keep, generator=self._generator(layer, place))
        if samples is None or moment.stop - moment.start == moment.batch:
            return mask
        parts = torch.unflatten(mask, samples.dim, (samples.before, moment.batch, samples.after))
        return parts.narrow(samples.dim + 1, moment.start, moment.stop - moment.start).reshape(shape)

    def reseed(self, step: int) -> None:
        """Prepares all generators for a step whose draws are replayed from a CUDA graph."""
        for (layer, place, minibatch), generator in self.generators.items():
            generator.manual_seed(mix(self._seed, step, minibatch, layer, place))

    def _generator(self, layer: str, place: int) -> torch.Generator:
        key = (layer, place, self._moment.minibatch)
        generator = self.generators.get(key)
        if generator is None:
            generator = self.generators[key] = torch.Generator(self._device)
        if self._device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            generator.manual_seed(mix(self._seed, self._moment.step, self._moment.minibatch, layer, place))
        return generator


def exact_dropout(layer: str, site: Site, masks: Masks) -> Callable[..., torch.Tensor] | None:
    """What to call in the operator's place; None for one that drops nothing. `site.samples` must be known."""
    packet = site.operator.overloadpacket
    if packet is aten.scaled_dot_product_attention:
        rate = site.arguments[_ATTENTION_RATE] if len(site.arguments) > _ATTENTION_RATE else 0.0
        return _attention(layer, site, masks) if rate > 0 else None
    if packet not in _KINDS or not site.arguments[_TRAIN] or site.arguments[_RATE] == 0:
        return None
    by_feature, alpha, in_place = _KINDS[packet]
    return _dropout(layer, site, masks, by_feature=by_feature, alpha=alpha, in_place=in_place)


_KINDS = {
    aten.dropout: (False, False, False),
    aten.dropout_: (False, False, True),
    aten.feature_dropout: (True, False, False),
    aten.feature_dropout_: (True, False, True),
    aten.alpha_dropout: (False, True, False),
    aten.alpha_dropout_: (False, True, True),
    aten.feature_alpha_dropout: (True, True, False),
    aten.feature_alpha_dropout_: (True, True, True),
}
"""Operator → whether it drops whole features, is made for SELU, writes to its input."""


def _dropout(
    layer: str, site: Site, masks: Masks, *, by_feature: bool, alpha: bool, in_place: bool
) -> Callable[..., torch.Tensor]:
    place, samples = site.place, site.samples
    if by_feature and samples is not None and samples.dim > 1:
        samples = None  # the first two dimensions are taken for samples and features, whatever they are

    def dropout(x: torch.Tensor, rate: float, train: bool) -> torch.Tensor:
        shape = [*x.shape[:2], *[1] * (x.dim() - 2)] if by_feature else x.shape
        kept = masks.draw(layer, place, 1 - rate, shape, samples)
        if alpha:
            scale = 1 / math.sqrt((_ALPHA**2 * rate + 1) * (1 - rate))
            shift = (kept.to(x.dtype) - 1 + rate) * (_ALPHA * scale)
        else:
            scale, shift = (1 / (1 - rate) if rate < 1 else 0.0), None
        factor = kept.to(x.dtype).mul_(scale)
        dropped = x.mul_(factor) if in_place else x * factor
        if shift is None:
            return dropped
        return dropped.add_(shift) if in_place else dropped + shift

    return dropout


def _attention(layer: str, site: Site, masks: Masks) -> Callable[..., torch.Tensor]:
    """Attention written out, because its fused kernels draw their own masks."""
    place, samples = site.place, site.samples

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        weights = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        if mask is not None:
            weights = weights.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else weights + mask
        weights = weights.softmax(-1)
        kept = masks.draw(layer, place, 1 - dropout_p, weights.shape, samples)
        return (weights * kept.to(weights.dtype).mul_(1 / (1 - dropout_p))) @ value

    return attention


def is_dropout(operator: Any) -> bool:
    """Whether the operator can be replaced by an exact one."""
    packet = getattr(operator, "overloadpacket", None)
    return packet in _KINDS or packet is aten.scaled_dot_product_attention
