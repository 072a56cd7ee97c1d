"""The Trainer compared with a plain loop, resumed before and after the switch, on one and two processes."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import BATCH, EPOCHS, SAMPLES, Register, same, tensorboard
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput

import pufferfish as pf
from processes import as_torchrun, free_port, in_processes, preload, same_everywhere
from pufferfish.integrations.convert import merge
from pufferfish.integrations.transformers import SwitchCallback, train

preload("transformers.trainer")
STEPS = EPOCHS * SAMPLES // BATCH
EXAMPLE = Path(__file__).parents[2] / "examples" / "transformers_trainer.py"


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(64, generator=generator), "labels": i % 4} for i in range(SAMPLES)]


def make(model: nn.Module, folder: Path, data: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "learning_rate": 1e-2, "weight_decay": 0.1,
        "optim": "adamw_torch", "max_grad_norm": 0.5, "save_strategy": "no", "logging_strategy": "no",
        "use_cpu": True, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(str(folder), **settings | options)
    return Trainer(model, args, train_dataset=data or samples(), eval_dataset=data or samples())


def tiny_gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=1)
    )  # fmt: skip


TOKENS = [{"input_ids": (t := torch.arange(8 + i, 16 + i) % 32), "labels": t} for i in range(SAMPLES)]


def by_hand(switch: pf.Switch, accumulate: int = 1) -> nn.Module:
    """The Trainer's work as a plain loop: AdamW without decay on biases, a linear schedule, clipping."""
    model, data = Net(), samples()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if not n.endswith("bias")], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    total = STEPS // accumulate
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    steps = 0
    for epoch in range(EPOCHS):
        if isinstance(switch.when, pf.AtEpoch):
            switch.step(model, optimizer, epoch=epoch)
        for first in range(0, SAMPLES, BATCH * accumulate):
            if isinstance(switch.when, pf.AtStep):
                switch.step(model, optimizer, step=steps)
            for i in range(first, first + BATCH * accumulate, BATCH):
                batch = data[i : i + BATCH]
                out = model(torch.stack([s["x"] for s in batch]), torch.tensor([s["labels"] for s in batch]))
                (out["loss"] / accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            steps += 1
    return model


@pytest.mark.parametrize(
    ("when", "accumulate"),
    [(pf.AtEpoch(1), 1), (pf.AtEpoch(1), 2), (pf.AtStep(2), 2), (pf.AtStep(0), 1), (pf.AtStep(99), 1)],
    ids=str,
)
def test_equals_a_plain_loop(when: Any, accumulate: int, tmp_path: Path) -> None:
    trainer = make(
        Net(), tmp_path, train_sampling_strategy="sequential", gradient_accumulation_steps=accumulate
    )
    switch, other = pf.Switch(rank=0.25, when=when), pf.Switch(rank=0.25, when=when)
    result = train(trainer, switch)
    assert isinstance(result, TrainOutput)
    assert result.global_step == STEPS // accumulate
    same(trainer.model, by_hand(other, accumulate))
    assert (switch.report is None) == (other.report is None) == (when == pf.AtStep(99))
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    "when",
    [
        pf.AtStep(6),
        pf.RanksSettle(latest=pf.AtEpoch(2)),
    ],
    ids=lambda when: type(when).__name__,
)
def test_resumes_before_and_after_the_switch(when: Any, tmp_path: Path) -> None:
    def run(folder: str, **resume: Any) -> tuple[Trainer, pf.Switch]:
        switch = pf.Switch(rank=0.25, when=when, lr=0.5)
        trainer = make(
            Net(dropout=0.5), tmp_path / folder, save_strategy="steps", save_steps=2, logging_strategy="steps",
            logging_steps=1,
        )  # fmt: skip
        train(trainer, switch, **resume)
        return trainer, switch

    trainer, switch = run("whole")
    assert switch.report is not None
    rates = learning_rates(trainer)
    for step in (2, 4, 6, 10):  # dense, at the end of an epoch, at or after the switch, low-rank
        resumed, again = run(str(step), resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        same(trainer.model, resumed.model)
        assert again.state_dict() == switch.state_dict()
        assert learning_rates(resumed) == rates
    last, _ = run("whole", resume_from_checkpoint=True)  # the run is complete: nothing changes
    same(trainer.model, last.model)


def learning_rates(trainer: Trainer) -> dict[int, float]:
    return {e["step"]: e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e}


def changes(trainer: Trainer) -> list[dict[str, float]]:
    """What the Trainer has logged of the switch."""
    return [e for e in trainer.state.log_history if "pufferfish/parameters_after" in e]


def test_the_switch_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))

    def run(folder: str, **resume: Any) -> tuple[Trainer, pf.Switch]:
        switch = pf.Switch(rank=0.25, when=pf.AtStep(6), back=pf.AtStep(10))
        trainer = make(
            Net(), tmp_path / folder, save_strategy="steps", save_steps=4, report_to=["tensorboard"]
        )
        train(trainer, switch, **resume)
        return trainer, switch

    trainer, switch = run("whole")
    assert switch.report is not None
    dense = sum(p.numel() for p in Net().parameters())
    low_rank = dense - 2 * (64 * 64 - 2 * 64 * 16)
    scalars = tensorboard(tmp_path / "events")
    assert scalars["train/pufferfish/parameters_after"] == [(6, low_rank), (10, dense)]
    found = changes(trainer)
    assert [(e["step"], e["pufferfish/parameters_before"]) for e in found] == [(6, dense), (10, low_rank)]
    assert found[1] == {"epoch": 2.5, "step": 10} | switch.report.metrics
    for step in (4, 8):  # before and after the switch
        resumed, _ = run(str(step), resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert changes(resumed) == found


def test_load_best_model_of_gpt2_in_mixed_precision(tmp_path: Path) -> None:
    """Tied weights, Conv1D, autocast; the best checkpoint is chosen among those after the switch."""
    options = {
        "bf16": True, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "greater_is_better": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    trainer = make(tiny_gpt2(), tmp_path, TOKENS, **options)
    train(trainer, pf.Switch(rank=0.25, when=pf.AtStep(5)))
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = max((step for step in losses if step > 5), key=losses.__getitem__)
    assert losses[best] < max(losses.values())  # the overall maximum is before the switch
    assert trainer.state.best_global_step == best
    assert type(trainer.model.transformer.h[0].mlp.c_fc) is not type(tiny_gpt2().transformer.h[0].mlp.c_fc)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best], abs=1e-6)

    resumed = make(tiny_gpt2(), tmp_path / "again", TOKENS, **options)
    train(resumed, pf.Switch(rank=0.25, when=pf.AtStep(5)), str(tmp_path / "checkpoint-10"))
    assert resumed.state.global_step == STEPS
    pf.merge_(trainer.model)
    trainer.save_model(str(tmp_path / "dense"))
    dense = GPT2LMHeadModel.from_pretrained(tmp_path / "dense")
    ids = TOKENS[0]["input_ids"][None]
    torch.testing.assert_close(dense(ids).logits, trainer.model.eval()(ids).logits, rtol=0.05, atol=0.05)


