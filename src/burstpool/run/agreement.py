"""Agreement: which gradients are added up, and which parameters stepped, with which action of one device.

Steps that follow one another become one call of the optimizer, as do all steps where gradients are judged as a whole.
Parameters that blocks on different devices share have a bucket of their own, which starts after the device's last
backward that adds to them.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from burstpool.run.groups import Groups, Members
from burstpool.run.holdings import Holdings
from burstpool.run.reduction import Bucket
from burstpool.schedule.actions import Action, Kind


class Agreement:
    """Fixed for a run."""

    def __init__(
        self,
        actions: Sequence[Action],
        holdings: Holdings,
        groups: Groups,
        *,
        device: int,
        parameters: Mapping[str, nn.Parameter],
        all_at_once: bool,
        timeout_s: float,
    ) -> None:
        self._actions, self._holdings, self._parameters = actions, holdings, parameters
        self._device, self._timeout_s = device, timeout_s
        self._bucket: dict[str, Bucket] = {}
        self.of_block = self._block_buckets(groups)
        """Block → what its `reduce` starts."""
        self.shared_after = self._shared_buckets(groups)
        """Action → what starts when it, a backward, has ended."""
        self._step_of = {key: self._last_step(key) for key in holdings.blocks if key in parameters}
        self.stepped_at: dict[int, list[str]] = {}
        """Action → keys of the parameters that it steps."""
        self.stepped_last: list[str] = []
        """Keys that are stepped when all actions are done: those without a `step`, or all."""
        for key, place in self._step_of.items():
            if place is None or all_at_once:
                self.stepped_last.append(key)
            else:
                self.stepped_at.setdefault(self._end_of_run(place), []).append(key)

    def buckets(self, keys: Sequence[str]) -> list[Bucket]:
        """Those that hold gradients of these parameters, in the order in which they start."""
        return list({id(self._bucket[key]): self._bucket[key] for key in keys if key in self._bucket}.values())

    def parts(self, keys: Sequence[str]) -> list[tuple[int, float, float]]:
        """For each `step` action among these parameters: from and to which part of their common step it counts."""
        sizes: dict[int, int] = {}
        for key in keys:
            if (place := self._step_of[key]) is not None:
                sizes[place] = sizes.get(place, 0) + self._parameters[key].numel()
        total, reached, found = max(sum(sizes.values()), 1), 0, []
        for place in sorted(sizes):
            found.append((place, reached / total, (reached + sizes[place]) / total))
            reached += sizes[place]
        return found

    def _block_buckets(self, groups: Groups) -> dict[str, Bucket]:
        apart = {key for keys in self._holdings.shared.values() for key in keys}
        found: dict[str, Bucket] = {}
        for action in self._actions:
            if action.kind is not Kind.REDUCE:
                continue
            own = [k for k in self._parameters if self._holdings.block.get(k) == action.block and k not in apart]
            members = tuple(sorted(action.group))
            if own and len(members) > 1:
                found[action.block] = self._make(own, members, groups.reduce, f"the gradients of {action.block!r}")
        return found

    def _shared_buckets(self, groups: Groups) -> dict[int, list[Bucket]]:
        found: dict[int, list[Bucket]] = {}
        for members, keys in self._holdings.shared.items():
            if self._device in members:
                users = {name for key in keys for name in self._holdings.blocks[key]}
                place = max(i for i, x in enumerate(self._actions) if x.kind is Kind.BACKWARD and x.block in users)
                bucket = self._make(keys, members, groups.shared, "the gradients of shared parameters")
                found.setdefault(place, []).append(bucket)
        return found

    def _make(
        self, keys: Sequence[str], members: Members, groups: Mapping[Members, dist.ProcessGroup], what: str
    ) -> Bucket:
        bucket = Bucket(
            [self._parameters[key] for key in keys],
            groups[members],
            timeout_s=self._timeout_s,
            what=f"{what} from devices {', '.join(map(str, members))}",
        )
        self._bucket.update(dict.fromkeys(keys, bucket))
        return bucket

    def _last_step(self, key: str) -> int | None:
        users = self._holdings.blocks[key]
        return max((i for i, x in enumerate(self._actions) if x.kind is Kind.STEP and x.block in users), default=None)

    def _end_of_run(self, place: int) -> int:
        while place + 1 < len(self._actions) and self._actions[place + 1].kind is Kind.STEP:
            place += 1
        return place
