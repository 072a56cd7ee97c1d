"""The advisor: what it is about, what it says, and that bad input is refused before anything runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pufferfish as pf
from pufferfish.cli import advise as command
from pufferfish.lab.advise import Advice, advise, nominal, subject
from pufferfish.lab.network import Shape
from pufferfish.measure import CostModel, Line, Link, Work
from pufferfish.measure.fsdp2_messages import sharded
from pufferfish.measure.remedies import Job, gradients, plain
from pufferfish.measure.worthwhile import worthwhile

FACTORY = """
import torch
from torch import nn

def wide():
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    return model, torch.randn(4, 64), lambda model, x: model(x).square().mean()

def tiny():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.randn(512, 8),)

def even():
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(4, 256)

def alone():
    return nn.Linear(4, 4)

def number():
    return 3

def nan():
    return nn.Linear(64, 64), torch.randn(4, 64), lambda model, x: model(x).sum() * float("nan")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FACTORY)
    return path


def called(*words: str) -> None:
    """The command, as the program calls it."""
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers(dest="command"))
    arguments = parser.parse_args(["advise", *words])
    arguments.run(arguments)


def test_a_task_brings_its_recipe() -> None:
    about = subject("digits:mlp", size=4, rank=1, batch=32)
    assert about.keep == ("fc3",)
    assert about.warm_up == pytest.approx(4 / 12)
    images, labels = about.batch()
    assert len(labels) == 8
    first, second = about.build(), about.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    about.forward(first, (images, labels)).backward()


