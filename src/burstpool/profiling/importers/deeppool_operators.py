"""What DeepPool's operators hand on, weigh and compute, from their parameters and input shape.

Takes an operator as a line of a DeepPool profile describes it; returns its output shape, number of
parameters and floating-point operations. DeepPool itself takes a convolution's output height for its number
of filters and forgets its input channels, so its own byte counts are wrong; these are the architectures'
true ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

Shape = tuple[int, ...]
"""Of one sample: channels, height, width; or features."""

BOTTLENECK_EXPANSION = 4
"""Output channels of a ResNet bottleneck over its `planes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator, worked out."""

    output_shape: Shape
    """Of one sample."""
    num_parameters: int = 0
    """Weights and biases."""
    flops_per_sample: int = 0
    """Forward, of matrix products and convolutions, 2 a multiply-add."""


def _pair(value: int | list[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _window(parameters: Mapping[str, Any], shape: Shape) -> tuple[int, int]:
    """Output height and width of a sliding window."""
    kernel, padding, stride = (_pair(parameters[key]) for key in ("kernel_size", "padding", "stride"))
    height, width = (
        (size + 2 * p - k) // s + 1 for size, k, p, s in zip(shape[1:], kernel, padding, stride, strict=True)
    )
    return height, width


def _convolution(parameters: Mapping[str, Any], shape: Shape, *, conv_bias: bool) -> Operator:
    height, width = _window(parameters, shape)
    inputs, outputs = parameters["in_channels"], parameters["out_channels"]
    weights = inputs * outputs * prod(_pair(parameters["kernel_size"]))
    return Operator(
        output_shape=(outputs, height, width),
        num_parameters=weights + (outputs if parameters.get("bias", conv_bias) else 0),
        flops_per_sample=2 * weights * height * width,
    )


def _pool(parameters: Mapping[str, Any], shape: Shape, **_: Any) -> Operator:
    return Operator(output_shape=(shape[0], *_window(parameters, shape)))


def _adaptive_pool(parameters: Mapping[str, Any], shape: Shape, **_: Any) -> Operator:
    return Operator(output_shape=(shape[0], parameters["output_height"], parameters["output_width"]))


def _linear(parameters: Mapping[str, Any], shape: Shape, **_: Any) -> Operator:
    inputs, outputs = parameters["in_features"], parameters["out_features"]
    return Operator(
        output_shape=(outputs,),
        num_parameters=inputs * outputs + (outputs if parameters["bias"] else 0),
        flops_per_sample=2 * inputs * outputs,
    )


def _bottleneck(parameters: Mapping[str, Any], shape: Shape, **_: Any) -> Operator:
    """Three convolutions without bias, each with its batch norm, and the shortcut's projection if any."""
    inputs, groups, stride = parameters["inplanes"], parameters["groups"], parameters.get("stride", 1)
    middle = int(parameters["planes"] * parameters["base_width"] / 64) * groups
    outputs = parameters["planes"] * BOTTLENECK_EXPANSION
    before = prod(shape[1:])
    height, width = ((size - 1) // stride + 1 for size in shape[1:])
    after = height * width
    convolutions = [  # weights, and the positions they are applied at
        (inputs * middle, before),
        (middle * middle * 9 // groups, after),
        (middle * outputs, after),
    ]
    batch_norms = 2 * (middle + middle + outputs)
    if "downsampleParams" in parameters:
        convolutions.append((inputs * outputs, after))
        batch_norms += 2 * outputs
    return Operator(
        output_shape=(outputs, height, width),
        num_parameters=sum(weights for weights, _ in convolutions) + batch_norms,
        flops_per_sample=sum(2 * weights * positions for weights, positions in convolutions),
    )


def _same(parameters: Mapping[str, Any], shape: Shape, **_: Any) -> Operator:
    return Operator(output_shape=shape)


def _flatten(parameters: Mapping[str, Any], shape: Shape, **_: Any) -> Operator:
    return Operator(output_shape=(prod(shape),))


OPERATORS: dict[str, Callable[..., Operator]] = {
    "conv2d": _convolution,
    "linear": _linear,
    "ResnetBottleneck": _bottleneck,
    "maxPool2d": _pool,
    "avgPool2d": _pool,
    "adAvgPool2d": _adaptive_pool,
    "ReLU1d": _same,
    "ReLU2d": _same,
    "flatten": _flatten,
}
"""DeepPool's name of an operator → function of its parameters, its input shape and, for convolutions, whether
the architecture gives them a bias."""
