"""RunOptions: how a job is trained, apart from what is trained (the job) and where (the plan)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Artifact):
    """Everything `train` can be told besides job, plan and number of steps."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    """What a worker computes on. Workers share GPUs where there are fewer of them, and then talk over gloo."""
    autocast: Literal["bf16", "fp16"] | None = None
    """Number format of matrix products; with fp16 the loss is scaled so that small gradients survive."""
    batch_norm: Literal["exact", "local"] = "exact"
    """Statistics over all devices that hold a block's samples, as one device would take them; or over each device's
    own samples, which is faster and trains another model."""
    dropout: Literal["exact", "local"] = "exact"
    """The mask of the whole minibatch, whatever the plan; or each device's own random numbers, which is faster."""
    clip_norm: float | None = None
    """Scales all gradients down so that the norm over all parameters of the model is at most this."""
    allow_nan: bool = False
    """Whether to go on when the loss is not a finite number."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0 for only one, at the end."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints are kept."""
    timeout_s: float = 300.0
    """How long any worker may wait for another, or stay silent, before the run is ended."""
    timeline_steps: int = 20
    """How many of the last steps the measured timeline covers; 0 for none."""
    device_timeline: bool = False
    """On CUDA: time actions by events on the device rather than by when the host started them."""
    cuda_graphs: bool = True
    """On CUDA: capture what a device computes between two communications, and replay it."""
    fallback: Literal["modules"] | None = None
    """How to split a model that cannot be traced by operators: between whole modules."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 0 or self.keep_checkpoints < 1:
            raise RunError(
                f"checkpoint_every={self.checkpoint_every}, keep_checkpoints={self.keep_checkpoints}: "
                "pass checkpoint_every>=0 and keep_checkpoints>=1"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RunError(f"clip_norm={self.clip_norm} must be more than 0; leave it out not to clip")
        if not self.timeout_s > 0:
            raise RunError(f"timeout_s={self.timeout_s} must be more than 0")
        if self.timeline_steps < 0:
            raise RunError(f"timeline_steps={self.timeline_steps} must be 0 or more")
