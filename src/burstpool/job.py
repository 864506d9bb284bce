"""Jobs: what a user submits, and how one is loaded from a Python file or the zoo.

A job file holds a function that returns a `Job`; the function's arguments are the hyper-parameters, and its
annotations say which values `--set` may give them. Takes `"job.py"`, `"job.py:function"` or `"zoo:NAME"`.
"""

import contextlib
import dataclasses
import enum
import hashlib
import importlib.util
import inspect
import math
import os
import random
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burstpool.errors import JobError
from burstpool.limits import available_bytes, in_gib, is_out_of_memory
from burstpool.random_state import gpus_in_use, random_state_kept, seed_all
from burstpool.setting_lists import written_list
from burstpool.setting_values import convert

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset


_JUST_TRIED = 4096
"""Samples that are loaded without a look at memory: looking takes a sample, and may draw random numbers."""
_TENSOR_BYTES = 512
"""Of Python's and torch's own for each sample, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model, its loss, its data and its optimizer, with nothing said of devices."""

    model: "Callable[[], torch.nn.Module]"
    """Builds the model, unmodified user code; called under the job's seed."""
    loss: "Callable[[Any, Any], torch.Tensor]"
    """`loss(output, target)`, the mean over the samples it is given."""
    data: "Dataset[Any]"
    """Samples `(input, target)`. An input that is a tuple becomes the model's positional arguments, a dict its
    keyword arguments, anything else its only argument."""
    optimizer: "Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]"
    """Builds the optimizer over the parameters it is given."""
    scheduler: "Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None" = None
    """Builds the learning-rate schedule, stepped once a step."""
    batch: int = 32
    """Samples a step over all devices together, unless the command line says otherwise."""
    evaluation: "Dataset[Any] | None" = None
    """Held-out samples `(input, target)`: a sweep ranks its trials by their mean loss over these."""
    seed: int = 0
    """Seeds the model's initial weights, the order of the data and the steps' random numbers."""
    name: str = ""
    """How reports call the job; filled in when it is loaded."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The hyper-parameters it was made with; filled in when it is loaded."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise JobError(f"batch={self.batch} of job {self.name!r} must be at least 1")
        if not 0 <= self.seed < 2**64:
            raise JobError(f"seed={self.seed} of job {self.name!r} must be from 0 to 2**64 - 1")
        for field in ("model", "loss", "optimizer"):
            if not callable(getattr(self, field)):
                raise JobError(
                    f"Job.{field} must be callable, e.g. {field}=lambda …: …; got {type(getattr(self, field)).__name__}"
                )

    def build_model(self) -> "torch.nn.Module":
        """The model with the weights its seed gives; leaves the global random state as it was."""
        import torch

        in_use = gpus_in_use()
        try:
            model = self._seeded_model()
            if gpus_in_use() and not in_use:  # it builds on a GPU, which had no seed before
                del model  # two of them may be more than the GPU holds
                model = self._seeded_model()
        except JobError:
            raise
        except Exception as error:
            raise JobError(f"the model of job {self.name!r} cannot be built: {in_words(error)}") from error
        if not isinstance(model, torch.nn.Module):
            raise JobError(f"Job.model of {self.name!r} returned a {type(model).__name__}; it must return a module")
        return model

    def _seeded_model(self) -> Any:
        with random_state_kept():
            seed_all(self.seed)
            return self.model()

    def samples(self, batch: int) -> tuple[Any, Any]:
        """The first `batch` samples, collated to `(input, target)`; wraps around short data."""
        from torch.utils.data import default_collate

        try:
            length = len(self.data)  # type: ignore[arg-type]
        except TypeError:
            raise JobError(f"the data of job {self.name!r} has no length; pass a map-style Dataset") from None
        if length == 0:
            raise JobError(f"the data of job {self.name!r} is empty")
        try:
            self._check_memory(batch)
            inputs, targets = default_collate([self.data[i % length] for i in range(batch)])
        except JobError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise JobError(_no_memory(batch, self.name, available_bytes())) from error
            raise JobError(
                f"the samples of job {self.name!r} cannot be batched: {in_words(error)}; "
                "each must be (input, target), all of one shape"
            ) from error
        return inputs, targets

    def _check_memory(self, batch: int) -> None:
        """Refuses a batch whose samples alone do not fit: the system would kill the process without a word."""
        if batch <= _JUST_TRIED:
            return
        from torch import Tensor
        from torch.utils import _pytree as pytree

        tensors = [leaf for leaf in pytree.tree_leaves(self.data[0]) if isinstance(leaf, Tensor)]
        # Once apart and once as a batch; a number that is no tensor becomes one of eight bytes.
        needed_bytes = batch * (_TENSOR_BYTES + 2 * max(8, sum(tensor.nbytes for tensor in tensors)))
        if needed_bytes > available_bytes():
            raise JobError(_no_memory(batch, self.name, needed_bytes))

    def example(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's positional and keyword arguments for `batch` samples."""
        return model_arguments(self.samples(batch)[0])


