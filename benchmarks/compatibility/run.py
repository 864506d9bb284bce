"""Which unmodified models of torchvision and transformers can be traced, and does the trace do what the model does?

Traces each with random weights in training mode in fp64, runs one step block by block at a batch it was not traced
with, and compares with the model's own step: outputs bit for bit, gradients to 1e-12. Writes the table of
docs/compatibility.md with --write.

    python benchmarks/compatibility/run.py [--device cuda] [--only NAME,NAME] [--json FILE] [--write]
"""

import argparse
import datetime
import functools
import json
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from burstpool import trace
from burstpool.errors import TraceError
from burstpool.job import model_arguments
from burstpool.model.check import check_step
from burstpool.model.replay import sum_of_outputs

TORCHVISION = {
    "classification": [
        "alexnet", "vgg11", "vgg16_bn", "vgg19", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2",
        "densenet121", "squeezenet1_1", "googlenet", "inception_v3", "mobilenet_v2", "mobilenet_v3_large",
        "mobilenet_v3_small", "shufflenet_v2_x1_0", "mnasnet1_0", "efficientnet_b0", "efficientnet_v2_s",
        "regnet_y_400mf", "convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16", "maxvit_t",
    ],
    "segmentation": ["fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"],
    "video": ["r3d_18", "mc3_18", "mvit_v1_b"],
    "optical_flow": ["raft_small"],
    "detection": ["fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn"],
}  # fmt: skip
SINGLE_PRECISION = {"MixtralForCausalLM", "RAFT"}
"""Models that have no fp64 form."""
SINGLE_TOLERANCE = 1e-5
"""Of fp32 models, some of which choose other kernels when they are exported."""
OWN_SPREAD = 3.0
"""A model whose own steps differ on CUDA may differ from its trace by so many times as much."""
TOLERANCE = {"cpu": 1e-12, "cuda": 1e-9}
"""On CUDA some gradients are summed by atomic additions, in an order that changes from run to run."""


def torchvision_models() -> Iterator[tuple[str, Callable[[], tuple[torch.nn.Module, Any]]]]:
    """(name, function that builds the model and an example of two samples)."""
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:
        print(f"torchvision cannot be imported: {error}", file=sys.stderr)
        return

    def build(kind: str, name: str) -> tuple[torch.nn.Module, Any]:
        sizes: dict[str, Any] = {
            "inception_v3": (3, 299, 299), "vit_b_16": (3, 224, 224), "maxvit_t": (3, 224, 224),
            "mvit_v1_b": (3, 16, 224, 224), "r3d_18": (3, 4, 64, 64), "mc3_18": (3, 4, 64, 64),
            "raft_small": (3, 128, 128),
        }  # fmt: skip
        options: dict[str, Any] = {"weights": None}
        if kind in ("segmentation", "detection"):
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        model = torchvision.models.get_model(name, **options)
        image = torch.rand(2, *sizes.get(name, (3, 64, 64)))
        if kind == "detection":
            target = {"boxes": torch.tensor([[1.0, 1.0, 20.0, 20.0]]), "labels": torch.tensor([1])}
            return model, ([image[0], image[1]], [target, target])
        return model, ((image, image) if kind == "optical_flow" else image)

    for kind, names in TORCHVISION.items():
        for name in names:
            yield f"torchvision {name}", functools.partial(build, kind, name)


def transformers_models() -> Iterator[tuple[str, Callable[[], tuple[torch.nn.Module, Any]]]]:
    """Small configurations of each architecture; the code is the full model's."""
    try:
        import transformers as t
    except ImportError as error:
        print(f"transformers cannot be imported: {error}", file=sys.stderr)
        return
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    wide = {**small, "intermediate_size": 128}
    tokens = torch.randint(3, 100, (2, 16))
    text = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    decoder = {"input_ids": tokens, "use_cache": False}
    image = {"pixel_values": torch.rand(2, 3, 32, 32)}
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    grouped = {**wide, "num_key_value_heads": 2}
    both = {"input_ids": tokens, "decoder_input_ids": tokens, "use_cache": False}
    distil = {"vocab_size": 100, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    t5 = {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    bart = {"vocab_size": 100, "d_model": 64}
    for part in ("encoder", "decoder"):
        bart |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 128}
    cases = {
        "BertForMaskedLM": (t.BertConfig(**wide), text),
        "RobertaForMaskedLM": (t.RobertaConfig(**wide), text),
        "DistilBertForMaskedLM": (t.DistilBertConfig(**distil), text),
        "ElectraForPreTraining": (t.ElectraConfig(**wide, embedding_size=64), text),
        "DebertaV2ForMaskedLM": (t.DebertaV2Config(**wide), text),
        "GPT2LMHeadModel": (t.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4), decoder),
        "GPTNeoXForCausalLM": (t.GPTNeoXConfig(**wide), decoder),
        "LlamaForCausalLM": (t.LlamaConfig(**grouped), decoder),
        "MistralForCausalLM": (t.MistralConfig(**grouped), decoder),
        "Qwen2ForCausalLM": (t.Qwen2Config(**grouped), decoder),
        "GemmaForCausalLM": (t.GemmaConfig(**grouped, head_dim=16), decoder),
        "Phi3ForCausalLM": (t.Phi3Config(**grouped, pad_token_id=0), decoder),
        "MixtralForCausalLM": (t.MixtralConfig(**grouped, num_local_experts=4), decoder),
        "T5ForConditionalGeneration": (t.T5Config(**t5), both),
        "BartForConditionalGeneration": (t.BartConfig(**bart), both),
        "ViTForImageClassification": (t.ViTConfig(**vision, image_size=32, patch_size=8), image),
        "DeiTForImageClassification": (t.DeiTConfig(**vision, image_size=32, patch_size=8), image),
        "MambaForCausalLM": (t.MambaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, state_size=8), decoder),
    }  # fmt: skip
    for name, (config, example) in cases.items():
        yield f"transformers {name}", functools.partial(_build, getattr(t, name), config, example)


