"""Blocks: consecutive layers run together, forward and backward, apart from the rest of the model.

A block takes the values that enter it and returns those that leave it. `Block(...)` lets autograd see through;
`Block.run(...)` cuts the graph at the block's edge and runs backward from gradients that come from elsewhere,
which is how a device runs its part of a model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from burstpool.errors import TraceError
from burstpool.model.code import LayerCode
from burstpool.model.graph import Layer, LayerGraph


class Block:
    """Layers `start` to `stop - 1` of a traced model, sharing its parameters."""

    def __init__(
        self, graph: LayerGraph, model: nn.Module, codes: Sequence[LayerCode], *, start: int, stop: int
    ) -> None:
        if not 0 <= start < stop <= len(graph.layers):
            raise TraceError(f"no block {start}:{stop} in {len(graph.layers)} layers; pass 0 <= start < stop <= that")
        self.start, self.stop = start, stop
        self.layers: tuple[Layer, ...] = graph.layers[start:stop]
        """What it runs."""
        self.inputs, self.outputs = graph.boundary(start, stop)
        self._codes = codes[start:stop]
        self._homes = [[_home(model, key) for key in code.state] for code in self._codes]
        self._model = model
        self._values = graph.values()
        self._release = _last_uses(self.layers, keep=set(self.outputs))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by state-dict key, as they are in the model now."""
        names = dict.fromkeys(name for layer in self.layers for name in layer.parameters)
        return {name: getattr(*_home(self._model, name)) for name in names}

    @property
    def state(self) -> tuple[str, ...]:
        """State-dict keys of all parameters and buffers that its code uses."""
        return tuple(dict.fromkeys(key for code in self._codes for key in code.state))

    @property
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers by state-dict key, as they are in the model now."""
        return {key: getattr(*_home(self._model, key)) for code in self._codes for key in code.state}

    def signature(self) -> str:
        """The same text for two blocks that do the same work on the same shapes."""
        sizes = [f"{tuple(t.shape)}{t.dtype}{t.requires_grad}" for t in self.state_tensors.values()]
        values = [f"{self._values[x].shape}{self._values[x].dtype}" for x in (*self.inputs, *self.outputs)]
        grads = [str(self._values[x].differentiable) for x in self.inputs]
        return "\n".join([*(code.signature() for code in self._codes), *sizes, *values, *grads])

    def batch_of(self, inputs: Sequence[torch.Tensor]) -> int:
        """Samples in the inputs."""
        for name, tensor in zip(self.inputs, inputs, strict=True):
            dim = self._values[name].sample_dim
            if dim is not None:
                return tensor.shape[dim]
        raise TraceError(f"block {self.layers[0].name!r} takes nothing that has samples; pass batch=")

    def __call__(
        self,
        *inputs: torch.Tensor,
        batch: int | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """The values that leave the block, in the order of `outputs`.

        `state` replaces some of the model's parameters or buffers by tensors of the same shapes.
        """
        if len(inputs) != len(self.inputs):
            raise TraceError(f"block takes {len(self.inputs)} values {self.inputs}, not {len(inputs)}")
        batch = self.batch_of(inputs) if batch is None else batch
        return self._run_layers(inputs, batch, self._state(state or {}))

    def caller(self, batch: int) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """The block as a function of its inputs alone, its state looked up beforehand: for timing."""
        state = self._state({})
        if len(self.layers) == 1 and tuple(value.name for value in self.layers[0].outputs) == self.outputs:
            code, own = self._codes[0], state[0]
            return lambda inputs: code(own, inputs, batch)
        return lambda inputs: self._run_layers(inputs, batch, state)

    def _state(self, replaced: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        # Read at every call: `model.to(…)` replaces buffers by new ones.
        return [
            [replaced[key] if key in replaced else getattr(*home) for key, home in zip(code.state, homes, strict=True)]
            for code, homes in zip(self._codes, self._homes, strict=True)
        ]

    def _run_layers(
        self, inputs: Sequence[torch.Tensor], batch: int, state: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        values = dict(zip(self.inputs, inputs, strict=True))
        for layer, code, own, released in zip(self.layers, self._codes, state, self._release, strict=True):
            results = code(own, [values[name] for name in layer.inputs], batch)
            values.update(zip((value.name for value in layer.outputs), results, strict=True))
            for name in released:
                values.pop(name, None)
        return tuple(values[name] for name in self.outputs)

    def run(self, *inputs: torch.Tensor, batch: int | None = None) -> "BlockRun":
        """Runs forward on its own: no gradient flows to where the inputs came from until `backward` returns it."""
        leaves = tuple(
            tensor.detach().requires_grad_(self._values[name].differentiable)
            for name, tensor in zip(self.inputs, inputs, strict=True)
        )
        return BlockRun(block=self, inputs=leaves, outputs=self(*leaves, batch=batch))


@dataclass(slots=True, kw_only=True)
class BlockRun:
    """One forward pass of a block, waiting for its backward."""

    block: Block
    inputs: tuple[torch.Tensor, ...]
    """Cut off from what made them."""
    outputs: tuple[torch.Tensor, ...]
    """In the order of `block.outputs`."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Takes the outputs' gradients, adds to the parameters' `.grad`, returns the inputs' gradients."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(self.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        return tuple(leaf.grad for leaf in self.inputs)


def _home(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter or buffer, and its name there."""
    owner, _, leaf = key.rpartition(".")
    return model.get_submodule(owner), leaf


def _last_uses(layers: Sequence[Layer], *, keep: set[str]) -> list[list[str]]:
    """For each layer, the values nobody in the block needs after it."""
    last = {name: index for index, layer in enumerate(layers) for name in layer.inputs}
    return [[name for name in last if last[name] == index and name not in keep] for index in range(len(layers))]
