"""Options: each member's own numbers of an optimizer, held by M of torch's own optimizers over stand-ins.

torch's classes check numbers and the parameters' shapes, fill in defaults, and are what torch's schedulers act upon;
the array reads the numbers off them. A list gives one value a member; a tuple, as `betas`, is one value.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion.copied import copied

Factory = Callable[..., torch.optim.Optimizer]


def for_member(options: Mapping[str, Any], member: int, members: int) -> dict[str, Any]:
    """The options of one member."""
    return {name: plain(_value(name, value, member, members)) for name, value in options.items()}


def plain(value: Any) -> Any:
    """numpy's numbers as Python's own, which a checkpoint can hold; all else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value
    return value.item() if getattr(value, "ndim", None) == 0 and not isinstance(value, Tensor) else value


def _value(name: str, value: Any, member: int, members: int) -> Any:
    if getattr(value, "ndim", 0) == 1:  # a tensor, or numpy's array
        value = value.tolist()
    if not isinstance(value, list) or (name == "betas" and value and not isinstance(value[0], Sequence)):
        return value
    if len(value) != members:
        raise FusionError(f"{name} has {len(value)} values for {members} members; pass one each, or one number for all")
    return value[member]


def stepping(active: Tensor, skip: Tensor | None) -> Tensor:
    """[M]: who steps."""
    if callable(skip):
        raise FusionError("an array's optimizer takes no closure; call backward on array.losses(…).sum(), then step()")
    return active if skip is None else active & ~skip


def stand_ins(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """One member's parameters in shape only, which take no memory."""
    return {
        key: nn.Parameter(parameter.new_zeros(()).expand(parameter.shape[1:]), requires_grad=parameter.requires_grad)
        for key, parameter in parameters.items()
    }


def made(
    factory: Factory,
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    parameters: Sequence[Sequence[nn.Parameter]],
) -> torch.optim.Optimizer:
    """torch's optimizer with a member's numbers, over the parameters of each group."""
    described = [{"params": list(mine), **_own(group)} for mine, group in zip(parameters, groups, strict=True)]
    try:
        return factory(described, **_own(options))
    except (TypeError, ValueError) as error:
        name, given = getattr(factory, "__name__", "the optimizer"), " ".join(str(dict(options)).split())
        raise FusionError(f"{name} refuses {given}: {error}") from None


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule writes into a rate that is a tensor, so each member has its own."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}


def numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a group that members may differ in."""
    found: dict[str, float] = {}
    for name, value in group.items():
        if name == "betas":
            found["beta1"], found["beta2"] = (float(beta) for beta in value)
        elif isinstance(value, Tensor | Real) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def load_numbers(proxy: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """A member's numbers as they were saved."""
    for mine, described in zip(proxy.param_groups, loaded_groups(proxy, groups), strict=True):
        mine.update(copied(described))


def loaded_groups(proxy: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A member's groups with the numbers that were saved, or a refusal; nothing is changed."""
    if len(groups) != len(proxy.param_groups):
        raise FusionError(
            f"the optimizer's state has {len(groups)} groups of parameters, this one {len(proxy.param_groups)}"
        )
    wanted = numbers(proxy.defaults).keys() - {"beta1", "beta2"} | proxy.defaults.keys() & {"betas"}
    for saved in groups:
        if missing := sorted(wanted - saved.keys()):
            raise FusionError(f"the state is not one of {type(proxy).__name__}: it has no {missing[0]!r}")
        if wrong := sorted(name for name in wanted if not _is_number(name, saved[name])):
            raise FusionError(f"the state's {wrong[0]} is {saved[wrong[0]]!r}; {type(proxy).__name__} takes numbers")
    return [
        {**mine, **{name: value for name, value in saved.items() if name not in ("params", "param_names")}}
        for mine, saved in zip(proxy.param_groups, groups, strict=True)
    ]


def _is_number(name: str, value: Any) -> bool:
    if name == "betas":
        return isinstance(value, tuple | list) and len(value) == 2 and all(_is_number("", beta) for beta in value)
    return isinstance(value, Tensor | Real)


def flags(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What of a group is no number, the same for all members; None where they differ."""
    ignored = {"params", "foreach", "fused", "capturable", "differentiable"}
    found = [
        {k: v for k, v in g.items() if isinstance(v, bool | str | type(None)) and k not in ignored} for g in groups
    ]
    if any(other != found[0] for other in found):
        return None
    columns = {
        name: [numbers(group).get(name, 0.0) for group in groups] for name in ("momentum", "dampening", "weight_decay")
    }
    return {
        **found[0],
        "has_momentum": any(columns["momentum"]),
        "all_momentum": all(columns["momentum"]),
        "damps": any(columns["dampening"]),
        "decays": any(columns["weight_decay"]),
    }
