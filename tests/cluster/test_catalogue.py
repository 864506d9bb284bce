"""The catalogue: its figures are there, are sourced, and are found by the names people and drivers use."""

import itertools

import pytest

from burstpool.cluster import catalogue
from burstpool.errors import ClusterError

NAMES = ["K80", "P100", "V100", "T4", "A100", "A100-80GB", "H100", "H200", "B200", "L4", "cpu-core"]
NAMES += ["RTX 2060", "Quadro P4000", "TITAN V", "TITAN RTX", "RTX 3090"]
LINKS = ["nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "loopback"]
LINKS += ["infiniband-fdr", "infiniband-edr", "infiniband-hdr", "infiniband-ndr"]
LINKS += ["ethernet-10g", "ethernet-25g", "ethernet-100g"]


@pytest.mark.parametrize("name", NAMES)
def test_the_devices_that_matter_are_listed(name: str) -> None:
    assert name in catalogue.names()


@pytest.mark.parametrize("name", catalogue.names())
def test_a_devices_figures_are_sourced_and_in_the_range_of_real_devices(name: str) -> None:
    found = catalogue.device_type(name)
    assert found.source
    assert 1e9 < found.memory_bytes < 1e12
    assert 1e9 < found.memory_bytes_per_s < 1e14
    assert found.multiprocessors is None or 10 <= found.multiprocessors <= 200
    assert {"fp64", "fp32"} <= set(found.flops_per_s)
    assert all(1e9 < rate < 1e16 for rate in found.flops_per_s.values())
    assert found.flops_per_s["fp64"] <= found.flops_per_s["fp32"]


@pytest.mark.parametrize("name", catalogue.names())
def test_narrower_types_are_never_slower(name: str) -> None:
    rates = catalogue.device_type(name).flops_per_s
    ordered = [rates[key] for key in ("fp64", "fp32", "tf32", "fp16") if key in rates]
    assert ordered == sorted(ordered)
    if "bf16" in rates:
        assert rates["bf16"] == rates["fp16"]  # so on every NVIDIA GPU that has both


def test_newer_data_centre_devices_are_faster() -> None:
    line = [catalogue.device_type(name) for name in ("K80", "P100", "V100", "A100", "H100", "B200")]
    for older, newer in itertools.pairwise(line):
        assert older.memory_bytes_per_s < newer.memory_bytes_per_s
        assert older.flops_per_s["fp32"] < newer.flops_per_s["fp32"]


def test_names_are_found_whatever_their_case() -> None:
    assert catalogue.device_type("titan rtx") is catalogue.device_type("TITAN RTX")
    assert catalogue.link("NVLink3") == catalogue.link("nvlink3")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA B200", "B200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla P100-SXM2-16GB", "P100"),
        ("Tesla T4", "T4"),
        ("Tesla K80", "K80"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("GeForce RTX 2060", "RTX 2060"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("TITAN V", "TITAN V"),
        ("Quadro P4000", "Quadro P4000"),
    ],
)
def test_drivers_names_are_recognised(reported: str, name: str) -> None:
    assert catalogue.match(reported) == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA A100 80GB PCIe",
        "Tesla V100-PCIE-16GB",
        "NVIDIA GeForce RTX 2060 SUPER",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA L40S",
        "AMD Instinct MI300X",
        "NVIDIA",
        "",
    ],
)
def test_variants_with_other_figures_are_not_taken_for_a_listed_device(reported: str) -> None:
    assert catalogue.match(reported) is None


def test_every_recognised_name_is_listed() -> None:
    assert set(catalogue._catalogue().reported_names.values()) <= set(catalogue.names())


def test_an_unknown_device_names_close_ones() -> None:
    with pytest.raises(ClusterError, match=r"'H10' is not in the catalogue .did you mean 'H100'"):
        catalogue.device_type("H10")
    with pytest.raises(ClusterError, match="did you mean 'Quadro P4000'"):
        catalogue.device_type("p4000")
    with pytest.raises(ClusterError, match=r"it has K80, P100, .*, cpu-core"):
        catalogue.device_type("zzz")


def test_a_missing_rate_names_those_there_are() -> None:
    assert catalogue.device_type("A100").peak_flops_per_s("bf16") == 312e12
    with pytest.raises(ClusterError, match="no bf16 rate is known for device type 'V100'; known: fp64, fp32, fp16"):
        catalogue.device_type("V100").peak_flops_per_s("bf16")


@pytest.mark.parametrize("name", LINKS)
def test_link_presets_are_sourced_and_in_the_range_of_real_links(name: str) -> None:
    found = catalogue.link(name)
    assert found.source == name
    assert catalogue.link_source(name)
    assert 1e9 <= found.bytes_per_s <= 1e12
    assert 1e-6 <= found.latency_s <= 1e-4


def test_links_are_listed_and_unknown_ones_name_close_ones() -> None:
    assert set(LINKS) == set(catalogue.link_names())
    with pytest.raises(ClusterError, match=r"no link preset 'nvlink9' .did you mean 'nvlink"):
        catalogue.link("nvlink9")


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        (3e11, "B/s", "300 GB/s"),
        (15.754e9, "B/s", "15.8 GB/s"),
        (999.9e9, "B/s", "1 TB/s"),
        (1.2e-5, "s", "12 µs"),
        (2e-9, "s", "2 ns"),
        (0, "s", "0 s"),
        (1, "B", "1 B"),
    ],
)
def test_quantities_are_written_as_people_write_them(value: float, unit: str, written: str) -> None:
    assert catalogue.in_units(value, unit) == written
