"""The cluster description: what it refuses, what it answers, and that files come back unchanged."""

import copy
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstpool.cluster import catalogue
from burstpool.cluster.catalogue import DTYPES, DeviceType, Link
from burstpool.cluster.spec import ClusterSpec, Device, DeviceCount, DeviceFigures, NodeGroup
from burstpool.errors import ClusterError

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"

TWO_NODES = """
schema_version = 1
name = "two"
network = "infiniband-hdr"

[[node_groups]]
name = "a"
count = 2
devices = [{ type = "A100", count = 2 }, { type = "T4", count = 1 }]
link = "pcie4"
"""

lines = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: text.isprintable() and bool(text.strip())
)
rates = st.floats(min_value=1e-3, max_value=1e18)
flops = st.dictionaries(st.sampled_from(DTYPES), rates, min_size=1)
links = st.builds(
    Link,
    bytes_per_s=rates,
    latency_s=st.floats(min_value=0, max_value=10),
    send_s=st.floats(min_value=0, max_value=10),
    source=st.just("") | lines,
)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSpec:
    """Any cluster: known and own device types, corrections, one node or many."""
    own_names = draw(st.lists(lines, max_size=3, unique_by=str.casefold))
    own_names = [name for name in own_names if name.casefold() not in map(str.casefold, catalogue.names())]
    figures = [
        DeviceFigures(
            name=name,
            memory_bytes=draw(st.integers(1, 1 << 50)),
            memory_bytes_per_s=draw(rates),
            flops_per_s=draw(flops),
            multiprocessors=draw(st.none() | st.integers(1, 500)),
            host_step_s=draw(st.none() | st.floats(0, 1)),
            host_block_s=draw(st.none() | st.floats(0, 1)),
            source=draw(lines),
        )
        for name in own_names
    ]
    known = draw(st.lists(st.sampled_from(catalogue.names()), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        figures.append(DeviceFigures(name=known[0], flops_per_s=draw(flops | st.just({}))))
    parts = [DeviceCount(type=name, count=draw(st.integers(1, 4))) for name in [*known, *own_names]]
    names = draw(st.lists(lines, min_size=1, max_size=3, unique=True))
    groups = tuple(
        NodeGroup(name=name, count=draw(st.integers(1, 3)), devices=tuple(parts), link=draw(links)) for name in names
    )
    return ClusterSpec(name=draw(lines), node_groups=groups, network=draw(links), device_types=tuple(figures))


@given(clusters())
@settings(deadline=None)
def test_json_comes_back_unchanged(cluster: ClusterSpec) -> None:
    assert ClusterSpec.from_json(cluster.to_json()) == cluster


@given(clusters())
@settings(deadline=None)
def test_toml_comes_back_unchanged_and_is_the_same_text_again(cluster: ClusterSpec) -> None:
    again = ClusterSpec.from_toml(cluster.to_toml())
    assert again == cluster
    assert again.to_toml() == cluster.to_toml()


@given(clusters())
@settings(deadline=None)
def test_devices_are_ranked_node_by_node(cluster: ClusterSpec) -> None:
    assert [device.index for device in cluster.devices] == list(range(cluster.num_devices))
    assert [node.index for node in cluster.nodes()] == list(range(cluster.num_nodes))
    assert tuple(device for node in cluster.nodes() for device in node.devices) == cluster.devices
    assert all(device.node == node.index for node in cluster.nodes() for device in node.devices)
    assert cluster.homogeneous == (len({device.type for device in cluster.devices}) == 1)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_saved_files_load_unchanged(tmp_path: Path, suffix: str) -> None:
    cluster = ClusterSpec.load(EXAMPLES / "mixed.toml")
    assert ClusterSpec.load(cluster.save(tmp_path / f"cluster{suffix}")) == cluster


@pytest.mark.parametrize(
    ("file", "num_devices", "num_nodes", "homogeneous"),
    [("dgx-a100.toml", 8, 1, True), ("hetpipe.toml", 16, 4, False), ("mixed.toml", 35, 7, False)],
)
def test_examples_load(file: str, num_devices: int, num_nodes: int, homogeneous: bool) -> None:
    cluster = ClusterSpec.load(EXAMPLES / file)
    assert (cluster.num_devices, cluster.num_nodes) == (num_devices, num_nodes)
    assert cluster.homogeneous == homogeneous
    assert len(cluster.devices) == num_devices


def test_the_documented_file_loads() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
    text = page.split("```toml\n")[1].split("```")[0]
    assert ClusterSpec.from_toml(text).num_devices == 19


def test_a_link_is_the_nodes_own_inside_and_the_network_between() -> None:
    cluster = ClusterSpec.from_toml(TWO_NODES)
    assert cluster.link(0, 2) == catalogue.link("pcie4")
    assert cluster.link(2, 3) == catalogue.link("infiniband-hdr")
    assert cluster.link(cluster.devices[5], cluster.devices[0]) == cluster.link(0, 5)
    assert [device.type for device in cluster.devices] == ["A100", "A100", "T4"] * 2


def test_a_device_has_no_link_to_itself_or_to_one_that_is_not_there() -> None:
    cluster = ClusterSpec.from_toml(TWO_NODES)
    with pytest.raises(ClusterError, match="device 1 of 'two' needs no link to itself"):
        cluster.link(1, 1)
    with pytest.raises(ClusterError, match="no device 6 in 'two'; it has 0 to 5"):
        cluster.link(0, 6)
    with pytest.raises(ClusterError, match="no device -1"):
        cluster.link(-1, 0)


def test_type_names_are_spelt_as_in_the_catalogue() -> None:
    cluster = ClusterSpec.uniform("a100-80gb", devices_per_node=2, link="nvlink3")
    assert cluster.devices == (Device(0, "A100-80GB", 0), Device(1, "A100-80GB", 0))
    assert cluster.device_type("A100-80gb") == catalogue.device_type("A100-80GB")


def test_a_files_figures_go_before_the_catalogues_and_leave_the_others() -> None:
    cluster = ClusterSpec.load(EXAMPLES / "mixed.toml")
    corrected, listed = cluster.device_type("V100"), catalogue.device_type("V100")
    assert corrected.memory_bytes == 15_750_000_000
    assert corrected.flops_per_s == listed.flops_per_s
    assert corrected.source.startswith("example; else ")
    assert cluster.device_type("prototype").flops_per_s == {"fp32": 9e12, "fp16": 18e12}
    only_fp32 = DeviceFigures(name="V100", flops_per_s={"fp32": 1e12}).over(listed)
    assert only_fp32.flops_per_s == {**listed.flops_per_s, "fp32": 1e12}


def test_a_preset_can_be_corrected_in_place() -> None:
    network = ClusterSpec.load(EXAMPLES / "mixed.toml").network
    assert network == Link(bytes_per_s=12.5e9, latency_s=35e-6, source="example")


def test_thousands_of_devices_are_asked_about_quickly() -> None:
    cluster = ClusterSpec.uniform("A100", devices_per_node=8, num_nodes=1000, link="nvlink3", network="infiniband-hdr")
    start = time.perf_counter()
    for i in range(20_000):
        cluster.link(i % 8000, (7 * i + 1) % 8000 if (7 * i + 1) % 8000 != i % 8000 else 0)
    assert time.perf_counter() - start < 2  # 0.05 s on an idle core; per-query work over all devices takes minutes


def test_copies_pickles_and_hashes_are_of_the_value_alone() -> None:
    cluster = ClusterSpec.from_toml(TWO_NODES)
    fresh = ClusterSpec.from_toml(TWO_NODES)
    assert cluster.devices  # works out the layout, which must not show
    again = pickle.loads(pickle.dumps(cluster))
    assert again == cluster == fresh == copy.copy(cluster)
    assert again.devices == cluster.devices
    assert hash(again) == hash(fresh)


def test_prints_as_a_person_would_say_it() -> None:
    assert str(ClusterSpec.from_toml(TWO_NODES)) == (
        "two: 6 devices in 2 nodes\n"
        "  a: 2 nodes of 2 × A100 + 1 × T4, inside 31.5 GB/s, 14 µs\n"
        "  between nodes: 25 GB/s, 18 µs"
    )


MISTAKES = {
    "unknown field": ("count = 2\n", "cuont = 2\n", "node_groups[0].cuont: unknown field"),
    "negative bandwidth": (
        '"pcie4"',
        "{ bytes_per_s = -1e9, latency_s = 0 }",
        "node_groups[0].link: bytes_per_s=-1000000000.0 must be more than 0",
    ),
    "negative latency": (
        '"infiniband-hdr"',
        "{ bytes_per_s = 1e9, latency_s = -1 }",
        "network: latency_s=-1.0 must be 0 or more",
    ),
    "NaN": (
        '"pcie4"',
        "{ bytes_per_s = nan, latency_s = 0 }",
        "node_groups[0].link.bytes_per_s: Input should be a finite number",
    ),
    "infinite": (
        '"pcie4"',
        "{ bytes_per_s = inf, latency_s = 0 }",
        "node_groups[0].link.bytes_per_s: Input should be a finite number",
    ),
    "newer schema": ("schema_version = 1", "schema_version = 2", "schema_version 2, newer than 1"),
    "no schema": ("schema_version = 1", "", "schema_version None; expected 1"),
    "unknown device type": (
        '"A100"',
        '"A10O"',
        "type \"A10O\" of node group \"a\": device type 'A10O' is not in the catalogue (did you mean 'A100'",
    ),
    "a type of two lines": ('"T4"', '"T\\n4"', "node_groups[0].devices[1]: type of a device='T\\n4' must be one line"),
    "how to define a type": ('"T4"', '"X9"', '; to define it, add [[device_types]] with name = "X9"'),
    "unknown preset": (
        '"pcie4"',
        '"pcie44"',
        "node_groups[0].link: there is no link preset 'pcie44' (did you mean 'pcie4'",
    ),
    "preset in a table": ('"pcie4"', '{ preset = "pci" }', "node_groups[0].link: there is no link preset 'pci'"),
    "half a link": ('"pcie4"', "{ bytes_per_s = 1e9 }", "node_groups[0].link.latency_s: Field required"),
    "link of a wrong type": ('"pcie4"', "3", "node_groups[0].link: Input should be a dictionary"),
    "no nodes": ("count = 2\n", "count = 0\n", 'count=0 of node group "a" must be at least 1'),
    "no such device": ("count = 1 }]", "count = 0 }]", 'count=0 of device type "T4" must be at least 1'),
    "no devices": (
        '[{ type = "A100", count = 2 }, { type = "T4", count = 1 }]',
        "[]",
        'node group "a" has no devices',
    ),
    "no link inside": ('link = "pcie4"', "", 'node group "a" has several devices a node and no link'),
    "no network": ('network = "infiniband-hdr"', "", "2 nodes and no network"),
    "too many": ("count = 2\n", "count = 2_000_000\n", "6000000 devices are more than 1000000"),
    "empty name": ('name = "a"', 'name = " "', "node_groups[0]: name of a node group=' '"),
    "cut short": ('link = "pcie4"', 'link = "pci', "is not whole TOML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_ends_in_one_line_that_names_file_and_field(mistake: str, tmp_path: Path) -> None:
    right, wrong, expected = MISTAKES[mistake]
    assert TWO_NODES.count(right) == 1
    text = TWO_NODES.replace(right, wrong)
    if mistake == "cut short":
        text = text[: text.index(wrong) + len(wrong)]
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(path)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


FIGURES_MISTAKES = {
    "neither defined nor known": ('name = "T5"', 'device_types describes "T5", which no node group has'),
    "a rate of nothing": ('name = "T4"\nflops_per_s = { fp32 = 0 }', "flops_per_s.fp32=0.0 must be more than 0"),
    "an unknown key": ('name = "T4"\nflops_per_s = { float32 = 1e12 }', "device_types[0].flops_per_s.float32"),
    "no memory": ('name = "T4"\nmemory_bytes = 0', "device_types[0]: memory_bytes=0 must be more than 0"),
    "more memory than there is": ('name = "T4"\nmemory_bytes = 1' + "0" * 400, "must be more than 0 and less"),
    "host's time below nothing": ('name = "T4"\nhost_step_s = -1.0', "host_step_s=-1.0 must be 0 or more"),
    "no multiprocessors": ('name = "T4"\nmultiprocessors = 0', "multiprocessors=0 must be at least 1"),
    "twice": ('name = "T4"\n[[device_types]]\nname = "t4"', 'device type "t4" is described 2 times'),
    "no source": ('name = "T4"\nsource = ""', "source of a device type=''"),
}


@pytest.mark.parametrize("mistake", FIGURES_MISTAKES)
def test_a_mistake_in_a_device_type_is_named(mistake: str) -> None:
    text, expected = FIGURES_MISTAKES[mistake]
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_toml(f"{TWO_NODES}\n[[device_types]]\n{text}\n", source="cluster.toml")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("cluster.toml: ")


def test_a_type_of_ones_own_says_which_figures_it_lacks() -> None:
    text = TWO_NODES.replace('"T4"', '"X9"') + '\n[[device_types]]\nname = "X9"\nmemory_bytes = 1\n'
    with pytest.raises(ClusterError, match='"X9" is not in the catalogue, so it needs memory_bytes_per_s, flops_per_s'):
        ClusterSpec.from_toml(text)


def test_groups_have_names_of_their_own() -> None:
    group = TWO_NODES[TWO_NODES.index("[[node_groups]]") :]
    with pytest.raises(ClusterError, match='node group "a" is described 2 times'):
        ClusterSpec.from_toml(TWO_NODES + group)


def test_a_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(ClusterError, match="node_groups is empty"):
        ClusterSpec.from_toml('schema_version = 1\nname = "none"\nnode_groups = []\n')


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read .*none\.toml: No such file"):
        ClusterSpec.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=r"binary\.toml is not whole TOML"):
        ClusterSpec.load(tmp_path / "binary.toml")
    (tmp_path / "half.json").write_text('{"schema_version": 1, "name"')
    with pytest.raises(ClusterError, match=r"half\.json is not whole JSON"):
        ClusterSpec.load(tmp_path / "half.json")


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_no_damaged_file_ends_in_anything_but_a_cluster_error(data: st.DataObject) -> None:
    text = (EXAMPLES / "mixed.toml").read_text()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    junk = data.draw(st.text(max_size=5) | st.sampled_from(["nan", "-1", "1e999", "[[", "true", '"', "9" * 400, "{}"]))
    message = ""
    try:
        ClusterSpec.from_toml(text[:start] + junk + text[end:])
    except ClusterError as error:
        message = str(error)
    assert "\n" not in message


def test_mistakes_in_python_are_value_errors() -> None:
    with pytest.raises(ValueError, match="bytes_per_s=nan"):
        Link(bytes_per_s=math.nan, latency_s=0)
    with pytest.raises(ValueError, match="count=0"):
        DeviceCount(type="A100", count=0)
    with pytest.raises(ValueError, match="'A101' is not in the catalogue"):
        ClusterSpec.uniform("A101", devices_per_node=1)
    with pytest.raises(ValueError, match="flops_per_s of 'x' is empty"):
        DeviceType(name="x", memory_bytes=1, memory_bytes_per_s=1.0, flops_per_s={}, source="nowhere")


def test_reading_a_cluster_imports_no_torch() -> None:
    code = "import sys; from burstpool.cluster.spec import ClusterSpec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