def tiny_mixture() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("best", [False, True])
def test_experts_are_read_from_dense_checkpoints(best: bool, tmp_path: Path) -> None:
    """Files have one tensor for each expert, and the model one for all: the Trainer's own names do not match."""
    options = {"save_strategy": "steps", "save_steps": 4}
    if best:  # the first checkpoint, of a run that ends before the switch
        best_first = {"eval_steps": 4, "metric_for_best_model": "loss", "greater_is_better": True}
        options |= {"eval_strategy": "steps", "load_best_model_at_end": True} | best_first
    trainer = make(tiny_mixture(), tmp_path / "whole", TOKENS, **options)
    train(trainer, pf.Switch(rank=0.25, when=pf.AtStep(99 if best else 6)))
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    if best:
        assert trainer.state.best_global_step == 4
        same(trainer.model, MixtralForCausalLM.from_pretrained(checkpoint))
        return
    for step in (4, 8):
        resumed = make(tiny_mixture(), tmp_path / "again", TOKENS)
        folder = str(tmp_path / "whole" / f"checkpoint-{step}")
        train(resumed, pf.Switch(rank=0.25, when=pf.AtStep(6)), folder)
        same(trainer.model, resumed.model)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    def switch() -> pf.Switch:
        return pf.Switch(rank=0.25, when=pf.AtStep(6))

    trainer = make(Net(), tmp_path, save_strategy="steps", save_steps=4)
    train(trainer, switch())
    with pytest.raises(ValueError, match="the model's 2 low-rank layers, or their ranks, do not match"):
        train(trainer, switch(), str(tmp_path / "checkpoint-4"))
    fresh = make(Net(), tmp_path)
    with pytest.raises(ValueError, match=r"trainer_state\.json is missing"):
        train(fresh, switch(), str(tmp_path / "nowhere"))
    same(fresh.model, Net())
    ordinary = make(Net(), tmp_path / "ordinary", save_strategy="steps", save_steps=4)
    ordinary.train()
    resumed = make(Net(), tmp_path / "more", save_strategy="steps", save_steps=4)
    late = switch()
    train(resumed, late, str(tmp_path / "ordinary" / "checkpoint-4"))
    assert late.report is not None
    assert late.report.position.step == 6
    assert len(resumed.callback_handler.callbacks) == len(ordinary.callback_handler.callbacks)


@pytest.mark.parametrize(
    ("build", "data"), [(Net, None), (tiny_gpt2, TOKENS)], ids=["Module", "PreTrainedModel"]
)
def test_a_plain_resume_says_what_to_call(build: Any, data: Any, tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    trainer = make(build(), tmp_path, data, **options)
    train(trainer, pf.Switch(rank=0.25, when=pf.AtStep(6), back=pf.AtStep(10)))
    dense = make(build(), tmp_path, data, **options)
    text = r"checkpoint-8: saved after the switch .* resume by .*train\(trainer, switch, resume_from_checkpoint=…\)"
    with pytest.raises(ValueError, match=text):
        dense.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    same(dense.model, build())
    for step in (4, 12):  # saved before the switch and after the return to full rank
        dense.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))


