"""Reader of DeepPool's text profiles (`A100_vgg.prof`; Park et al., MLSys'22).

A line is `operator{parameters}[batch][input shape] total ms forward µs backward µs`, in the order in which
the model was built; after the lines of a batch comes their sum. Returns a Profile with the true parameter
and output bytes, and with the graph: a chain, or Inception-v3's branches and joins.

An operator and the ReLU after it become one layer: DeepPool books the operator's backward on the in-place
ReLU. With `merge_relus=False` every operator stays a layer of its own, as DeepPool's planner sees them.
Batches that lack a layer are left out, and `source` says which. The numbers behind a sum are unlabelled and
ignored. A file that is cut right after a sum cannot be told from one with fewer batches.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from burstpool.errors import ProfileError
from burstpool.profiling.importers.deeppool_models import GRAPH_INPUT, Model, Node, find_model
from burstpool.profiling.importers.deeppool_operators import OPERATORS, Operator, Shape
from burstpool.profiling.importers.plain import read_text
from burstpool.profiling.profile import LayerProfile, Profile

ELEMENT_BYTES = 4
"""DeepPool measured in fp32 (tensor-float-32 in matrix products: its convolutions reach 117 TFLOP/s)."""

KINDS = {
    "ReLU1d": "relu",
    "ReLU2d": "relu",
    "adAvgPool2d": "adaptive_avgpool2d",
    "ResnetBottleneck": "bottleneck",
}
"""What Burstpool calls some of DeepPool's operators; the others keep their name in lower case."""

