"""Eager steps: each action of a device becomes a function once; a step calls them in order and writes down when."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from burstpool.engine.base import Doing, phrase
from burstpool.errors import RunError
from burstpool.model.block import Block
from burstpool.run.agreement import Agreement
from burstpool.run.links import Links, describe
from burstpool.run.passes import Passes
from burstpool.run.recorder import Recorder
from burstpool.run.update import Update
from burstpool.schedule.actions import Action, Kind


class EagerStep:
    """A step, action by action."""

    def __init__(
        self,
        actions: Sequence[Action],
        blocks: Mapping[str, Block],
        *,
        passes: Passes,
        links: Links,
        agreement: Agreement,
        update: Update,
        recorder: Recorder,
    ) -> None:
        self._actions, self._passes, self._links = actions, passes, links
        self._agreement, self._update, self._recorder = agreement, update, recorder
        dropped = _last_uses(actions, blocks, passes.returned)
        self.computing = [self._compute(action, dropped.get(index, ())) for index, action in enumerate(actions)]
        """Action → its forward or backward, None for others."""
        self._stops: list[int] = []
        self._starts: list[int] = []
        self._operations = [self._operation(index, action) for index, action in enumerate(actions)]
        last = agreement.stepped_last
        self._last_step = self._step(last) if last or update.always_judges else None
        self._phrases = [phrase(in_words(action)) for action in actions]

    def run(self, step: int, doing: Doing) -> None:
        """All actions, timed by the host's clock."""
        now, recorder = time.perf_counter_ns, self._recorder
        starts, stops = self._starts, self._stops = recorder.begin_step(step)
        busy = 0
        for index, (operation, is_compute) in enumerate(self._operations):
            doing.say(self._phrases[index])
            starts[index] = begun = now()
            operation()
            if is_compute:
                stops[index] = ended = now()
                busy += ended - begun
            recorder.look(now())
        recorder.busy_ns += busy
        if self._last_step is not None:
            self._last_step()

    def run_timed_on_device(self, step: int, doing: Doing) -> None:
        """All actions, compute timed by CUDA events; waits for the device at the end of the step."""
        torch.cuda.synchronize()
        begun_ns, begin = time.perf_counter_ns(), _event()
        events = []
        starts, stops = self._starts, self._stops = self._recorder.begin_step(step)
        for index, (operation, is_compute) in enumerate(self._operations):
            doing.say(self._phrases[index])
            starts[index] = time.perf_counter_ns()
            before = _event()
            operation()
            if is_compute or index in self._agreement.stepped_at:
                events.append((index, before, _event()))
        if self._last_step is not None:
            self._last_step()
        torch.cuda.synchronize()
        self._recorder.look(time.perf_counter_ns())
        self._recorder.busy_ns = 0  # what the host spent on starting things
        for index, before, after in events:
            first = begun_ns + int(begin.elapsed_time(before) * 1e6)
            spent = int(before.elapsed_time(after) * 1e6)
            self._recorder.busy_ns += spent
            keys = self._agreement.stepped_at.get(index)
            for place, start, stop in self._agreement.parts(keys) if keys else ((index, 0.0, 1.0),):
                starts[place], stops[place] = first + int(spent * start), first + int(spent * stop)

    def _compute(self, action: Action, dropped: Sequence[tuple[str, int]]) -> Callable[[], None] | None:
        if action.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return None
        run = self._passes.forward(action) if action.kind is Kind.FORWARD else self._passes.backward(action)
        if not dropped:
            return run

        def run_and_drop() -> None:
            run()
            for name, minibatch in dropped:
                self._passes.drop(name, minibatch)

        return run_and_drop

    def _operation(self, index: int, action: Action) -> tuple[Callable[[], None], bool]:
        """The function for an action, and whether it is compute."""
        match action.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                return self._computation(index), True
            case Kind.SEND:
                return self._send(index, action), False
            case Kind.RECEIVE:
                return self._receive(index, action), False
            case Kind.REDUCE:
                return self._reduce(index, action), False
            case Kind.STEP:
                keys = self._agreement.stepped_at.get(index)
                return (self._step(keys) if keys else lambda: None), False  # else done together with a later one
        raise RunError(f"cannot execute {in_words(action)}: waves are not executed yet")

    def _computation(self, index: int) -> Callable[[], None]:
        compute, shared = self.computing[index], self._agreement.shared_after.get(index)
        assert compute is not None
        if not shared:
            return compute

        def compute_and_share() -> None:
            compute()
            for bucket in shared:
                bucket.start()

        return compute_and_share

    def _send(self, index: int, action: Action) -> Callable[[], None]:
        name, minibatch, start, stop = action.value, action.minibatch, action.start, action.stop
        find = self._passes.pop_gradient if action.gradient else self._passes.take

        def send() -> None:
            work = self._links.send(action, find(name, minibatch, start, stop))
            self._recorder.watch((work,), self._stops, index)

        return send

    def _receive(self, index: int, action: Action) -> Callable[[], None]:
        name, minibatch, start, stop = action.value, action.minibatch, action.start, action.stop
        keep = self._passes.add_gradient if action.gradient else self._passes.put

        def receive() -> None:
            tensor = self._links.receive(action)
            self._stops[index] = time.perf_counter_ns()
            keep(name, minibatch, start, stop, tensor)

        return receive

    def _reduce(self, index: int, action: Action) -> Callable[[], None]:
        bucket = self._agreement.of_block.get(action.block)

        def reduce() -> None:
            if bucket is not None:
                bucket.start()
                self._recorder.watch(bucket.works, self._stops, index)

        return reduce

    def _step(self, keys: Sequence[str]) -> Callable[[], None]:
        buckets, parts = self._agreement.buckets(keys), self._agreement.parts(keys)

        def step() -> None:
            for bucket in buckets:
                bucket.finish()
            begun = time.perf_counter_ns()
            self._update.apply(keys)
            spent = time.perf_counter_ns() - begun
            self._recorder.busy_ns += spent
            for place, start, stop in parts:
                self._starts[place], self._stops[place] = begun + int(spent * start), begun + int(spent * stop)

        return step


