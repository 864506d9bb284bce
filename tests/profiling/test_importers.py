"""Importers: the published measurements come in whole, with the right graph and sizes; damaged files are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstpool.errors import ProfileError
from burstpool.profiling.importers import FORMATS, deeppool, import_profile
from burstpool.profiling.profile import Profile

DATA = Path(__file__).parents[3] / "shared" / "data"
BYTES_PER_PARAMETER = 4
BATCH_NORM_CHANNELS_OF_INCEPTION = 17_216
"""Output channels of all of Inception-v3's convolutions; each has a batch norm with a weight and a bias."""


def shared(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the public measurements are not here: {path}")
    return path


def vgg() -> Profile:
    return import_profile(shared("deeppool_a100/A100_vgg.prof"))


def wide_resnet() -> Profile:
    return import_profile(shared("deeppool_a100/A100_wrn.prof"))


def inception() -> Profile:
    return import_profile(shared("deeppool_a100/A100_inception.prof"))


def gnmt_graph() -> Profile:
    return import_profile(shared("placement_graphs/gnmt_training.json"))


def inception_graph() -> Profile:
    return import_profile(shared("placement_graphs/inceptionv3_training.json"))


ALL = [vgg, wide_resnet, inception, gnmt_graph, inception_graph]

CONV = 'conv2d{"in_channels":3,"kernel_size":3,"out_channels":8,"padding":1,"stride":1}[%d][3,6,6]'
RELU = 'ReLU2d{"inplace":true,"kernel_size":1,"padding":0,"stride":1}[%d][8,6,6]'
POOL = 'maxPool2d{"kernel_size":2,"padding":0,"stride":2}[%d][8,6,6]'


def deeppool_text(*batches: int) -> str:
    """A small file in DeepPool's format."""
    return "".join(
        f"{CONV % batch} 0.100 100 1\n{RELU % batch} 0.210 10 200\n{POOL % batch} 0.030 10 20\n"
        " SUM(avg)  0.340  9.9\n\n"
        for batch in batches
    )


def deeppool_file(folder: Path, text: str) -> Path:
    path = folder / "A100_tiny.prof"
    path.write_text(text)
    return path


# --- DeepPool ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("vgg", (1, 2, 3, 4, 6, 8, 16, 32, 64)),
        ("wrn", (1, 2, 3, 4, 6, 8, 16, 32)),
        ("inception", (*range(1, 17), 32, *range(59, 65))),
    ],
)
def test_layers_add_up_to_the_files_sums_at_every_batch(name: str, batches: tuple[int, ...]) -> None:
    path = shared(f"deeppool_a100/A100_{name}.prof")
    profile = import_profile(path)
    text = path.read_text()
    sums_ms = [float(found) for found in re.findall(r"(?:SUM\(avg\)|sum:)\s+([\d.]+)", text)]
    in_file = list(dict.fromkeys(int(batch) for batch in re.findall(r"\}\[(\d+)\]", text)))
    assert profile.batches == batches
    for batch, sum_ms in zip(in_file, sums_ms, strict=True):
        # The file cuts forward and backward to whole microseconds: 0.54% of VGG's step at batch 1.
        assert profile.step_time_s(batch) * 1e3 == pytest.approx(sum_ms, rel=0.006)


def test_vgg_is_a_chain_with_the_true_number_of_parameters() -> None:
    profile = vgg()
    assert (profile.model, profile.device, profile.dtype) == ("vgg16", "A100", "tf32")
    assert profile.parameter_bytes == 138_357_544 * BYTES_PER_PARAMETER
    assert sum(layer.flops_per_sample for layer in profile.layers) == pytest.approx(2 * 15.47e9, rel=1e-3)
    before = "input"
    for layer in profile.layers:
        assert layer.inputs == (before,)
        before = layer.name
    first = profile.layer("features.0")
    assert (first.parameter_bytes, first.output_bytes_per_sample) == (7168, 12_845_056)
    assert profile.layer("classifier.6").output_bytes_per_sample == 4000


