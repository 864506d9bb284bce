"""The models whose DeepPool profiles are known: names of their layers and how these hang together.

DeepPool's text lists operators in the order in which the model was built, and says nothing of the graph. A
chain can be told from the shapes; the branches of Inception-v3 cannot (two convolutions side by side have
the same shapes as two in a row), so the graph is written down here. Names are torchvision's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GRAPH_INPUT = "input"
"""What first layers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A layer to be: one line of the profile, or a join without a line."""

    name: str
    inputs: tuple[str, ...]
    is_join: bool = False
    """A concatenation of its inputs, which DeepPool did not measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A graph that fits the lines of a profile."""

    name: str
    nodes: tuple[Node, ...]
    """In the order of the lines, joins in between."""
    conv_bias: bool
    """Whether its plain convolutions have a bias."""
    remark: str = ""
    """What the file lacks, for the profile's `source`."""


def find_model(operators: Sequence[str], *, name: str) -> Model:
    """The known model with these operators, else a chain called `name`."""
    operators = tuple(operators)
    for known_operators, model in KNOWN:
        if known_operators == operators:
            return model
    layers = [f"{operator}_{index}" for index, operator in enumerate(operators)]
    return Model(name=name, nodes=_chain(layers), conv_bias=True)


def _chain(names: Sequence[str]) -> tuple[Node, ...]:
    before = (GRAPH_INPUT, *names)
    return tuple(Node(name=name, inputs=(previous,)) for previous, name in zip(before, names, strict=False))


def _vgg16() -> tuple[tuple[str, ...], Model]:
    operators, names = [], []
    for count in (2, 2, 3, 3, 3):
        operators += ["conv2d", "ReLU2d"] * count + ["maxPool2d"]
    names = [f"features.{index}" for index in range(len(operators))]
    operators += ["flatten", "linear", "ReLU1d", "linear", "ReLU1d", "linear"]
    names += ["flatten", "classifier.0", "classifier.1", "classifier.3", "classifier.4", "classifier.6"]
    remark = "dropout was not measured; the last linear layer's backward is recorded as 0"
    return tuple(operators), Model(name="vgg16", nodes=_chain(names), conv_bias=True, remark=remark)


def _wide_resnet101_2() -> tuple[tuple[str, ...], Model]:
    blocks = [f"layer{stage}.{block}" for stage, count in enumerate((3, 4, 23, 3), 1) for block in range(count)]
    names = ["conv1", "relu", "maxpool", *blocks, "avgpool", "flatten", "fc"]
    operators = (
        "conv2d",
        "ReLU2d",
        "maxPool2d",
        *["ResnetBottleneck"] * len(blocks),
        "adAvgPool2d",
        "flatten",
        "linear",
    )
    remark = "the first batch norm was not measured; the last linear layer's backward is recorded as 0"
    return operators, Model(name="wide_resnet101_2", nodes=_chain(names), conv_bias=False, remark=remark)


STEM = (
    "Conv2d_1a_3x3",
    "Conv2d_2a_3x3",
    "Conv2d_2b_3x3",
    "maxpool1",
    "Conv2d_3b_1x1",
    "Conv2d_4a_3x3",
    "maxpool2",
)
"""Inception-v3 up to its first branching block."""

_A = "branch1x1|branch5x5_1 branch5x5_2|branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3|avgpool branch_pool"
_B = "branch3x3|branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3|maxpool"
_C = (
    "branch1x1|branch7x7_1 branch7x7_2 branch7x7_3|"
    "branch7x7dbl_1 branch7x7dbl_2 branch7x7dbl_3 branch7x7dbl_4 branch7x7dbl_5|avgpool branch_pool"
)
_D = "branch3x3_1 branch3x3_2|branch7x7x3_1 branch7x7x3_2 branch7x7x3_3 branch7x7x3_4|maxpool"
_E = (
    "branch1x1|branch3x3_1 branch3x3_2a,branch3x3_2b|"
    "branch3x3dbl_1 branch3x3dbl_2 branch3x3dbl_3a,branch3x3dbl_3b|avgpool branch_pool"
)
BLOCKS = {
    "Mixed_5b": _A,
    "Mixed_5c": _A,
    "Mixed_5d": _A,
    "Mixed_6a": _B,
    "Mixed_6b": _C,
    "Mixed_6c": _C,
    "Mixed_6d": _C,
    "Mixed_6e": _C,
    "Mixed_7a": _D,
    "Mixed_7b": _E,
    "Mixed_7c": _E,
}
"""Blocks: `|` between branches, spaces between layers in a row, commas between layers side by side."""


def _inception_v3() -> tuple[tuple[str, ...], Model]:
    nodes = list(_chain(STEM))
    for block, branches in BLOCKS.items():
        nodes += _block(block, branches, previous=nodes[-1].name)
    operators = tuple(_inception_operator(node.name) for node in nodes if not node.is_join)
    remark = (
        "concatenations were not measured and take 0 s; batch norms and ReLUs were not measured; "
        "the last pooling and the classifier are missing from the file and left out"
    )
    return operators, Model(name="inception_v3", nodes=tuple(nodes), conv_bias=False, remark=remark)


def _block(block: str, branches: str, *, previous: str) -> list[Node]:
    """The layers of one block, then the join of its branches' ends."""
    nodes: list[Node] = []
    ends: list[str] = []
    for branch in branches.split("|"):
        heads = [previous]
        for step in branch.split():
            made = [Node(name=f"{block}.{name}", inputs=tuple(heads)) for name in step.split(",")]
            nodes += made
            heads = [node.name for node in made]
        ends += heads
    return [*nodes, Node(name=f"{block}.cat", inputs=tuple(ends), is_join=True)]


def _inception_operator(name: str) -> str:
    leaf = name.rpartition(".")[2]
    if leaf.startswith("maxpool"):
        return "maxPool2d"
    return "avgPool2d" if leaf == "avgpool" else "conv2d"


KNOWN = (_vgg16(), _wide_resnet101_2(), _inception_v3())
"""Operators in order, and the model they are."""