def _build(model: Callable[[Any], torch.nn.Module], config: Any, example: Any) -> tuple[torch.nn.Module, Any]:
    return model(config), example


def examine(build: Callable[[], tuple[torch.nn.Module, Any]], device: str) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, example = build()
        dtype = torch.float32 if type(model).__name__ in SINGLE_PRECISION else torch.float64
        model = model.to(device, dtype).train()
        example = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: _move(t, device, dtype), example)
        start = time.perf_counter()
        try:
            traced = trace(model, example)
        except TraceError as error:
            seconds = time.perf_counter() - start
            return {"traced": False, "reason": f"{error}{_fallback(model, example)}", "seconds": seconds}
        seconds = time.perf_counter() - start
        try:
            found = check_step(traced, example, batch=3)
        except Exception as error:
            return {"traced": False, "reason": f"{type(error).__name__}: {error}", "seconds": seconds}
    tolerance = TOLERANCE[device] if dtype is torch.float64 else 1e-4
    right = found.within(tolerance)
    if dtype is torch.float32 and max(found.output_error, found.gradient_error) < SINGLE_TOLERANCE:
        right = True
    row = {"traced": right, "layers": len(traced.layers), "seconds": seconds, "gradient_error": found.gradient_error}
    if dtype is torch.float32:
        equal = "bit for bit" if found.outputs_equal else f"to {found.output_error:.0e}"
        row["reason"] = f"in fp32, its operators have no fp64 form; outputs equal {equal}"
    if not right and max(found.output_error, found.gradient_error) <= OWN_SPREAD * own_spread(model, example):
        row |= {"traced": True, "reason": "as far from the model's own step as two of those are from each other"}
    elif not right:
        equal = f"outputs equal {found.outputs_equal}, buffers equal {found.buffers_equal}"
        row["reason"] = f"differs: {equal}, gradients {found.gradient_error:.1e}"
    return row


def own_spread(model: torch.nn.Module, example: Any) -> float:
    """How far two steps of the model itself are apart: not 0 where kernels add in an order that changes."""
    args, kwargs = model_arguments(example)
    steps = []
    for _ in range(2):
        torch.manual_seed(0)
        model.zero_grad()
        output = model(*args, **kwargs)
        sum_of_outputs(output).backward()
        values = [x.detach() for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
        steps.append([*values, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in zip(*steps, strict=True))


def _fallback(model: torch.nn.Module, example: Any) -> str:
    """What splitting at module level makes of it."""
    try:
        traced = trace(model, example, fallback="modules")
        right = check_step(traced, example, batch=2).outputs_equal
    except Exception:
        return ""
    return f" (there: {len(traced.layers)} layers, {'equal' if right else 'not equal'})"


def _move(tensor: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def table(rows: dict[str, dict[str, Any]], device: str) -> str:
    """The Markdown of docs/compatibility.md between its marks."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    yes = sum(row["traced"] for row in rows.values())
    lines = [
        f"{yes} of {len(rows)} models; {datetime.date.today()}, {name}, torch {torch.__version__}, fp64, train mode, "
        "checked at batch 3 after tracing at batch 2.",
        "",
        "| model | traced | layers | seconds | remark |",
        "| --- | --- | --- | --- | --- |",
    ]
    for model, row in rows.items():
        remark = re.sub(r"\S*/site-packages/", "", " ".join(row.get("reason", "").split())).replace("|", "\\|")
        cells = (model, "yes" if row["traced"] else "no", row.get("layers", ""), f"{row['seconds']:.1f}", remark)
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="names, or parts of names, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--write", action="store_true", help="write the table into docs/compatibility.md")
    parser.add_argument("--from-json", type=Path, help="make the table from rows written before")
    options = parser.parse_args()
    if options.from_json:
        text = options.from_json.read_text()
    else:
        torch.backends.cudnn.deterministic = True
        rows = {}
        for name, build in [*torchvision_models(), *transformers_models()]:
            if any(part in name for part in options.only.split(",")):
                rows[name] = examine(build, options.device)
                print(name, json.dumps(rows[name]), file=sys.stderr, flush=True)
        text = json.dumps({"rows": rows, "table": table(rows, options.device)}, indent=1)
        if options.json:
            options.json.write_text(text)
    found = json.loads(text)["table"]
    print(found)
    if options.write:
        page = Path(__file__).parents[2] / "docs" / "compatibility.md"
        before, _, rest = page.read_text().partition("<!-- table -->")
        _, _, after = rest.partition("<!-- end of table -->")
        page.write_text(f"{before}<!-- table -->\n{found}\n<!-- end of table -->{after}")


if __name__ == "__main__":
    main()
