"""The zoo: every entry builds and trains; sizes are the published ones; tiny models learn the digits.

That every entry exports, for any batch, is tested where it is traced: test_trace.py.
"""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from burstpool.data import digits
from burstpool.errors import JobError
from burstpool.job import load_job, model_arguments
from burstpool.model import zoo

# Torch's own: its LSTM reassigns its weights while exported, and oneDNN lacks LSTMs with a projection.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]

PUBLISHED_PARAMETERS = {
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "wide_resnet101_2": 126_886_696,
    "inception_v3": 27_161_264,
    "mobilenet_v3_large": 5_483_032,
    "gpt_small": 124_439_808,
}
"""From torchvision's documentation, and of the smallest GPT-2."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "zoo.md"

every_name = pytest.mark.parametrize("name", zoo.names())


def small(name):
    return load_job(f"zoo:{name}", zoo.SMALL[name])


def num_parameters(job):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in job.model().parameters())


def test_listing_the_zoo_imports_no_torch():
    program = "import sys; from burstpool.model import zoo; zoo.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_unknown_name_is_refused_with_close_ones():
    with pytest.raises(JobError, match=r"the zoo has no 'resnet51'; did you mean resnet50") as error:
        zoo.job_function("resnet51")
    assert "\n" not in str(error.value)


def test_unknown_name_like_no_other_is_refused_with_all_names():
    with pytest.raises(JobError, match=r"it has: vgg16, .*tiny_transformer"):
        load_job("zoo:xyzzy")


def test_every_entry_has_a_small_form():
    assert list(zoo.SMALL) == zoo.names()


@every_name
def test_entry_is_documented_with_its_size(name):
    row = re.search(rf"^\| `{name}` \|.*$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    assert f" {num_parameters(load_job(f'zoo:{name}')):,} " in row[0]


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_full_size_has_the_published_number_of_parameters(name):
    assert num_parameters(load_job(f"zoo:{name}")) == PUBLISHED_PARAMETERS[name]


@every_name
def test_small_form_trains_every_parameter(name):
    job = pickle.loads(pickle.dumps(small(name)))
    model = job.build_model()
    inputs, target = job.samples(3)
    arguments, keywords = model_arguments(inputs)
    loss = job.loss(model(*arguments, **keywords), target)
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    job.optimizer(model.parameters()).step()


@every_name
def test_loss_is_a_mean_over_samples(name):
    job = small(name)
    model = job.build_model().double().eval()
    inputs, target = pytree.tree_map(lambda x: x.double() if x.is_floating_point() else x, job.samples(5))

    def loss(part):
        arguments, keywords = model_arguments(pytree.tree_map(lambda x: x[part], inputs))
        return job.loss(model(*arguments, **keywords), target[part]).detach()

    expected = (2 * loss(slice(2)) + 3 * loss(slice(2, 5))) / 5
    torch.testing.assert_close(loss(slice(5)), expected, rtol=1e-12, atol=0)  # fp64; only sums are reordered


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vgg16", {"image_size": "16"}, "greater than or equal to 32"),
        ("inception_v3", {"image_size": 224}, "greater than or equal to 299"),
        ("inception_v3", {"width": 3}, "multiple of 2"),
        ("tiny_mlp", {"width": "0"}, "greater than or equal to 1"),
        ("tiny_mlp", {"dropout": "1.5"}, "less than 1"),
        ("bert_medium", {"heads": 3}, "width=512 cannot be split over heads=3; pass a multiple of 3"),
        ("biglstm", {"hidden": 64}, "projection=1024 must be smaller than hidden=64"),
    ],
)
def test_impossible_hyperparameters_are_refused(name, settings, message):
    with pytest.raises(JobError, match=re.escape(message)):
        load_job(f"zoo:{name}", settings)


def test_inception_weighs_its_auxiliary_head_by_two_fifths():
    from burstpool.model.zoo.inception import inception_loss

    main, auxiliary, target = torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0, 1, 2])
    alone = torch.nn.functional.cross_entropy
    expected = alone(main, target) + 0.4 * alone(auxiliary, target)
    torch.testing.assert_close(inception_loss((main, auxiliary), target), expected)
    torch.testing.assert_close(inception_loss(main, target), alone(main, target))


def test_inception_returns_named_heads_while_training():
    model = small("inception_v3").build_model()
    images = small("inception_v3").samples(2)[0]
    assert model(images)._fields == ("logits", "aux_logits")
    assert model.eval()(images).shape == (2, 10)


@pytest.mark.parametrize("name", ["bert_medium", "gpt_small"])
def test_head_and_embedding_share_one_weight(name):
    model = small(name).build_model()
    embedding = model.embeddings.token if name == "bert_medium" else model.token
    assert model.head.weight is embedding.weight


@pytest.mark.parametrize("name", ["transformer", "gpt_small", "biglstm"])
def test_language_models_look_at_no_later_token(name):
    job = small(name)
    model = job.build_model().eval()
    tokens = job.samples(1)[0]
    changed = tokens.clone()
    changed[0, 3:] = (changed[0, 3:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize(("name", "epochs"), [("tiny_vgg", 4), ("tiny_lstm", 10)])
def test_tiny_model_learns_the_digits(name, epochs):
    job = load_job(f"zoo:{name}")
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    order = torch.Generator().manual_seed(job.seed)
    for _ in range(epochs):
        for part in torch.randperm(len(job.data), generator=order).split(job.batch):
            optimizer.zero_grad()
            job.loss(model(job.data.inputs[part]), job.data.targets[part]).backward()
            optimizer.step()
    test = digits(train=False, form=job.data.form)
    accuracy = (model.eval()(test.inputs).argmax(1) == test.targets).float().mean().item()
    assert accuracy > 0.9  # 0.95 to 0.99 was seen; chance is 0.1
