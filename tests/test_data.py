"""The data sets: facts of the digits, and that synthetic samples depend on nothing but seed and index."""

import pickle

import pytest
import torch
from torch.utils.data import default_collate

from burstpool.data import Floats, Integers, Masked, NextToken, Synthetic, TeacherForced, digits
from burstpool.data.sequences import IGNORED
from burstpool.errors import JobError

CLASS_COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
"""Of the test part of the UCI data set, from its description."""


def equal(one, other):
    """Whether two nested samples hold the same tensors."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one.dtype == other.dtype and torch.equal(one, other)


def test_digits_are_the_1797_images_of_uci():
    train, test = digits(), digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert torch.cat((train.targets, test.targets)).bincount().tolist() == CLASS_COUNTS
    assert test.targets.bincount().min() >= 25


def test_a_digit_is_a_scaled_image_and_a_class():
    image, label = digits()[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert (label.shape, label.dtype) == ((), torch.int64)
    assert (digits().inputs.min(), digits().inputs.max()) == (0, 1)


def test_forms_show_the_same_pixels():
    images, rows, tokens = (digits(train=False, form=form).inputs for form in ("image", "rows", "tokens"))
    assert rows.shape == (360, 8, 8)
    assert tokens.shape == (360, 64)
    assert tokens.dtype == torch.int64
    assert torch.equal(images[:, 0], rows)
    assert torch.equal(tokens.view(360, 8, 8) / 16, rows)


def test_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(JobError, match=r"no form 'audio'; pass one of: image, rows, tokens"):
        digits(form="audio")


def test_digits_travel_without_their_pixels():
    data = digits(train=False, form="tokens")
    assert len(pickle.dumps(data)) < 1000
    assert equal(pickle.loads(pickle.dumps(data))[7], data[7])


FIELDS = {
    "float": Floats(shape=(3, 4)),
    "tuple": (Floats(shape=(2,)), Integers(count=9, shape=(5,))),
    "dict": {"tokens": Integers(count=9, shape=(5,)), "noise": Floats(shape=(2, 2))},
}


@pytest.mark.parametrize("inputs", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("target", [Integers(count=10), Integers(count=9, shape=(5,))], ids=["class", "sequence"])
def test_synthetic_samples_depend_on_seed_and_index_alone(inputs, target):
    data = Synthetic(inputs=inputs, target=target, num_samples=5, seed=2)
    forwards = [data[i] for i in range(5)]
    again = pickle.loads(pickle.dumps(data))
    assert all(equal(again[i], forwards[i]) for i in reversed(range(5)))
    assert equal(data[-1], forwards[4])
    other = Synthetic(inputs=inputs, target=target, num_samples=5, seed=3)
    assert not any(equal(other[i][0], forwards[i][0]) for i in range(5))
    assert not any(equal(forwards[i][0], forwards[i + 1][0]) for i in range(4))


def test_synthetic_values_have_the_stated_types_and_ranges():
    data = Synthetic(inputs=Floats(shape=(2, 50)), target=Integers(count=3, shape=(100,)))
    noise, target = data[0]
    assert (noise.shape, noise.dtype) == ((2, 50), torch.float32)
    assert abs(noise.mean()) < 0.5
    assert target.unique().tolist() == [0, 1, 2]


def test_synthetic_batches_collate_to_their_structure():
    data = Synthetic(inputs=FIELDS["dict"], target=Integers(count=10))
    inputs, target = default_collate([data[i] for i in range(4)])
    assert inputs["tokens"].shape == (4, 5)
    assert target.shape == (4,)
    assert target.dtype == torch.int64


def test_synthetic_ends():
    data = Synthetic(inputs=Floats(shape=(1,)), target=Integers(count=2), num_samples=3)
    assert len(list(data)) == len(data) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Floats(shape=(3, 0)),
        lambda: Integers(count=0),
        lambda: Synthetic(inputs=Floats(shape=(1,)), target=Integers(count=1), num_samples=0),
        lambda: Synthetic(inputs=Floats(shape=(1,)), target=Integers(count=1), seed=-1),
    ],
)
def test_senseless_synthetic_data_is_refused(make):
    with pytest.raises(JobError):
        make()


def test_next_token_shifts_by_one():
    text = Synthetic(inputs=Integers(count=9, shape=(6,)), target=Integers(count=1), num_samples=4)
    inputs, target = NextToken(text)[2]
    assert torch.equal(torch.cat((inputs[:1], target)), text[2][0])
    assert len(NextToken(text)) == 4


def test_teacher_forcing_gives_the_translation_so_far():
    sentences = Synthetic(inputs=Integers(count=9, shape=(4,)), target=Integers(count=9, shape=(6,)))
    (source, so_far), target = TeacherForced(sentences)[2]
    assert torch.equal(source, sentences[2][0])
    assert torch.equal(torch.cat((so_far[:1], target)), sentences[2][1])


def test_masking_hides_the_same_number_of_tokens_in_each_sample():
    text = Synthetic(inputs={"tokens": Integers(count=9, shape=(20,))}, target=Integers(count=1), num_samples=8)
    data = Masked(source=text, field="tokens", mask_token=99, num_masked=3)
    assert equal(pickle.loads(pickle.dumps(data))[1], data[1])
    places = set()
    for i in range(8):
        inputs, target = data[i]
        hidden = target != IGNORED
        assert hidden.sum() == 3
        assert torch.equal(inputs["tokens"] == 99, hidden)
        assert torch.equal(torch.where(hidden, target, inputs["tokens"]), text[i][0]["tokens"])
        places.add(tuple(hidden.tolist()))
    assert len(places) > 1


def test_masking_more_tokens_than_there_are_is_refused():
    text = Synthetic(inputs={"tokens": Integers(count=9, shape=(4,))}, target=Integers(count=1))
    with pytest.raises(JobError, match=r"num_masked=5 of 4 tokens; pass 1 to 4"):
        Masked(source=text, field="tokens", mask_token=0, num_masked=5)