def test_a_convolution_and_its_relu_are_one_layer_so_that_the_backward_is_where_it_belongs() -> None:
    first = vgg().layer("features.0")
    assert first.kind == "conv2d+relu"
    assert first.forward_s[64] == pytest.approx((2157 + 1205) * 1e-6)
    assert first.backward_s[64] == pytest.approx((6 + 3730) * 1e-6)
    assert not any(layer.kind == "relu" for layer in vgg().layers)
    for layer in vgg().layers:
        if layer.kind == "conv2d+relu" and layer.name != "features.0":  # whose input needs no gradient
            assert 1.5 < layer.backward_s[64] / layer.forward_s[64] < 3  # two products for the forward's one


def test_wide_resnet_is_a_chain_of_bottlenecks_with_the_true_number_of_parameters() -> None:
    profile = wide_resnet()
    assert profile.model == "wide_resnet101_2"
    first_batch_norm = 128  # not measured, so not in the file
    assert profile.parameter_bytes == (126_886_696 - first_batch_norm) * BYTES_PER_PARAMETER
    assert [layer.name for layer in profile.layers][:4] == ["conv1", "maxpool", "layer1.0", "layer1.1"]
    assert sum(layer.kind == "bottleneck" for layer in profile.layers) == 33
    assert profile.layer("layer4.2").output_bytes_per_sample == 2048 * 7 * 7 * 4
    assert sum(layer.flops_per_sample for layer in profile.layers) == pytest.approx(2 * 22.75e9, rel=1e-3)


def test_inception_is_a_graph_of_branches_and_joins_with_the_true_number_of_parameters() -> None:
    profile = inception()
    assert profile.model == "inception_v3"
    classifier = 2048 * 1000 + 1000  # missing from the file, as are the batch norms
    whole = profile.parameter_bytes // BYTES_PER_PARAMETER + 2 * BATCH_NORM_CHANNELS_OF_INCEPTION + classifier
    assert whole == 23_834_568
    joins = {layer.name: layer for layer in profile.layers if layer.kind == "cat"}
    assert len(joins) == 11
    assert {len(joins[f"Mixed_{block}.cat"].inputs) for block in ("5b", "5c", "5d", "6b", "6c", "6d", "6e")} == {4}
    assert joins["Mixed_6a.cat"].inputs == ("Mixed_6a.branch3x3", "Mixed_6a.branch3x3dbl_3", "Mixed_6a.maxpool")
    assert len(joins["Mixed_7c.cat"].inputs) == 6
    assert joins["Mixed_7c.cat"].output_bytes_per_sample == 2048 * 8 * 8 * 4
    assert profile.layer("Mixed_7b.branch3x3_2a").inputs == profile.layer("Mixed_7b.branch3x3_2b").inputs
    assert profile.layer("Mixed_6e.branch_pool").inputs == ("Mixed_6e.avgpool",)
    assert profile.layer("Mixed_6e.avgpool").inputs == ("Mixed_6d.cat",)


def test_what_inception_lacks_is_said() -> None:
    assert "concatenations were not measured and take 0 s" in inception().source
    assert "the classifier" in inception().source
    assert all(layer.forward_s[64] == 0 for layer in inception().layers if layer.kind == "cat")


def test_an_unknown_chain_is_read_too(tmp_path: Path) -> None:
    profile = import_profile(deeppool_file(tmp_path, deeppool_text(4, 1)))
    assert (profile.model, profile.device, profile.batches) == ("tiny", "A100", (1, 4))
    assert [layer.kind for layer in profile.layers] == ["conv2d+relu", "maxpool2d"]
    assert profile.layers[1].inputs == (profile.layers[0].name,)
    assert profile.parameter_bytes == (3 * 8 * 9 + 8) * 4
    assert profile.layers[1].output_bytes_per_sample == 8 * 3 * 3 * 4


