"""The zoo: job functions for the models of the papers, and tiny ones that learn real digits in seconds.

Holds names only, so that listing them imports no torch; an entry's module is loaded when it is asked for.
"""

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from burstpool.errors import JobError

if TYPE_CHECKING:
    from burstpool.job import Job

ENTRIES = {
    "vgg16": "vgg:vgg16",
    "vgg19": "vgg:vgg19",
    "resnet18": "resnet:resnet18",
    "resnet50": "resnet:resnet50",
    "resnet152": "resnet:resnet152",
    "wide_resnet101_2": "resnet:wide_resnet101_2",
    "inception_v3": "inception:inception_v3",
    "mobilenet_v3_large": "mobilenet:mobilenet_v3_large",
    "dcgan_generator": "dcgan:dcgan_generator",
    "dcgan_discriminator": "dcgan:dcgan_discriminator",
    "pointnet_classification": "pointnet:pointnet_classification",
    "pointnet_segmentation": "pointnet:pointnet_segmentation",
    "gnmt": "gnmt:gnmt",
    "biglstm": "biglstm:biglstm",
    "transformer": "transformer:transformer",
    "bert_medium": "bert:bert_medium",
    "gpt_small": "gpt:gpt_small",
    "tiny_mlp": "tiny:tiny_mlp",
    "tiny_vgg": "tiny:tiny_vgg",
    "tiny_resnet": "tiny:tiny_resnet",
    "tiny_inception": "tiny:tiny_inception",
    "tiny_lstm": "tiny:tiny_lstm",
    "tiny_transformer": "tiny:tiny_transformer",
}
"""Name → `module:function`, the module relative to this folder."""

SMALL: dict[str, dict[str, int | float]] = {
    "vgg16": {"image_size": 32, "num_classes": 10, "width": 4},
    "vgg19": {"image_size": 32, "num_classes": 10, "width": 4},
    "resnet18": {"image_size": 32, "num_classes": 10, "width": 4},
    "resnet50": {"image_size": 32, "num_classes": 10, "width": 4},
    "resnet152": {"image_size": 32, "num_classes": 10, "width": 4},
    "wide_resnet101_2": {"image_size": 32, "num_classes": 10, "width": 4},
    "inception_v3": {"num_classes": 10, "width": 2},
    "mobilenet_v3_large": {"image_size": 32, "num_classes": 10, "width": 0.1},
    "dcgan_generator": {"width": 2, "noise": 8},
    "dcgan_discriminator": {"width": 2},
    "pointnet_classification": {"width": 4, "points": 32, "num_classes": 4},
    "pointnet_segmentation": {"width": 4, "points": 32, "num_parts": 4},
    "gnmt": {"hidden": 16, "layers": 3, "vocabulary": 50, "tokens": 6},
    "biglstm": {"hidden": 32, "projection": 8, "vocabulary": 50, "tokens": 6},
    "transformer": {"width": 16, "feedforward": 16, "vocabulary": 50, "tokens": 6},
    "bert_medium": {"width": 16, "layers": 2, "heads": 2, "vocabulary": 50, "tokens": 8},
    "gpt_small": {"width": 16, "layers": 2, "heads": 2, "vocabulary": 50, "tokens": 8},
    "tiny_mlp": {},
    "tiny_vgg": {},
    "tiny_resnet": {},
    "tiny_inception": {},
    "tiny_lstm": {},
    "tiny_transformer": {},
}
"""Name → hyper-parameters that keep the entry's structure and make it small enough for a laptop's CPU."""


def names() -> list[str]:
    """All names, in the order of the documentation."""
    return list(ENTRIES)


def job_function(name: str) -> "Callable[..., Job]":
    """The function behind a name; its arguments are the hyper-parameters."""
    if name not in ENTRIES:
        close = difflib.get_close_matches(name, ENTRIES)
        advice = f"did you mean {' or '.join(close)}?" if close else f"it has: {', '.join(ENTRIES)}"
        raise JobError(f"the zoo has no {name!r}; {advice}")
    module, _, function = ENTRIES[name].partition(":")
    loaded: Any = importlib.import_module(f"{__name__}.{module}")
    return getattr(loaded, function)  # type: ignore[no-any-return]