def in_words(action: Action) -> str:
    """`"forward features.0, samples 0:8, minibatch 1"`."""
    if action.kind in (Kind.SEND, Kind.RECEIVE):
        way = "to" if action.kind is Kind.SEND else "from"
        return f"{action.kind} {describe(action)} {way} device {action.peer}"
    if action.kind in (Kind.FORWARD, Kind.BACKWARD):
        return f"{action.kind} {action.block}, samples {action.start}:{action.stop}, minibatch {action.minibatch}"
    if action.kind is Kind.REDUCE:
        return f"reduce {action.block} among devices {', '.join(map(str, action.group))}"
    return f"{action.kind} {action.block}"


def _last_uses(
    actions: Sequence[Action], blocks: Mapping[str, Block], returned: Sequence[str]
) -> dict[int, list[tuple[str, int]]]:
    """Forward or backward → (value, minibatch) that nobody here needs after it."""
    last: dict[tuple[str, int], int] = {}
    final = list(blocks)[-1]
    for index, action in enumerate(actions):
        if action.kind is Kind.FORWARD:
            block = blocks[action.block]
            names = [*block.inputs, *block.outputs, *(returned if action.block == final else ())]
            last.update(((name, action.minibatch), index) for name in names)
        elif action.kind is Kind.SEND and not action.gradient:
            last[action.value, action.minibatch] = index
    computing = [i for i, action in enumerate(actions) if action.kind in (Kind.FORWARD, Kind.BACKWARD)]
    dropped: dict[int, list[tuple[str, int]]] = {}
    for key, index in last.items():
        place = next((i for i in computing if i >= index), None)  # a send is followed by some backward
        if place is not None:
            dropped.setdefault(place, []).append(key)
    return dropped


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