def test_deeppools_operators_can_be_kept_apart(tmp_path: Path) -> None:
    path = deeppool_file(tmp_path, deeppool_text(4, 1))
    merged, apart = deeppool.read(path), deeppool.read(path, merge_relus=False)
    assert [layer.kind for layer in apart.layers] == ["conv2d", "relu", "maxpool2d"]
    assert apart.step_time_s(4) == pytest.approx(merged.step_time_s(4))
    assert apart.parameter_bytes == merged.parameter_bytes


def test_a_batch_that_lacks_a_layer_is_left_out_and_said(tmp_path: Path) -> None:
    partial = f"{CONV % 2} 0.100 100 1\n{POOL % 2} 0.030 10 20\nSUM(avg) 0.130\n"
    profile = import_profile(deeppool_file(tmp_path, deeppool_text(4, 1) + partial))
    assert profile.batches == (1, 4)
    assert "left out: batch 2 (1 of 3 operators were not measured)" in profile.source


def test_a_layer_that_no_whole_batch_has_is_an_error_that_names_its_line(tmp_path: Path) -> None:
    other = f"{CONV % 2} 0.1 100 1\n{POOL.replace('maxPool2d', 'avgPool2d') % 2} 0.03 10 20\nSUM(avg) 0.130\n"
    path = deeppool_file(tmp_path, deeppool_text(4) + other)
    with pytest.raises(ProfileError, match=r"A100_tiny\.prof, line 7: avgPool2d of 8×6×6 has a time at batch 2 but no"):
        import_profile(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("conv2d{} nonsense", "line 6 is not of the form"),
        (CONV % 1 + " 0.1 100", "line 6 is not of the form"),
        (CONV % 1 + " 0.1 -100 5", "line 6 is not of the form"),
        ('conv2d{"in_channels":}[1][3,6,6] 0.1 100 5', "line 6: the operator's parameters are not JSON"),
        ("conv3d{}[1][3,6,6] 0.1 100 5", "line 6: unknown operator 'conv3d'; known are: conv2d"),
        (CONV % 2 + " 0.1 100 5\n" + CONV % 1 + " 0.1 100 5", "line 7: batch 1 begins before the sum of batch 2"),
        ("SUM(avg) 3.0", "line 6: a sum without lines before it"),
        (CONV % 1 + " 0.1 100 5\nSUM(avg) 3.0", "line 7: the sum is 3.0 ms, but the lines add up to 0.100 ms"),
        (CONV % 4 + " 0.1 100 5\nSUM(avg) 0.1", "line 7: batch 4 comes twice"),
        (CONV % 1 + " 0.1 100 5", "line 6: the file ends without the sum of a batch; was it cut short?"),
    ],
)
def test_a_malformed_deeppool_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = deeppool_file(tmp_path, deeppool_text(4) + line + "\n")
    with pytest.raises(ProfileError) as caught:
        import_profile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_shapes_that_do_not_follow_from_each_other_are_refused(tmp_path: Path) -> None:
    path = deeppool_file(tmp_path, deeppool_text(4).replace("[8,6,6]   ", "").replace("ReLU2d", "ReLU1d"))
    assert import_profile(path).layers[0].kind == "conv2d+relu"
    path = deeppool_file(tmp_path, deeppool_text(4).replace("[4][8,6,6] 0.030", "[4][7,6,6] 0.030"))
    with pytest.raises(ProfileError, match="line 3 takes 7×6×6 where the layer before it gives 8×6×6"):
        import_profile(path)


def test_parameters_that_do_not_fit_their_operator_are_refused(tmp_path: Path) -> None:
    path = deeppool_file(tmp_path, deeppool_text(4).replace('"out_channels":8,', ""))
    with pytest.raises(ProfileError, match="line 1: the parameters of conv2d do not fit its shape 3×6×6"):
        import_profile(path)


