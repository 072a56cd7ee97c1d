"""Fine-tuning given weights: the two examples and the studies of benchmarks/given.py, on tiny models and data."""

from __future__ import annotations

import importlib
import re
import signal
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

from processes import in_processes, preload
from test_examples import run_as_torchrun

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("peft")
preload("peft", "transformers.models.bert", "transformers.models.llama")

ROOT = Path(__file__).parents[1]
REAL = ROOT / "data" / "smollm2"  # if it has been fetched
WORDS = ("mann frau kind hund ball haus", "man woman child dog ball house")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with tiny models in place of MiniLM and SmolLM2, and 24 sentence pairs in each split."""
    folder = tmp_path_factory.mktemp("data")
    torch.manual_seed(0)
    letters = {letter: i for i, letter in enumerate(["[PAD]", "Ġ", "Ċ", *string.printable[:94]])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    size = {
        "vocab_size": 128,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    bert = transformers.BertConfig(
        **size, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    llama = transformers.LlamaConfig(**size, tie_word_embeddings=True)
    for name, model in (
        ("minilm", transformers.BertModel(bert)),
        ("smollm2", transformers.LlamaForCausalLM(llama)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
    (folder / "multi30k").mkdir()
    for split in ("train", "val", "test2016"):
        for language, words in zip(("de", "en"), map(str.split, WORDS), strict=True):
            lines = [f"{words[i % 6]} {words[i // 6]} {words[i % 5]}\n" for i in range(24)]
            (folder / "multi30k" / f"{split}.{language}").write_text("".join(lines))
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return folder


@pytest.mark.parametrize("name", ["bilingual", "continue_lm"])
def test_an_example_compares_all_methods(name: str, data: Path, tmp_path: Path) -> None:
    arguments = ["--data", str(data), "--updates", "4", "--fp32"]
    arguments += ["--text", str(data / "text.txt")] if name == "continue_lm" else ["--batch", "8"]
    methods = ["full", "powersgd-4", "lora-16"] + (["sharded"] if name == "continue_lm" else [])
    output = run_as_torchrun(tmp_path, 2, f"{name}/{name}.py", *arguments, "--methods", *methods)
    sent = {
        method: float(sent) for method, sent in re.findall(r"^([\w-]+): .* sent ([\d.]+) MB", output, re.M)
    }
    assert list(sent) == methods
    assert sent["powersgd-4"] < sent["full"] / 2


@pytest.mark.parametrize(
    "fetched",
    [
        False,
        pytest.param(
            True, marks=[pytest.mark.slow, pytest.mark.skipif(not REAL.is_dir(), reason=f"no {REAL}")]
        ),
    ],
)
def test_a_killed_example_continues(fetched: bool, data: Path, tmp_path: Path) -> None:
    """The checkpoint at the end is that of an uninterrupted run, bit for bit; also of SmolLM2."""
    folder = REAL.parent if fetched else data

    def run(name: str, **stop: Any) -> None:
        run_as_torchrun(
            tmp_path, 2, "continue_lm/continue_lm.py", "--data", str(folder), "--text", str(data / "text.txt"),
            "--updates", "20", "--methods", "powersgd-4", "--checkpoint", name, **stop,
        )  # fmt: skip

    run("undisturbed")
    with pytest.raises(ProcessExitedException):
        run("killed", stop_at=15, stop_by=signal.SIGKILL)
    run("killed")
    expected, found = tensors(tmp_path / "undisturbed"), tensors(tmp_path / "killed")
    assert expected
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all files of the last checkpoint."""
    (last,) = folder.glob("*/*step-20")
    return {
        f"{file.name} {name}": tensor
        for file in last.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.fixture
def benchmark(data: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    given = importlib.import_module("given")
    monkeypatch.setattr(given, "DATA", data)
    given._pairs.cache_clear()
    given._rows.cache_clear()
    yield given
    given._pairs.cache_clear()
    given._rows.cache_clear()


@pytest.mark.parametrize("task", ["minilm", "smollm2"])
def test_a_study_runs(task: str, benchmark: Any, tmp_path: Path) -> None:
    """Three updates of the arms that differ in more than a number."""
    some = {"minilm": benchmark.minilm(1, []), "smollm2": benchmark.smollm2(3, [])}[task]
    settings = some.settings | ({"batch": 8} if task == "minilm" else {"rows": 2})
    rows = {}
    for arm in (
        "full training, bf16",
        "LoRA 4",
        "PowerSGD(4), 5 plain",
        *benchmark.CHOICES,
        *benchmark.FACTORIZED,
    ):
        job = benchmark.Job(study=some.name, arm=arm, rate=1e-3, seed=0, settings=settings, folder=tmp_path)
        rows[arm] = benchmark.run(job)
        assert rows[arm]["updates"] == 3
        assert all(0 < rows[arm][split] < 101 for split in ("validation", "test"))
    full, lora = rows["full training, bf16"], rows["LoRA 4"]
    assert lora["optimizer_bytes"] < full["optimizer_bytes"] / 2
    assert lora["wire_bytes"] < full["wire_bytes"]


def test_factors_for_inputs_lose_less_of_the_products(benchmark: Any) -> None:
    x = torch.randn(256, 64) @ torch.diag(torch.logspace(0, -2, 64))
    errors = {}
    for by in ("weights", "inputs"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64))
        expected = model(x)
        benchmark.factorize_(model, by, lambda x, model=model: model(x).sum(), [(x[:128],), (x[128:],)])
        assert model[0].down.weight.shape[0] < 64
        errors[by] = (model(x) - expected).norm().item()
    assert errors["inputs"] < errors["weights"] / 2


def gradients(encoder: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in encoder.parameters() if p.grad is not None]


def contrast_is_shared(rank: int, size: int) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    steps = importlib.import_module("given_steps")
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 8)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize((self.words(ids) * mask[..., None]).sum(1), dim=1)

    encoder = Encoder()
    ids, mask = torch.randint(30, (2, 8, 5)), torch.ones(2, 8, 5)
    whole = steps.bilingual.contrast(encoder, ids, mask)
    whole.backward()
    expected = gradients(encoder)
    encoder.zero_grad()
    ddp = DistributedDataParallel(encoder)
    steps.shared_contrast(ddp)(ids.chunk(size, 1)[rank], mask.chunk(size, 1)[rank]).backward()
    for own, all_pairs in zip(gradients(encoder), expected, strict=True):
        torch.testing.assert_close(own, all_pairs)


def test_workers_that_share_vectors_have_the_gradient_of_one() -> None:
    in_processes(contrast_is_shared, 2)
