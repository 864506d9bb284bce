"""Jobs: loading from files and the zoo, hyper-parameters checked against annotations."""

import json
import random
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from burstpool.errors import JobError
from burstpool.job import (
    Job,
    as_recorded,
    fingerprint,
    from_anywhere,
    from_record,
    load_job,
    model_arguments,
    parse_settings,
)

JOB_FILE = """
import torch
from typing import Literal
from torch.nn import functional as F
from burstpool import Job
from neighbour import WIDTH

def job(
    lr: float = 0.1, width: int = WIDTH, bias: bool = True, kind: Literal["a", "b"] = "a", *, name: str = "mine"
) -> Job:
    return Job(
        model=lambda: torch.nn.Linear(4, width, bias=bias), loss=F.mse_loss,
        data=torch.utils.data.TensorDataset(torch.ones(3, 4), torch.zeros(3, width)),
        optimizer=lambda p: torch.optim.SGD(p, lr=lr), name=name,
    )

def needs(width: int) -> Job:
    return job(width=width)

def broken():
    raise RuntimeError("no data here")

def wrong():
    return 3
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 5\n")
    path = tmp_path / "my_job.py"
    path.write_text(JOB_FILE)
    return path


def test_a_job_loads_from_a_file_with_its_neighbours(job_file: Path) -> None:
    job = load_job(job_file)
    assert job.name == "mine"
    assert job.settings == {"lr": 0.1, "width": 5, "bias": True, "kind": "a", "name": "mine"}
    assert job.build_model().out_features == 5


def test_settings_are_converted_to_the_annotated_types(job_file: Path) -> None:
    job = load_job(job_file, parse_settings(["lr=3e-2", "width=7", "bias=false", "kind=b"]))
    assert job.settings == {"lr": 0.03, "width": 7, "bias": False, "kind": "b", "name": "mine"}


def test_a_function_is_named_after_a_colon(job_file: Path) -> None:
    assert load_job(f"{job_file}:needs", {"width": 2}).build_model().out_features == 2


@pytest.mark.parametrize(
    ("source", "settings", "says"),
    [
        ("{file}", {"lr": "fast"}, "lr=fast"),
        ("{file}", {"width": "2.5"}, "width=2.5"),
        ("{file}", {"kind": "c"}, "'a' or 'b'"),
        ("{file}", {"depth": "1"}, "has no hyper-parameter 'depth'; it has: lr, width"),
        ("{file}:needs", {}, "needs hyper-parameter 'width'; pass --set width="),
        ("{file}:absent", {}, "has no function 'absent'; its functions: job, needs"),
        ("{file}:broken", {}, "RuntimeError: no data here ({file}, line"),
        ("{file}:wrong", {}, "returned a int; it must return a burstpool.Job"),
        ("{folder}/none.py", {}, "there is no job file"),
        ("{folder}/job.txt", {}, "neither a Python file (job.py) nor a zoo name (zoo:vgg16)"),
        ("zoo:vgg61", {}, "did you mean"),
    ],
)
def test_mistakes_end_in_one_line_that_says_what_to_do(
    job_file: Path, source: str, settings: dict[str, str], says: str
) -> None:
    names = {"file": str(job_file), "folder": str(job_file.parent)}
    with pytest.raises(JobError) as caught:
        load_job(source.format(**names), settings)
    assert says.format(**names) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_with_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text("x = 1\ndef job(:\n")
    with pytest.raises(JobError, match=r"SyntaxError.*line 2"):
        load_job(path)


@pytest.mark.parametrize("pair", ["lr", "=3"])
def test_a_setting_without_name_or_value_is_refused(pair: str) -> None:
    with pytest.raises(JobError, match="name=value"):
        parse_settings([pair])


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(JobError, match="twice"):
        parse_settings(["lr=1", "lr=2"])


def test_the_seed_alone_decides_the_weights_and_leaves_the_random_state() -> None:
    job = load_job("zoo:tiny_mlp")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = job.build_model(), job.build_model()
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_samples_wrap_around_short_data(job_file: Path) -> None:
    inputs, targets = load_job(job_file).samples(7)
    assert inputs.shape == (7, 4)
    assert targets.shape == (7, 5)


def test_inputs_become_arguments_by_their_structure() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    assert model_arguments(x) == ((x,), {})
    assert model_arguments([x, y]) == ((x, y), {})
    assert model_arguments({"x": x}) == ((), {"x": x})


def test_a_job_with_a_bad_batch_or_a_model_instead_of_a_factory_is_refused() -> None:
    job = load_job("zoo:tiny_mlp")
    options = {"loss": job.loss, "data": job.data, "optimizer": job.optimizer}
    with pytest.raises(JobError, match="batch=0"):
        Job(model=job.model, batch=0, **options)
    with pytest.raises(JobError, match=r"Job\.loss must be callable"):
        Job(model=job.model, **(options | {"loss": 3}))


def test_a_job_file_documented_in_the_design_loads(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        import torch.nn.functional as F
        from burstpool import Job
        from burstpool.data import digits
        from burstpool.model.zoo.tiny import tiny_vgg

        def job(lr: float = 0.1, width: int = 8) -> Job:
            return Job(model=tiny_vgg(width=width).model, loss=F.cross_entropy, data=digits(),
                       optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))
        """)
    )
    job = load_job(path, {"lr": "0.03"})
    output = job.build_model()(*job.example(3)[0])
    assert torch.isfinite(job.loss(output, job.samples(3)[1]))