def test_a_factory_brings_a_step(file: Path) -> None:
    about = subject(f"{file}:wide", keep=["4"], steps=100)
    assert about.steps == 100
    about.forward(about.build(), about.batch()).backward()
    about = subject(f"{file}:tiny")
    about.forward(about.build(), about.batch()).backward()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit", "--network", "1gbit", "--nodes", "2"], "no such task"),
        (["digits", "--network", "real"], "torchrun"),
        (["digits"], "torchrun"),
        (["digits", "--network", "1gbit"], "--nodes"),
        (["digits", "--network", "fast", "--nodes", "2"], "write it as 100mbit"),
        (["digits", "--network", "1gbit", "--nodes", "0"], "1 or more"),
        (["digits", "--network", "1gbit", "--nodes", "2", "--engine", "zero"], "ddp, fsdp2"),
        (["digits", "--network", "1gbit", "--nodes", "2", "--engine", "fsdp2", "--check"], "predicted"),
        (["digits", "--network", "1gbit", "--nodes", "3"], "equal parts"),
        (["digits", "--network", "1gbit", "--nodes", "2", "--methods", "pufferfish"], "compression methods"),
        (["digits", "--network", "1gbit", "--nodes", "2", "--methods", "zip"], "no zip"),
        (["digits", "--network", "10gbit", "--nodes", "2", "--check"], "predicted, not emulated"),
        (["digits", "--network", "1gbit", "--nodes", "2", "--check", "--methods", "zip"], "no zip"),
        (["{file}:wide", "--network", "1gbit", "--nodes", "2", "--check", "--keep", "head"], "matches no"),
        (
            ["digits", "--network", "1gbit", "--nodes", "2", "--engine", "fsdp2", "--methods", "int8"],
            "leave it",
        ),
        (["digits", "--network", "1gbit", "--nodes", "2", "--recipe", "long"], "no recipe"),
        (["{file}:alone", "--network", "1gbit", "--nodes", "2"], "return .model, batch"),
        (["{file}:number", "--network", "1gbit", "--nodes", "2"], "return .model, batch"),
        (["{file}:nobody", "--network", "1gbit", "--nodes", "2"], "no function"),
        (["{file}:wide", "--network", "1gbit", "--nodes", "2", "--batch", "8"], "its own batch"),
        (
            ["{file}:wide", "--network", "1gbit", "--nodes", "2", "--recipe", "paper"],
            "is no task and has none",
        ),
        (["{file}:wide", "--network", "1gbit", "--nodes", "2", "--methods", ""], "method ''"),
        (["{file}:wide", "--network", "1gbit", "--nodes", "1000", "--per-node", "2"], "1,024 or fewer"),
        (["{file}:nan", "--network", "1gbit", "--nodes", "2"], "as it is built is nan"),
        (["{file}:wide", "--network", "1gbit", "--nodes", "2", "--keep", "head"], "matches no layer"),
    ],
)
def test_bad_input(words: list[str], message: str, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    with pytest.raises(ValueError, match=message):
        called(*(word.format(file=file) for word in words), "--out", str(out), "--device", "cpu")
    assert not out.exists()


def test_a_slow_network_wants_fewer_bytes(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    called(f"{file}:wide", "--network", "1mbit", "--nodes", "4", "--steps", "3600", "--device", "cpu", "--json",
           "--methods", "bf16", "--out", str(out))  # fmt: skip
    said = json.loads(capsys.readouterr().out)
    steps = {c["name"]: c["step"] for c in said["choices"]}
    assert said["best"] == "pufferfish+bf16"
    assert steps["pufferfish+bf16"] < min(steps["pufferfish"], steps["bf16"])
    assert max(steps["pufferfish"], steps["bf16"]) < steps["dense"]
    dense = said["choices"][0]
    assert dense["hours"] == pytest.approx(dense["step"])
    assert dense["wire_bytes"] == 1.5 * 4 * sum(
        p.numel() for p in subject(f"{file}:wide").build().parameters()
    )
    model = subject(f"{file}:wide").build()
    plan = pf.Plan.load(out)
    pf.factorize_(model, plan)
    pf.Switch(plan=plan)


def test_the_clock_has_the_last_word(file: Path) -> None:
    about = subject(f"{file}:wide", steps=3600)
    said = advise(
        about, nominal(Shape.parse("1mbit"), 4, 1, "cpu"), network="1mbit", nodes=4, methods=["bf16"]
    )
    assert said.best.name == "pufferfish+bf16"
    steps = {"dense": 3.0, "bf16": 2.0, "pufferfish": 0.6}  # low rank with bf16 was not run
    found = said.clocked(steps)
    assert found.best.name == "pufferfish"
    by_name = {c.name: c for c in found.choices}
    assert by_name["pufferfish"].speedup == pytest.approx(5)
    full_rank_for_a_third = 3.0 / 3 + 2 * 0.6 / 3
    assert by_name["pufferfish"].run_speedup == pytest.approx(3 / full_rank_for_a_third)
    assert by_name["bf16"].run_speedup == pytest.approx(1.5)
    assert [by_name[name].hours for name in steps] == pytest.approx([3.0, 2.0, 1.4])
    assert by_name["pufferfish+bf16"] == next(c for c in said.choices if c.name == "pufferfish+bf16")
    assert "by the clock" in str(found)
    assert "pf.Switch(plan, when=pf.AtFraction(0.33))." in str(found)
    assert "within 3% of the fastest" not in str(found)
    assert "within 3% of the fastest" in str(said.clocked(steps | {"bf16": 1.43}))
    again = found.clocked(steps)
    assert [c.hours for c in again.choices] == pytest.approx([c.hours for c in found.choices])
    assert "nothing that was run" in str(said.clocked({"dense": 1.0, "bf16": 1.1}))


def test_nothing_pays_where_there_is_nothing_to_save(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    called(f"{file}:tiny", "--network", "400gbit", "--nodes", "2", "--device", "cpu", "--methods", "powersgd-4",
           "--out", str(out))  # fmt: skip
    said = capsys.readouterr().out
    assert "Use plain DDP" in said
    assert "was not written" in said
    assert not out.exists()


def test_sharded_weights_have_no_compression(file: Path) -> None:
    about = subject(f"{file}:wide")
    found = advise(about, nominal(Shape(1.0), 4, 2), nodes=4, per_node=2, engine="fsdp2")
    assert {c.name for c in found.choices} == {"dense", "bf16", "pufferfish", "pufferfish+bf16"}
    assert found.choices[0].wire_bytes == pytest.approx(3 * 7 / 8 * 4 * 300_040, rel=0.01)
    assert found.link.size == 8


def test_machines_with_several_workers_may_average_inside_first(file: Path) -> None:
    about = subject(f"{file}:even")
    found = advise(about, nominal(Shape(10.0), 2, 4), nodes=2, per_node=4, methods=["topk-0.01"])
    choices = {c.name: c for c in found.choices}
    ways = ("dense", "topk-0.01", "pufferfish", "pufferfish+topk-0.01")
    assert set(choices) == {*ways, *(f"{name}, levels=node" for name in ways)}
    for name in ways:
        node = choices[f"{name}, levels=node"]
        assert node.step < choices[name].step
        assert node.wire_bytes < choices[name].wire_bytes
        assert found.plans.get(node.name) == found.plans.get(name)
    pair = choices["pufferfish+topk-0.01, levels=node"]
    assert pair.wire_bytes < choices["topk-0.01, levels=node"].wire_bytes
    said = str(found)
    assert "\npufferfish+topk-0.01, levels=node " in said
    assert "\npufferfish+topk-0.01 " not in said  # the slower of the two
    assert "\ndense " in said
    assert f"no exchange at all, dense: {found.ceiling:.2f}×" in said
    assert said.splitlines()[4].split() == ["ms", "a", "step", "MB", "sent", "step", "run"]


def test_two_levels_are_told_only_where_they_pay() -> None:
    names = {"dense": 1.0, "dense, levels=node": 1.5, "bf16": 1.9, "bf16, levels=node": 1.91}
    found = _advice(names)
    assert found.best.name == "bf16"
    rows = [line.partition("  ")[0] for line in str(found).splitlines()[5:8]]
    assert rows == ["dense", "bf16", "dense, levels=node"]
    assert 'levels="node"' not in str(found)
    names["bf16, levels=node"] = 2.5
    assert "Use bf16, levels=node" in str(_advice(names))
    assert 'pf.compress(ddp, pf.compression.BFloat16(), levels="node")' in str(_advice(names))
    names["dense, levels=node"] = 2.6
    assert 'pf.compress(ddp, pf.compression.NoCompression(), levels="node")' in str(_advice(names))


def _advice(speedups: dict[str, float]) -> Advice:
    choices = [
        pf.measure.Choice(kind="", name=name, step=1, speedup=s, run_speedup=s, hours=None, wire_bytes=1.0)
        for name, s in speedups.items()
    ]
    return Advice(
        subject="s", network="n", nodes=2, per_node=1, engine="ddp", choices=choices, plans={}, ceiling=2.0,
        link=Link.of(bandwidth=1e9, latency=0, size=2), computing=Work(forward=1, backward=1),
    )  # fmt: skip


def test_of_two_that_are_alike_the_simpler_one() -> None:
    found = _advice({"dense": 1.0, "bf16": 1.99, "powersgd-4": 2.0})
    choices = found.choices
    assert found.best.name == "bf16"
    assert [c.name for c in found.top()] == ["bf16", "powersgd-4", "dense"]
    slight = replace(found, choices=[choices[0], replace(choices[1], run_speedup=1.04)])
    assert slight.best.name == "dense"


def test_layers_are_chosen_by_time_and_bytes() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    made = pf.plan(model, 0.25)
    times = [(1.0, 0.5), (1.0, 1.2), (1.0, 30.0)]
    timed = made.replace(replace(e, ms=ms) for e, ms in zip(made, times, strict=True))
    work = plain(Work(forward=0.01, backward=0.02), gradients(model))
    chosen = []
    for bandwidth in (1e6, 1e8, 1e12):
        costs = CostModel(link=Link.of(bandwidth=bandwidth, latency=0, size=2))
        chosen.append(sorted(worthwhile(timed, work, costs, 2).ranks))
    assert chosen == [["0", "1", "2"], ["0", "1"], ["0"]]
    costs = CostModel(link=Link.of(bandwidth=1e8, latency=0, size=2))
    compressed = worthwhile(timed, work, costs, 2, share=0.01)
    assert sorted(compressed.ranks) == ["0"]
    assert "not worth it" in compressed["1"].reason
    assert "1.2 ms low-rank" in compressed["1"].reason


def test_a_nominal_network_by_hand() -> None:
    link = nominal(Shape(1000.0), nodes=2, per_node=4)
    beta = 8 / 949e6
    assert link.lines["all_reduce"].beta == pytest.approx(beta)
    assert link.lines["all_to_all"].beta == pytest.approx(
        beta * 4 * 4 / 7
    )  # four at once; 4 of 7 peers are outside
    assert link.between is not None
    assert link.between["all_reduce"].beta == pytest.approx(4 * beta)
    assert nominal(Shape(1000.0, delay_ms=5), 2, 1).latency == pytest.approx(5.1e-3)
    assert nominal(Shape(1.0), 1, 8).bandwidth > 1e10  # one machine: its own line does not count


def test_levels_send_one_share() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in "abcd"))
    like = gradients(model)
    job = Job(model, Work(forward=0.0, backward=0.0), 8, None, pf.plan(model, 0.25), "")
    work = job.by_machine(pf.compression.BFloat16(), 4).work
    flat = sum(x.nbytes for x in like.values())
    assert work.inside == flat
    flags = 4 * (1 + len(like))  # of all tensors, whoever owns them
    assert sum(n for _, n in work.messages) == flat / 2 / 4 + flags
    link = Link(
        size=8, per_node=4, lines={"all_reduce": Line(alpha=0, beta=1e-8)},
        inside={"all_reduce": Line(alpha=0, beta=0)}, between={"all_reduce": Line(alpha=0, beta=4e-8)},
    )  # fmt: skip
    said = CostModel(link=link).predict(work)
    assert said.exchange == pytest.approx(flat / 2 * 1e-8, rel=0.01)  # 2(p-1)/p = 1 between two machines
    assert sharded(work, like, 8).gathers == (("all_gather", flat // 8),)
