"""Substitutes: operators that must see the whole minibatch, replaced where its samples are split.

Takes a traced model and a plan. Returns the model with exact batch norm in blocks that several devices run, and exact
dropout everywhere, as far as the options ask for them. What cannot be made exact is said in a warning (random numbers)
or refused (results that mix samples in an unknown way).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from burstpool.errors import RunError
from burstpool.model.code import Site
from burstpool.model.graph import Layer
from burstpool.model.traced import TracedModel
from burstpool.plan.plan import Plan, PlannedBlock
from burstpool.run import batch_norm, dropout
from burstpool.run.options import RunOptions

_LOG = logging.getLogger(__name__)


def needs_statistics(plan: Plan, layers: Mapping[str, Layer], options: RunOptions) -> list[PlannedBlock]:
    """Blocks whose devices must share statistics, in the plan's order."""
    if options.batch_norm == "local":
        return []
    return [
        block
        for block in plan.blocks
        if len(block.shares) > 1 and any(layers[name].mixes_samples for name in block.layers)
    ]


class Substitutes:
    """Chooses replacements for the layers that one device runs."""

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        *,
        device: int,
        statistics: Mapping[tuple[int, ...], dist.ProcessGroup],
        masks: dropout.Masks,
    ) -> None:
        self._options, self._statistics, self._masks, self._device = options, statistics, masks, device
        self._block_of = {name: block for block in plan.blocks if device in block.devices for name in block.layers}
        self._normalised: set[str] = set()
        self._seen: set[str] = set()

    def apply(self, traced: TracedModel) -> TracedModel:
        """The model with replaced operators in the layers of this device."""
        changed = traced.with_operators(self._replace)
        for layer in traced.layers:
            self._check(layer)
        return changed

    def _replace(self, layer: Layer, site: Site) -> Callable[..., Any] | None:
        block = self._block_of.get(layer.name)
        if block is None:
            return None
        self._seen.add(layer.name)
        if site.operator is batch_norm.OPERATOR:
            return self._batch_norm(layer, site, block)
        if self._options.dropout == "local" or not _draws(site):
            return None
        if not dropout.is_dropout(site.operator) or site.samples is None:
            name = site.operator.overloadpacket.__name__
            self._warn_random(block, f"{name} in layer {layer.name!r} draws its own random numbers")
            return None
        return dropout.exact_dropout(layer.name, site, self._masks)

    def _batch_norm(self, layer: Layer, site: Site, block: PlannedBlock) -> Callable[..., Any] | None:
        if not site.arguments[batch_norm.TRAINING]:
            return None
        self._normalised.add(layer.name)
        if self._options.batch_norm == "local" or len(block.shares) == 1:
            return None
        members = tuple(sorted(block.devices))
        held = {share.device: share.num_samples for share in block.shares}
        return batch_norm.exact_batch_norm(self._statistics[members], [held[device] for device in members])

    def _check(self, layer: Layer) -> None:
        block = self._block_of.get(layer.name)
        if block is None:
            return
        whole_module = layer.name not in self._seen
        mixes = layer.mixes_samples and len(block.shares) > 1
        if mixes and layer.name not in self._normalised and not (whole_module and self._options.batch_norm == "local"):
            raise RunError(
                f"layer {layer.name!r} ({layer.kind}) mixes samples, so block {block.name!r} must run on one device"
                + ('; or pass batch_norm="local"' if whole_module else "")
            )
        if layer.random and whole_module and self._options.dropout == "exact":
            self._warn_random(block, f"module {layer.name!r} draws its own random numbers")

    def _warn_random(self, block: PlannedBlock, what: str) -> None:
        if len(block.shares) > 1 and self._device == min(block.devices):  # once is enough
            _LOG.warning("%s on each device; its masks depend on the plan", what)


def _draws(site: Site) -> bool:
    """Whether the operator draws random numbers when called with these arguments."""
    if torch.Tag.nondeterministic_seeded not in site.operator.tags:
        return False
    names = [argument.name for argument in site.operator._schema.arguments]
    given = dict(zip(names, site.arguments, strict=False))
    rate = next((given[name] for name in ("dropout", "dropout_p", "p") if name in given), None)
    training = next((given[name] for name in ("train", "training") if name in given), True)
    if rate is None and "dropout_p" in names:
        return False  # attention with its default rate
    return bool(training) and rate != 0
