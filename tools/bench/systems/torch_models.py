"""PyTorch: sentence-transformers as it comes, and the model under it with batches made by hand."""

import numpy as np

from models import weights

from ..batching import by_count, by_tokens, pad, valid
from ..workloads import MAX_TOKENS, Workload
from .base import Answers, Settings, System, package


class SentenceTransformers(System):
    """`SentenceTransformer.encode` of the texts, with its defaults."""

    needs = ("torch", "transformers", "sentence_transformers")

    def load(self, workload: Workload) -> None:
        library = package("sentence_transformers")
        modules = library.sentence_transformer.modules
        bert = modules.Transformer(str(weights.fetch("minilm")), max_seq_length=MAX_TOKENS)
        pooling = modules.Pooling(384, pooling_mode="mean")
        self._model = library.SentenceTransformer(modules=[bert, pooling, modules.Normalize()], device="cpu")
        if self.settings.products == "bfloat16":
            self._model.bfloat16()

    def run(self, workload: Workload) -> Answers:
        found = self._model.encode(workload.texts, show_progress_bar=False, convert_to_numpy=False)
        return package("torch").stack(found).float().numpy()


class Torch(System):
    """The model of the `transformers` package on token ids; subclasses say in which batches."""

    needs = ("torch", "transformers")

    def load(self, workload: Workload) -> None:
        transformers = package("transformers")
        transformers.logging.set_verbosity_error()
        self._torch = package("torch")
        model = transformers.BertModel.from_pretrained(
            weights.fetch("minilm"), add_pooling_layer=False, attn_implementation="sdpa"
        )
        self._model = model.eval().to(getattr(self._torch, self.settings.products))

    def batches(self, lengths: np.ndarray) -> list[np.ndarray]:
        raise NotImplementedError

    def run(self, workload: Workload) -> Answers:
        lengths = workload.lengths["n"]
        vectors, self.padded_cells = np.empty((len(lengths), 384), np.float32), 0
        with self._torch.inference_mode():
            for indices in self.batches(lengths):
                rows, size = len(indices), int(lengths[indices].max())
                ids = self._torch.from_numpy(pad([workload.items[i] for i in indices], size, rows))
                mask = self._torch.from_numpy(valid(lengths[indices], size, rows))
                vectors[indices] = self._embed(ids, mask).numpy()
                self.padded_cells += rows * size
        return vectors

    def _embed(self, ids, mask):
        whole = bool(mask.all())  # without padding, attention is faster without a mask
        hidden = self._model(ids, attention_mask=None if whole else mask).last_hidden_state
        weight = mask[:, :, None].to(hidden.dtype)
        mean = (hidden * weight).sum(1).float() / mask.sum(1, keepdim=True)
        return self._torch.nn.functional.normalize(mean, dim=1)


class TorchByCount(Torch):
    """Batches of 32 texts of similar length, padded to the longest."""

    def batches(self, lengths: np.ndarray) -> list[np.ndarray]:
        return by_count(lengths, 32)


class TorchByTokens(Torch):
    """Batches of a bounded number of padded tokens."""

    budget = 4096

    def batches(self, lengths: np.ndarray) -> list[np.ndarray]:
        return by_tokens(lengths, self.budget)


class TorchStreams(TorchByTokens):
    """The same, two batches at a time on one thread each."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        package("torch").set_num_threads(1)

    def run(self, workload: Workload) -> Answers:
        from concurrent.futures import ThreadPoolExecutor

        lengths = workload.lengths["n"]
        vectors, batches = np.empty((len(lengths), 384), np.float32), self.batches(lengths)
        self.padded_cells = sum(len(indices) * int(lengths[indices].max()) for indices in batches)

        def one(indices: np.ndarray) -> None:
            rows, size = len(indices), int(lengths[indices].max())
            ids = self._torch.from_numpy(pad([workload.items[i] for i in indices], size, rows))
            mask = self._torch.from_numpy(valid(lengths[indices], size, rows))
            with self._torch.inference_mode():
                vectors[indices] = self._embed(ids, mask).numpy()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(one, batches))
        return vectors
