"""Links: samples of values, and of their gradients, sent between devices.

Sends never wait; receives are posted as early as they can be, and waited for when their samples are needed. Messages
are told apart by tags that every rank derives from the whole schedule, and arrive in the order in which their source
sends them. In the first step a small header goes ahead of every message and says its shape and dtype, which autocast
and the user's operators may have changed; later steps know them.
"""

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from burstpool.cluster.cores import let_gloo_run
from burstpool.errors import RunError
from burstpool.run.waiting import wait_for
from burstpool.schedule.actions import Action, Kind, Schedule

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_HEADER_SIZE = 10
"""Numbers of a header: dtype, number of dimensions, sizes."""

Key = tuple[str, int, bool, int, int]
"""Value, minibatch, whether its gradient, first sample, one past the last."""
Message = tuple[int, int, Key]
"""Source, destination, what."""


class Links:
    """One device's ends of all links. Used by one thread."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        device: int,
        pairs: Mapping[tuple[int, int], dist.ProcessGroup],
        control: dist.ProcessGroup,
        on: torch.device,
        timeout_s: float,
    ) -> None:
        self._device, self._pairs, self._control, self._on = device, pairs, control, on
        self._timeout = timedelta(seconds=timeout_s)
        self._tags = _tags(schedule)
        self._incoming: dict[int, list[Key]] = {}
        """Source → what it sends here, in its order."""
        for source, destination, key in self._tags:
            if destination == device:
                self._incoming.setdefault(source, []).append(key)
        self._shapes: dict[Message, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._posted: dict[Message, tuple[dist.Work, torch.Tensor]] = {}
        self._sent: list[tuple[dist.Work, torch.Tensor, str]] = []
        self._sent_before: list[tuple[dist.Work, torch.Tensor, str]] = []
        self._staged = on.type == "cuda" and any(dist.get_backend(group) == "gloo" for group in pairs.values())
        """Whether messages go by way of the host, because gloo cannot read the device's memory."""

    def begin_step(self) -> None:
        """Posts all receives whose shapes are known."""
        for source, keys in self._incoming.items():
            for key in keys:
                if (source, self._device, key) not in self._shapes:
                    break
                self._post(source, key)

    def send(self, action: Action, tensor: torch.Tensor) -> dist.Work:
        """Starts to send; the tensor must not change until the step has ended."""
        key = key_of(action)
        message = (self._device, action.peer, key)
        tensor = tensor.detach().contiguous()
        if self._staged:
            tensor = tensor.cpu()
        if message not in self._shapes:
            self._shapes[message] = (tensor.dtype, tuple(tensor.shape))
            header = _header(tensor)
            work = dist.isend(header, action.peer, group=self._control, tag=self._tags[message])
            self._sent.append((_made(work), header, "header"))
        let_gloo_run()
        work = _made(dist.isend(tensor, action.peer, group=self._pairs[message[:2]], tag=self._tags[message]))
        self._sent.append((work, tensor, f"device {action.peer} to take {describe(action)}"))
        return work

    def post(self, action: Action) -> dist.Work:
        """Makes sure that the receive, and all that its source sends before, are under way."""
        wanted = (action.peer, self._device, key_of(action))
        if wanted not in self._posted:
            for key in self._incoming[action.peer]:
                if (action.peer, self._device, key) not in self._shapes:
                    self._post(action.peer, key)
                if key == wanted[2]:
                    break
        return self._posted[wanted][0]

    def receive(self, action: Action) -> torch.Tensor:
        """Waits for the samples."""
        self.post(action)
        work, tensor = self._posted.pop((action.peer, self._device, key_of(action)))
        wait_for(work, self._timeout, f"device {action.peer} to send {describe(action)}")
        return tensor.to(self._on) if self._staged else tensor

    def empty(self, action: Action) -> torch.Tensor:
        """A place for what a receive brings; its shape must be known from an earlier step."""
        dtype, shape = self._shapes[action.peer, self._device, key_of(action)]
        return torch.empty(shape, dtype=dtype, device=self._on)

    def end_step(self) -> None:
        """Waits for the sends of the step before, so that no device runs ahead of its messages without end."""
        for work, _, what in self._sent_before:
            wait_for(work, self._timeout, what)
        self._sent_before, self._sent = self._sent, []

    def flush(self) -> None:
        """Waits for all sends."""
        self.end_step()
        self.end_step()

    def _post(self, source: int, key: Key) -> None:
        message = (source, self._device, key)
        if message not in self._shapes:
            self._shapes[message] = self._read_header(message)
        dtype, shape = self._shapes[message]
        buffer = torch.empty(shape, dtype=dtype, device="cpu" if self._staged else self._on)
        work = dist.irecv(buffer, source, group=self._pairs[message[:2]], tag=self._tags[message])
        self._posted[message] = (_made(work), buffer)

    def _read_header(self, message: Message) -> tuple[torch.dtype, tuple[int, ...]]:
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64)
        work = _made(dist.irecv(header, message[0], group=self._control, tag=self._tags[message]))
        wait_for(work, self._timeout, f"device {message[0]} to announce {message[2][0]!r}")
        dtype, dims, *sizes = header.tolist()
        return _DTYPES[dtype], tuple(sizes[:dims])


def key_of(action: Action) -> Key:
    """What a send or receive carries."""
    return (action.value, action.minibatch, action.gradient, action.start, action.stop)


def describe(action: Action) -> str:
    """In words."""
    what = f"the gradient of {action.value!r}" if action.gradient else f"{action.value!r}"
    return f"samples {action.start}:{action.stop} of {what}, minibatch {action.minibatch}"


def _tags(schedule: Schedule) -> dict[Message, int]:
    """Every message of a step, numbered in the order of sources and of their actions."""
    found: dict[Message, int] = {}
    for source, actions in enumerate(schedule.devices):
        for action in actions:
            if action.kind is Kind.SEND:
                message = (source, action.peer, key_of(action))
                if message in found:
                    raise RunError(f"device {source} sends {describe(action)} to device {action.peer} twice in a step")
                found[message] = len(found)
    return found


def _header(tensor: torch.Tensor) -> torch.Tensor:
    sizes = list(tensor.shape)
    if tensor.dtype not in _DTYPES or len(sizes) > _HEADER_SIZE - 2:
        raise RunError(f"a value of dtype {tensor.dtype} and {len(sizes)} dimensions cannot travel between devices")
    numbers = [_DTYPES.index(tensor.dtype), len(sizes), *sizes]
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))


def _made(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None only for a rank outside the group
    return work
