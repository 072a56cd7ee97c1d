"""torchft: replicas that are killed, hang, join and come back; each in a real process."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
import runpy
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft")

import torch
import torchft.ddp
from torch import Tensor, nn
from torchft.coordination import LighthouseServer

import pufferfish as pf
from integrations.elastic import (
    Accident,
    Job,
    all_do,
    backward,
    build,
    close_to,
    cluster,
    join,
    reference,
    train_without,
)
from processes import forked, in_processes
from pufferfish.compression import BlockInt8, PowerSGD, SparseLoCo, TopK
from pufferfish.compression.settings import Methods
from pufferfish.integrations.torchft import (
    ElasticGradients,
    ElasticLocalSteps,
    Replicas,
    StateServer,
)
from pufferfish.integrations.torchft.replicas import digest
from pufferfish.integrations.torchft.state_server import decode, encode


def test_replicas_train_as_the_reference_does() -> None:
    with cluster(job := Job(momentum=0.9)) as c:
        three = [c.add(name) for name in "abc"]
        all_do(three, "start")
        found = all_do(three, "until", 8)
    assert found[0]["size"] == 3
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2)] * 2))


SLOW = pytest.mark.slow


@pytest.mark.parametrize("collective", [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)])
def test_a_replica_is_killed_in_an_exchange_and_joins_again(collective: int) -> None:
    """The survivors keep the updates of this round and average without it; a new process gets everything from them."""
    with cluster(job := Job(momentum=0.9)) as c:
        a, b = c.add("a"), c.add("b")
        lost = c.add("c", Accident(round=2, collective=collective))
        all_do([a, b, lost], "start")
        all_do([a, b, lost], "until", 4)
        found = train_without(lost, [a, b], 8)
        close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1)]))
        back = c.add("c")
        assert join(c, back, [a, b], 12)["position"] == 12
        found = all_do([a, b, back], "until", 16)
    assert found[0]["size"] == 3
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1), (0, 1, 2)]))


@pytest.mark.slow
def test_a_replica_hangs_and_comes_back() -> None:
    with cluster(job := Job(timeout=2.0)) as c:
        a, b = c.add("a"), c.add("b")
        stopped = c.add("c", Accident(round=2, collective=1, signal=signal.SIGSTOP))
        all_do([a, b, stopped], "start")
        for one in (a, b, stopped):
            one.tell("until", 12)
        stopped.hangs()
        found = [one.answer() for one in (a, b)]
        close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1)]))
        stopped.wake()
        c.wait_for_joiner()
        all_do([a, b], "until", 16)
        assert stopped.answer()["position"] == 16
        found = all_do([a, b, stopped], "until", 20)
    assert found[0]["size"] == 3
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1), (0, 1), (0, 1, 2)]))


def test_a_replica_is_killed_in_a_flight() -> None:
    """The average on its way is lost for all; the survivors average again when it should have been applied."""
    with cluster(Job(fragments=2, delay=1, momentum=0.9)) as c:
        a, b = c.add("a"), c.add("b")
        lost = c.add("c", Accident(round=4, collective=1))
        all_do([a, b, lost], "start")
        all_do([a, b, lost], "until", 6)
        found = train_without(lost, [a, b], 11)
        assert (found[0]["round"], found[0]["size"]) == (6, 2)
        back = c.add("c")
        assert join(c, back, [a, b], 13)["position"] == 12
        found = all_do([a, b, back], "until", 21)
    assert found[0]["size"] == 3


@pytest.mark.parametrize("collective", [pytest.param(0, marks=SLOW), 1])
def test_a_replica_is_killed_in_the_switch_and_joins_after_it(collective: int) -> None:
    with cluster(Job(switch_at=4, inner="AdamW")) as c:
        a, b = c.add("a"), c.add("b")
        lost = c.add("c", Accident(round=2, collective=collective))  # in `start` after the switch
        all_do([a, b, lost], "start")
        found = train_without(lost, [a, b], 8)
        assert found[0]["ranks"] == {"2": 12}
        back = c.add("c")
        joined = join(c, back, [a, b], 12)
        assert joined["ranks"] == {"2": 12}
        assert joined["model"] == joined["anchor"], "it begins with the anchor"
        assert joined["optimizer"] == ["exp_avg", "exp_avg_sq", "step"]
        found = all_do([a, b, back], "until", 16)
    assert found[0]["size"] == 3


@pytest.mark.slow
def test_a_replica_joins_in_the_round_before_the_switch() -> None:
    """The others have updates of the second fragment to average before the switch; it has none."""
    with cluster(Job(fragments=2, switch_at=6)) as c:
        a, b = c.add("a"), c.add("b")
        all_do([a, b], "start")
        all_do([a, b], "until", 5)
        late = c.add("c")
        late.tell("start")
        c.wait_for_joiner()
        for one in (a, b):
            one.tell("until", 10)
        assert late.answer()["position"] == 6
        late.tell("until", 10)
        found = [one.answer() for one in (a, b, late)]
    assert found[0]["anchor"] == found[1]["anchor"] == found[2]["anchor"]
    assert found[2]["ranks"] == {"2": 12}


@pytest.mark.slow
def test_too_few_replicas_end_the_job_with_one_line() -> None:
    with cluster(Job()) as c:
        alone = c.add("a", job=Job(min_replicas=2, timeout=1.0, patience=2.0))
        alone.tell("start")
        with pytest.raises(RuntimeError, match="round 0 was not completed within 2 s, with 1 replicas"):
            alone.answer()


@pytest.mark.parametrize(
    "method",
    [PowerSGD(2), pytest.param(BlockInt8(), marks=SLOW), pytest.param(SparseLoCo(), marks=SLOW)],
    ids=lambda m: type(m).__name__,
)
def test_compressed_averages_survive_a_change_of_the_members(method: Methods) -> None:
    with cluster(Job(method=method)) as c:
        a, b = c.add("a"), c.add("b")
        lost = c.add("c", Accident(round=3, collective=2))
        all_do([a, b, lost], "start")
        train_without(lost, [a, b], 16)
        back = c.add("c")
        joined = join(c, back, [a, b], 20)
        assert joined["error_feedback"] > 0, "a replica that joins gets that of another one"
        found = all_do([a, b, back], "until", 28)
    assert found[0]["size"] == 3


def gradient_steps(present: list[tuple[int, ...]]) -> dict[str, Tensor]:
    """SGD on the mean of the replicas' gradients, in one process."""
    model = build()
    for position, numbers in enumerate(present):
        for number in numbers:
            backward(model, position, number)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad / len(numbers)
                p.grad = None
    return {name: p.detach() for name, p in model.named_parameters()}


