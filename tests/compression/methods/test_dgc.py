"""Deep Gradient Compression against its equations, element by element."""

import torch

from driver import State, drive, normal
from pufferfish.compression import DGC, Engine, Settings
from pufferfish.compression.check_compressor import gradients


def slow(g: list[float], u: list[float], v: list[float], k: int, m: float) -> list[float]:
    """One worker, one tensor: what it sends; u and v are changed."""
    for i, x in enumerate(g):
        u[i] = m * u[i] + x
        v[i] = v[i] + u[i]
    sent = [0.0] * len(g)
    for i in sorted(range(len(g)), key=lambda i: -abs(v[i]))[:k]:
        sent[i], u[i], v[i] = v[i], 0.0, 0.0
    return sent


def test_is_the_equations() -> None:
    workers, b, d = 2, 2, 20
    method = DGC(sparsity=0.85, momentum=0.7)
    states: list[State] = [{} for _ in range(workers)]
    u, v = ([[[0.0] * d for _ in range(b)] for _ in range(workers)] for _ in range(2))
    for step in range(6):
        gs = normal(b, d, workers=workers, seed=step)
        mean = drive(method, gs, states, step).mean
        sent = torch.zeros(workers, b, d)
        for w in range(workers):
            for row in range(b):
                sent[w, row] = torch.tensor(slow(gs[w][row].tolist(), u[w][row], v[w][row], 3, 0.7))
        torch.testing.assert_close(mean, sent.mean(0))
        for w in range(workers):
            torch.testing.assert_close(states[w]["u"], torch.tensor(u[w]))
            torch.testing.assert_close(states[w]["v"], torch.tensor(v[w]))


def test_warm_up_in_stages() -> None:
    method = DGC(warm_up=10)
    stages = [method.sparsity_at(step) for step in range(0, 60, 10)]
    assert stages == [0.75, 0.9375, 0.984375, 1 - 0.25**4, 0.999, 0.999]
    (g,) = normal(1, 1000, workers=1)
    sent = [int((drive(method, [g], step=step).mean != 0).sum()) for step in (0, 9, 10, 20, 30, 40, 10**6)]
    assert sent == [250, 250, 62, 16, 4, 1, 1]
    assert DGC(sparsity=0.9, warm_up=1).sparsity_at(7) == 0.9


def test_unsent_gradients_do_not_depend_on_the_learning_rate() -> None:
    """u and v are sums of gradients: a lower learning rate leaves them as they are."""
    plain, other = (Engine(Settings(DGC(sparsity=0.9), smallest=0)) for _ in range(2))
    for step, rate in enumerate([1.0, 0.5, 0.1]):
        given = gradients(1, step)[0]
        means = [
            engine.average(given, units)
            for engine, units in ((plain, None), (other, dict.fromkeys(given, 1 / rate)))
        ]
        assert all(torch.equal(means[0][name], means[1][name]) for name in given)


def test_unsent_gradients_follow_the_loss_scale() -> None:
    """With twice the loss scale and twice the gradients, all results are twice as large."""
    plain, scaled = (Engine(Settings(DGC(sparsity=0.9), smallest=0)) for _ in range(2))
    for step, scale in enumerate([1.0, 2.0, 0.5]):
        given = gradients(1, step)[0]
        mean = plain.average(given, dict.fromkeys(given, 1.0))
        larger = {n: g * scale for n, g in given.items()}
        other = scaled.average(larger, dict.fromkeys(given, scale), scale)
        for name in given:
            assert torch.equal(other[name], mean[name] * scale)
