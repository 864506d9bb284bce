"""Every error Burstpool raises on purpose.

    BurstpoolError            anything below; `str(error)` is one line that says what is wrong and what to do
    ├─ ArtifactError          a file of ours that cannot be read: truncated, wrong field, newer schema
    │  ├─ ClusterError        a cluster description that makes no sense
    │  ├─ PlanError           a plan that cannot be made, or does not fit model or cluster
    │  ├─ ProfileError        a profile that lacks what is asked of it: layer, time, batch, device
    │  └─ ScheduleError       a schedule that is unsound; says which action of which device
    ├─ FusionError            models, hyper-parameters or calls that cannot be fused; names the member
    ├─ JobError               a job file, a zoo name or a hyper-parameter that cannot be used
    ├─ RunError               a training run that failed; names the rank, the action and the user's line
    │  └─ CaptureError        a step that CUDA graphs cannot hold; says what of it
    ├─ ShareError             a slowdown budget or a background job that cannot be used
    └─ TraceError             a model that cannot be split into layers; names the user's line

The command line prints the line and ends with exit status 2. Anything else that is raised is a defect
of Burstpool or of the user's own model code, and keeps its traceback.
"""

_MOST_CHARACTERS = 300
"""Of what others raise; a library may print whole tensors."""


class BurstpoolError(Exception):
    """Base of all errors that are the input's fault rather than Burstpool's."""


class ArtifactError(BurstpoolError):
    """A file that is not a sound artifact."""


class ClusterError(ArtifactError):
    """A cluster description that cannot be used."""


class PlanError(ArtifactError):
    """A plan that cannot be made or used."""


class ProfileError(ArtifactError):
    """A profile that lacks what is asked of it."""


class ScheduleError(ArtifactError):
    """A schedule that is unsound."""


class FusionError(BurstpoolError):
    """Models, hyper-parameters or calls that cannot be fused."""


class JobError(BurstpoolError):
    """A job that cannot be loaded with the given hyper-parameters."""


class RunError(BurstpoolError):
    """A training run that failed."""


class CaptureError(RunError):
    """A step that CUDA graphs cannot hold."""


class ShareError(BurstpoolError):
    """Sharing that cannot be done as asked."""


class TraceError(BurstpoolError):
    """A model that cannot be split into layers."""


def in_a_line(error: BaseException) -> str:
    """An exception in words: ours whole, as they end in what to do; of others the kind and the first 300 characters."""
    if isinstance(error, BurstpoolError):
        return " ".join(str(error).split())
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_CHARACTERS]
