"""Tracing and measuring on a CUDA device."""

import pytest
import torch

from burstpool import load_job, trace
from burstpool.model import zoo
from burstpool.model.check import check_step
from burstpool.profiling.measure import profile_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*_flat_weights.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*RNN module weights are not part of single contiguous chunk.*:UserWarning"),
]


@pytest.mark.parametrize("name", ["tiny_vgg", "tiny_resnet", "tiny_inception", "tiny_lstm", "tiny_transformer"])
def test_a_model_traced_on_the_cpu_runs_the_same_on_cuda(name: str) -> None:
    job = load_job(f"zoo:{name}")
    example = job.samples(4)[0]
    traced = trace(job.build_model(), example)
    traced.model.to("cuda")
    found = check_step(traced, example.to("cuda"), batch=6)
    assert found.outputs_equal
    assert found.gradient_error < 1e-5  # fp32, and atomic additions in some kernels


@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_layers_add_up_to_the_whole_step_on_cuda(autocast: str | None) -> None:
    found = profile_job(load_job("zoo:resnet18"), device="cuda", batches=[8, 32], autocast=autocast)
    for batch in found.batches:
        assert 0.85 < found.sum_over_step(batch) < 1.15  # the benchmark holds 10% for the papers' models
    assert all(layer.forward_s[32] > 0 for layer in found.layers if "conv2d" in layer.kind)
    assert found.layer("conv1").peak_memory_bytes[32] > found.layer("conv1").activation_bytes[32] > 0


@pytest.mark.parametrize("name", ["dcgan_generator", "pointnet_classification", "gnmt", "bert_medium"])
def test_other_kinds_of_models_can_be_measured_on_cuda(name: str) -> None:
    found = profile_job(load_job(f"zoo:{name}", zoo.SMALL[name]), device="cuda", batches=[4])
    assert found.step_time_s(4) > 0
