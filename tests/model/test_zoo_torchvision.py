"""The zoo's image classifiers against torchvision's: same weights, same outputs, bit for bit where torch allows.

Runs on CUDA where there is one, else on the CPU; skips where torchvision cannot be imported.
"""

import copy
import warnings

import pytest
import torch

from burstpool.job import load_job

try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        import torchvision
except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
    pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMAGE_SIZES = {
    "vgg16": 64,
    "vgg19": 64,
    "resnet18": 64,
    "resnet50": 64,
    "resnet152": 64,
    "wide_resnet101_2": 64,
    "inception_v3": 299,
    "mobilenet_v3_large": 64,
}
BATCH = 2


def ours(name):
    return load_job(f"zoo:{name}", {"seed": 3}).build_model()


def theirs(name):
    options = {"init_weights": True} if name == "inception_v3" else {}
    torch.manual_seed(3)
    return getattr(torchvision.models, name)(weights=None, **options)


def run(model, images, *, train):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.inplace = False  # on CUDA, dropout in place draws other random numbers
    torch.manual_seed(1)  # so that both drop the same activations
    with torch.no_grad():
        output = model.train(train)(images)
    return output if isinstance(output, tuple) else (output,)


@pytest.fixture(scope="module", params=IMAGE_SIZES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def built(name):
    return ours(name), theirs(name)


@pytest.fixture
def pair(built):
    return copy.deepcopy(built)


def test_state_is_torchvisions_key_by_key_and_loads_both_ways(pair):
    mine, other = pair
    assert [(k, v.shape) for k, v in mine.state_dict().items()] == [(k, v.shape) for k, v in other.state_dict().items()]
    mine.load_state_dict(other.state_dict(), strict=True)
    other.load_state_dict(mine.state_dict(), strict=True)


def test_same_seed_draws_torchvisions_initial_weights(pair):
    mine, other = pair
    for (key, value), expected in zip(mine.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, expected), key


@pytest.mark.parametrize("train", [False, True])
def test_outputs_equal_torchvisions(name, pair, train):
    mine, other = pair
    mine.load_state_dict(other.state_dict(), strict=True)
    mine, other = mine.to(DEVICE), other.to(DEVICE)
    size = IMAGE_SIZES[name]
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    outputs, expected = run(mine, images, train=train), run(other, images, train=train)
    assert len(outputs) == len(expected) == (2 if train and name == "inception_v3" else 1)
    for output, wanted in zip(outputs, expected, strict=True):
        # The same kernels in the same order; 1e-6 of the largest value is room for cuDNN to choose another.
        torch.testing.assert_close(output, wanted, rtol=0, atol=1e-6 * wanted.abs().max().item())
    for (key, value), wanted in zip(mine.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