_COUNT = r"\d{1,9}"
_NUMBER = r"(\d{1,15}(?:\.\d*)?)"
_LINE = re.compile(
    rf"\s*(\w+)(\{{.*\}})\[({_COUNT})\]\[?({_COUNT}(?:,{_COUNT})*)\]?\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s*"
)
_SUM = re.compile(rf"\s*(?:SUM\(avg\)|sum:)\s+{_NUMBER}(?:\s.*)?")
_FILE_NAME = re.compile(r"([A-Za-z0-9-]+)_(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One measured operator."""

    number: int
    """In the file, from 1."""
    operator: str
    parameters: dict[str, Any]
    batch: int
    input_shape: Shape
    total_ms: float
    forward_s: float
    backward_s: float

    @property
    def description(self) -> tuple[str, str, Shape]:
        """What is the same at every batch."""
        return self.operator, json.dumps(self.parameters, sort_keys=True), self.input_shape


def recognises(text: str) -> bool:
    """Whether the first line that says something is a measured operator."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return re.match(r"\s*\w+\{.*\}\[\d+\]", first) is not None


def read(path: Path, *, merge_relus: bool = True) -> Profile:
    """The profile in the file; its name says the device: `A100_vgg.prof`."""
    named = _FILE_NAME.fullmatch(path.stem)
    if named is None:
        raise ProfileError(f"{path} does not say its device; name the file DEVICE_model{path.suffix or '.prof'}")
    by_batch, dropped = _whole_batches(_parse(path), path)
    reference = next(iter(by_batch.values()))
    model = find_model([line.operator for line in reference], name=named[2])
    layers = _layers(model, by_batch, path)
    if merge_relus:
        layers = _merge_relus(layers)
    merged = "a ReLU counts with the operator before it" if any("+" in layer.kind for layer in layers) else ""
    return Profile(
        model=model.name,
        device=named[1],
        source="; ".join(filter(None, [f"DeepPool's {path.name}: mean times", merged, model.remark, dropped])),
        layers=tuple(layers),
        dtype="tf32",
    )


def _parse(path: Path) -> dict[int, list[Line]]:
    """Batch → its lines; each batch is closed, and checked, by its sum."""
    by_batch: dict[int, list[Line]] = {}
    lines: list[Line] = []
    number = 0
    for number, text in enumerate(read_text(path).splitlines(), 1):
        where = f"{path}, line {number}"
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        if summed := _SUM.fullmatch(text):
            _check_sum(lines, float(summed[1]), where)
            if lines[0].batch in by_batch:
                raise ProfileError(f"{where}: batch {lines[0].batch} comes twice; keep one of them")
            by_batch[lines[0].batch] = lines
            lines = []
            continue
        lines.append(_parse_line(text, number, where))
        if lines[-1].batch != lines[0].batch:
            raise ProfileError(f"{where}: batch {lines[-1].batch} begins before the sum of batch {lines[0].batch}")
    if lines or not by_batch:
        raise ProfileError(f"{path}, line {number}: the file ends without the sum of a batch; was it cut short?")
    return by_batch


def _parse_line(text: str, number: int, where: str) -> Line:
    found = _LINE.fullmatch(text)
    if found is None:
        raise ProfileError(f"{where} is not of the form operator{{…}}[batch][shape] total_ms forward_us backward_us")
    try:
        parameters = json.loads(found[2])
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where}: the operator's parameters are not JSON ({error})") from None
    if found[1] not in OPERATORS:
        raise ProfileError(f"{where}: unknown operator {found[1]!r}; known are: {', '.join(OPERATORS)}")
    return Line(
        number=number,
        operator=found[1],
        parameters=parameters,
        batch=int(found[3]),
        input_shape=tuple(int(size) for size in found[4].split(",")),
        total_ms=float(found[5]),
        forward_s=float(found[6]) * 1e-6,
        backward_s=float(found[7]) * 1e-6,
    )


def _check_sum(lines: Sequence[Line], sum_ms: float, where: str) -> None:
    if not lines:
        raise ProfileError(f"{where}: a sum without lines before it; was the file cut?")
    added_ms = sum(line.total_ms for line in lines)
    # Totals are rounded to 1 µs each, sums to 10 µs in some files.
    if abs(added_ms - sum_ms) > 0.0005 * len(lines) + 0.01:
        raise ProfileError(f"{where}: the sum is {sum_ms} ms, but the lines add up to {added_ms:.3f} ms; one is off")


def _whole_batches(by_batch: dict[int, list[Line]], path: Path) -> tuple[dict[int, list[Line]], str]:
    """The batches at which every layer was measured, and a remark on those left out."""
    fullest = max(by_batch.values(), key=len)
    reference = [line.description for line in fullest]
    whole, lacking = {}, []
    for batch, lines in by_batch.items():
        if [line.description for line in lines] == reference:
            whole[batch] = lines
            continue
        _check_is_part(lines, fullest, path)
        lacking.append(f"batch {batch} ({len(fullest) - len(lines)} of {len(fullest)} operators were not measured)")
    return whole, f"left out: {', '.join(lacking)}" if lacking else ""


def _check_is_part(lines: Sequence[Line], fullest: Sequence[Line], path: Path) -> None:
    """Each line must stand in the fullest batch too, in the same order: else they are not of one model."""
    remaining = iter(fullest)
    for line in lines:
        if not any(line.description == other.description for other in remaining):
            raise ProfileError(
                f"{path}, line {line.number}: {line.operator} of {_text(line.input_shape)} has a time at "
                f"batch {line.batch} but no place at batch {fullest[0].batch}; no batch has all layers"
            )


def _layers(model: Model, by_batch: dict[int, list[Line]], path: Path) -> list[LayerProfile]:
    """One layer a node of the model; checks that each takes the shapes its inputs hand on."""
    columns = iter(zip(*by_batch.values(), strict=True))
    shapes: dict[str, Shape] = {}
    layers = []
    for node in model.nodes:
        given = [shapes[name] for name in node.inputs if name != GRAPH_INPUT]
        if node.is_join:
            shapes[node.name] = (sum(shape[0] for shape in given), *given[0][1:])
            layers.append(_join(node, shapes[node.name], tuple(by_batch)))
            continue
        column = next(columns)
        if given and column[0].input_shape != given[0]:
            raise ProfileError(
                f"{path}, line {column[0].number} takes {_text(column[0].input_shape)} where the layer "
                f"before it gives {_text(given[0])}; only chains and Inception-v3 are understood"
            )
        operator = _operator(column[0], model, path)
        shapes[node.name] = operator.output_shape
        layers.append(_layer(node, operator, column))
    return layers


def _operator(line: Line, model: Model, path: Path) -> Operator:
    try:
        return OPERATORS[line.operator](line.parameters, line.input_shape, conv_bias=model.conv_bias)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        problem = f"the parameters of {line.operator} do not fit its shape {_text(line.input_shape)} ({error!r})"
        raise ProfileError(f"{path}, line {line.number}: {problem}") from None


def _layer(node: Node, operator: Operator, column: Sequence[Line]) -> LayerProfile:
    return LayerProfile(
        name=node.name,
        inputs=node.inputs,
        parameter_bytes=operator.num_parameters * ELEMENT_BYTES,
        output_bytes_per_sample=prod(operator.output_shape) * ELEMENT_BYTES,
        forward_s={line.batch: line.forward_s for line in column},
        backward_s={line.batch: line.backward_s for line in column},
        flops_per_sample=operator.flops_per_sample,
        kind=KINDS.get(column[0].operator, column[0].operator.lower()),
    )


def _join(node: Node, shape: Shape, batches: Sequence[int]) -> LayerProfile:
    unmeasured = dict.fromkeys(batches, 0.0)
    return LayerProfile(
        name=node.name,
        inputs=node.inputs,
        parameter_bytes=0,
        output_bytes_per_sample=prod(shape) * ELEMENT_BYTES,
        forward_s=unmeasured,
        backward_s=unmeasured,
        kind="cat",
    )


def _merge_relus(layers: Sequence[LayerProfile]) -> list[LayerProfile]:
    """Makes an operator and the ReLU after it one layer, under the operator's name."""
    merged: list[LayerProfile] = []
    stands_for: dict[str, str] = {}
    for layer in layers:
        inputs = tuple(stands_for.get(name, name) for name in layer.inputs)
        before = merged[-1] if merged else None
        if before and layer.kind == "relu" and before.kind in ("conv2d", "linear") and inputs == (before.name,):
            stands_for[layer.name] = before.name
            merged[-1] = replace(
                before,
                kind=f"{before.kind}+relu",
                forward_s=_added(before.forward_s, layer.forward_s),
                backward_s=_added(before.backward_s, layer.backward_s),
            )
        else:
            merged.append(replace(layer, inputs=inputs))
    return merged


def _added(table: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {batch: seconds + other[batch] for batch, seconds in table.items()}


def _text(shape: Shape) -> str:
    return "×".join(map(str, shape))
