"""The array: M models trained as one, each as if it were trained alone.

    array = burstpool.fuse(models, example)                       # unmodified nn.Modules
    optimizer = array.optimizer(torch.optim.Adam, lr=[1e-1, 1e-2, 1e-3])
    for x, y in data:
        losses = array.losses(x, lambda out: F.cross_entropy(out, y))   # one number a member
        losses.sum().backward(); optimizer.step(); optimizer.zero_grad()
    array.member(0).state_dict()                                  # the user's own keys and shapes

Shapes: M = members, N = samples.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion import checkpoint, kernels
from burstpool.fusion.clip import clip_grad_norm, clip_grad_value
from burstpool.fusion.compiled import compiler_options
from burstpool.fusion.explain import Explanation, explain
from burstpool.fusion.inputs import model_arguments, named_inputs, stacked_inputs
from burstpool.fusion.loss import member_losses
from burstpool.fusion.lowering import ONE_BY_ONE, choose_lowerings
from burstpool.fusion.memory import KeptMemory
from burstpool.fusion.modes import Example, Mode
from burstpool.fusion.optim import ArrayOptimizer, make_optimizer
from burstpool.fusion.plan import Plan
from burstpool.fusion.rules import Run
from burstpool.fusion.scaler import LossScaler
from burstpool.fusion.schedulers import ArrayScheduler
from burstpool.fusion.serial import run_serially
from burstpool.fusion.state import State, skeleton
from burstpool.fusion.streams import Streams
from burstpool.fusion.structure import check_same_state, check_tensors, checked_models, checked_seeds, whole_numbers
from burstpool.model.capture import flatten_arguments

if TYPE_CHECKING:
    from burstpool.job import Job

Execution = Literal["rules", "measured", "fastest", "serial"]


def fuse(
    models: Sequence[nn.Module],
    example: Any,
    *,
    seeds: Sequence[int] | None = None,
    verify: bool = False,
    mode: Execution = "rules",
) -> "FusedArray":
    """Makes one array of models of the same shape.

    `example` is one batch of what a model is called with: a tensor, a tuple of positional or a dict of keyword
    arguments. `seeds` start the members' random streams (default 0, 1, …): member i draws what it would draw alone
    after `torch.manual_seed(seeds[i])`. `verify` compares one step in double precision with the members alone and
    raises FusionError on a mismatch. `mode` says how operators run: by the rules' own choice, by the fastest of
    their lowerings as measured once and cached, or by the fastest of all, one member after another included.
    """
    array = FusedArray(models, example, seeds=seeds, mode=mode)
    if verify:
        array.verify()
    return array


@dataclass(frozen=True, slots=True)
class Member:
    """One member of an array."""

    array: "FusedArray"
    index: int

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of its parameters and buffers under the user's own keys, as its module alone would have."""
        return self.array.state.member(self.index)

    def module(self) -> nn.Module:
        """A plain module with copies of its tensors."""
        return self.array.state.module(self.index)

    def checkpoint(self) -> dict[str, Any]:
        """All that another array needs to train it on: state, optimizers, schedules, random stream."""
        return checkpoint.member_state(self.array, self.index)