ODD_JOBS = """
import enum
import math
import torch
from torch.nn import functional as F
from burstpool import Job

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.ones(2), 0

def make(model=lambda: torch.nn.Linear(2, 2), data=None):
    return Job(model=model, loss=F.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
               data=data if data is not None else torch.utils.data.TensorDataset(torch.ones(3, 2), torch.ones(3, 2)))

def endless(): return make(data=Endless())
def triples(): return make(data=[(torch.ones(2), 0, 1)] * 3)
def unequal(): return make(data=[(torch.ones(i + 1), 0) for i in range(8)])
def raising(): return make(model=lambda: torch.nn.Linear(2, "two"))
def number(): return make(model=lambda: 3)
def unannotated(width=3): return make(model=lambda: torch.nn.Linear(2, width))
def undefined(width: "Undefined" = 3): return make()
def late():
    import late_neighbour
    return make()
def random_data():
    import random, numpy
    return make(data=[(torch.rand(2) + numpy.random.rand() + random.random(), 0)] * 3)
def collecting(width: int = 2, *others, **more): return make(model=lambda: torch.nn.Linear(2, width))
def leaving(): raise SystemExit(3)
class Act(enum.Enum):
    RELU = "relu"
    TANH = "tanh"
def layered(widths: list[int] = [64, 64], pair: tuple[int, int] = (1, 2), rates: tuple[float, ...] = (0.1,),
            names: list[str] = ["a"], acts: "list[Act]" = [Act.RELU], deep: list[list[int]] = [[1]],
            maybe: list[int] | None = None, word_or_list: str | list[int] = "x", bare=(1, 2)): return make()
def odd(width: int | None = 3, act: Act = Act.RELU, clip: float = math.inf, note=None, *others, **more): return make()
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("endless", "has no length"),
        ("triples", "each must be (input, target)"),
        ("unequal", "each must be (input, target), all of one shape"),
        ("raising", "cannot be built"),
        ("number", "returned a int; it must return a module"),
        ("undefined", "annotations of"),
        ("leaving", "failed: SystemExit: 3"),
    ],
)
def test_jobs_that_cannot_be_used_say_why_in_one_line(tmp_path: Path, function: str, says: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)

    def use() -> None:
        job = load_job(f"{path}:{function}", {"width": 4} if function == "undefined" else {})
        job.build_model()
        job.samples(4)

    with pytest.raises(JobError) as caught:
        use()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_without_annotation_take_the_type_of_the_default(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    assert load_job(f"{path}:unannotated", {"width": "5"}).build_model().out_features == 5


def test_a_job_may_import_its_neighbours_late(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    (tmp_path / "late_neighbour.py").write_text("")
    assert load_job(f"{path}:late").name == "late"


def test_what_a_job_function_draws_at_random_is_the_same_every_time_and_leaves_the_random_state(
    tmp_path: Path,
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    first = load_job(f"{path}:random_data").data[0][0]
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    assert torch.equal(load_job(f"{path}:random_data").data[0][0], first)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == expected


def test_a_job_function_may_collect_further_arguments(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    assert load_job(f"{path}:collecting", {"width": 3}).build_model().out_features == 3
    with pytest.raises(JobError, match="no hyper-parameter 'more'; it has: width"):
        load_job(f"{path}:collecting", {"more": 3})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"width": "None", "act": "tanh", "clip": "1"},
        {"clip": "-inf", "note": "None"},
        {"note": "hi", "clip": "nan"},
    ],
)
def test_a_job_is_made_again_from_its_record(tmp_path: Path, given: dict[str, str]) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    source = f"{path}:odd"
    settings = load_job(source, given).settings
    recorded = json.loads(json.dumps({name: as_recorded(value) for name, value in settings.items()}, allow_nan=False))
    again = load_job(source, from_record(source, recorded)).settings
    assert {name: str(value) for name, value in again.items()} == {name: str(value) for name, value in settings.items()}


def test_none_is_a_value_where_the_annotation_or_the_default_says_so(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    settings = load_job(f"{path}:odd", {"width": "None", "note": "None"}).settings
    assert (settings["width"], settings["note"]) == (None, None)
    with pytest.raises(JobError, match=r"width=None for .* valid integer"):
        load_job(f"{path}:collecting", {"width": "None"})


def test_a_jobs_place_and_fingerprint_do_not_depend_on_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(JOB_FILE)
    monkeypatch.chdir(tmp_path)
    places = [from_anywhere(source) for source in ("mine.py", "mine.py:needs", "zoo:vgg16")]
    before = fingerprint("mine.py")
    monkeypatch.chdir("/")
    assert places == [f"{tmp_path}/mine.py", f"{tmp_path}/mine.py:needs", "zoo:vgg16"]
    assert [from_anywhere(place) for place in places] == places
    assert fingerprint(places[1]) == before != ""
    (tmp_path / "mine.py").write_text(JOB_FILE + "#")
    assert fingerprint(places[0]) != before
    assert fingerprint("zoo:vgg16") == fingerprint("nowhere.py") == ""


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ("widths=[64,128]", [64, 128]),
        ("widths=[ 64, 128 ]", [64, 128]),
        ("widths=[]", []),
        ("pair=[3,4]", (3, 4)),
        ("rates=[1e-3,.5,inf]", (0.001, 0.5, float("inf"))),
        ("names=[b,64,true]", ["b", "64", "true"]),
        ('names=["b,c","[d]","\\"",e]', ["b,c", "[d]", '"', "e"]),
        ("deep=[[1,2],[]]", [[1, 2], []]),
        ("maybe=[1]", [1]),
        ("maybe=None", None),
        ("word_or_list=[1,2]", [1, 2]),
        ("word_or_list=y", "y"),
        ('bare=[1.5,"x"]', (1.5, "x")),
    ],
)
def test_a_list_or_a_tuple_is_set_in_brackets_and_made_again_from_its_record(
    tmp_path: Path, given: str, settings: object
) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    source, words = f"{path}:layered", parse_settings([given])
    (name,) = words
    job = load_job(source, words)
    assert job.settings[name] == settings
    recorded = json.loads(json.dumps({name: as_recorded(value) for name, value in job.settings.items()}))
    again = load_job(source, from_record(source, recorded)).settings
    assert {**again, "acts": None} == {**job.settings, "acts": None}, "an enumeration is another at each import"


def test_an_enumeration_in_a_list_is_made_again_from_its_record(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    source = f"{path}:layered"
    recorded = as_recorded(load_job(source, {"acts": "[tanh,relu]"}).settings["acts"])
    again = load_job(source, from_record(source, {"acts": recorded})).settings["acts"]
    assert [act.value for act in again] == ["tanh", "relu"]


def test_a_list_as_earlier_versions_recorded_it_is_the_default_again(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    assert from_record(f"{path}:layered", {"pair": "(1, 2)", "widths": "[64, 64]"}) == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("widths=64,128", "a list is written in brackets; write 'name=[64,128]'"),
        ("widths=64", "a list is written in brackets"),
        ("widths=[64", "a bracket is not closed"),
        ("widths=[64]]", "a bracket is closed that was not opened"),
        ("widths=[64],[128]", "a list is written in brackets"),
        ("widths=[64,,128]", "the list has an empty entry"),
        ('names=["a]', "a quote is not closed"),
        ('names=["a"b]', "is no quoted text"),
        ("widths=[64,wide]", "entry 1 of the list: input should be a valid integer"),
        ("widths=[64,1.5]", "entry 1 of the list: input should be a valid integer"),
        ("pair=[1,2,3]", "at most 2"),
        ("pair=[1]", "field required"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, given: str, says: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(ODD_JOBS)
    with pytest.raises(JobError) as caught:
        load_job(f"{path}:layered", parse_settings([given]))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
