"""Every task on tiny data: it learns, workers share its batches, and its figures match a slow reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from tiny import TINY, Tiny
from torch import Tensor, nn

import pufferfish as pf
from paper import COUNTS
from pufferfish.lab.data.batches import hold_out
from pufferfish.lab.tasks import Recipe, Task, find_task
from pufferfish.lab.tasks.images import shift_and_flip

RECIPE = Recipe(epochs=1, batch=8, lr=0.1)


@pytest.fixture(scope="module", params=TINY)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Any]:
    if request.param == "imagefolder":
        pytest.importorskip("PIL", reason="Pillow is not installed")
    tiny = TINY[request.param]
    folder = tmp_path_factory.mktemp("data")
    tiny.write(folder)
    return tiny, tiny.task.load(folder)


def epoch(
    task: Task, data: Any, split: str = "train", batch: int = 8, seed: int = 0, **order: int
) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return list(task.batches(data, split, batch, generator=generator, **order))


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, sum(a, ()), sum(b, ())))


def test_the_loss_falls(loaded: tuple[Tiny, Any]) -> None:
    tiny, data = loaded
    torch.manual_seed(1)
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    batch, losses = epoch(tiny.task, data)[0], []
    for _ in range(25):
        loss = tiny.task.loss(model, tuple(x.clone() for x in batch), RECIPE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_workers_share_the_batches_of_one(loaded: tuple[Tiny, Any], size: int, split: str) -> None:
    tiny, data = loaded
    whole = epoch(tiny.task, data, split)
    shares = [epoch(tiny.task, data, split, worker=i, world_size=size) for i in range(size)]
    assert {len(x) for x in shares} == {len(whole)}
    for batch, *parts in zip(whole, *shares, strict=True):
        for x, *mine in zip(batch, *parts, strict=True):
            if x.dim():
                assert torch.equal(torch.cat(mine, tiny.rows), x)
            else:  # what the workers' parts of the loss are divided by
                torch.testing.assert_close(sum(mine), x)


def test_the_mean_of_the_workers_losses_is_that_of_the_batch(loaded: tuple[Tiny, Any]) -> None:
    tiny, data = loaded
    model = tiny.model().eval()
    losses = [
        tiny.task.loss(model, epoch(tiny.task, data, worker=i, world_size=size)[0], RECIPE)
        for size in (1, 4)
        for i in range(size)
    ]
    torch.testing.assert_close(torch.stack(losses[1:]).mean(), losses[0])


def test_an_epoch_is_drawn_from_the_generator_and_can_be_resumed(loaded: tuple[Tiny, Any]) -> None:
    tiny, data = loaded
    first = epoch(tiny.task, data)
    assert len(first) == tiny.task.steps(data, 8)
    assert same(epoch(tiny.task, data), first)
    assert same(epoch(tiny.task, data, start=1), first[1:])
    if not tiny.task.carried_tensors:
        assert not same(epoch(tiny.task, data, seed=1), first)
        with pytest.raises(ValueError, match="pass a generator"):
            next(tiny.task.batches(data, "train", 8))


def test_every_training_batch_has_one_shape(loaded: tuple[Tiny, Any]) -> None:
    tiny, data = loaded
    shapes = {tuple(x.shape for x in batch) for batch in epoch(tiny.task, data)}
    assert len(shapes) == 1 or not tiny.task.static_shapes


def test_invalid_batches(loaded: tuple[Tiny, Any]) -> None:
    tiny, data = loaded
    with pytest.raises(ValueError, match="a batch of 8 cannot be divided evenly among 3 workers"):
        epoch(tiny.task, data, world_size=3)
    with pytest.raises(ValueError, match="worker 2 does not exist among 2"):
        epoch(tiny.task, data, worker=2, world_size=2)
    with pytest.raises(ValueError, match=r"there are|too short"):
        epoch(tiny.task, data, batch=100_000)
    with pytest.raises(ValueError, match="there are"):
        tiny.task.steps(data, 100_000)


def slow_figures(tiny: Tiny, data: Any, model: nn.Module, split: str) -> dict[str, float]:
    """Row by row, token by token."""
    losses, right = [], []
    with torch.no_grad():
        for logits, target in predictions(tiny, data, model, split):
            losses.append(float(-logits.double().log_softmax(-1)[target]))
            right.append(int(logits.argmax()) == target)
    loss = sum(losses) / len(losses)
    figures = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2)}
    return figures | {"accuracy": 100 * sum(right) / len(right)}


def predictions(tiny: Tiny, data: Any, model: nn.Module, split: str) -> Iterator[tuple[Tensor, int]]:
    task: Any = tiny.task
    if task.metric == "accuracy":
        for images, labels in task.batches(data, split, 1):
            yield model(images)[0], int(labels)
    elif task.metric == "bleu":
        for source, target in zip(*data.rows.on(split, "cpu"), strict=True):
            source, target = source[source != 0], target[target != 0]
            yield from zip(model(source[None], target[None, :-1])[0], target[1:].tolist(), strict=True)
    elif task.carried_tensors:
        (text,) = data.on(split, "cpu")
        rows = len(text) // 10
        for column in text[: 10 * rows].view(10, rows):
            logits, _ = model(column[:-1, None])
            yield from zip(logits[:, 0], column[1:].tolist(), strict=True)
    else:
        (text,) = data.on(split, "cpu")
        for first in range(0, len(text) - 1, task.context):
            window = text[first : first + task.context + 1].long()
            yield from zip(model(window[None, :-1])[0], window[1:].tolist(), strict=True)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluate_matches_a_slow_reference(loaded: tuple[Tiny, Any], split: str) -> None:
    tiny, data = loaded
    model = tiny.model()
    tiny.task.loss(model, epoch(tiny.task, data)[0], RECIPE)  # so that batch norms know something
    slow = slow_figures(tiny, data, model.eval(), split)
    model.train()
    for batch in (3, 64):
        found = tiny.task.evaluate(model, data, split, batch=batch)
        assert tiny.task.metric in found
        assert {k: v for k, v in found.items() if k != "bleu"} == pytest.approx(
            {k: slow[k] for k in found if k != "bleu"}, rel=1e-4
        )
    assert model.training


def test_recipes(loaded: tuple[Tiny, Any]) -> None:
    task = loaded[0].task
    assert "short" in task.recipes
    for recipe in task.recipes.values():
        assert recipe.switch_at is None or recipe.switch_at < recipe.epochs
    with pytest.raises(ValueError, match=f"{task.name} has no recipe 'long'; choose from .*short"):
        task.recipe("long")


@pytest.mark.parametrize("name", TINY)
def test_the_models_are_the_papers(name: str) -> None:
    task: Any = find_task(name)
    with torch.device("meta"):
        plan = pf.plan(task.build(), rank=pf.Ratio(0.25, multiple=1), keep=task.keep)
    paper = {"cifar10": "resnet18", "cifar10:vgg19": "vgg19", "wikitext2": "lstm", "multi30k": "transformer"}
    paper |= {"imagefolder": "resnet50"}
    if name in paper:
        assert (plan.before.parameters, plan.after.parameters) == COUNTS[paper[name]]
    assert plan.ranks


def test_the_low_rank_model_trains(loaded: tuple[Tiny, Any]) -> None:
    tiny, data = loaded
    model = tiny.model()
    pf.factorize_(model, pf.plan(model, rank=pf.Ratio(0.25, multiple=1)))
    for batch in epoch(tiny.task, data)[:2]:
        tiny.task.loss(model, batch, RECIPE).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_training_and_validation_are_apart() -> None:
    data = find_task("digits").load(None)
    rows = [{tuple(x.flatten().tolist()) for x in data.on(s, "cpu")[0]} for s in ("train", "valid", "test")]
    assert [data.size(s) for s in ("train", "valid", "test")] == [1294, 144, 359]
    assert not rows[0] & rows[1] | rows[0] & rows[2] | rows[1] & rows[2]
    train, valid = hold_out(1000, 100)
    assert torch.equal(valid, hold_out(1000, 100)[1])
    assert sorted(torch.cat((train, valid)).tolist()) == list(range(1000))


def test_shift_and_flip_is_padding_and_cropping() -> None:
    pixels = torch.randint(256, (6, 9, 7, 3), dtype=torch.uint8)
    rows = torch.tensor([5, 0, 0, 3, 2])
    down, right = torch.randint(-4, 5, (2, 5))
    mirror = torch.tensor([True, False, True, True, False])
    for i, image in enumerate(shift_and_flip(pixels, rows, down, right, mirror)):
        wide = F.pad(pixels[rows[i]].permute(2, 0, 1)[None].float(), (4, 4, 4, 4), mode="reflect")[0]
        y, x = 4 - int(down[i]), 4 - int(right[i])
        cut = wide[:, y : y + 9, x : x + 7]
        assert torch.equal(image.permute(2, 0, 1).float(), cut.flip(2) if mirror[i] else cut)


def test_only_training_images_are_augmented(tmp_path: Path) -> None:
    tiny = TINY["cifar10"]
    tiny.write(tmp_path)
    data = tiny.task.load(tmp_path)
    _, labels = data.on("train", "cpu")
    seen = torch.cat([y for _, y in epoch(tiny.task, data)])
    assert sorted(seen.tolist()) == sorted(labels.tolist())
    images = torch.cat([x for x, _ in epoch(tiny.task, data, "test", batch=5)])
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (tiny.task.mean, tiny.task.std))  # type: ignore[attr-defined]
    raw = data.on("test", "cpu")[0].permute(0, 3, 1, 2)
    torch.testing.assert_close(images * std + mean, raw.float())
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert "valid" not in find_task("cifar10:held=0").load(tmp_path)._splits


def test_cutout_hides_a_square_of_training_images(tmp_path: Path) -> None:
    TINY["cifar10"].write(tmp_path)
    plain, cut = (find_task(f"cifar10:held=8{more}") for more in ("", ",cutout=6"))
    data = plain.load(tmp_path)
    hidden = []
    for (images, labels), (others, same) in zip(epoch(plain, data), epoch(cut, data), strict=True):
        assert torch.equal(labels, same)
        assert others.is_contiguous(memory_format=torch.channels_last)
        inside = ((others == 0) & (images != 0)).any(1)
        assert torch.equal(others, images.masked_fill(inside[:, None], 0.0))
        for mask in inside:
            rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
            assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
            assert int(rows[-1] - rows[0]) < 6
            hidden.append(int(mask.sum()))
    assert max(hidden) == 36  # whole squares; others lie partly outside
    assert min(hidden) < 36
    tests = [torch.cat([x for x, _ in epoch(task, data, "test", batch=5)]) for task in (plain, cut)]
    assert torch.equal(*tests)
    with pytest.raises(ValueError, match="cutout=40 must be between 0 and 32"):
        find_task("cifar10:cutout=40")


def test_carried_state_is_one_long_text(tmp_path: Path) -> None:
    tiny = TINY["wikitext2"]
    tiny.write(tmp_path)
    task, data = tiny.task, tiny.task.load(tmp_path)
    model = tiny.model().train()  # without dropout
    losses = [tiny.task.loss(model, batch, RECIPE) for batch in task.batches(data, "train", 4)]
    (text,) = data.on("train", "cpu")
    rows = len(text) // 4
    long = text[: 4 * rows].view(4, rows).t()[: 5 * len(losses) + 1]
    logits, _ = model(long[:-1])
    torch.testing.assert_close(
        torch.stack(losses).mean(), F.cross_entropy(logits.flatten(0, 1), long[1:].flatten())
    )
    losses[-1].backward()  # nothing that it needs was overwritten
    assert len({x.item() for x in losses}) > 1

    *_, h, c = batch = next(task.batches(data, "train", 4))
    task.loss(model.eval(), batch, RECIPE)
    assert not h.any()
    assert not c.any()
    task.loss(model.train(), batch, RECIPE)
    assert h.any()
    assert c.any()


def test_dropout_of_the_gpt_is_kept_by_factorize() -> None:
    model = find_task("text:d=32,layers=2,heads=2,context=8,dropout=0.5").build()
    text = torch.randint(256, (2, 8))
    pf.factorize_(model, pf.plan(model, rank=pf.Ratio(0.25, multiple=1)))
    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))


def test_an_epoch_of_fewer_tokens(tmp_path: Path) -> None:
    """Windows are drawn from the whole text, each once at most; the order does not depend on `epoch_tokens`."""
    tiny.text(tmp_path)
    task: Any = find_task("text:context=8,epoch_tokens=160")
    data = task.load(tmp_path)
    whole = epoch(find_task("text:context=8"), data, batch=4)
    assert len(whole) == (810 // 8 - 1) // 4
    assert task.steps(data, 4) == 5
    assert same(epoch(task, data, batch=4), whole[:5])
    assert same(epoch(task, data, batch=4, start=3), whole[3:5])
    assert same(epoch(task, data, batch=2)[:10], epoch(find_task("text:context=8"), data, batch=2)[:10])
    assert not same(epoch(task, data, batch=4, seed=1), whole[:5])
    assert find_task("text:context=8,epoch_tokens=0") == find_task("text:context=8")
    assert task.steps(data, 20) == find_task("text:context=8,epoch_tokens=9999").steps(data, 100) == 1
    with pytest.raises(ValueError, match="there are 20 windows of 8 tokens in an epoch"):
        task.steps(data, 21)


@pytest.mark.parametrize("problem", ["pixels", "class", "val", "more"])
def test_invalid_image_folders(problem: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="Pillow is not installed")
    tiny = TINY["imagefolder"]
    tiny.write(tmp_path)
    task, says = tiny.task, ""
    if problem == "pixels":
        path = tmp_path / "val" / "cat" / "0.png"
        path.write_bytes(path.read_bytes()[:-60])
        says = str(path)
    elif problem == "class":
        (tmp_path / "val" / "cat").rename(tmp_path / "val" / "bird")
        says = "bird, cat"
    elif problem == "val":
        (tmp_path / "val").rename(tmp_path / "other")
        says = f"{tmp_path / 'val'}: it needs one folder of images"
    else:
        task, says = find_task("imagefolder:classes=1"), "use imagefolder:classes=2"
    with pytest.raises(ValueError) as raised:
        epoch(task, task.load(tmp_path), "test")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


RATES = {
    "linear": ({}, lambda s: 1 - (s - 20) / 80),
    "cosine": ({"floor": 0.1}, lambda s: 0.1 + 0.45 * (1 + math.cos(math.pi * (s - 20) / 80))),
    "steps": ({"milestones": (0.5, 0.75)}, lambda s: 1.0 if s < 50 else 0.1 if s < 75 else 0.01),
    "inverse-sqrt": ({}, lambda s: math.sqrt(20 / (s + 1))),
    "plateau": ({}, lambda s: 1.0),
}


@pytest.mark.parametrize("schedule", RATES)
def test_learning_rates(schedule: str) -> None:
    settings, after = RATES[schedule]
    recipe = Recipe(epochs=1, batch=1, lr=2.0, warm_up=0.2, schedule=schedule, **settings)
    for step in range(100):
        rise = (step + 1) / 20
        expected = rise if rise <= 1 else after(step)
        assert recipe.lr_at(step, 100) == pytest.approx(2 * expected), step


def test_a_warm_up_longer_than_the_run() -> None:
    paper = find_task("multi30k").recipe("paper")
    assert paper.lr_at(45_199, 45_200) == pytest.approx(512**-0.5 * 45_200 * 128_000**-1.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0}, {"batch": 0}, {"lr": 0.0}, {"lr": math.nan}, {"schedule": "cosin"}, {"optimizer": "lion"},
        {"warm_up": -1.0}, {"floor": 2.0}, {"label_smoothing": 1.0}, {"clip": 0.0}, {"schedule": "inverse-sqrt"},
    ],
)  # fmt: skip
def test_invalid_recipes(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Recipe: {next(iter(wrong))}="):
        Recipe(**({"epochs": 1, "batch": 1, "lr": 1.0} | wrong))


def test_find_task(tmp_path: Path) -> None:
    for name in TINY:
        assert isinstance(find_task(name), Task)
    assert find_task("wikitext2:lstm") == find_task("wikitext2")
    assert find_task("text:gpt") == find_task("text")
    assert find_task("text:dropout=0").dropout == 0.0  # type: ignore[attr-defined]
    own = tmp_path / "own.py"
    own.write_text("from pufferfish.lab.tasks.digits import Digits\ntask = Digits('mlp')\nnumber = 3\n")
    assert find_task(f"{own}:task").model == "mlp"  # type: ignore[attr-defined]
    assert find_task("pufferfish.lab.tasks.cifar10:Cifar10") == find_task("cifar10")
    for text, says in {
        "cifar100": "did you mean cifar10",
        "cifar10:vgg18": "did you mean vgg19",
        "cifar10:depth=3": "unknown option 'depth'; choose from model, held, cutout",
        "cifar10:held=many": "must be an int",
        "cifar10:held=2.5": "must be an int",
        "digits:width=0": "width=0 is too small",
        "digits:held=-1": "held=-1 is too small",
        "imagefolder:held=x": "must be a float",
        "cifar10:resnet18,vgg19": "'vgg19' is not an option",
        "multi30k:gpt": "'gpt' is not an option",
        "text:lstm": "has no model 'lstm'; choose from gpt, llama",
        "text:d=100,heads=3": "not a multiple",
        f"{own}:other": "has no function 'other'",
        f"{own}:number": "has no function 'number'",
        f"{own}": "has no function 'build'; add `def build(): return model`",
        f"{tmp_path}/none.py:task": "no such file",
        "": "not found",
    }.items():
        with pytest.raises((ValueError, TypeError)) as raised:
            find_task(text)
        assert says in str(raised.value)
        assert str(raised.value).startswith(f"task {text!r}: ") or text.startswith(str(tmp_path))
        assert "\n" not in str(raised.value)
