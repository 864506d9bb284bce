"""State: all members' parameters and buffers, stacked, and each member's in the user's own keys and shapes.

A member's skeleton is a copy of its module without data, from which `module()` builds the module again, hooks on
gradients included: an array does not call them, but `verify` asks whether they matter.

Shapes: M = members.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError


class State:
    """Parameters and buffers [M, …] by state-dict key; a tensor with several keys is held once."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.aliases = aliases(models[0])
        self.skeletons = [skeleton(model) for model in models]
        held = [_held(model) for model in models]
        self.parameters = {
            key: nn.Parameter(_stacked(held, key), requires_grad=value.requires_grad)
            for key, value in held[0].items()
            if isinstance(value, nn.Parameter)
        }
        self.buffers = {
            key: _stacked(held, key) for key, value in held[0].items() if not isinstance(value, nn.Parameter)
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers together."""
        return {**self.parameters, **self.buffers}

    def member(self, index: int, *, persistent: bool = True) -> dict[str, Tensor]:
        """Copies of one member's tensors under the user's keys, in the user's order."""
        if persistent and not self._has_plain_keys(index):
            return dict(self.module(index).state_dict())
        keys = self.skeletons[index].state_dict().keys() if persistent else self.aliases.keys()
        tensors, empty = self.tensors, dict(_named(self.skeletons[index]))
        return {key: _laid(tensors[self.aliases[key]][index], empty[key]) for key in keys}

    def load(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Overwrites one member's tensors."""
        self.check(index, state)
        if not self._has_plain_keys(index):
            state = dict(_named(self._loaded(index, state)))
        tensors = self.tensors
        with torch.no_grad():
            for key, value in state.items():
                tensors[self.aliases[key]][index].copy_(value)

    def check(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Refuses a state that is not one of the user's module."""
        if not isinstance(state, Mapping):
            raise FusionError(f"the state for member {index} is a {type(state).__name__}; pass a state dict")
        if not self._has_plain_keys(index):
            self._loaded(index, state)
            return
        expected = self.skeletons[index].state_dict().keys()
        if missing := [key for key in expected if key not in state]:
            raise FusionError(f"the state for member {index} lacks {', '.join(map(repr, missing[:5]))}")
        if unknown := [key for key in state if key not in expected]:
            raise FusionError(
                f"the state for member {index} has {', '.join(map(repr, unknown[:5]))}, which it does not know"
            )
        self.check_shapes(index, state)

    def _has_plain_keys(self, index: int) -> bool:
        """Whether the module's state dict is its tensors by name: no hook gives them other keys, no state is extra."""
        return self.skeletons[index].state_dict().keys() <= self.aliases.keys()

    def _loaded(self, index: int, state: Mapping[str, Tensor]) -> nn.Module:
        """The member as a module that has taken the state in itself, by its own hooks."""
        module = self.module(index)
        try:
            module.load_state_dict(dict(state))
        except Exception as error:
            raise FusionError(f"member {index} refuses the state: {' '.join(str(error).split())}") from error
        return module

    def check_shapes(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Refuses tensors of other shapes than the member's."""
        tensors = self.tensors
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise FusionError(f"{key!r} for member {index} is a {type(value).__name__}; it must be a tensor")
            if value.shape != tensors[self.aliases[key]].shape[1:]:
                wanted = list(tensors[self.aliases[key]].shape[1:])
                raise FusionError(f"{key!r} for member {index} has shape {list(value.shape)}; it must have {wanted}")

    def keep(self, indices: Sequence[int]) -> None:
        """Only these members, in this order. The Parameter objects are new ones."""
        chosen = torch.tensor(indices)
        self._replace(lambda tensor, key: tensor.index_select(0, chosen.to(tensor.device)))
        self.skeletons = [self.skeletons[index] for index in indices]

    def taken(self, indices: Sequence[int]) -> "State":
        """Copies of these members' tensors, in a state of their own."""
        other = copy.copy(self)
        other.parameters, other.buffers = dict(self.parameters), dict(self.buffers)
        other.keep(indices)
        return other

    def admit(self, model: nn.Module) -> None:
        """One more member, the last."""
        held = _held(model)

        def joined(tensor: Tensor, key: str | None) -> Tensor:
            if key is not None:
                return _joined(tensor, held[key].detach().to(tensor.device))
            shape, like = (1, *tensor.shape[1:]), (tensor.dtype, tensor.layout, tensor.device)
            return torch.cat([tensor, torch.zeros(shape, dtype=like[0], layout=like[1], device=like[2])])

        self._replace(joined)
        self.skeletons.append(skeleton(model))

    def cut(self, members: int) -> None:
        """Only the first ones, some tensors of which may have one more; takes no memory."""
        first = torch.arange(members)
        self._replace(
            lambda tensor, key: (
                tensor.index_select(0, first.to(tensor.device)) if tensor.is_sparse else tensor.narrow(0, 0, members)
            )
        )
        del self.skeletons[members:]

    def _replace(self, change: Callable[[Tensor, str | None], Tensor]) -> None:
        """Changes the tensors in the dicts, which optimizers share, and gradients, for which `change` gets no key.

        New Parameters, as autograd does not let an old one change its shape while a graph of it is alive.
        """
        for key, parameter in self.parameters.items():
            made = nn.Parameter(change(parameter.detach(), key), requires_grad=parameter.requires_grad)
            if parameter.grad is not None:
                made.grad = change(parameter.grad.detach(), None)
            self.parameters[key] = made
        for key, buffer in self.buffers.items():
            self.buffers[key] = change(buffer, key)

    def module(self, index: int) -> nn.Module:
        """The member as a plain module with tensors of its own."""
        tensors = self.member(index, persistent=False)
        made: dict[str, Tensor] = {}
        memo: dict[int, Any] = {}
        for key, empty in _named(self.skeletons[index]):
            name = self.aliases[key]
            if name not in made:
                value = tensors[key]
                is_parameter = isinstance(empty, nn.Parameter)
                made[name] = nn.Parameter(value, requires_grad=empty.requires_grad) if is_parameter else value
                _take_hooks(made[name], empty)
            memo[id(empty)] = made[name]
        return copy.deepcopy(self.skeletons[index], memo)


def skeleton(model: nn.Module) -> nn.Module:
    """The module with tensors that hold no data."""
    memo: dict[int, Any] = {}
    for _, tensor in _named(model):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        made = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        _take_hooks(made, tensor)
        if made.requires_grad:
            for hook in (tensor._post_accumulate_grad_hooks or {}).values():
                made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        memo[id(tensor)] = made
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise FusionError(_uncopied(model, error)) from error


def _uncopied(model: nn.Module, error: Exception) -> str:
    """Which module cannot be copied, and what to use instead."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return (
                    f"{type(model).__name__} cannot be copied: attribute {attribute!r} of module "
                    f"{name or 'itself'!r} is computed from parameters and kept, as by torch.nn.utils.weight_norm; "
                    "use torch.nn.utils.parametrizations.weight_norm or spectral_norm, or compute it in forward"
                )
    first = next(iter(str(error).splitlines()), "")
    return f"{type(model).__name__} cannot be copied ({type(error).__name__}: {first}); copy.deepcopy must work on it"


def _take_hooks(made: Tensor, source: Tensor) -> None:
    """Hooks on the gradient, which copying forgets."""
    for hook in (source._backward_hooks or {}).values() if made.requires_grad else ():
        made.register_hook(hook)  # type: ignore[no-untyped-call]


def _named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def aliases(model: nn.Module) -> dict[str, str]:
    """Every key → the first key of the same tensor."""
    first: dict[int, str] = {}
    return {key: first.setdefault(id(tensor), key) for key, tensor in _named(model)}


def _held(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _stacked(held: Sequence[Mapping[str, Tensor]], key: str) -> Tensor:
    """[M, …], the usual way in memory, also where members have channels last."""
    return torch.stack([tensors[key].detach() for tensors in held]).clone(memory_format=torch.contiguous_format)


def _joined(tensor: Tensor, one: Tensor) -> Tensor:
    """[M, …] and one more, the usual way in memory."""
    joined = tensor.new_empty((len(tensor) + 1, *tensor.shape[1:]))
    joined[:-1], joined[-1] = tensor, one
    return joined


def _laid(value: Tensor, like: Tensor) -> Tensor:
    """A copy that lies in memory as the user's own tensor."""
    return torch.empty_like(like, device=value.device).copy_(value.detach())
