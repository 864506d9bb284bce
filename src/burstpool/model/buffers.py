"""Keeping a model as it was while it is looked at.

Tracing, checking and measuring run the user's code, which may count batches, move averages or put new tensors into
its modules. `kept(model)` undoes all of that afterwards, also what an export leaves behind: tensors without data.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses import FakeTensor


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Restores every buffer, its contents, and every attribute that was replaced by a tensor without data."""
    before = [
        (module, dict(module._buffers), dict(module.__dict__), set(module._non_persistent_buffers_set))
        for module in model.modules()
    ]
    contents = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
    try:
        yield
    finally:
        for module, buffers, attributes, non_persistent in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            module._non_persistent_buffers_set = non_persistent
            for name, value in list(module.__dict__.items()):
                if isinstance(value, FakeTensor):
                    if name in attributes:
                        module.__dict__[name] = attributes[name]
                    else:
                        del module.__dict__[name]
        with torch.no_grad():
            for buffer in model.buffers():
                if not torch.equal(buffer, contents[id(buffer)]):
                    buffer.copy_(contents[id(buffer)])