def test_a_merged_checkpoint_is_resumed_as_a_dense_one(tmp_path: Path) -> None:
    def switch(step: int) -> pf.Switch:
        return pf.Switch(rank=0.25, when=pf.AtStep(step))

    options = {"save_strategy": "steps", "save_steps": 4}
    train(make(tiny_gpt2(), tmp_path, TOKENS, **options), switch(2))
    merge(tmp_path / "checkpoint-8", tmp_path / "dense")
    plain = make(tiny_gpt2(), tmp_path / "plain", TOKENS)
    plain.train(resume_from_checkpoint=str(tmp_path / "dense"))
    resumed, again = make(tiny_gpt2(), tmp_path / "more", TOKENS), switch(10)
    train(resumed, again, str(tmp_path / "dense"))
    assert again.report is not None
    assert again.report.position.step == 10
    assert all(p.isfinite().all() for trainer in (plain, resumed) for p in trainer.model.parameters())


def test_a_second_run_of_a_new_model_switches_again(tmp_path: Path) -> None:
    trainer = make(Net(), tmp_path, save_strategy="steps", save_steps=8)
    trainer.model_init = lambda: Net()
    switch = pf.Switch(rank=0.25, when=pf.AtStep(6))
    trainer.add_callback(SwitchCallback(trainer, switch))
    trainer.train()
    first = trainer.model
    for resume in (None, str(tmp_path / "checkpoint-8"), None):
        trainer.train(resume_from_checkpoint=resume)
        same(first, trainer.model)
    other = make(Net(), tmp_path)
    train(other, switch)
    assert isinstance(other.model.layers[0], pf.layers.LowRank)


def test_automatic_switch_in_one_epoch_and_on_a_stream(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(samples())

    for data, options in ((samples(), {"num_train_epochs": 1}), (Stream(), {"max_steps": 6})):
        switch = pf.Switch(rank=0.25, when=pf.RanksSettle())
        trainer = make(Net(), tmp_path, data, per_device_train_batch_size=4, **options)
        train(trainer, switch)
        assert switch.report is not None
        assert switch.report.position.step == -(-trainer.state.max_steps // 3)
    assert SwitchCallback(trainer, pf.Switch(back=pf.AtEpoch(2))).by == "epoch"


def test_a_run_that_ends_before_the_switch_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"train: the run ended before the switch \(when=AtEpoch\(n=9\)\)"):
        train(make(Net(), tmp_path), pf.Switch(rank=0.25, when=pf.AtEpoch(9)))


def test_weights_from_before_the_switch_are_not_published(tmp_path: Path) -> None:
    trainer = make(Net(), tmp_path)
    trainer.args.push_to_hub = True  # later than the Trainer asks the Hub
    with pytest.raises(ValueError, match=r'hub_strategy="every_save" .*; set hub_strategy="end"'):
        train(trainer, pf.Switch(rank=0.25, when=pf.AtStep(6)))
    same(trainer.model, Net())


def trains_and_resumes(rank: int, size: int, folder: str, port: int) -> None:
    as_torchrun(rank, size, port)
    register = Register()

    def run(name: str, **resume: Any) -> Trainer:
        trainer = make(
            Net(), Path(folder, name), train_sampling_strategy="sequential", save_strategy="steps", save_steps=2,
            per_device_train_batch_size=BATCH // size,
        )  # fmt: skip
        assert trainer.args.world_size == size
        train(trainer, pf.Switch(rank=0.25, when=pf.AtStep(5)), register=register, **resume)
        assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
        assert isinstance(trainer.model.layers[0], pf.layers.LowRank)
        for p in trainer.model.parameters():
            assert same_everywhere(p)
        assert [e["step"] for e in changes(trainer)] == [5]
        return trainer

    whole = run("whole")
    for step in (4, 8):
        dist.barrier()
        resumed = run(str(step), resume_from_checkpoint=str(Path(folder, "whole", f"checkpoint-{step}")))
        same(whole.model, resumed.model)
    assert len(register.seen) == 3
    # Signs of factors depend on the worker that computed the SVD: compare outputs.
    x = torch.stack([s["x"] for s in samples()])
    alone = by_hand(pf.Switch(rank=0.25, when=pf.AtStep(5)))
    torch.testing.assert_close(whole.model.layers(x), alone.layers(x), rtol=1e-3, atol=1e-3)


@pytest.mark.timeout(240)  # the hang guard
def test_two_processes(tmp_path: Path) -> None:
    in_processes(trains_and_resumes, 2, str(tmp_path), free_port())


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main(str(tmp_path / "run"), steps=4)
    main(str(tmp_path / "run"), steps=8)  # resumes from a low-rank checkpoint
    assert capsys.readouterr().out.count("Switched to low rank at step 1") == 2
    assert (tmp_path / "run" / "dense" / "model.safetensors").is_file()
    assert len(EXAMPLE.read_text().splitlines()) < 40
