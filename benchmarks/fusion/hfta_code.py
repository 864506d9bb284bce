"""HFTA's own code beside ours: its example models, operators and optimizers, from a checkout of UofT-EcoSystem/hfta.

    python benchmarks/fusion/run.py --device cuda --hfta PATH

Nothing of it is copied here. Its examples are imported from their folders; DCGAN's classes stand in a script and are
taken out of it. Loss and inputs are as its examples have them: B times the mean, inputs repeated for each model. HFTA
has no SGD: its Adam stands in, which reads and writes one state more.
"""

import ast
import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from ways import Made, autocast, recorded
from workloads import Task

Parts = tuple[nn.Module, Callable[[], Tensor]]
"""A fused model, and its loss on the task's batch."""


def hfta_eager(task: Task, members: int) -> Made:
    """As its examples run."""
    step = _step(task, members)
    return lambda: (step, members)


def hfta_graph(task: Task, members: int) -> Made:
    """The same recorded as a CUDA graph, with torch's fused Adam over its weights: its own cannot be recorded."""
    step = _step(task, members, recordable=True)
    return lambda: (recorded(step), members)


def add_path(folder: Path) -> None:
    """Makes the checkout importable."""
    sys.path.insert(0, str(folder))
    # hfta/ops/transformerencoderlayer.py imports a module that is not there; layer norm is in another.
    normalization = importlib.import_module("hfta.ops.normalization")
    sys.modules["hfta.ops.layernorm"] = normalization
    _FOLDER.append(folder)


_FOLDER: list[Path] = []


def _step(task: Task, members: int, *, recordable: bool = False) -> Callable[[], None]:
    with _torch_as_it_was():
        model, loss_of = _PARTS[task.name](task, members)
    model.to(task.device)
    if recordable:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True, fused=True)
    else:
        adam = importlib.import_module("hfta.optim").get_hfta_optim_for(torch.optim.Adam, B=members)
        optimizer = adam(model.parameters(), lr=[1e-3 * (1 + i / members) for i in range(members)])

    def step() -> None:
        with autocast(task):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


@contextlib.contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """Its MobileNet puts fused operators into torch.nn, where a second array of it would find them."""
    before = dict(vars(nn))
    try:
        yield
    finally:
        vars(nn).update(before)


def _example(folder: str, name: str) -> ModuleType:
    sys.path.insert(0, str(_FOLDER[0] / "examples" / folder))
    return importlib.import_module(name)


def _repeated(x: Tensor, members: int, dim: int) -> Tensor:
    sizes = list(x.unsqueeze(dim).shape)
    sizes[dim] = members
    return x.unsqueeze(dim).expand(sizes).contiguous()


def _resnet(task: Task, members: int) -> Parts:
    module = _example("resnet", "model")
    model = module.ResNet(module.BasicBlock, [2, 2, 2, 2], num_classes=10, B=members)
    x, y = _repeated(task.inputs, members, 1), _repeated(task.target, members, 0)
    return model, lambda: members * F.nll_loss(model(x).flatten(0, 1), y.flatten())


def _mobilenet(task: Task, members: int) -> Parts:
    model = _example("mobilenet", "v3").mobilenetv3_large(B=members, num_classes=10)
    x, y = _repeated(task.inputs, members, 1), _repeated(task.target, members, 0)
    return model, lambda: members * F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _pointnet(task: Task, members: int) -> Parts:
    module = _example("pointnet", "model")
    dense = task.name == "pointnet_seg"
    classes = int(task.target.max()) + 1
    make = module.PointNetDenseCls if dense else module.PointNetCls
    model = make(k=max(classes, 50 if dense else 16), feature_transform=True, B=members)
    x = _repeated(task.inputs.transpose(1, 2), members, 0)
    y = _repeated(task.target, members, 0)

    def loss() -> Tensor:
        scores, _, features = model(x)
        likelihood = members * F.nll_loss(scores.flatten(0, -2), y.flatten())
        return likelihood + 0.001 * module.feature_transform_regularizer(features)

    return model, loss


def _dcgan(task: Task, members: int) -> Parts:
    wanted = "Generator" if task.name == "dcgan_g" else "Discriminator"
    path = _FOLDER[0] / "examples" / "dcgan" / "main.py"
    tree = ast.parse(path.read_text())
    ops = importlib.import_module("hfta.ops")
    names = {
        cls.__name__: ops.get_hfta_op_for(cls, B=members)
        for cls in (nn.ConvTranspose2d, nn.BatchNorm2d, nn.ReLU, nn.Tanh, nn.Conv2d, nn.LeakyReLU)
    }
    space = {"nn": nn, "nz": 100, "ngf": 64, "ndf": 64, "nc": 3, "B": members, **names}
    space["args"] = SimpleNamespace(device="cuda")
    body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == wanted]
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), space)
    model: nn.Module = space[wanted](1)  # type: ignore[operator]
    x, y = _repeated(task.inputs, members, 1), _repeated(task.target, members, 1)
    if wanted == "Generator":
        return model, lambda: members * F.mse_loss(model(x), y)
    return model, lambda: members * F.binary_cross_entropy_with_logits(model(x), y.to(torch.float32))


def _transformer(task: Task, members: int) -> Parts:
    module = _example("transformer", "model")
    model = module.TransformerModel(33_278, 200, 2, 200, 2, 0.2, B=members)
    # Today's nn.TransformerEncoder asks a layer for what HFTA's does not have; one after another, they run.
    layers = model.transformer_encoder.layers
    model.transformer_encoder.forward = lambda x, mask: functools.reduce(lambda y, layer: layer(y, mask), layers, x)
    x, y = _repeated(task.inputs, members, 0), _repeated(task.target, members, 0)
    return model, lambda: members * F.nll_loss(model(x).flatten(0, -2), y.flatten())


def _bert(task: Task, members: int) -> Parts:
    model = _example("bert", "model.bert").BERT(30_522, hidden=512, n_layers=8, attn_heads=8, B=members)
    tokens = _repeated(task.inputs["tokens"], members, 0)
    places = torch.arange(tokens.shape[2], device=tokens.device).expand_as(tokens).contiguous()
    segments, y = _repeated(task.inputs["segments"], members, 0), _repeated(task.target, members, 0)
    return model, lambda: members * F.nll_loss(model(tokens, places, segments).flatten(0, -2), y.flatten())


_PARTS: dict[str, Callable[[Task, int], Parts]] = {
    "resnet18": _resnet,
    "mobilenet_v3_large": _mobilenet,
    "pointnet_cls": _pointnet,
    "pointnet_seg": _pointnet,
    "dcgan_d": _dcgan,
    "dcgan_g": _dcgan,
    "transformer": _transformer,
    "bert_medium": _bert,
}
"""Workload → HFTA's model of it. It has none of the MLP and the GPT."""
HFTA_WAYS: dict[str, Callable[[Task, int], Made]] = {"hfta": hfta_eager, "hfta_graph": hfta_graph}


def known(name: str) -> bool:
    """Whether HFTA has the workload."""
    return name in _PARTS
