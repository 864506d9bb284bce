"""`burstpool cluster`: looks at this machine and writes a cluster file, or checks and shows one.

Takes a file or `--detect`; prints a table for people or, with `--json`, the cluster as JSON. Decides nothing.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burstpool.cluster.catalogue import in_units
from burstpool.cluster.spec import ClusterSpec, plural
from burstpool.errors import ClusterError

if TYPE_CHECKING:
    from burstpool.cluster.detect import DeviceKind

_KINDS: dict[str, "DeviceKind"] = {"auto": "auto", "cpu": "cpu", "cuda": "cuda"}


def cluster(
    file: Annotated[Path | None, typer.Argument(help="A cluster file to check and show.", show_default=False)] = None,
    detect: Annotated[bool, typer.Option("--detect", help="Look at this machine instead.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write what was detected: .toml or .json.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="Detect so many: CPU workers, or GPUs of those there are.")
    ] = None,
    device: Annotated[str, typer.Option(help="Detect cuda, cpu, or auto: cuda where there is some.")] = "auto",
    measure: Annotated[bool, typer.Option(help="Measure rates and links, or take the catalogue's.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cluster as one JSON object.")] = False,
) -> None:
    """Describe the machines: detect this one, or check a cluster file."""
    if detect == (file is not None):
        raise ClusterError("give either a cluster file or --detect: burstpool cluster --detect -o cluster.toml")
    if not detect and (output or devices is not None or device != "auto" or not measure):
        raise ClusterError("-o, --devices, --device and --no-measure go with --detect")
    if device not in _KINDS:
        raise ClusterError(f"--device {device} is unknown; give {', '.join(_KINDS)}")
    spec = _detect(devices, kind=_KINDS[device], measure=measure) if file is None else ClusterSpec.load(file)
    if output:
        spec.save(output)
    if as_json:
        sys.stdout.write(spec.to_json())
        return
    console = Console()
    show(spec, console)
    if output:
        console.print(f"Written to {output}", markup=False, highlight=False)


def show(spec: ClusterSpec, console: Console) -> None:
    """One view of a cluster: its node groups in a table, and the link between nodes."""
    title = f"{spec.name}: {plural(spec.num_devices, 'device')} in {plural(spec.num_nodes, 'node')}"
    console.print(title, markup=False, highlight=False, style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("node group", "nodes", "devices a node", "memory", "fp32", "link inside"):
        table.add_column(header, no_wrap=True)
    for group in spec.node_groups:
        once: list[Text | str] = [
            Text(group.name),
            str(group.count),
            str(group.link or ""),
        ]  # not again for its second device type
        for part in group.devices:
            found = spec.device_type(part.type)
            fp32 = found.flops_per_s.get("fp32")
            table.add_row(
                once[0],
                once[1],
                Text(f"{part.count} × {found.name}"),
                in_units(found.memory_bytes, "B"),
                in_units(fp32, "FLOP/s") if fp32 else "unknown",
                once[2],
            )
            once = ["", "", ""]
    console.print(table)
    if spec.network:
        console.print(f"Between nodes: {spec.network}", markup=False, highlight=False)


def _detect(num_devices: int | None, *, kind: "DeviceKind", measure: bool) -> ClusterSpec:
    from burstpool.run.machine import this_machine  # imports torch, which takes seconds

    errors = Console(stderr=True)
    with errors.status("looking at this machine") as status:

        def progress(step: str) -> None:
            status.update(step)
            if not errors.is_terminal:  # no spinner there, so say it in lines
                errors.print(step, highlight=False)

        return this_machine(measure=measure, device=kind, num_devices=num_devices, progress=progress)