class FusedArray:
    """M models trained as one. Made by `fuse` or `FusedArray.from_job`."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        example: Any,
        *,
        seeds: Sequence[int] | None = None,
        mode: Execution = "rules",
    ) -> None:
        models = checked_models(models)
        seeds = checked_seeds(models, seeds)
        if mode not in get_args(Execution):
            raise FusionError(f"mode={mode!r} is unknown; pass one of {', '.join(map(repr, get_args(Execution)))}")
        self._example: Example = model_arguments(example)
        self._example_leaves = flatten_arguments(*self._example)[0]
        self._mode_name = mode
        self.training = models[0].training
        self.state = State(models)
        self._modes = {self.training: Mode(self.state.skeletons, lambda index: models[index], self._example)}
        self.device = next((tensor.device for tensor in self.state.tensors.values()), torch.device("cpu"))
        self.streams = Streams(seeds, self.device)
        self.active = torch.ones(len(models), dtype=torch.bool, device=self.device)
        """[M]: false for members that were stopped or whose loss was not finite; the optimizers pass over them."""
        self._frozen: dict[int, dict[str, Tensor]] = {}
        self._memory = KeptMemory() if self.device.type == "cpu" else None
        """For large gradients, of the members there are."""
        self.optimizers: list[ArrayOptimizer] = []
        self.schedulers: list[ArrayScheduler] = []
        self.scalers: list[LossScaler] = []
        self._compiled: dict[str, Any] | None = None
        self.compiled_ways: dict[Any, Any] = {}
        """Compiled functions of a whole step, by what they are for (fusion/compiled.py); making them takes long."""
        self.recording = False
        """Whether a step is being recorded: lowerings are then compared as recorded ones."""
        self.choices_file: Path | None = None
        """Where what was measured for this array is kept besides the machine's cache; for those who go on with it."""
        self.jobs: list[Job] = []
        """What the members were made of, where the array was made from jobs."""

    @classmethod
    def from_job(
        cls,
        source: Any,
        settings: "Sequence[Mapping[str, Any] | Job]",
        *,
        batch: int | None = None,
        mode: Execution = "rules",
    ) -> "FusedArray":
        """An array of one job with several hyper-parameters: `from_job("job.py", [{"lr": 0.1}, {"lr": 0.01}])`.

        Each member is built under its job's own seed, so its initial weights are those it would have alone. The jobs'
        optimizers and schedules are `array.optimizers[0]` and `array.schedulers`, each member with its own numbers.
        """
        from burstpool.fusion.jobs import attach
        from burstpool.job import Job, load_jobs

        if isinstance(settings, Mapping | str) or not isinstance(settings, Iterable):
            raise FusionError("settings are a list with one dict of hyper-parameters for each member")
        given = list(settings)
        if not given:
            raise FusionError("no settings: pass one dict of hyper-parameters for each member")
        made = all(isinstance(each, Job) for each in given)
        loaded = iter(() if made else load_jobs(source, [each for each in given if not isinstance(each, Job)]))
        jobs = [each if isinstance(each, Job) else next(loaded) for each in given]
        example = jobs[0].samples(batch or jobs[0].batch)[0]
        array = cls([job.build_model() for job in jobs], example, seeds=[job.seed for job in jobs], mode=mode)
        attach(array, jobs)
        return array

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FusionError("an array is neither copied nor pickled; save array.state_dict(), and load it into an array")

    def __len__(self) -> int:
        return len(self.state.skeletons)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Stacked, [M, …]."""
        return iter(self.state.parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Stacked, under the first of the user's keys."""
        return iter(self.state.parameters.items())

    def train(self, training: bool = True) -> "FusedArray":
        """Training mode, as the models were given; or eval mode. The other mode is captured when first used."""
        self.training = training
        return self

    def eval(self) -> "FusedArray":
        """Eval mode."""
        return self.train(False)

    def __call__(self, inputs: Any, *, per_member: bool = False) -> Any:
        """The models' outputs, tensors [M, N, …], for one batch that all share.

        With `per_member` each has its own: tensors [M, N, …], or a list of M inputs.
        """
        mode, batched, named = self.placed(inputs, per_member=per_member)
        # A compiled function allocates for itself.
        run = Run(members=len(self), streams=self.streams, memory=None if self._compiled else self._memory)
        values = mode.values(self.state.tensors, self.state.aliases, named)
        plan = self._plan(mode, batched, named, values)
        if plan is None or plan.choice in ONE_BY_ONE:
            concurrent = plan is not None and plan.choice == ONE_BY_ONE[1]
            leaves = run_serially(mode, run, values, batched, concurrent=concurrent)
        else:
            plan.compiled = self._compiled
            results = plan(run, [values[node.name] for node in plan.placeholders])
            leaves = mode.outputs(plan, results, run)
        self._restore_frozen()
        return pytree.tree_unflatten(leaves, mode.capture.out_spec)

    def placed(self, inputs: Any, *, per_member: bool = False) -> tuple[Mode, frozenset[str], dict[str, Any]]:
        """The captured graph, those of its inputs that are each member's own, and what they stand for, by name."""
        mode = self.mode
        named = named_inputs(mode.capture, self._example_leaves, inputs, own=len(self) if per_member else None)
        batched = frozenset(name for name in named if named[name] is not None) if per_member else frozenset()
        return mode, batched, named

    def losses(self, inputs: Any, function: Callable[..., Tensor], *targets: Any, per_member: bool = False) -> Tensor:
        """[M]: `function(output)` of each member's output, or `function(output, *targets)`.

        Targets are shared as the inputs are, or with `per_member` each member's own: tensors [M, N, …] or lists.
        Train with `losses.sum()`: it gives each member its own gradient, unscaled. A member whose loss is not finite
        stops: the optimizer leaves it as it is from then on.
        """
        if not callable(function):
            raise FusionError(f"the loss is a {type(function).__name__}; pass a function of one member's output")
        output = self(inputs, per_member=per_member)
        own = [stacked_inputs(target, len(self)) for target in targets] if per_member else ()
        shared = () if per_member else targets
        return self.watched(member_losses(function, output, own, shared, self.streams))

    def watched(self, losses: Tensor) -> Tensor:
        """The losses; a member whose loss is not finite stops."""
        if self.training and not self.scalers and torch.is_grad_enabled():
            self._stop_not_finite(losses.detach())
        return losses

    def _stop_not_finite(self, losses: Tensor) -> None:
        if kernels.usable(losses):
            from burstpool.fusion.kernels.finite import stop_not_finite

            stop_not_finite(self.active, losses)
        else:
            self.active.logical_and_(torch.isfinite(losses))

    def optimizer(self, cls: Callable[..., torch.optim.Optimizer], **options: Any) -> ArrayOptimizer:
        """torch's optimizer for all members; every number may be a list with one value a member.

        `groups=[{"keys": [...], "weight_decay": 0.0}, …]` gives the named parameters options of their own.
        """
        if not callable(cls):
            kind = type(cls).__name__
            raise FusionError(f"an optimizer's class is needed, such as torch.optim.Adam; this is an object of {kind}")
        made = make_optimizer(cls, self.state.parameters, options, active=self.active)
        made.keeps_state = bool(self._frozen)
        self.optimizers.append(made)
        return made

    def scheduler(
        self, cls: Callable[..., Any], *, optimizer: ArrayOptimizer | None = None, **options: Any
    ) -> ArrayScheduler:
        """torch's learning-rate schedule for each member; a list gives one value a member.

        An argument that is itself a list for every member, as `milestones`, is given as a list of lists.
        """
        if optimizer is None and not self.optimizers:
            raise FusionError("a schedule needs an optimizer; call array.optimizer(…) first")
        if not callable(cls):
            kind = type(cls).__name__
            raise FusionError(f"a schedule's class is needed, as torch.optim.lr_scheduler.StepLR; this is a {kind}")
        made = ArrayScheduler(cls, self.own(optimizer or self.optimizers[-1]), options)
        for index in self._frozen:
            made.rest(index)
        self.schedulers.append(made)
        return made

    def loss_scaler(self, **options: Any) -> LossScaler:
        """Loss scaling for fp16, each member with its own scale: an overflow skips its step alone."""
        made = LossScaler(self.state.parameters, self.active, options)
        self.scalers.append(made)
        return made

    def own(self, made: Any) -> Any:
        """An optimizer or loss scaler of this array, or a refusal of what is not."""
        if not any(made is mine for mine in (*self.optimizers, *self.scalers)):
            raise FusionError(f"the {type(made).__name__} is not this array's; make it by the array that it is for")
        return made

    def clip_grad_norm_(self, max_norm: float | Sequence[float | None]) -> Tensor:
        """Clips each member's gradients to its own norm; None leaves a member's alone. Returns the norms [M]."""
        return clip_grad_norm(list(self.parameters()), max_norm, len(self))

    def clip_grad_value_(self, clip_value: float | Sequence[float | None]) -> None:
        """Clips each number of a member's gradients to its own limit, by magnitude; None leaves a member's alone."""
        clip_grad_value(list(self.parameters()), clip_value, len(self))

    def member(self, index: int) -> Member:
        """One member, counted from 0 among those present."""
        return Member(self, self._index(index))

    def load_member(self, index: int, state: Mapping[str, Tensor]) -> None:
        """Overwrites one member's parameters and buffers with a state dict of the user's module.

        A stopped member stays so; `start` trains it on.
        """
        index = self._index(index)
        self.state.load(index, state)
        if index in self._frozen:
            self._freeze(index)

    def resume_member(self, index: int, saved: Mapping[str, Any]) -> None:
        """Goes on with a member where `member(i).checkpoint()` of this or another array left it.

        Whether it trains is what it was then.
        """
        checkpoint.load_member_state(self, self._index(index), saved)

    def stop(self, index: int) -> None:
        """Ends one member's training where it is; it stays in the array until it is dropped."""
        index = self._index(index)
        self.active[index] = False
        for optimizer in self.optimizers:
            optimizer.keeps_state = True
        self._freeze(index)

    def start(self, index: int) -> None:
        """Trains a stopped member on, from where it is: its weights, buffers and optimizer state."""
        index = self._index(index)
        self.active[index] = True
        self._thaw(index)

    def stopped(self) -> list[int]:
        """Members that train no more: stopped, or their loss was not finite. Waits for the device."""
        return [index for index, active in enumerate(self.active.tolist()) if not active]

    def drop(self, index: int | Sequence[int]) -> None:
        """Removes members and closes the gap; the others keep their state, optimizer and random streams included."""
        gone = self._indices(index)
        kept = [i for i in range(len(self)) if i not in gone]
        if not kept:
            raise FusionError("the array would be empty; an array has at least one member")
        self._forget_sizes()
        self._frozen = {kept.index(i): saved for i, saved in self._frozen.items() if i in kept}
        self.jobs = [self.jobs[i] for i in kept] if self.jobs else []
        self.state.keep(kept)
        for mode in self._modes.values():
            mode.keep(kept)
        self.streams.keep(kept)
        self.active = self.active[torch.tensor(kept, device=self.device)].clone()
        for optimizer in self.optimizers:
            optimizer.keep(kept, self.active)
        for schedule in self.schedulers:
            schedule.keep(kept)
        for scaler in self.scalers:
            scaler.keep(kept, self.active)

    def admit(
        self,
        model: nn.Module,
        *,
        seed: int | None = None,
        scheduler: Mapping[str, Any] | None = None,
        job: "Job | None" = None,
        **options: Any,
    ) -> int:
        """Adds a model of the same shape as the last member, with a fresh optimizer state; returns its index.

        `options` are its optimizer options, `scheduler` its arguments of the schedule; what is left out is what
        the first of the present members was given. `job` is what it was made of, for an array that was made from jobs.
        """
        index = len(self)
        if not isinstance(model, nn.Module):
            raise FusionError(f"member {index} is a {type(model).__name__}; pass an nn.Module")
        if options and not self.optimizers:
            raise FusionError(f"{next(iter(options))!r} is for an optimizer, and the array has none")
        if scheduler and not self.schedulers:
            raise FusionError(f"{next(iter(scheduler))!r} is for a schedule, and the array has none")
        (seed,) = whole_numbers([index if seed is None else seed])
        check_tensors(model, member=index)
        self._forget_sizes()
        empty = skeleton(model)
        check_same_state(self.state.skeletons[0], empty, member=index)
        for optimizer in self.optimizers:
            optimizer.check_options(options)
        try:
            for training, mode in self._modes.items():
                mode.admit(empty, lambda training=training: _in_mode(model, training))  # type: ignore[misc]
        except Exception:
            for mode in self._modes.values():
                mode.keep(range(index))  # those that had taken it up
            raise
        jobs, active = self.jobs, self.active
        try:
            self._admit_state(model, seed, options, dict(scheduler or {}))
        except Exception:
            self.active = active.clone()
            self._cut(index)
            raise
        self.jobs = [*jobs, job] if jobs and job is not None else []
        return index

    def _admit_state(self, model: nn.Module, seed: int, options: Mapping[str, Any], schedule: dict[str, Any]) -> None:
        self.state.admit(model)
        self.streams.admit(seed)
        self.active = torch.cat([self.active, torch.ones_like(self.active[:1])])
        for optimizer in self.optimizers:
            optimizer.admit(options, self.active)
        for scaler in self.scalers:
            scaler.admit(self.active)
        for made in self.schedulers:
            made.admit(schedule)

    def _forget_sizes(self) -> None:
        """What was made for as many members as there were."""
        self.compiled_ways = {}
        if self._memory is not None:
            self._memory.forget()

    def _cut(self, members: int) -> None:
        """Only the first ones, where one more was admitted in part."""
        kept = list(range(members))
        self.state.cut(members)
        for mode in self._modes.values():
            mode.keep(kept)
        self.streams.keep(kept)
        for optimizer in self.optimizers:
            optimizer.keep(kept, self.active)
        for schedule in self.schedulers:
            schedule.keep(kept)
        for scaler in self.scalers:
            scaler.keep(kept, self.active)

    def split(self, indices: Sequence[int]) -> "FusedArray":
        """Moves members to an array of their own, with their optimizer state, schedules and random streams."""
        chosen = self._indices(indices)
        if len(set(chosen)) < len(chosen):
            raise FusionError(f"members {chosen} are to split off; name each once")
        if not 0 < len(chosen) < len(self):
            raise FusionError(f"{len(chosen)} of {len(self)} members to split off; both arrays need at least one")
        other = self._taken(chosen)
        self.drop(chosen)
        return other

    def _taken(self, chosen: Sequence[int]) -> "FusedArray":
        """An array of these members, whose random streams are still this one's, too."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.compiled_ways, other._memory = {}, copy.copy(self._memory)
        other.active = self.active[torch.tensor(chosen, device=self.device)].clone()
        other.state = self.state.taken(chosen)
        other._modes = {training: mode.taken(chosen) for training, mode in self._modes.items()}
        other.streams = self.streams.taken(chosen)
        other._frozen = {chosen.index(i): saved for i, saved in self._frozen.items() if i in chosen}
        other.jobs = [self.jobs[i] for i in chosen] if self.jobs else []
        parameters = other.state.parameters
        other.optimizers = [optimizer.taken(chosen, parameters, other.active) for optimizer in self.optimizers]
        made = dict(zip(map(id, self.optimizers), other.optimizers, strict=True))
        other.schedulers = [s.taken(chosen, made[id(s.optimizer)]) for s in self.schedulers]
        other.scalers = [scaler.taken(chosen, parameters, other.active) for scaler in self.scalers]
        return other

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume: members, optimizers, schedules, loss scales, random streams."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes: the array must have as many members, optimizers and schedules as the one that was saved."""
        checkpoint.load_state_dict(self, state)

    def compile(self, **options: Any) -> None:
        """Hands the array's function to torch.compile when it next runs, with torch.compile's options.

        Each shape of the inputs is compiled on its own. Where members draw random numbers the graph breaks.
        """
        # Changing shapes have crashed the compiler on fused convolutions.
        self._compiled = compiler_options(self.device, options)
        for mode in self._modes.values():
            for plan in mode.plans():
                plan.recompile()

    def explain(self) -> Explanation:
        """How each operator runs, and why; prints as a table."""
        mode = self.mode
        return explain(mode.plans() or [mode.plan(frozenset())])

    def verify(self, *, tolerance: float = 1e-9) -> None:
        """Compares one step in double precision with the members alone; FusionError names the operator."""
        from burstpool.fusion.verify import verify

        verify(self, self._example, tolerance=tolerance, dropout=self.device.type == "cpu")

    @property
    def mode(self) -> Mode:
        """The captured graph of the mode the array is in."""
        if self.training not in self._modes:
            self._modes[self.training] = Mode(self.state.skeletons, self._module_in_mode, self._example)
        return self._modes[self.training]

    def _module_in_mode(self, index: int) -> nn.Module:
        return _in_mode(self.state.module(index), self.training)

    def _plan(
        self, mode: Mode, batched: frozenset[str], named: Mapping[str, Any], values: Mapping[str, Any]
    ) -> Plan | None:
        """The plan to run, None for one member after another."""
        if self._mode_name == "serial":
            return None
        if self._mode_name == "rules":
            return mode.plan(batched)
        return choose_lowerings(self, mode, batched, named, values, serial=self._mode_name == "fastest")

    def _freeze(self, index: int, buffers: dict[str, Tensor] | None = None) -> None:
        """A stopped member's buffers stay what they are now, its random stream and schedules where they are."""
        now = {key: buffer[index].clone() for key, buffer in self.state.buffers.items()} if buffers is None else buffers
        self._frozen[index] = now
        self.streams.rest(index)
        for schedule in self.schedulers:
            schedule.rest(index)

    def _thaw(self, index: int) -> None:
        self._frozen.pop(index, None)
        self.streams.wake(index)
        for schedule in self.schedulers:
            schedule.wake(index)

    def _restore_frozen(self) -> None:
        if self.recording:
            return  # a graph would keep today's members and values; whoever replays it restores them
        for index, saved in self._frozen.items():
            for key, value in saved.items():
                # Past autograd's check of versions: a stopped member's backward pass is of no consequence.
                self.state.buffers[key].data[index].copy_(value)

    def _index(self, index: int) -> int:
        try:
            place = operator.index(index)
        except TypeError:
            raise FusionError(f"a member is named by its number; {index!r} is a {type(index).__name__}") from None
        if not -len(self) <= place < len(self):
            raise FusionError(f"there is no member {index}; the array has members 0 to {len(self) - 1}")
        return place % len(self)

    def _indices(self, indices: Any) -> list[int]:
        several = isinstance(indices, Iterable) and getattr(indices, "ndim", 1) > 0
        return [self._index(i) for i in (indices if several else [indices])]


def _in_mode(model: nn.Module, training: bool) -> nn.Module:
    return model if model.training == training else copy.deepcopy(model).train(training)


__all__ = ["Execution", "FusedArray", "Member", "fuse"]
