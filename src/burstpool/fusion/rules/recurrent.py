"""LSTM, GRU and RNN: one loop over time for all members, a batched product a step.

The inputs' share of the gates is one product for all times. Packed sequences and LSTM projections run member by
member. Shapes: M = members, N = samples, T = times, I = inputs, H = hidden, G = gates · H.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, with_members
from burstpool.fusion.rules.dropout import scaled_mask

aten = torch.ops.aten

Cell = Callable[[Tensor, Tensor, Tensor | None, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""(gates from the input, hidden weights, hidden bias, state) → new state, the output first."""


def _hidden(w_MGH: Tensor, bias: Tensor | None, h_MNH: Tensor) -> Tensor:
    product = w_MGH.transpose(1, 2)
    return torch.bmm(h_MNH, product) if bias is None else torch.baddbmm(bias.unsqueeze(1), h_MNH, product)


def _lstm_cell(gates_MNG: Tensor, weight: Tensor, bias: Tensor | None, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    h_MNH, c_MNH = state
    enter, forget, new, leave = (gates_MNG + _hidden(weight, bias, h_MNH)).chunk(4, 2)
    c_MNH = forget.sigmoid() * c_MNH + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * c_MNH.tanh(), c_MNH


def _gru_cell(gates_MNG: Tensor, weight: Tensor, bias: Tensor | None, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (h_MNH,) = state
    reset_i, update_i, new_i = gates_MNG.chunk(3, 2)
    reset_h, update_h, new_h = _hidden(weight, bias, h_MNH).chunk(3, 2)
    new = (new_i + (reset_i + reset_h).sigmoid() * new_h).tanh()
    update = (update_i + update_h).sigmoid()
    return (new + update * (h_MNH - new),)


def _tanh_cell(gates_MNG: Tensor, weight: Tensor, bias: Tensor | None, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((gates_MNG + _hidden(weight, bias, state[0])).tanh(),)


def _relu_cell(gates_MNG: Tensor, weight: Tensor, bias: Tensor | None, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((gates_MNG + _hidden(weight, bias, state[0])).relu(),)


_CELLS: dict[Any, tuple[Cell, int]] = {
    aten.lstm.input: (_lstm_cell, 2),
    aten.gru.input: (_gru_cell, 1),
    aten.rnn_tanh.input: (_tanh_cell, 1),
    aten.rnn_relu.input: (_relu_cell, 1),
}
"""Operator → cell, tensors of its state."""


def _rule(call: Call) -> Lowered | None:
    if call.op not in _CELLS:
        return None  # packed sequences
    cell, num_states = _CELLS[call.op]
    expected = (4 if call["has_biases"] else 2) * call["num_layers"] * (2 if call["bidirectional"] else 1)
    flags = call.flags(call["params"])
    if len(flags) != expected or not all(flags) or call.rank("input") != 3 or isinstance(call["train"], tuple):
        return None  # projections, weights shared between members, a sequence without samples
    batched = call.is_batched("input")
    state_flags = call.flags(call["hx"])
    state_flags = list(state_flags) if num_states == 2 else [state_flags]

    def kernel(
        run: Run, x: Tensor, hx: Any, params: Sequence[Tensor], biases: bool, layers: int, p: Any, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        states = list(hx) if num_states == 2 else [hx]
        states = [s if f else with_members(s, run.members) for s, f in zip(states, state_flags, strict=True)]
        # Samples first or times first, the time of [M, N, T, I] or [M, T, N, I] goes to the front.
        x_TMNI = (x if batched else with_members(x, run.members)).movedim(2 if batch_first else 1, 0)
        network = _Network(cell, biases, bidirectional, params)
        y_TMNH, finals = network.run(run, x_TMNI, states, layers, p if train else 0.0)
        return y_TMNH.movedim(0, 2 if batch_first else 1), *finals

    return Lowered(kernel=kernel, why="one loop over time, a batched product a step")


class _Network:
    """Layers and directions of one call."""

    def __init__(self, cell: Cell, biases: bool, bidirectional: bool, params: Sequence[Tensor]) -> None:
        self.cell, self.biases, self.params = cell, biases, params
        self.directions = 2 if bidirectional else 1

    def run(
        self, run: Run, x_TMNI: Tensor, states: Sequence[Tensor], layers: int, p: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The last layer's outputs [T, M, N, …] and the final states [M, layers, N, H]."""
        finals: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                state = tuple(s[:, index] for s in states)
                y_TMNH, final = self._direction(x_TMNI, index, state, backwards=direction == 1)
                outputs.append(y_TMNH)
                finals.append(final)
            x_TMNI = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if layer < layers - 1 and (isinstance(p, tuple) or p > 0):
                x_TMNI = self._dropped(run, x_TMNI, p)
        return x_TMNI, [torch.stack(parts, 1) for parts in zip(*finals, strict=True)]

    def _dropped(self, run: Run, x_TMNH: Tensor, p: Any) -> Tensor:
        times, _, samples, hidden = x_TMNH.shape  # drawn as [T, N, H], as torch does between layers
        mask_MTNH = scaled_mask(run, (times, samples, hidden), p, x_TMNH)
        return x_TMNH * mask_MTNH.transpose(0, 1)

    def _direction(
        self, x_TMNI: Tensor, index: int, state: tuple[Tensor, ...], *, backwards: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        per_layer = 4 if self.biases else 2
        weights = self.params[index * per_layer : (index + 1) * per_layer]
        w_MGI, w_MGH = weights[:2]
        bias_i, bias_h = weights[2:] if self.biases else (None, None)
        gates = self._input_gates(x_TMNI, w_MGI, bias_i)
        outputs = []
        for gates_MNG in reversed(gates.unbind(0)) if backwards else gates.unbind(0):
            state = self.cell(gates_MNG, w_MGH, bias_h, state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backwards else outputs), state

    def _input_gates(self, x_TMNI: Tensor, w_MGI: Tensor, bias: Tensor | None) -> Tensor:
        times, members, samples, width = x_TMNI.shape
        x_MPI = x_TMNI.transpose(0, 1).reshape(members, times * samples, width)
        product = w_MGI.transpose(1, 2)
        gates = torch.bmm(x_MPI, product) if bias is None else torch.baddbmm(bias.unsqueeze(1), x_MPI, product)
        return gates.view(members, times, samples, -1).transpose(0, 1)


RULES: dict[Callable[..., Any], Rule] = dict.fromkeys((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu), _rule)