def test_what_the_profile_refuses_is_told_with_the_files_name(tmp_path: Path) -> None:
    path = deeppool_file(tmp_path, deeppool_text(4).replace("[4]", "[0]"))
    with pytest.raises(ProfileError, match=r"A100_tiny\.prof: forward_s of layer 'conv2d_0' has batch 0"):
        import_profile(path)


def test_a_deeppool_file_must_say_its_device_in_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tiny.prof"
    path.write_text(deeppool_text(1))
    with pytest.raises(ProfileError, match=r"does not say its device; name the file DEVICE_model\.prof"):
        import_profile(path)


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_cut_deeppool_file_is_an_error_or_holds_whole_batches_only(
    data: st.DataObject, tmp_path_factory: Any
) -> None:
    whole = deeppool_text(4, 2, 1)
    path = deeppool_file(tmp_path_factory.mktemp("cut"), whole[: data.draw(st.integers(0, len(whole) - 1))])
    try:
        profile = import_profile(path, "deeppool")
    except ProfileError:
        return
    assert profile.batches in ((4,), (2, 4), (1, 2, 4))  # cut after a sum: the file does not say how many there are
    assert profile.step_time_s(4) == pytest.approx(0.341e-3)


# --- Placement graphs --------------------------------------------------------------------------------------------


def test_the_inception_graph_is_the_whole_model_at_batch_128() -> None:
    profile = inception_graph()
    assert (profile.model, profile.batches, len(profile.layers)) == ("inception_v3", (128,), 326)
    assert profile.parameter_bytes == 27_161_264 * BYTES_PER_PARAMETER  # torchvision's, auxiliary classifier included
    assert profile.layer("node1").output_bytes_per_sample == 3 * 299 * 299 * 4
    assert sum(profile.times([128])[0])[0] == pytest.approx(0.310969)
    assert sum(profile.times([128])[1])[0] == pytest.approx(0.399769)
    assert "data loading" in profile.source


def test_the_gnmt_graph_is_the_whole_model_at_batch_128() -> None:
    profile = gnmt_graph()
    assert (profile.model, profile.batches, len(profile.layers)) == ("gnmt", (128,), 96)
    assert profile.step_time_s(128) == pytest.approx(0.520453)
    assert profile.layer("node4").parameter_bytes == 32_320 * 1024 * 4  # the embedding
    assert profile.layer("node96").parameter_bytes == (1024 + 1) * 32_320 * 4  # the classifier, a last node
    assert profile.layer("node96").output_bytes_per_sample == 25 * 32_320 * 4


def test_a_placement_graphs_edges_are_its_forward_edges() -> None:
    path = shared("placement_graphs/gnmt_training.json")
    graph = json.loads(path.read_text())
    forward = {node["id"]: node["name"] for node in graph["nodes"] if not node["isBackwardNode"]}
    edges = {
        (forward[edge["sourceId"]], forward[edge["destId"]]) for edge in graph["edges"] if edge["sourceId"] in forward
    }
    profile = gnmt_graph()
    assert edges == {(name, layer.name) for layer in profile.layers for name in layer.inputs if name != "input"}
    assert all(layer.inputs == ("input",) for layer in profile.layers if layer.kind == "input")


