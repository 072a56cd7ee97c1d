"""LoCo against a loop over its blocks, and what its error is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import low_bits
from driver import State, drive, normal
from pufferfish.compression import Engine, LoCo, NoCompression, Settings
from pufferfish.compression.check_compressor import gradients


def rounded(x: np.ndarray, block: int, levels: int) -> np.ndarray:
    result = np.zeros(len(x))
    for a in range(0, len(x), block):
        part = x[a : a + block]
        step = np.abs(part).max() / levels
        if step:
            result[a : a + block] = np.round(part / step) * step
    return result


def test_equals_the_papers_loop() -> None:
    """h = g + e, e = βe + (1 − β)(h − sent) in 8 bits, zero after every third step; the owners' error is in fp32."""
    workers, d, beta = 2, 32, 0.7
    method = LoCo(block=8, beta=beta, reset=3)
    states: list[State] = [{}, {}]
    errors = [np.zeros(d) for _ in range(workers)]
    owner = np.zeros(d)
    for step in range(7):
        xs = normal(1, d, workers=workers, seed=step)
        mean, rests, meter = drive(method, xs, states, step)
        assert rests == [None, None]
        total = owner.copy()
        for worker, x in enumerate(xs):
            h = x[0].double().numpy() + errors[worker]
            sent = np.concatenate([low_bits.int4(part) for part in h.reshape(-1, 8)])
            total += sent / workers
            new = beta * errors[worker] + (1 - beta) * (h - sent)
            errors[worker] = np.zeros(d) if step % 3 == 2 else rounded(new, 8, 127)
            e = states[worker]["e"].view(-1, 8) * states[worker]["scale"].view(-1, 1)
            torch.testing.assert_close(
                e.view(-1).double(), torch.tensor(errors[worker]), rtol=1e-3, atol=1e-5
            )
        back = np.concatenate([low_bits.int4(part) for part in total.reshape(-1, 8)])
        owner = total - back
        torch.testing.assert_close(mean[0].double(), torch.tensor(back), rtol=1e-4, atol=1e-5)
    found = meter.collective_bytes
    assert (found["all_to_all"], found["all_gather"]) == (32 // 2 + 4 * 4, 16 // 2 + 2 * 4)


@pytest.mark.parametrize("d", [1, 7, 257, 512])
def test_all_that_was_not_sent_is_handed_over(d: int) -> None:
    """Another method that takes over sends what was left; only rounding to 8 bits loses some of it."""
    engine = Engine(Settings(LoCo(block=16), smallest=0))
    balance = torch.zeros(d)
    for step in range(10):
        (x,) = normal(d, workers=1, seed=step)
        balance += x - engine.average({"w": x})["w"]
    assert balance.norm() > 0.05 * d**0.5 or d == 1  # a single number is exact
    engine.use(Settings(NoCompression(), smallest=0))
    (x,) = normal(d, workers=1, seed=11)
    balance += x - engine.average({"w": x})["w"]
    assert balance.norm() < 0.05 * d**0.5


def test_the_error_follows_the_units() -> None:
    """A learning rate ten times lower makes what is left ten times larger, in units of the gradient."""
    engine = Engine(Settings(LoCo(block=8), smallest=0))
    given = gradients(1)[0]
    engine.average(given, units=dict.fromkeys(given, 1.0))
    before = engine.state_dict()["own"]
    engine.begin(dict.fromkeys(given, 10.0))
    after = engine.state_dict()["own"]
    for name, state in before.items():
        assert torch.equal(after[name]["e"], state["e"])
        torch.testing.assert_close(after[name]["scale"], 10 * state["scale"])
        torch.testing.assert_close(after[name]["owner"], 10 * state["owner"])
