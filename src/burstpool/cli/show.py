"""How artifacts look in a terminal: tables and bars made of text."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burstpool.model.graph import BATCH, LayerGraph
from burstpool.profiling.profile import LayerProfile, Profile

_BAR_WIDTH = 16
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MAX_BATCH_COLUMNS = 6


def seconds(value: float) -> str:
    """`1.24 ms`, `56 µs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "0" if value == 0 else f"{value / 1e-9:.3g} ns"


def size(value: float) -> str:
    """`12.5 MiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def bar(share: float, *, width: int = _BAR_WIDTH) -> str:
    """A share of 1 as a bar of text."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def show_graph(graph: LayerGraph, console: Console) -> None:
    """Each layer, its operators and what it takes."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("layer", "operators", "takes", "gives a sample"):
        table.add_column(title, no_wrap=True, overflow="ellipsis")
    for layer in graph.layers:
        shapes = " ".join("×".join(str(x) for x in value.shape if x != BATCH) for value in layer.outputs)
        table.add_row(Text(layer.name), Text(layer.kind, style="dim"), Text(", ".join(layer.inputs)), shapes)
    console.print(table)


def show_profile(profile: Profile, console: Console, *, most: int | None = None) -> None:
    """Each layer's time a batch, memory and share; only the `most` costly ones when given."""
    how = f"estimated from {profile.estimated_from}" if profile.estimated_from else profile.source
    precision = f"autocast {profile.autocast}" if profile.autocast else profile.dtype
    console.print(
        Text(f"{profile.model} on {profile.device}, {precision}", style="bold"), Text(f"({how})", style="dim")
    )
    shown = _costliest(profile, most)
    console.print(_layer_table(profile, shown, console.width))
    if len(shown) < len(profile.layers):
        last = profile.batches[-1]
        total = sum(_time(layer, last) for layer in profile.layers)
        rest = total - sum(_time(layer, last) for layer in shown)
        others = len(profile.layers) - len(shown)
        console.print(f"… and {others} cheaper layers, {rest / total:.0%} of the time; --all shows them", style="dim")
    console.print(_sum_table(profile))
    if note := profile.accuracy_note():
        console.print(f"note: {note}", style="yellow", highlight=False)


def _layer_table(profile: Profile, shown: Sequence[LayerProfile], width: int) -> Table:
    """As many columns as the terminal has room for, the most telling first."""
    last = profile.batches[-1]
    total = sum(_time(layer, last) for layer in profile.layers) or 1.0
    largest = max(_time(layer, last) for layer in profile.layers) or 1.0
    shares = [
        Text(f"{_time(x, last) / total:5.1%} ").append(bar(_time(x, last) / largest), style="cyan") for x in shown
    ]
    columns: dict[str, list[Text]] = {"layer": [Text(layer.name) for layer in shown], f"share at {last}": shares}
    optional = {
        f"batch {batch}": [Text(seconds(_time(layer, batch))) for layer in shown]
        for batch in reversed(_batch_columns(profile.batches))
    }
    optional["parameters"] = [Text(size(x.parameter_bytes) if x.parameter_bytes else "") for x in shown]
    if all(layer.activation_bytes for layer in shown):
        optional["kept"] = [Text(size(x.activation_bytes[last])) for x in shown]
    optional["output/sample"] = [Text(size(x.output_bytes_per_sample)) for x in shown]
    optional["operators"] = [Text(x.kind, style="dim") for x in shown]
    room = width - sum(_column_width(title, cells) for title, cells in columns.items())
    for title, cells in optional.items():
        room -= _column_width(title, cells)
        if room < 0:
            break
        columns[title] = cells
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    order = ["layer", "operators", *reversed([x for x in columns if x.startswith("batch ")])]
    order += [title for title in columns if title not in order]
    order.append(order.pop(order.index(f"share at {last}")))
    for title in (title for title in order if title in columns):
        right = title not in ("layer", "operators", f"share at {last}")
        table.add_column(title, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in zip(*(columns[title] for title in order if title in columns), strict=True):
        table.add_row(*row)
    return table


def _column_width(title: str, cells: Sequence[Text]) -> int:
    return max([len(title), *(cell.cell_len for cell in cells)]) + 2


def _sum_table(profile: Profile) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    titles = ["batch", "sum of layers", "samples/s"]
    if profile.step_s:
        titles += ["whole step in one piece", "sum/whole"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for batch in profile.batches:
        total = profile.step_time_s(batch)
        cells = [str(batch), seconds(total), f"{batch / total:,.0f}" if total else ""]
        if batch in profile.step_s:
            cells += [seconds(profile.step_s[batch]), f"{profile.sum_over_step(batch):.2f}"]
        table.add_row(*cells)
    return table


def _costliest(profile: Profile, most: int | None) -> Sequence[LayerProfile]:
    if most is None or len(profile.layers) <= most:
        return profile.layers
    last = profile.batches[-1]
    kept = {id(x) for x in sorted(profile.layers, key=lambda layer: -_time(layer, last))[:most]}
    return [layer for layer in profile.layers if id(layer) in kept]


def _batch_columns(batches: Sequence[int]) -> Sequence[int]:
    if len(batches) <= _MAX_BATCH_COLUMNS:
        return batches
    step = (len(batches) - 1) / (_MAX_BATCH_COLUMNS - 1)
    return [batches[round(i * step)] for i in range(_MAX_BATCH_COLUMNS)]


def _time(layer: LayerProfile, batch: int) -> float:
    return layer.forward_s[batch] + layer.backward_s[batch]
