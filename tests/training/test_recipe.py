"""The recipe of the embedded model on nano configurations: corpus, tokenizer, training, export and baseline."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tiers import examples
from training.corpus import HELD_OUT, SourceFile, is_table, is_test_of_held_out, load_corpus, manifest, shingles
from training.evaluate import cut_body, find_sites, left_function
from training.export import EXPORTED, export_model, load_exported
from training.model import KVCache, LlamaModel, ModelConfig
from training.ngram import KneserNey, pack
from training.optimiser import orthogonalise
from training.tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer
from training.train import Run, TrainConfig, Workers, config_from_dict, config_to_dict

TRAINING = Path(__file__).resolve().parents[2] / "training"
NANO = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    exit_layers=(1, 2),
)
TEXT = 'def add(a, b):\n    """Adds."""\n    if a is None:\n        return b\n    return a + b\n\n' * 8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], vocab_size=300)


def documents(seed: int, count: int = 6, length: int = 300) -> list[np.ndarray]:
    """Random walks over the nano vocabulary, which a model can learn a little of."""
    rng = np.random.default_rng(seed)
    return [(np.cumsum(rng.integers(0, 3, length)) % NANO.vocab_size).astype(np.uint16) for _ in range(count)]


def nano_run(checkpoint: dict[str, object] | None = None, **changes: object) -> Run:
    config = TrainConfig(
        minutes=None,
        tokens=64 * 12,
        batch_tokens=64,
        micro_tokens=32,
        phases=((0.5, 16), (1.0, 32)),
        precision="float32",
        model=NANO,
    )
    return Run(replace(config, **changes), documents(0), documents(1), checkpoint=checkpoint)  # type: ignore[arg-type]


# --- corpus


def test_committed_manifest_keeps_held_out_modules_out_of_training() -> None:
    recorded = json.loads((TRAINING / "manifest.json").read_text())
    held = {row["path"] for row in recorded["files"] if row["split"] == "heldout"}
    trained = {row["path"] for row in recorded["files"] if row["split"] != "heldout"}
    assert held == set(HELD_OUT)
    assert not held & trained
    assert not [path for path in trained if is_test_of_held_out(path)]
    hashes = [row["sha256"] for row in recorded["files"]]
    assert len(hashes) == len(set(hashes))
    assert recorded["splits"]["heldout"]["bytes"] >= 300_000


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("test/test_json/test_dump.py", True),
        ("test/test_csv.py", True),
        ("test/test_contextlib_async.py", True),
        ("test/test_queue.py", True),
        ("test/test_csvkit.py", False),
        ("asyncio/queues.py", False),
        ("test/test_email/test_message.py", False),
    ],
)
def test_tests_of_held_out_modules_are_known_by_name(path: str, expected: bool) -> None:
    assert is_test_of_held_out(path) is expected


def make_library(root: Path) -> None:
    """A small stand-in for a standard library, with every held-out module."""
    for name in HELD_OUT:
        (root / name).parent.mkdir(exist_ok=True)
        lines = "".join(f"    value_{i} = compute_{Path(name).stem}({i}, 'long enough to count')\n" for i in range(9))
        (root / name).write_text(f"def main_{Path(name).parent.name}():\n{lines}")
    (root / "plain.py").write_text("def plain():\n    return 1\n")
    (root / "copied.py").write_text((root / "heapq.py").read_text() + "extra = 1\n")
    (root / "numbers_table.py").write_text("table = (" + "0x12, 0x34, " * 50 + ")\n")
    (root / "broken.py").write_text("def broken(:\n")
    (root / "latin.py").write_bytes(b"name = '\xe9'\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("other = 1\n")
    (root / "test").mkdir()
    (root / "test" / "test_heapq.py").write_text("unrelated = 1\n")
    (root / "test" / "test_plain.py").write_text("also = 'a test'\n")


def test_corpus_drops_copies_tables_and_what_does_not_parse(tmp_path: Path) -> None:
    make_library(tmp_path)
    files, left_out = load_corpus(tmp_path)
    splits = {file.path: file.split for file in files}
    assert {path: splits[path] for path in splits if path not in HELD_OUT} == {
        "plain.py": "library",
        "test/test_plain.py": "test",
    }
    assert set(left_out) == {"broken.py", "copied.py", "latin.py", "numbers_table.py", "test/test_heapq.py"}
    recorded = manifest(files, left_out)
    assert recorded["splits"]["heldout"]["files"] == len(HELD_OUT)  # type: ignore[index]


def test_table_and_shingles() -> None:
    assert is_table("x = (1, 2, 3, 4, 5, 6, 7, 8)")
    assert not is_table(TEXT)
    assert shingles("a\nb\nc\n") == set()
    assert len(shingles("    a = some_function(1)\n\n  b = some_function(2)\nc = some_function(3)\n")) == 1


# --- tokenizer


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    # A special token's own text is one id, and is left out of the decoded text unless asked for.
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_indentation_is_one_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(i) for i in range(4)] == list(SPECIAL_TOKENS)
    assert tokenizer.encode("<|endoftext|>").ids == [0]
    tokens = tokenizer.encode("def add(a, b):\n        return b\n").tokens
    assert tokenizer.encode("def add(a, b):\n").tokens == tokens[: tokens.index("ĠĠĠĠĠĠĠĠ")]


def test_chat_template_honours_the_generation_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, 64)
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Add two\nnumbers."}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "# Add two\n# numbers.\n"
    asked = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert asked == "# Add two\n# numbers.\n\n"
    messages.append({"role": "assistant", "content": "def add(a, b):"})
    assert loaded.apply_chat_template(messages, tokenize=False) == asked + "def add(a, b):\n\n"
    messages[-1] = {"role": "assistant", "content": None}  # as clients send a call without words
    assert loaded.apply_chat_template(messages, tokenize=False) == asked + "\n\n"


# --- model and training


def test_cache_gives_the_logits_of_the_whole_sequence() -> None:
    model = LlamaModel(NANO, seed=3)
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        cache: KVCache = []
        parts = [model.head(model.hidden_states(p, cache=cache)[3]) for p in tokens.split([7, 1, 1, 6, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)


def test_an_exit_is_the_first_layers_with_the_same_head() -> None:
    model = LlamaModel(NANO, seed=3)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        early = model.hidden_states(tokens, stop_layer=2)[2]
        torch.testing.assert_close(early, model.hidden_states(tokens)[2])
        _, plain = model.loss(tokens[:, :-1], tokens[:, 1:], torch.float32, {1: 0.5, 2: 0.5})
        logits = model.head(early)[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    torch.testing.assert_close(plain[2], expected)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_schedule_warms_up_and_decays_to_its_floor() -> None:
    config = TrainConfig()
    halfway = (config.decay_from + 1.0) / 2
    rates = [config.learning_rate(done) for done in (0.0, config.warmup, 0.3, config.decay_from, halfway, 1.0)]
    assert rates[0] < 0.1
    assert rates[1] == rates[2] == rates[3] == 1.0
    assert rates[4] == pytest.approx((1.0 + config.final_lr) / 2)
    assert rates[5] == pytest.approx(config.final_lr)
    assert [config.sequence_length(done) for done in (0.0, 0.8, 0.999, 1.0)] == [512, 1024, 4096, 4096]


def test_training_lowers_the_loss() -> None:
    run = nano_run(tokens=64 * 40)
    losses = [step[3] for step in run.steps()]
    assert run.done == 1.0
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1.0


def test_a_resumed_run_continues_exactly(tmp_path: Path) -> None:
    straight = nano_run()
    expected = [step[3] for step in straight.steps()]
    first = nano_run()
    got = [first.step()[3] for _ in range(5)]
    torch.save(first.checkpoint(), tmp_path / "checkpoint.pt")
    stored = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert config_from_dict(stored["config"]) == first.config
    second = nano_run(stored)
    got += [step[3] for step in second.steps()]
    assert got == expected
    for name, value in straight.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_config_survives_a_checkpoint() -> None:
    config = TrainConfig(minutes=None, tokens=5, model=NANO)
    assert config_from_dict(config_to_dict(config)) == config


def test_workers_give_the_gradient_of_one_process() -> None:
    run = nano_run()
    rows = torch.from_numpy(np.stack([d[:17] for d in documents(2)]).astype(np.int64))
    model = LlamaModel(NANO, seed=run.config.seed)
    loss, plain = model.loss(
        rows[:, :-1], rows[:, 1:], torch.float32, {1: 0.25, 2: 0.25}, stride=run.config.exit_stride
    )
    loss.backward()
    workers = Workers(run.config, run.model, 1, compiled=False)
    try:
        losses = workers.gradient((part, len(part) / len(rows)) for part in rows.split(2))
    finally:
        workers.close()
    assert sum(row[3] for row in losses) == pytest.approx(plain[3].item(), rel=1e-5)
    for one, other in zip(model.parameters(), run.model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-4)


def test_exported_model_has_the_logits_of_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path / "run", NANO.max_position_embeddings)
    export_model(LlamaModel(NANO, seed=5), tmp_path / "out", tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(EXPORTED)
    ours = load_exported(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_theta"] == NANO.rope_theta


# --- baseline


def reference_probability(docs: list[list[int]], context: list[int], token: int, order: int, vocab: int) -> float:
    """Modified Kneser-Ney by its definition, with dictionaries."""
    counts: dict[int, dict[tuple[int, ...], int]] = {n: defaultdict(int) for n in range(1, order + 1)}
    for doc in docs:
        padded = [0] * (order - 1) + doc
        for i in range(order - 1, len(padded)):
            counts[order][tuple(padded[i - order + 1 : i + 1])] += 1
    for n in range(order - 1, 0, -1):
        for gram in counts[n + 1]:
            counts[n][gram[1:]] += 1

    def probability(context: tuple[int, ...], n: int) -> float:
        if n == 0:
            return 1.0 / vocab
        values = list(counts[n].values())
        n1, n2, n3, n4 = (values.count(c) for c in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2) if n1 else 0.5
        steps = [(1, n1, n2), (2, n2, n3), (3, n3, n4)]
        discount = [0.0] + [min(max(c - (c + 1) * y * b / max(a, 1), 0.0), c) for c, a, b in steps]
        lower = probability(context[1:], n - 1)
        row = {gram[-1]: c for gram, c in counts[n].items() if gram[:-1] == context}
        if not row:
            return lower
        total = sum(row.values())
        spare = sum(discount[min(c, 3)] for c in row.values())
        own = row.get(token, 0)
        return (own - discount[min(own, 3)]) / total + spare / total * lower

    return probability(tuple(context), order)


TOY = [[1, 2, 3, 1, 2, 4, 0], [1, 2, 3, 3, 3, 1, 0], [2, 1, 2, 3, 1, 2, 3, 1, 2, 3, 0]]


@pytest.mark.parametrize("context", [[0, 0], [1, 2], [3, 1], [4, 4], [3, 3], [2, 4]])
def test_kneser_ney_sums_to_one_and_follows_its_definition(context: list[int]) -> None:
    model = KneserNey([np.array(doc, np.uint16) for doc in TOY], vocab_size=6, order=3)
    grams = pack([np.array([*context, token], np.uint16) for token in range(6)], 3, model.bits, 0)[2::3]
    got = model.probabilities(grams)
    assert got.sum() == pytest.approx(1.0)
    assert (got > 0).all()
    assert got.tolist() == pytest.approx([reference_probability(TOY, context, t, 3, 6) for t in range(6)])


def test_kneser_ney_bits_are_those_of_the_tokens() -> None:
    model = KneserNey([np.array(doc, np.uint16) for doc in TOY], vocab_size=6, order=3)
    expected = sum(
        -math.log2(reference_probability(TOY, ([0, 0, *TOY[0]])[i : i + 2], token, 3, 6))
        for i, token in enumerate(TOY[0])
    )
    assert model.bits_of([np.array(TOY[0], np.uint16)]) == pytest.approx(expected)


# --- completions


HEADER = "    def f(self, x):\n"


@pytest.mark.parametrize(
    ("body", "ended", "kept"),
    [
        ("        return x\n", True, "        return x\n"),
        ("        return (x\n", True, None),
        ("", True, None),
        ('        """Only words."""\n', True, None),
        ("        y = x\n        return self.g(x, y", False, "        y = x\n"),
        ("        y = x\n        return y", False, "        y = x\n"),
        ("        y = x\n        if y:\n            retu", False, "        y = x\n"),
        ("        y = x\n        try:\n            z = y\n            w = z.", False, "        y = x\n"),
        ("        y = = x\n        if y:\n            retu", False, None),
        ("        y = x)\n        z = 1\n        w", False, None),
        ("        return self.g(x, y", False, None),
    ],
)
def test_cut_keeps_full_statements_and_forgives_nothing_else(body: str, ended: bool, kept: str | None) -> None:
    result = cut_body(HEADER, body, ended)
    assert result == (None if kept is None else HEADER + kept)


def test_the_function_ends_at_a_dedent() -> None:
    body = "        return x\n\n"
    assert left_function(body + "    def g(self):\n", 4) == len(body)
    assert left_function(body + "    def g", 4) is None
    assert left_function("        return (\n    )\n", 4) is None


def test_sites_stop_before_the_body() -> None:
    text = 'import a\n\ndef f(x,\n      y):\n    """Says."""\n    z = x\n    return z\n\ndef g(): return 1\n'
    (site,) = find_sites(SourceFile("m.py", "heldout", text))
    assert site.context == text[: text.index("    z = x")]
    assert site.header == site.context[len("import a\n\n") :]
