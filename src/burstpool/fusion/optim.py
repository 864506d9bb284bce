"""The array's optimizer: one update for all members, each with its own numbers, step count and state.

How an update runs on a device is in apply.py, its formula in updates.py. Numbers and step counts live on the device
and change in place, so that a step can be recorded as a CUDA graph. A class without a formula runs as M torch
optimizers over slices: slices.py.

Shapes: M = members, P = all of a member's parameters in a bucket.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import copy
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion import kernels
from burstpool.fusion.apply import apply_at_once, apply_in_chunks
from burstpool.fusion.copied import copied
from burstpool.fusion.gradients import forget_gradients
from burstpool.fusion.options import (
    Factory,
    flags,
    for_member,
    load_numbers,
    loaded_groups,
    made,
    numbers,
    plain,
    stand_ins,
    stepping,
)
from burstpool.fusion.updates import UPDATES, Bucket, Update, real, width

_EXACT = ("lr", "beta1", "beta2", "lr_decay")
"""Numbers that are also kept in double precision, where torch computes with Python's."""
_REST = ("beta1", "beta2", "rho", "alpha", "dampening")
"""Numbers whose difference to 1 is a column too: torch takes it in double precision."""
_SPARSE = (torch.optim.SGD, torch.optim.Adagrad)
"""Formulas that torch also has for sparse gradients."""
_DIFFERENT_FLAGS = "members differ in an option of the optimizer that is no number; use two arrays"
_LARGE = 4096
"""Elements of a member's parameter from which it has a launch of its own, where there is a kernel."""