def test_gradients_of_every_step() -> None:
    with cluster(Job(kind="gradients")) as c:
        a, b = c.add("a"), c.add("b")
        lost = c.add("c", Accident(round=2, collective=1))
        for one in (a, b, lost):
            one.ready()
            one.tell("start")
            one.answer()
        found = train_without(lost, [a, b], 4)
        # In the first step all but one get the weights, so that only the gradient of that one is used.
        three, two = (0, 1, 2), (0, 1)
        close_to(found[0]["anchor"], gradient_steps([(0,), three, two, two]))
        back = c.add("c")
        back.tell("start")
        back.answer()
        back.tell("until", 5)
        c.wait_for_joiner()
        all_do([a, b], "until", 5)
        back.answer()
        found = all_do([a, b, back], "until", 7)
    close_to(found[0]["anchor"], gradient_steps([(0,), three, two, two, two, three, three]))


@contextlib.contextmanager
def one_replica() -> Iterator[Replicas]:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    replicas = Replicas(f"http://127.0.0.1:{lighthouse.address().split(':')[-1]}", hostname="127.0.0.1")
    yield replicas
    replicas.shutdown()
    lighthouse.shutdown()


@pytest.mark.parametrize(("kind", "factor"), [(torch.optim.SGD, 10.0), (torch.optim.Adam, 1.0)])
def test_error_feedback_follows_only_rates_that_scale_the_gradient(kind: Any, factor: float) -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = kind(model.parameters(), lr=1.0)
    with one_replica() as replicas:
        gradients = ElasticGradients(replicas, TopK(0.1), smallest=0)
        gradients.start(model, optimizer)
        model.weight.grad = torch.randn(16, 16)
        gradients.average(model)
        before = gradients.engine.state.errors()["weight"].clone()
        optimizer.param_groups[0]["lr"] = 0.1
        model.weight.grad = torch.zeros(16, 16)  # so that the error feedback waits
        gradients.average(model)
        torch.testing.assert_close(gradients.engine.state.errors()["weight"], before * factor)