def _no_memory(batch: int, name: str, needed_bytes: int) -> str:
    return (
        f"memory runs out at batch {batch} of job {name!r}: its samples alone need {in_gib(needed_bytes)} or more, "
        f"{in_gib(available_bytes())} are free here; try smaller batches"
    )


def model_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a collated input is passed to the model: tuple → positional, dict → keywords, else one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def load_job(source: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> Job:
    """Loads `"job.py"`, `"job.py:function"` or `"zoo:NAME"` with the given hyper-parameters.

    Values may be strings, as `--set` gives them, or already of the annotated type.
    """
    return load_jobs(source, [settings or {}])[0]


def load_jobs(source: str | os.PathLike[str], several: Sequence[Mapping[str, Any]]) -> list[Job]:
    """A job with each of several hyper-parameters; of one import, so that what is alike in them is known for it."""
    name, function = job_function(source)
    return [make_job(function, settings, source=str(source), name=name) for settings in several]


def job_function(source: str | os.PathLike[str]) -> tuple[str, Callable[..., Any]]:
    """How a job is called, and the function that makes it; the file is imported once for many jobs of it."""
    source = str(source)
    return _zoo_function(source) if source.startswith("zoo:") else _file_function(source)


def make_job(function: Callable[..., Any], settings: Mapping[str, Any], *, source: str, name: str) -> Job:
    """The function's job with the given hyper-parameters; `source` names it in errors.

    Random numbers that the function draws, to split its data for example, are the same at every call and in every
    process; the global random state is left as it was.
    """
    accepted = check_settings(function, settings, source=source)
    try:
        with _drawing_alike():
            job = function(**accepted)
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"{source} failed: {in_words(error)}") from error
    if not isinstance(job, Job):
        raise JobError(f"{source} returned a {type(job).__name__}; it must return a burstpool.Job")
    return dataclasses.replace(job, name=job.name or name, settings=settings_of(function, accepted))


@contextlib.contextmanager
def _drawing_alike() -> Iterator[None]:
    """What is drawn inside on the CPU is the same every time; what is drawn after goes on as before."""
    import numpy as np
    import torch

    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs as well
            np.random.seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def from_anywhere(source: str | os.PathLike[str]) -> str:
    """The same job from any folder: a file by its whole path, `zoo:NAME` as it is."""
    text = str(source)
    if text.startswith("zoo:"):
        return text
    path, wanted = _file_and_function(text)
    return str(path.resolve()) + (f":{wanted}" if wanted else "")


def fingerprint(source: str | os.PathLike[str]) -> str:
    """Of the job's file, to tell whether it was changed; "" where there is none, as of the zoo."""
    path, _ = _file_and_function(str(source))
    return "" if str(source).startswith("zoo:") or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()


def is_job(source: str) -> bool:
    """Whether `load_job` is meant, rather than a file of ours."""
    return source.startswith("zoo:") or source.endswith(".py") or ".py:" in source