def small_graph(**changes: Any) -> dict[str, Any]:
    node = {"supportedOnFpga": 1, "cpuLatency": 1.0, "fpgaLatency": 2.0, "size": 100.0}
    nodes = [
        node | {"id": 1, "name": "in", "isBackwardNode": 0, "colorClass": 1},
        node | {"id": 2, "name": "out", "isBackwardNode": 0, "colorClass": 2},
        node | {"id": 3, "name": "ingrad", "isBackwardNode": True, "colorClass": 1, "fpgaLatency": 4.0},
        node | {"id": 4, "name": "outgrad", "isBackwardNode": True, "colorClass": 2, "fpgaLatency": 4.0},
    ]
    edges = [
        {"sourceId": 1, "destId": 2, "cost": 99.0, "size": 60.0},
        {"sourceId": 3, "destId": 4, "cost": 99.0, "size": 60.0},
    ]
    return {"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges} | changes


def graph_file(folder: Path, graph: dict[str, Any]) -> Path:
    path = folder / "graph_training.json"
    path.write_text(json.dumps(graph))
    return path


def test_of_an_unknown_graph_one_minibatch_is_the_unit(tmp_path: Path) -> None:
    profile = import_profile(graph_file(tmp_path, small_graph()))
    assert profile.batches == (1,)
    assert "batch 1 is one minibatch of unknown size" in profile.source
    assert profile.layer("in").parameter_bytes == 40  # its size less what its edges carry; `cost` is ignored
    assert profile.layer("in").output_bytes_per_sample == 60
    assert profile.layer("out").inputs == ("in",)
    assert (profile.forward_s("in", 1), profile.backward_s("in", 1)) == (0.002, 0.004)


def changed(key: str, index: int, **changes: Any) -> dict[str, Any]:
    graph = small_graph()
    graph[key][index] |= changes
    return graph


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (small_graph(nodes=small_graph()["nodes"][:2]), "no backward nodes: an inference graph"),
        (
            small_graph(nodes=small_graph()["nodes"][:3]),
            "node 2 is not alone in its colorClass 2 with one backward node",
        ),
        (small_graph(nodes=small_graph()["nodes"][1:]), "backward node 3 has no forward node"),
        (changed("nodes", 1, colorClass=1), "node 1 is not alone in its colorClass 1"),
        (changed("nodes", 1, supportedOnFpga=0), "node 2 does not run on an accelerator"),
        (changed("nodes", 1, fpgaLatency=-1.0), "nodes[1].fpgaLatency: Input should be greater than or equal to 0"),
        (changed("nodes", 1, fpgaLatency=float("nan")), "nodes[1].fpgaLatency: Input should be"),
        (changed("edges", 0, size=160.0), "node 1 hands on 160 bytes but has size 100"),
        (changed("edges", 1, sourceId=2, destId=1), "the forward edges go in a circle through node 1"),
        (changed("edges", 1, sourceId=1, destId=2, size=50.0), "edges from node 1 carry different sizes"),
        ({"nodes": []}, "edges: Field required"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(tmp_path: Path, graph: dict[str, Any], message: str) -> None:
    path = graph_file(tmp_path, graph)
    with pytest.raises(ProfileError) as caught:
        import_profile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_a_cut_graph_is_a_profile_error(data: st.DataObject, tmp_path_factory: Any) -> None:
    whole = json.dumps(small_graph())
    path = tmp_path_factory.mktemp("cut") / "graph.json"
    path.write_text(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProfileError):
        import_profile(path)


# --- All formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ALL)
def test_what_is_imported_can_be_saved_and_read_again(load: Any, tmp_path: Path) -> None:
    profile = load()
    assert import_profile(profile.save(tmp_path / "p.json")) == profile


def test_the_format_is_recognised_by_the_text_not_by_the_name(tmp_path: Path) -> None:
    assert set(FORMATS) == {"burstpool", "deeppool", "placement-graph"}
    original = import_profile(deeppool_file(tmp_path, "# a remark\n" + deeppool_text(1)))
    odd = tmp_path / "odd.prof"
    assert import_profile(original.save(odd)) == original
    assert import_profile(odd, "burstpool") == original


def test_unknown_formats_and_files_are_refused(tmp_path: Path) -> None:
    noise = tmp_path / "noise.txt"
    noise.write_text("hello\n")
    with pytest.raises(ProfileError, match=r"noise\.txt is in none of the known formats \(placement-graph, deeppool"):
        import_profile(noise)
    with pytest.raises(ProfileError, match="there is no profile format 'xml'; known are"):
        import_profile(noise, "xml")
    with pytest.raises(ProfileError, match=r"cannot read .*absent\.prof: No such file"):
        import_profile(tmp_path / "absent.prof")
    noise.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="is not text"):
        import_profile(noise)