@pytest.mark.parametrize("method", [None, TopK(0.5)])
def test_unused_parameters_do_not_change(method: Methods | None) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with one_replica() as replicas:
        gradients = ElasticGradients(replicas, method, smallest=0)
        gradients.start(model, optimizer)
        for _ in range(2):
            model["used"](torch.ones(4)).sum().backward()
            gradients.average(model)
            optimizer.step()
            optimizer.zero_grad()
    changed = {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"used"}


def test_a_replica_that_gets_a_state_keeps_the_errors_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are errors of the mean, so they become those of one gradient for the number of replicas of the next round."""
    model = nn.Linear(16, 16, bias=False)
    with one_replica() as replicas:
        gradients = ElasticGradients(replicas, BlockInt8(), smallest=0)
        gradients.start(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model.weight.grad = torch.randn(16, 16)
        gradients.average(model)
        gradients.engine.state.batches[0].state["owner"].normal_()  # a single replica has none
        before = gradients.engine.state_dict()["own"]["weight"]
        monkeypatch.setattr(replicas.manager, "num_participants", lambda: 3)
        gradients._adopt(gradients._shared_state())
        gradients.engine.state.move(1, 3)
        after = gradients.engine.state_dict()["own"]["weight"]
        torch.testing.assert_close(after["error"], before["error"] + 3 * before["owner"].view(16, 16))
        assert "owner" not in after


@pytest.mark.slow
def test_gradients_of_every_step_with_the_switch_and_compression() -> None:
    with cluster(Job(kind="gradients", method=PowerSGD(2), switch_at=3, inner="AdamW")) as c:
        a, b = c.add("a"), c.add("b")
        for one in (a, b):
            one.ready()
            one.tell("start")
            one.answer()
        found = all_do([a, b], "until", 5)
        assert found[0]["ranks"] == {"2": 12}
        late = c.add("c")
        late.tell("start")
        late.answer()
        late.tell("until", 6)
        c.wait_for_joiner()
        all_do([a, b], "until", 6)
        joined = late.answer()
        assert joined["ranks"] == {"2": 12}
        assert joined["error_feedback"] > 0, "a replica that joins gets that of another one"
        found = all_do([a, b, late], "until", 9)
    assert found[0]["size"] == 3
    assert found[0]["model"] == found[2]["model"]


@pytest.mark.slow
def test_the_lighthouse_is_restarted() -> None:
    with cluster(job := Job(min_replicas=2)) as c:
        a, b, lost = c.add("a"), c.add("b"), c.add("c")
        all_do([a, b, lost], "start")
        all_do([a, b, lost], "until", 4)
        lost.process.kill()  # the new Lighthouse gives its rounds numbers that the old one has used for other members
        lost.process.join()
        a.tell("until", 12)
        c.wait_for_joiner()
        c.darken()
        c.light()
        b.tell("until", 12)
        found = [one.answer() for one in (a, b)]
    assert found[0]["anchor"] == found[1]["anchor"]
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1), (0, 1)]))


def test_a_replica_with_another_state_gets_that_of_most() -> None:
    with cluster(job := Job()) as c:
        three = [c.add(name) for name in "abc"]
        all_do(three, "start")
        all_do(three, "until", 4)
        three[0].tell("spoil")  # as after a commit that only one replica has made
        three[0].answer()
        found = all_do(three, "until", 8)
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (1, 2)]))


@pytest.mark.slow
def test_a_replica_with_other_arguments_is_refused_and_the_others_continue() -> None:
    with cluster(job := Job()) as c:
        a, b = c.add("a"), c.add("b")
        all_do([a, b], "start")
        other = c.add("c", job=Job(method=PowerSGD(2)))
        other.tell("start")
        c.wait_for_joiner()
        for one in (a, b):
            one.tell("until", 8)
        with pytest.raises(ValueError, match="differs from the others in its arguments"):
            other.answer()
        found = [one.answer() for one in (a, b)]
    close_to(found[0]["anchor"], reference(job, [(0, 1), (0, 1)]))


@pytest.mark.slow
def test_a_whole_job_starts_again_from_checkpoints(tmp_path: Path) -> None:
    """One replica has saved later than the other, which gets its state."""
    with cluster(job := Job(momentum=0.9, fragments=2)) as c:
        two = [c.add(name) for name in "ab"]
        all_do(two, "start")
        all_do(two, "until", 5)
        two[1].tell("save", tmp_path / "b")
        two[1].answer()
        saved = all_do(two, "until", 9)[0]
        two[0].tell("save", tmp_path / "a")
        two[0].answer()
    with cluster(job) as c:
        two = [c.add(name) for name in "ab"]
        for one in two:
            one.ready()
        for one in two:
            one.tell("resume", tmp_path / one.name)
            one.answer()
        found = all_do(two, "start")
        assert (found[0]["position"], found[0]["round"]) == (9, saved["round"] + 1)
        assert found[0]["anchor"] == saved["anchor"]
        assert found[0]["model"] == saved["model"], "its updates since the last average are still there"
        all_do(two, "until", 16)


@pytest.mark.parametrize("saved_at", [8, pytest.param(4, marks=SLOW)])
def test_a_killed_replica_returns_with_its_own_checkpoint(tmp_path: Path, saved_at: int) -> None:
    """Of the last round of all, or of an earlier one. It keeps its error feedback, and continues with the others."""
    with cluster(Job(method=TopK(0.1))) as c:
        killed, a, b = three = [c.add(name) for name in "cab"]
        all_do(three, "start")
        all_do(three, "until", saved_at)
        killed.tell("save", tmp_path)
        killed.answer()
        all_do(three, "until", 8)
        killed.process.kill()
        back = c.add("c")
        back.tell("resume", tmp_path)
        back.answer()
        joined = join(c, back, [a, b], 12)
        found = all_do([a, b, back], "until", 20)
    assert joined["position"] == 12
    assert joined["error_feedback"] > 0
    assert found[0]["size"] == 3


@pytest.mark.slow
def test_new_replicas_do_not_follow_one_that_returns(tmp_path: Path) -> None:
    """Its state is as recent as that of the others, so that new ones may get it; but the others are further in the round."""
    with cluster(Job()) as c:
        killed, a = two = [c.add(name) for name in "ba"]
        all_do(two, "start")
        all_do(two, "until", 4)
        killed.tell("save", tmp_path)
        killed.answer()
        killed.process.kill()
        back, *new = three = [c.add(name) for name in "bcd"]
        back.tell("resume", tmp_path)
        back.answer()
        for one in three:
            one.tell("start")
        c.wait_for_joiner(3)
        a.tell("until", 8)
        found = [one.answer() for one in (a, *three)]
        assert {status["position"] for status in found} == {8}
        all_do([a, back, *new], "until", 12)


@pytest.mark.parametrize("kind", ["local", pytest.param("gradients", marks=SLOW)])
def test_a_replica_with_the_checkpoint_of_another_job_ends_and_the_others_continue(
    kind: str, tmp_path: Path
) -> None:
    """Its round is higher, so that torchft offers its state to all others."""
    with cluster(job := Job(kind=kind)) as c:
        old = c.add("c")
        old.tell("start")
        old.answer()
        old.tell("until", 20)
        old.answer()
        old.tell("save", tmp_path)
        old.answer()
        old.process.kill()
        two = [c.add(name) for name in "ab"]
        for one in two:
            one.ready()
        for command in (["start"], ["until", 4]):
            for one in two:
                one.tell(*command)
            for one in two:
                one.answer()
        back = c.add("c")
        back.tell("resume", tmp_path)
        back.answer()
        back.tell("start")
        if kind == "gradients":
            back.answer()
            back.tell("until", 24)
        c.wait_for_joiner()
        for one in two:
            one.tell("until", 8)
        with pytest.raises(ValueError, match=r"this replica belongs to job \w+, the others to another one"):
            back.answer()
        found = [one.answer() for one in two]
    assert [status["position"] for status in found] == [8, 8]
    if kind == "local":
        close_to(found[0]["anchor"], reference(job, [(0, 1)] * 2))
    else:
        close_to(found[0]["anchor"], gradient_steps([(0,)] + [(0, 1)] * 7))


def test_weights_that_are_not_finite_are_refused() -> None:
    """One replica offers NaN at a high round. The others keep their weights, and it gets these from them."""
    with cluster(job := Job()) as c:
        *_, spoilt = three = [c.add(name) for name in "abc"]
        all_do(three, "start")
        all_do(three, "until", 4)
        spoilt.tell("poison")
        spoilt.answer()
        found = all_do(three, "until", 8)
    close_to(found[0]["anchor"], reference(job, [(0, 1, 2), (0, 1)]))


def test_a_replica_with_another_kind_of_exchange_is_refused_and_the_others_continue() -> None:
    with cluster(job := Job()) as c:
        a, b = c.add("a"), c.add("b")
        all_do([a, b], "start")
        other = c.add("c", job=Job(kind="gradients"))
        other.tell("start")
        other.answer()
        other.tell("until", 8)
        c.wait_for_joiner()
        for one in (a, b):
            one.tell("until", 8)
        with pytest.raises(
            ValueError, match="exchanges local steps, this replica gradients; use the same kind of exchange"
        ):
            other.answer()
        found = [one.answer() for one in (a, b)]
    close_to(found[0]["anchor"], reference(job, [(0, 1), (0, 1)]))


#: What is wrong with a state: the path to a value in it, another value, and the error.
WRONG: list[tuple[list[Any], Any, str]] = [
    (["job"], "another", "belongs to another job, another"),
    (["pufferfish", "local", "fragments"], [{}, {}], "saved with fragments=2, now fragments=1"),
    (["pufferfish", "local", "anchor", "weight"], torch.full((4, 4), torch.nan), "weight is not finite"),
    (["pufferfish", "local", "anchor", "weight"], torch.zeros(3, 4), "weight is torch.Size"),
    (
        ["pufferfish", "shared", "optimizers", 0, "state"],
        {"bias": {"m": torch.tensor([torch.inf])}},
        "m of bias is not",
    ),
    (["pufferfish", "shared", "optimizers", 0, "groups"], [], "0 groups, this one has 1"),
    (["pufferfish", "shared", "parts"], {"scheduler": {}}, "pass the same optimizers, parts= and switch="),
    (["pufferfish", "shared", "ranks"], {"": {"": 2}}, "the saved model is low-rank"),
]


def test_a_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    model = nn.Linear(4, 4)
    other = StateServer("127.0.0.1")
    with one_replica() as replicas:
        local = ElasticLocalSteps(replicas, 2)
        local.start(model, torch.optim.SGD(model.parameters(), lr=1.0))
        transport, limit = replicas.manager._checkpoint_transport, timedelta(seconds=10)
        before = encode(replicas.manager._manager_state_dict())

        def offer(state: Any) -> Any:
            other.send_checkpoint([1], 3, state, limit)
            return transport.recv_checkpoint(0, other.metadata(), 3, limit)

        assert encode(offer(decode(before))) == before
        for path, value, message in WRONG:
            state = decode(before)
            *parents, last = path
            functools.reduce(operator.getitem, parents, state["user"])[last] = value
            with pytest.raises(ValueError, match=f"refused the state of another replica.*{message}"):
                offer(state)
            assert encode(replicas.manager._manager_state_dict()) == before
    other.shutdown()


def test_malformed_bytes_of_a_state_are_a_value_error() -> None:
    data = encode({"w": torch.zeros(2)})
    tree = b'{"tensor": "w", "shape": [2], "dtype": "save"}'  # torch.save is no dtype
    no_dtype = len(tree).to_bytes(8, "big") + tree + data[8 + data[7] :]
    for wrong in (data[:7], data[:-1], data.replace(b'{"dict"', b'{"list"'), no_dtype):
        with pytest.raises(ValueError, match="the state of a replica is malformed"):
            decode(wrong)


class Peer:
    """A server that sends the same bytes to everyone who connects, after their request, and counts them."""

    def __init__(self, answer: bytes, close: bool = False) -> None:
        self.listener, self.count = socket.create_server(("127.0.0.1", 0)), 0
        self.answer, self.close = answer, close
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        self.held = []  # open connections
        with contextlib.suppress(OSError):
            while True:
                self.held.append(self.listener.accept()[0])
                self.count += 1
                if self.answer:
                    self.held[-1].recv(1000)
                    self.held[-1].sendall(self.answer)
                if self.close:
                    self.held[-1].close()


def test_state_comes_from_no_proxy_and_no_other_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server, limit = StateServer("127.0.0.1"), timedelta(seconds=10)
    server.send_checkpoint([1], 3, {"w": 1}, limit)
    proxy = Peer(b"HTTP/1.0 502 Bad Gateway\r\n\r\n")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert server.recv_checkpoint(0, server.metadata(), 3, limit) == {"w": 1}
    assert proxy.count == 0
    link = Peer(
        f"HTTP/1.0 302 Found\r\nLocation: {server.metadata()}/3/10\r\nContent-Length: 0\r\n\r\n".encode()
    )
    with pytest.raises(OSError, match="HTTP 302"):
        server.recv_checkpoint(0, link.address, 3, limit)
    with pytest.raises(ValueError, match="is not the address of a StateServer"):
        server.recv_checkpoint(0, f"file://{__file__}#", 3, limit)
    server.shutdown()


def test_a_peer_that_is_silent_or_ends_too_early_blocks_nobody() -> None:
    server, short = StateServer("127.0.0.1", timeout=0.1), timedelta(seconds=0.01)
    port = int(server.metadata().split(":")[-1])
    for request in (b"", b"GET /3/", b"GET /3/inf HTTP/1.0\r\n\r\n", b"GET /3/nan HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as peer:
            peer.sendall(request)
            while peer.recv(1000):  # until the server closes the connection
                pass
    with pytest.raises(OSError, match="timed out"):
        server.recv_checkpoint(0, Peer(b"").address, 3, short)
    with pytest.raises(OSError, match="IncompleteRead"):
        server.recv_checkpoint(
            0, Peer(b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n", close=True).address, 3, short
        )
    server.shutdown()


def test_the_state_server_listens_only_where_it_says() -> None:
    server = StateServer("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(server.metadata().split(":")[-1])), timeout=30)
    server.shutdown()
    with pytest.raises(ValueError, match=r"hostname='192\.0\.2\.1' is not an address of this machine"):
        StateServer("192.0.2.1")


def test_ddp_of_torchft_is_refused() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with one_replica() as replicas:
        ddp = torchft.ddp.DistributedDataParallel(replicas.manager, model)
        with pytest.raises(TypeError, match=r"torchft's DistributedDataParallel .*ElasticGradients"):
            pf.compress(ddp)
        for when in (pf.AtStep(0), pf.AtStep(100)):
            with pytest.raises(TypeError, match=r"torchft's DistributedDataParallel .*ElasticGradients"):
                pf.Switch(rank=8, when=when).step(ddp, optimizer, step=0)


def test_the_state_server_waits_for_the_state_and_refuses_others() -> None:
    server, other = StateServer("127.0.0.1"), StateServer("127.0.0.1")
    got: list[Any] = []
    limit = timedelta(seconds=30)
    thread = threading.Thread(
        target=lambda: got.append(other.recv_checkpoint(0, server.metadata(), 7, limit))
    )
    thread.start()
    server.send_checkpoint([1], 6, {"w": torch.zeros(1)}, limit)
    w = torch.arange(6.0).view(2, 3).T
    server.send_checkpoint([1], 7, {"w": w, "plan": None, "betas": (0.9, 0.95)}, limit)
    w.zero_()
    thread.join(30)
    assert got[0]["betas"] == (0.9, 0.95)
    assert torch.equal(got[0]["w"], torch.arange(6.0).view(2, 3).T)
    server.disallow_checkpoint()
    with pytest.raises(OSError, match="no state of step 7 within"):
        other.recv_checkpoint(0, server.metadata(), 7, timedelta(seconds=0.01))
    for one in (server, other):
        one.shutdown()


def test_long_waits_are_logged_and_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pufferfish.integrations.torchft.replicas._LONG_WAIT", 0.05)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=60_000)
    address = f"http://127.0.0.1:{lighthouse.address().split(':')[-1]}"
    alone = Replicas(address, min_replicas=2, timeout=2.0, patience=2.0, hostname="127.0.0.1")
    with pytest.raises(RuntimeError, match="no round could begin within 2 s: the Lighthouse does not answer"):
        alone.join()
    assert caplog.messages[0] == (
        "Replicas: waiting for other replicas or the Lighthouse in round 0, for 0 s so far (min_replicas=2)"
    )
    alone.shutdown()
    lighthouse.shutdown()


def grouped(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="a replica is one process, but a process group is initialized"):
        Replicas("http://127.0.0.1:1")


@pytest.mark.slow
def test_a_replica_of_several_processes_is_refused() -> None:
    in_processes(grouped, 2)


def guide(rank: int, port: int, folder: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "elastic.md").read_text()
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        user: dict[str, Any] = {
            "torch": torch,
            "lighthouse": f"http://127.0.0.1:{port}",
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "switch": pf.Switch(rank=8, when=pf.AtStep(60)),
            "loss": lambda model, position: model(torch.randn(4, 64)).square().mean(),
            "Replicas": lambda *args, **kwargs: Replicas(*args, hostname="127.0.0.1", **kwargs),
        }
        exec(snippet.replace("import ElasticLocalSteps, Replicas", "import ElasticLocalSteps"), user)
        name = "gradients" if "gradients" in user else "local"
        (Path(folder) / f"{name} {rank}").write_text(digest(dict(model.named_parameters())).hex())
        assert bool(user["switch"].low_rank) == (name == "local")


def test_the_guide(tmp_path: Path) -> None:
    with cluster(Job(min_replicas=2)) as c:
        forked(guide, 2, (c.port, str(tmp_path)), name="docs/elastic.md", limit=60)
    for name in ("local", "gradients"):
        assert (tmp_path / f"{name} 0").read_text() == (tmp_path / f"{name} 1").read_text()


def example(rank: int, port: int, folder: str) -> None:
    socket.gethostname = lambda: "127.0.0.1"
    os.environ |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "UPDATES": "900"}
    with (Path(folder) / str(rank)).open("w") as output, contextlib.redirect_stdout(output):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "elastic.py"), run_name="__main__")


def test_the_example(tmp_path: Path) -> None:
    with cluster(Job(min_replicas=2)) as c:
        forked(example, 2, (c.port, str(tmp_path)), name="examples/elastic.py", limit=60)
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert "Switched to low rank at step 300" in said
        assert float(said.split()[-1].rstrip("%")) >= 95, said