def check_settings(function: Callable[..., Any], settings: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The settings converted to the types the function's annotations ask for."""
    parameters = _named(inspect.signature(function))
    try:
        annotations = inspect.get_annotations(function, eval_str=True)
    except Exception as error:
        raise JobError(f"the annotations of {source} cannot be read: {error}") from None
    accepted = {}
    for key, value in settings.items():
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise JobError(f"{source} has no hyper-parameter {key!r}; it has: {known}")
        default = parameters[key].default
        inferred = str if default is inspect.Parameter.empty else str | None if default is None else type(default)
        accepted[key] = convert(value, annotations.get(key, inferred), where=f"{key}={value} for {source}")
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and key not in accepted:
            raise JobError(f"{source} needs hyper-parameter {key!r}; pass --set {key}=…")
    return accepted


def settings_of(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """All hyper-parameters of a call, defaults included."""
    signature = inspect.signature(function)
    bound = signature.bind(**given)
    bound.apply_defaults()
    return {name: bound.arguments[name] for name in _named(signature)}


def _named(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """All but `*args` and `**kwargs`."""
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: each for name, each in signature.parameters.items() if each.kind not in collecting}


def as_recorded(value: Any) -> str | int | float | bool | None:
    """A hyper-parameter as a run's record holds it: as `--set` takes it, where that is possible."""
    if isinstance(value, enum.Enum):
        return as_recorded(value.value)
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no word for it
        return str(value)
    if isinstance(value, list | tuple):
        return written_list(_entries_as_recorded(value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _entries_as_recorded(value: list[Any] | tuple[Any, ...]) -> list[Any]:
    return [_entries_as_recorded(e) if isinstance(e, list | tuple) else as_recorded(e) for e in value]


def from_record(source: str, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What to give a job so that it is made as recorded: all that its function would not take by itself."""
    _, function = job_function(source)
    parameters = inspect.signature(function).parameters
    defaults: dict[str, tuple[Any, ...]] = {name: (as_recorded(each.default),) for name, each in parameters.items()}
    for name, each in parameters.items():
        if isinstance(each.default, list | tuple):
            defaults[name] += (str(each.default),)  # how lists were recorded once
    return {name: value for name, value in recorded.items() if value not in defaults.get(name, ())}


def parse_settings(pairs: Iterable[str], *, given_by: str = "--set") -> dict[str, str]:
    """`["lr=0.1", "width=64"]` as a dict; `given_by` begins what is said of a mistake."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise JobError(f"{given_by} {pair} is not of the form name=value")
        if key in settings:
            raise JobError(f"{given_by} {key} is given twice")
        settings[key] = value
    return settings


def _zoo_function(source: str) -> tuple[str, Callable[..., Any]]:
    from burstpool.model import zoo

    name = source.removeprefix("zoo:")
    return name, zoo.job_function(name)


def _file_function(source: str) -> tuple[str, Callable[..., Any]]:
    path, wanted = _file_and_function(source)
    if path.suffix != ".py":
        raise JobError(f"{source} is neither a Python file (job.py) nor a zoo name (zoo:vgg16)")
    if not path.is_file():
        raise JobError(f"there is no job file {path}")
    module = _import_file(path)
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    name = wanted or "job"
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise JobError(f"{path} has no function {name!r}; its functions: {known}. Name one as {path}:function")
    return path.stem if name == "job" else name, functions[name]


def _file_and_function(source: str) -> tuple[Path, str]:
    """`"job.py:other"` → the file, and the function's name; "" where none is named."""
    path, _, wanted = source.partition(".py:")
    return Path(path + ".py" if wanted else path), wanted


def _import_file(path: Path) -> Any:
    """Imports the file under a name of its own, with its folder on the path so that its neighbours import."""
    name = f"burstpool_job_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):x}"  # the same in every process
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that pickle finds the user's classes
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)  # for good: the job's functions may import their neighbours later
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise JobError(f"{path} cannot be imported: {in_words(error)}") from error
    return module


def in_words(error: BaseException) -> str:
    """What the user's code raised, and on which line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({_last_user_line(error)})"


def _last_user_line(error: BaseException) -> str:
    frames: list[traceback.FrameSummary] = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in frames if not frame.filename.startswith((ours, "<frozen"))]
    # Rather the user's own line than that of a package it called.
    frames = [frame for frame in theirs if "site-packages" not in frame.filename] or theirs or frames
    return f"{frames[-1].filename}, line {frames[-1].lineno}"
