"""ONNX Runtime, with the fused form of the model that its own optimizer makes."""

import math
from pathlib import Path

import numpy as np

from models import weights

from ..batching import by_tokens, pad, pooled, valid
from ..workloads import Workload
from .base import Answers, System, converted, package


class OnnxByTokens(System):
    """Batches of a bounded number of padded tokens, through fused attention, bias, gelu and norms."""

    needs = ("torch", "transformers", "onnx", "onnxruntime")
    budget = 4096

    @classmethod
    def files(cls) -> list[Path]:
        return [converted("fused.onnx")]

    def load(self, workload: Workload) -> None:
        (path,) = self.files()
        if not path.exists():
            export(path)
        self._session = package("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(self, workload: Workload) -> Answers:
        lengths = workload.lengths["n"]
        vectors, self.padded_cells = np.empty((len(lengths), 384), np.float32), 0
        for indices in by_tokens(lengths, self.budget):
            rows, size = len(indices), int(lengths[indices].max())
            mask = valid(lengths[indices], size, rows)
            inputs = {
                "input_ids": pad([workload.items[i] for i in indices], size, rows),
                "attention_mask": mask,
            }
            (hidden,) = self._session.run(None, inputs)
            vectors[indices] = pooled(hidden, mask)
            self.padded_cells += rows * size
        return vectors


class OnnxDetector(System):
    """PP-OCR's own ONNX file, one image at a time."""

    needs = ("onnxruntime",)

    def load(self, workload: Workload) -> None:
        path = weights.fetch("ppocr") / "PP-OCRv6_det_small.onnx"
        self._session = package("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name

    def run(self, workload: Workload) -> Answers:
        self.padded_cells = int(workload.cells.sum())
        return [self._session.run(None, {self._input: image[None]})[0][0, 0] for image in workload.items]


def export(path: Path) -> None:
    """Write the fused model, once.

    The optimizer recognises attention only in the graph that BERT had in its early days, so that is written
    out here around the layers of today's model.
    """
    torch, transformers = package("torch"), package("transformers")
    transformers.logging.set_verbosity_error()
    bert = transformers.BertModel.from_pretrained(weights.fetch("minilm"), add_pooling_layer=False).eval()
    heads, d = bert.config.num_attention_heads, bert.config.hidden_size

    def split(x):
        return x.view(x.size(0), x.size(1), heads, d // heads).permute(0, 2, 1, 3)

    class Classic(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert

        def forward(self, input_ids, attention_mask):
            bias = (1.0 - attention_mask.unsqueeze(1).unsqueeze(2).to(torch.float32)) * -10000.0
            x = self.bert.embeddings(input_ids=input_ids, token_type_ids=torch.zeros_like(input_ids))
            for layer in self.bert.encoder.layer:
                attention = layer.attention.self
                q, k, v = (split(f(x)) for f in (attention.query, attention.key, attention.value))
                scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d // heads) + bias
                mixed = torch.matmul(torch.softmax(scores, -1), v).permute(0, 2, 1, 3).contiguous()
                x = layer.attention.output(mixed.view(mixed.size(0), mixed.size(1), d), x)
                x = layer.output(layer.intermediate(x), x)
            return x

    plain = path.with_suffix(".plain.onnx")
    example, axes = torch.ones((2, 8), dtype=torch.int64), {0: "rows", 1: "n"}
    names = ["input_ids", "attention_mask"]
    torch.onnx.export(
        Classic().eval(),
        (example, example),
        str(plain),
        input_names=names,
        output_names=["hidden"],
        dynamic_axes={name: axes for name in (*names, "hidden")},
        opset_version=17,
        dynamo=False,
    )
    optimizer = package("onnxruntime.transformers.optimizer")
    fused = optimizer.optimize_model(str(plain), model_type="bert", num_heads=heads, hidden_size=d)
    if fused.get_fused_operator_statistics()["Attention"] != bert.config.num_hidden_layers:
        raise RuntimeError(f"attention was not fused: {fused.get_fused_operator_statistics()}")
    part = path.with_suffix(".part")
    fused.save_model_to_file(str(part))
    part.rename(path)
    plain.unlink()
