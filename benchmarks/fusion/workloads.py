"""The benchmark's workloads: zoo jobs with settings, how many members to try, and the data, on a device."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.job import Job, load_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job of the zoo and what to try with it."""

    zoo: str
    settings: dict[str, Any] = field(default_factory=dict)
    members: tuple[int, ...] = (8, 32)
    """Sizes of an array that are tried on CUDA, ours; others are tried with the smaller ones."""
    small: int = 8
    """Members for the ways that hold B separate models."""
    compiled: bool = True
    """Whether ours tries torch.compile; it takes minutes over some."""


WORKLOADS: dict[str, Workload] = {
    "pointnet_cls": Workload(zoo="pointnet_classification", members=(8,), small=4),
    "pointnet_seg": Workload(zoo="pointnet_segmentation", members=(8,), small=4),
    "dcgan_d": Workload(zoo="dcgan_discriminator", members=(32,)),
    "dcgan_g": Workload(zoo="dcgan_generator", members=(32,)),
    "resnet18": Workload(zoo="resnet18", settings={"image_size": 32, "num_classes": 10, "batch": 128}, members=(32,)),
    "mobilenet_v3_large": Workload(
        zoo="mobilenet_v3_large",
        settings={"image_size": 32, "num_classes": 10, "batch": 128},
        members=(32,),
        compiled=False,
    ),
    "transformer": Workload(zoo="transformer", members=(16,)),
    "bert_medium": Workload(zoo="bert_medium", members=(8,), small=4),
    "tiny_mlp": Workload(zoo="tiny_mlp", members=(1024,)),
    "tiny_gpt": Workload(
        zoo="gpt_small",
        settings={"width": 128, "layers": 4, "heads": 4, "vocabulary": 256, "tokens": 64, "batch": 32},
        members=(64,),
    ),
}
"""HFTA's seven (DCGAN as its two networks), a small MLP, a tiny GPT."""

CPU_WORKLOADS: dict[str, Workload] = {
    "tiny_mlp": Workload(zoo="tiny_mlp", settings={"batch": 8}),
    "tiny_lstm": Workload(zoo="tiny_lstm", settings={"batch": 8}),
    "tiny_resnet": Workload(zoo="tiny_resnet", settings={"batch": 8, "width": 8}),
    "mlp784": Workload(zoo=""),
}


@dataclass(slots=True)
class Task:
    """A workload's jobs, models and one batch, on a device."""

    name: str
    job: Job
    inputs: Any
    target: Any
    device: torch.device
    dtype: torch.dtype | None
    """Of autocast; None for float32."""
    compiled: bool = True
    """Whether ours tries torch.compile."""

    @property
    def batch(self) -> int:
        """Samples a model and step."""
        return self.job.batch

    def models(self, count: int) -> list[nn.Module]:
        """Models of the same weights: what they are does not change the speed, building them one by one takes long."""
        first = self.job.build_model().to(self.device)
        return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def task(name: str, device: torch.device, dtype: torch.dtype | None) -> Task:
    """The workload, ready to be measured."""
    workload = (CPU_WORKLOADS if device.type == "cpu" else WORKLOADS)[name]
    job = wide_mlp() if name == "mlp784" else load_job(f"zoo:{workload.zoo}", dict(workload.settings))
    inputs, target = job.samples(job.batch)
    return Task(name, job, moved(inputs, device), moved(target, device), device, dtype, workload.compiled)


def moved(value: Any, device: torch.device) -> Any:
    """Tensors in any structure, on the device."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def wide_mlp() -> Job:
    """784-128-128-10, the MLP of the CPU bar."""
    layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    data = [(torch.randn(784), i % 10) for i in range(64)]
    return Job(
        model=lambda: copy.deepcopy(nn.Sequential(*layers)),
        loss=nn.functional.cross_entropy,
        data=data,  # type: ignore[arg-type]
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        batch=8,
        name="mlp784",
    )