class ArrayOptimizer(Protocol):
    """What an array needs of its optimizer."""

    proxies: list[torch.optim.Optimizer]
    """Each member's numbers; what its schedule acts upon."""
    keeps_state: bool
    """Whether a member that does not step must keep its state to the bit, not only its weights."""

    @property
    def lr(self) -> list[float]:
        """Each member's learning rate, of the first group."""
        ...

    def step(self, skip: Tensor | None = None) -> None:
        """Updates all active members, but for those where `skip` [M] is true."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        ...

    def pull(self) -> None:
        """Takes up changes of the proxies' numbers."""
        ...

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuses options that a new member cannot have."""
        ...

    def keep(self, indices: Sequence[int], active: Tensor) -> None:
        """Only these members, in this order."""
        ...

    def taken(self, indices: Sequence[int], parameters: Mapping[str, nn.Parameter], active: Tensor) -> "ArrayOptimizer":
        """An optimizer of these members over their new parameters, state carried; they leave this one."""
        ...

    def admit(self, options: Mapping[str, Any], active: Tensor) -> None:
        """One more member, with a fresh state."""
        ...

    def member_state_dict(self, index: int) -> dict[str, Any]:
        """One member's state as torch's optimizer over its parameters alone would give it."""
        ...

    def load_member_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """One member's state and numbers, as `member_state_dict` or torch's optimizer alone gave them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All members' state and numbers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same array's optimizer as it was."""
        ...


def make_optimizer(
    factory: Factory, parameters: Mapping[str, nn.Parameter], options: Mapping[str, Any], *, active: Tensor
) -> ArrayOptimizer:
    """The fast way where the class has a formula and members agree in all that is no number."""
    from burstpool.fusion.slices import SlicedOptimizer

    settings = Settings(factory, options, parameters, len(active))
    proxies = [settings.proxy(given) for given in settings.given]
    closure = inspect.signature(type(proxies[0]).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise FusionError(f"{type(proxies[0]).__name__} needs a closure to step, which an array cannot give it")
    update = UPDATES.get(type(proxies[0]))
    shared = all(flags([p.param_groups[g] for p in proxies]) is not None for g in range(len(settings.keys)))
    if update is None or not shared:
        return SlicedOptimizer(settings, parameters, active)
    return FusedOptimizer(settings, proxies, update, parameters, active)


class Settings:
    """What the optimizer was asked for: a factory, options, and groups of parameters with options of their own."""

    def __init__(
        self, factory: Factory, options: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], members: int
    ) -> None:
        self.factory, self._stand_ins = factory, stand_ins(parameters)
        named = _checked_groups(options.get("groups") or [], parameters)
        taken = [key for group in named for key in group["keys"]]
        rest = [key for key in parameters if key not in taken]
        groups = [dict(group) for group in named]
        # A group of frozen parameters alone is none: the user's optimizer has no such group.
        if any(parameters[key].requires_grad for key in rest) or not named:
            groups.insert(0, {"keys": rest})
        self.keys: list[list[str]] = [list(group["keys"]) for group in groups]
        """Of each group."""
        own = [{k: v for k, v in group.items() if k != "keys"} for group in groups]
        common = {name: value for name, value in options.items() if name != "groups"}
        self.given = [
            Given(for_member(common, member, members), [for_member(group, member, members) for group in own])
            for member in range(members)
        ]
        """Of each member."""

    @property
    def order(self) -> list[str]:
        """All keys, as torch counts parameters."""
        return [key for keys in self.keys for key in keys]

    def proxy(self, given: "Given") -> torch.optim.Optimizer:
        """A member's numbers, over nothing that could be trained."""
        proxy = self.optimizer(given, self._stand_ins)
        proxy.state.clear()  # Adagrad begins with some, as large as the parameters
        return proxy

    def optimizer(self, given: "Given", parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """torch's own, over one member's parameters."""
        return made(self.factory, given.options, given.groups, [[parameters[key] for key in k] for k in self.keys])

    def for_new(self, options: Mapping[str, Any]) -> "Given":
        """A new member's options; what is left out is what the first of the present members was given."""
        first = self.given[0]
        if vain := [name for name in options if all(name in group for group in first.groups)]:
            raise FusionError(
                f"{vain[0]}={options[vain[0]]!r} would have no effect, as each group of parameters has its own; "
                "leave it out, and give the member its numbers with resume_member"
            )
        return Given({**first.options, **{name: plain(value) for name, value in options.items()}}, first.groups)

    def kept(self, indices: Sequence[int]) -> "Settings":
        """The settings of these members, in this order."""
        other = copy.copy(self)
        other.given = [self.given[index] for index in indices]
        return other

    def with_one_more(self, given: "Given") -> "Settings":
        """The settings with a new member, the last."""
        other = copy.copy(self)
        other.given = [*self.given, given]
        return other


def _checked_groups(groups: Any, parameters: Mapping[str, nn.Parameter]) -> list[Mapping[str, Any]]:
    """Refuses groups that do not name parameters of the model."""
    for group in groups if isinstance(groups, list | tuple) else [None]:
        keys = group.get("keys") if isinstance(group, Mapping) else None
        if not isinstance(keys, list | tuple):
            raise FusionError('groups are a list of dicts such as {"keys": ["0.bias"], "weight_decay": 0.0}')
        if unknown := [key for key in keys if not isinstance(key, str) or key not in parameters]:
            name = repr(unknown[0]) if isinstance(unknown[0], str) else f"of type {type(unknown[0]).__name__}"
            raise FusionError(f"there is no parameter {name}; groups name parameters by their state-dict keys")
    return list(groups)


class Given(NamedTuple):
    """What one member's optimizer was asked for."""

    options: dict[str, Any]
    groups: list[dict[str, Any]]
    """What each group has of its own."""


class FusedOptimizer:
    """One update for all members."""

    def __init__(
        self,
        settings: Settings,
        proxies: list[torch.optim.Optimizer],
        update: Update,
        parameters: Mapping[str, nn.Parameter],
        active: Tensor,
    ) -> None:
        self.settings, self.proxies, self.update = settings, proxies, update
        self.parameters, self.active = parameters, active
        self.buckets: list[Bucket] = []
        self.keeps_state = False
        """Whether a member that does not step must keep its state to the bit, not only its weights."""
        self.recorded = False
        """Whether steps are replayed from a graph, where a launch costs next to nothing."""

    @property
    def lr(self) -> list[float]:
        """Each member's learning rate, of the first group."""
        return [float(proxy.param_groups[0]["lr"]) for proxy in self.proxies]

    @torch.no_grad()
    def step(self, skip: Tensor | None = None) -> None:
        """Updates all active members, but for those where `skip` [M] is true."""
        mask_M = stepping(self.active, skip)
        for bucket in self._with_gradients():
            self._update(bucket, mask_M, keep=skip is not None or self.keeps_state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or sets them to zero."""
        forget_gradients(self.parameters.values(), set_to_none=set_to_none)

    def _update(self, bucket: Bucket, mask_M: Tensor, *, keep: bool) -> None:
        bucket.step_M.add_(self._counted(bucket, mask_M))
        # Reading the mask is free on a CPU; on a GPU it would stall every step.
        on_cpu = mask_M.device.type == "cpu"
        masked = not on_cpu or not bool(mask_M.all())
        if self._has_kernel(bucket.keys[0], at_least=1 if self.recorded else _LARGE):
            from burstpool.fusion.kernels import update

            update.apply(type(self.proxies[0]), bucket, self.parameters, mask_M)
            return
        if on_cpu:  # only the rows of those that do not step; finding them would stall a GPU
            rows = [index for index, steps in enumerate(mask_M.tolist()) if not steps] if masked else []
            kept = {name: slot[rows] for name, slot in bucket.slots.items()} if rows else {}
            apply_in_chunks(self.update.formula, bucket, self.parameters, mask_M if masked else None)
            for name, old in kept.items():
                bucket.slots[name][rows] = old
            return
        before = {name: slot.clone() for name, slot in bucket.slots.items()} if keep else {}
        apply_at_once(self.update.formula, bucket, self.parameters, mask_M)
        for name, old in before.items():
            bucket.slots[name].copy_(torch.where(mask_M.unsqueeze(1), bucket.slots[name], old))

    def _counted(self, bucket: Bucket, mask_M: Tensor) -> Tensor:
        """Members whose step counts: with SGD those that have momentum, as torch has no state without."""
        counts_all = not isinstance(self.proxies[0], torch.optim.SGD) or bucket.flags["all_momentum"]
        return mask_M if counts_all else mask_M & (bucket.number("momentum").view(-1) != 0)

    def _has_kernel(self, key: str, *, at_least: int) -> bool:
        """Whether one kernel updates the parameter: those so large that reading them takes longer than a launch."""
        parameter = self.parameters[key]
        if parameter[0].numel() < at_least or parameter.dtype is not torch.float32 or not kernels.usable(parameter):
            return False
        from burstpool.fusion.kernels import update

        return update.knows(type(self.proxies[0]))

    def fresh(self, bucket: Bucket, name: str) -> Tensor:
        """A slot before any step."""
        columns = sum(width(self.parameters[key]) for key in bucket.keys)
        first = self.parameters[bucket.keys[0]]
        slot = torch.zeros(len(self.active), columns, dtype=first.dtype.to_real(), device=first.device)
        return slot.add_(bucket.numbers["initial_accumulator_value"]) if name == "sum" else slot

    def _with_gradients(self) -> list[Bucket]:
        """The buckets to update. Parameters that did not always have gradients together part here."""
        self._make_dense()
        present = {key for key, parameter in self.parameters.items() if parameter.grad is not None}
        for bucket in list(self.buckets):
            inside = [key for key in bucket.keys if key in present]
            if inside and len(inside) < len(bucket.keys):
                self._part(bucket, inside)
        known = {key for bucket in self.buckets for key in bucket.keys}
        self._add_buckets(present - known)
        return [bucket for bucket in self.buckets if bucket.keys[0] in present]

    def _make_dense(self) -> None:
        """Sparse gradients, as of `nn.Embedding(sparse=True)`, for formulas that torch has for them, too."""
        for key, parameter in self.parameters.items():
            if parameter.grad is None or parameter.grad.layout is torch.strided:
                continue
            if not isinstance(self.proxies[0], _SPARSE):
                raise FusionError(
                    f"{type(self.proxies[0]).__name__} does not take sparse gradients, which {key!r} has; "
                    "use SparseAdam, SGD or Adagrad, or an embedding with sparse=False"
                )
            parameter.grad = parameter.grad.to_dense()

    def _add_buckets(self, keys: set[str]) -> None:
        for group, known in enumerate(self.settings.keys):
            mine = [key for key in known if key in keys]
            kinds = {key: (self.parameters[key].dtype, self._has_kernel(key, at_least=_LARGE)) for key in mine}
            for kind in dict.fromkeys(kinds.values()):
                same = [key for key in mine if kinds[key] == kind]
                step_M = torch.zeros(len(self.active), dtype=torch.float64, device=self.active.device)
                bucket = Bucket(same, group, {}, {}, step_M, {})
                self._fill(bucket)
                self.buckets.append(bucket)

    def _part(self, bucket: Bucket, inside: Sequence[str]) -> None:
        pieces = self._pieces(bucket.keys, bucket.slots)
        self.buckets.remove(bucket)
        for keys in (list(inside), [key for key in bucket.keys if key not in inside]):
            slots = {name: torch.cat([piece[key] for key in keys], 1) for name, piece in pieces.items()}
            part = Bucket(keys, bucket.group, {}, bucket.flags, bucket.step_M.clone(), slots)
            self._fill(part)
            self.buckets.append(part)

    def _fill(self, bucket: Bucket) -> None:
        """The bucket's numbers from the proxies, in place where they are on the device already."""
        groups = [p.param_groups[bucket.group] for p in self.proxies]
        found = flags(groups)
        if found is None:
            raise FusionError(_DIFFERENT_FLAGS)
        if found != bucket.flags:
            bucket.chunks = None  # they hold flags of their own
        bucket.flags = found
        dtype, device = self.parameters[bucket.keys[0]].dtype.to_real(), self.active.device
        read = [numbers(group) for group in groups]
        # What a schedule adds (`initial_lr`) a new member has only when its schedule is made.
        columns = {name: [mine[name] for mine in read] for name in read[0] if all(name in mine for mine in read)}
        for name, values in columns.items():
            exact = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
            _set(bucket.numbers, name, exact.to(dtype), device)
            if name in _EXACT:
                _set(bucket.numbers, f"{name}_exact", exact, device)
            if name in _REST:
                _set(bucket.numbers, f"{name}_rest", (1 - exact).to(dtype), device)
        for name in self.update.slots(found):
            if name not in bucket.slots:
                bucket.slots[name], bucket.chunks = self.fresh(bucket, name), None

    def pull(self) -> None:
        """Takes up changes of the proxies' numbers."""
        for bucket in self.buckets:
            self._fill(bucket)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuses options that a new member cannot have."""
        new = self.settings.proxy(self.settings.for_new(options))
        for mine, theirs in zip(self.proxies[0].param_groups, new.param_groups, strict=True):
            if flags([mine, theirs]) is None:
                raise FusionError(
                    "a new member may differ in numbers only; its other options must be those of the first one"
                )

    def keep(self, indices: Sequence[int], active: Tensor) -> None:
        """Only these members, in this order."""
        self.active, self.settings = active, self.settings.kept(indices)
        self.proxies = [self.proxies[index] for index in indices]
        chosen = torch.tensor(indices, device=active.device)
        for bucket in self.buckets:
            bucket.step_M = bucket.step_M[chosen]
            bucket.slots = {name: slot[chosen] for name, slot in bucket.slots.items()}
            bucket.numbers, bucket.chunks = {}, None
        self.pull()

    def taken(self, indices: Sequence[int], parameters: Mapping[str, nn.Parameter], active: Tensor) -> "FusedOptimizer":
        """An optimizer of these members over their new parameters, state carried; they leave this one."""
        other = copy.copy(self)
        other.parameters, other.buckets = parameters, [dataclasses.replace(bucket) for bucket in self.buckets]
        other.keep(indices, active)
        return other

    def admit(self, options: Mapping[str, Any], active: Tensor) -> None:
        """One more member, with a fresh state."""
        given = self.settings.for_new(options)
        self.active, self.settings = active, self.settings.with_one_more(given)
        self.proxies.append(self.settings.proxy(given))
        start = numbers(self.proxies[-1].param_groups[0]).get("initial_accumulator_value", 0.0)
        for bucket in self.buckets:
            bucket.step_M = torch.cat([bucket.step_M, torch.zeros_like(bucket.step_M[:1])])
            for name, slot in bucket.slots.items():
                fresh = torch.full_like(slot[:1], start if name == "sum" else 0.0)
                bucket.slots[name] = torch.cat([slot, fresh])
            bucket.numbers, bucket.chunks = {}, None
        self.pull()

    def member_state_dict(self, index: int) -> dict[str, Any]:
        """One member's state as torch's optimizer over its parameters alone would give it."""
        order = self.settings.order
        if isinstance(self.proxies[index], torch.optim.Adagrad):
            self._add_buckets(set(order) - {key for bucket in self.buckets for key in bucket.keys})
        state: dict[int, dict[str, Tensor]] = {}
        counts_steps = not isinstance(self.proxies[index], torch.optim.SGD)
        for bucket in self.buckets:
            # Before its first step a member has no state, as torch's own; but Adagrad's, which begins with one.
            if "sum" not in bucket.slots and float(bucket.step_M[index]) == 0:
                continue
            for name, pieces in self._pieces(bucket.keys, bucket.slots).items():
                for key, piece in pieces.items():
                    state.setdefault(order.index(key), {})[name] = _shaped(piece[index].clone(), self.parameters[key])
            for key in bucket.keys:
                if counts_steps:
                    state.setdefault(order.index(key), {})["step"] = bucket.step_M[index].float().cpu()
        exported = copied(self.proxies[index].state_dict()["param_groups"])
        for group, keys in zip(exported, self.settings.keys, strict=True):
            group["params"] = [order.index(key) for key in keys]
        return {"state": dict(sorted(state.items())), "param_groups": exported}

    @torch.no_grad()
    def load_member_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """One member's state and numbers, as `member_state_dict` or torch's optimizer alone gave them."""
        saved = self._checked_state(index, state)
        load_numbers(self.proxies[index], state["param_groups"])
        self.pull()  # its numbers may ask for state that the array did not have
        self._add_buckets(saved.keys() - {key for bucket in self.buckets for key in bucket.keys})
        for bucket in list(self.buckets):
            present = [key for key in bucket.keys if key in saved]
            if present and len(present) < len(bucket.keys):
                self._part(bucket, present)
        for bucket in self.buckets:
            first = saved.get(bucket.keys[0])
            # SGD counts no steps; that there is a state says that there was one.
            bucket.step_M[index] = 0.0 if first is None else float(first.get("step", 1.0))
            for name, slot in bucket.slots.items():
                if first is None or first.get(name) is None:
                    slot[index] = self.fresh(bucket, name)[index]
                else:
                    slot[index] = torch.cat([real(saved[key][name]).reshape(-1) for key in bucket.keys])

    def _checked_state(self, index: int, state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Each parameter's slots, or a refusal before anything is changed."""
        for place, mine in enumerate(loaded_groups(self.proxies[index], state["param_groups"])):
            others = [p.param_groups[place] for i, p in enumerate(self.proxies) if i != index]
            if flags([mine, *others]) is None:
                raise FusionError(_DIFFERENT_FLAGS)
        order = self.settings.order
        if len(order) != (found := sum(len(group["params"]) for group in state["param_groups"])):
            raise FusionError(f"the optimizer's state has {found} parameters, this one {len(order)}")
        saved = {order[place]: slots for place, slots in state["state"].items()}
        for key, slots in saved.items():
            for name, value in slots.items():
                wanted = self.parameters[key].shape[1:]
                if name == "step" or value is None:
                    continue
                if not isinstance(value, Tensor) or value.shape != wanted:
                    got = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is {value!r}"
                    raise FusionError(f"the optimizer's {name} of {key!r} {got}; it must have shape {list(wanted)}")
        return saved

    def state_dict(self) -> dict[str, Any]:
        """All members' state and numbers."""
        buckets = [
            {
                "keys": list(b.keys),
                "group": b.group,
                "step": b.step_M.clone(),
                "slots": {k: v.clone() for k, v in b.slots.items()},
            }
            for b in self.buckets
        ]
        described = [[{k: v for k, v in g.items() if k != "params"} for g in p.param_groups] for p in self.proxies]
        return {"buckets": buckets, "numbers": copied(described)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same array's optimizer as it was."""
        count = len(state.get("numbers", state.get("members", ())))
        if count != len(self.proxies):
            raise FusionError(f"the optimizer was saved with {count} members; this one has {len(self.proxies)}")
        if "members" in state:  # by a `SlicedOptimizer`: members differed in flags then, and those that did have left
            for index, member in enumerate(state["members"]):
                self.load_member_state_dict(index, member)
            return
        for proxy_, groups in zip(self.proxies, state["numbers"], strict=True):
            load_numbers(proxy_, groups)
        with torch.no_grad():
            self._load_buckets(state["buckets"])
        self.pull()

    def _load_buckets(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """In place where it can be: a recorded step finds its state where it was."""
        origin = {key: place for place, bucket in enumerate(saved) for key in bucket["keys"]}
        kept = [b for b in self.buckets if len({origin.get(key) for key in b.keys}) == 1]
        pieces = [self._pieces(bucket["keys"], bucket["slots"]) for bucket in saved]
        for bucket in kept:
            place = origin.get(bucket.keys[0])
            bucket.step_M.zero_() if place is None else bucket.step_M.copy_(saved[place]["step"])
            mine = {} if place is None else pieces[place]
            for name, slot in bucket.slots.items():
                slot.copy_(
                    torch.cat([mine[name][key] for key in bucket.keys], 1) if name in mine else self.fresh(bucket, name)
                )
            for name in mine.keys() - bucket.slots.keys():
                found = torch.cat([mine[name][key] for key in bucket.keys], 1)
                bucket.slots[name], bucket.chunks = found.to(bucket.step_M.device, copy=True), None
        known = {key for bucket in kept for key in bucket.keys}
        self.buckets = kept + [
            self._made(old, parts, known) for old, parts in zip(saved, pieces, strict=True) if set(old["keys"]) - known
        ]

    def _made(self, saved: Mapping[str, Any], pieces: Mapping[str, Mapping[str, Tensor]], known: set[str]) -> Bucket:
        keys = [key for key in saved["keys"] if key not in known]
        device = self.active.device
        slots = {n: torch.cat([p[key] for key in keys], 1).to(device, copy=True) for n, p in pieces.items()}
        return Bucket(keys, saved["group"], {}, {}, saved["step"].to(device, copy=True), slots)

    def _pieces(self, keys: Sequence[str], slots: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Slot → parameter → its columns."""
        sizes = [width(self.parameters[key]) for key in keys]
        return {name: dict(zip(keys, torch.split(slot, sizes, 1), strict=True)) for name, slot in slots.items()}


def _shaped(values: Tensor, parameter: nn.Parameter) -> Tensor:
    """A member's columns as a tensor like its parameter, in the same memory."""
    shape = parameter.shape[1:]
    return torch.view_as_complex(values.view(*shape, 2)) if parameter.is_complex() else values.view(shape)


def _set(columns: dict[str, Tensor], name: str, values: Tensor, device: torch.device) -> None:
    if name in columns and columns[name].shape == values.shape:
        columns[name].copy_(values)
    else:
        columns[name] = values.to(device)
