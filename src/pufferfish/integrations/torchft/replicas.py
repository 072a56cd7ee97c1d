"""`Replicas`: the replicas of a job that are there now, and the rounds in which they exchange something."""

from __future__ import annotations

import gc
import hashlib
import logging
import math
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchft import Manager, ProcessGroupGloo

from ...compression.exchange import Group, Started
from .state_server import StateServer

T = TypeVar("T")

_log = logging.getLogger(__name__)
#: Seconds between two requests to a Lighthouse that does not answer.
_RETRY = 1.0
#: Seconds of waiting for other replicas after which the log says so.
_LONG_WAIT = 10.0
#: What begins each message of `agree`: digest of the job's id, claim to it (see `Replicas`) and round.
_HEAD = struct.Struct(">32sBQ")


class Replicas:
    """Membership of this replica in a job, through a Manager of torchft. Create one in every process.

    A replica is a process with a copy of the model, started on its own. A Lighthouse,
    `torchft_lighthouse --min_replicas 1 --join_timeout_ms 600000`, runs beside the job. Its join timeout must be longer than a
    round.

    Args:
        lighthouse: address of the Lighthouse, such as "http://host:29510". Default: the environment variable TORCHFT_LIGHTHOUSE.
        name: name of this replica, in messages and logs.
        min_replicas: smallest number of replicas that train; fewer wait for others.
        timeout: seconds after which a replica that does not answer counts as lost. Longer than an exchange takes.
        patience: seconds to wait for the other replicas, and for a Lighthouse that is being restarted. Longer than a round.
        hostname: name or address by which others reach this machine. Default: its name.

    Attributes:
        job: id of the job, made at its first start. A replica that has completed no round yet adopts that of the replica
            from which it gets its state; afterwards it refuses the state of another job.

    >>> from torchft.coordination import LighthouseServer
    >>> lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    >>> port = lighthouse.address().split(":")[-1]
    >>> replicas = Replicas(f"http://127.0.0.1:{port}", hostname="127.0.0.1")
    >>> replicas.share_state(lambda: {}, lambda state: None)
    >>> replicas.join()
    >>> replicas.agree("what this replica does", bytes(32), contributes=True), replicas.commit(), replicas.round
    (1, True, 1)
    >>> replicas.shutdown(), lighthouse.shutdown()
    (None, None)
    """

    def __init__(
        self,
        lighthouse: str | None = None,
        *,
        name: str = "",
        min_replicas: int = 1,
        timeout: float = 60.0,
        patience: float = 3600.0,
        hostname: str | None = None,
    ) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            # torchft restores each process of a replica from another replica, with another inner optimizer.
            raise ValueError(
                "Replicas: a replica is one process, but a process group is initialized; start each replica on its own"
            )
        limit = timedelta(seconds=timeout)
        hostname = hostname or socket.gethostname()
        # Before the store, which waits long for a wrong name.
        server = StateServer(hostname, timeout, self._check_state)
        self.job = uuid.uuid4().hex
        # How firmly this replica belongs to the job: 0 not yet, 1 by a checkpoint, 2 by a round that it has completed.
        self._claim = 0
        self._refused: str | None = None  # why the state offered in this round was refused
        self._check: Callable[[Any], None] = lambda state: None
        self._patience, self._min_replicas = patience, min_replicas
        self._begun: float | None = None  # when the first attempt at this round began
        self._size_before = 0  # number of replicas in the round before
        self._store = dist.TCPStore(hostname, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        members = ProcessGroupGloo(timeout=limit)
        self.transport = ReplicaTransport(members)
        self.manager = Manager(
            pg=members,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=timedelta(seconds=patience),
            connect_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=hostname,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=name,
            hostname=hostname,
            checkpoint_transport=server,
            # Without retries a Lighthouse that is being restarted ends the job. torchft waits patience/retries between them.
            quorum_retries=math.ceil(patience / _RETRY),
        )
        self.manager.register_state_dict_fn("job", lambda job: setattr(self, "job", job), lambda: self.job)

    @property
    def size(self) -> int:
        """Number of replicas in the last round."""
        return self.transport.size

    @property
    def round(self) -> int:
        """Number of rounds so far, of the whole job."""
        step: int = self.manager.current_step()
        return step

    def share_state(
        self,
        state_dict: Callable[[], Any],
        load_state_dict: Callable[[Any], None],
        check: Callable[[Any], None] = lambda state: None,
    ) -> None:
        """Register the state that a replica which joins, or has missed a round, gets from another one.

        All functions are called by `join`. `check` raises if this replica must not load a received state, and changes nothing.
        """
        self._check = check
        self.manager.register_state_dict_fn("pufferfish", load_state_dict, state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the job and the number of rounds, for a checkpoint."""
        return {**self.manager.state_dict(), "job": self.job}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the job of a checkpoint."""
        self.manager.load_state_dict(dict(state))
        self.job, self._claim = state["job"], int(state["step"] > 0)

    def join(self) -> None:
        """Begin a round: wait for the other replicas, and get the state of one of them where this one is behind.

        Raises:
            LostReplica: a replica was lost meanwhile.
            RuntimeError: `patience` has run out.
        """
        self._begun, self._refused = self._begun or time.monotonic(), None
        waiting = threading.Timer(_LONG_WAIT, self._log_wait)
        waiting.daemon = True
        waiting.start()
        try:
            self.manager.start_quorum()
        except (TimeoutError, RuntimeError) as error:
            raise RuntimeError(
                f"Replicas: no round could begin within {self._patience:g} s: the Lighthouse does not answer, or there are "
                f"fewer than min_replicas replicas; start those that are missing, and restart this one ({error})"
            ) from error
        finally:
            waiting.cancel()
        if (problem := self.manager.errored()) is not None:
            if not isinstance(problem.original_exception, ValueError):
                raise LostReplica(str(problem.original_exception))
            self._refused = str(problem.original_exception)  # `agree` decides who ends
        self.transport.move()
        expected = self.manager.num_participants()
        if self.transport.size != expected:  # a restarted Lighthouse counts its rounds anew
            raise LostReplica(f"{expected} replicas are there, but the group has {self.transport.size}")
        if self._size_before not in (0, self.size):
            _log.warning("Replicas: %d in round %d, %d before", self.size, self.round, self._size_before)
        self._size_before = self.size

    def agree(self, facts: str, shared: bytes, contributes: bool, returns: bool = False) -> int:
        """Compare what must be equal on all replicas, and return how many of them contribute to this round.

        A replica of another job than most ends with ValueError, and so does one that has refused the state of most.

        Args:
            facts: what this replica is about to do. If most replicas do something else, ValueError is raised.
            shared: digest of the state that all replicas share. One that differs from most is replaced in the next round.
            returns: whether this replica starts from a checkpoint of its own, or from a replica that does. The others may be
                elsewhere in the loop, so it gets their state instead of an error, and does not count among them.
        """
        own = hashlib.sha256(facts.encode()).digest() + shared
        head = _HEAD.pack(hashlib.sha256(self.job.encode()).digest(), self._claim, self.round)
        answers = self.transport.gather_bytes(head + own + bytes([contributes, returns]))
        if self._refused is not None and not self._claim:
            raise ValueError(self._refused)
        self._check_job(answers)
        answers = [answer[_HEAD.size :] for answer in answers]
        equal = len({answer[:-2] for answer in answers}) == 1
        if not equal or self._refused is not None:
            running = [answer for answer in answers if not answer[-1]]
            counts = Counter(answer[:-2] for answer in running or answers)
            most = max(counts, key=lambda answer: counts[answer])  # the first one of equal counts
            self._follow(own, most, equal, returns and bool(running))
        self._forget_rendezvous()
        return sum(answer[-2] for answer in answers)

    def _follow(self, own: bytes, most: bytes, equal: bool, returns: bool) -> NoReturn:
        """Raise ValueError if this replica must end, and LostReplica if most replicas show it the way in another round."""
        if self._refused is not None:
            if own != most or equal:
                raise ValueError(self._refused)
        elif own[32:] != most[32:] or (own != most and returns):
            self._fall_behind()
        elif own != most:
            raise ValueError(
                "this replica differs from the others in its arguments, its model (names, shapes, dtypes) or in what it does "
                f"in round {self.round}; start it as the others were started"
            )
        raise LostReplica("the replicas differ in their state")

    def confirm(self, result: bytes, flags: bytes = b"") -> list[bytes]:
        """Check that all replicas have completed the exchange with the same result, and return the flags of each.

        Args:
            flags: sent along; as many on all replicas.
        """
        answers = self.transport.gather_bytes(result + flags)
        if len({answer[: len(result)] for answer in answers}) > 1:
            raise LostReplica("the replicas differ in the result of the exchange")
        return [answer[len(result) :] for answer in answers]

    def commit(self, error: LostReplica | None = None) -> bool:
        """End the round. True: it counts, apply its result. False: begin it again."""
        if error is not None:
            self.manager.report_error(error.with_traceback(None))
            self.transport.group = None
            self.transport.members.abort()
            gc.collect()  # closes the connections, so that others which wait for this replica find out at once
        done: bool = self.manager.should_commit()
        if done:
            self._begun, self._claim = None, 2
        elif time.monotonic() - (self._begun or 0.0) > self._patience:
            raise RuntimeError(
                f"Replicas: round {self.round} was not completed within {self._patience:g} s, with {self.size} replicas and "
                f"min_replicas={self._min_replicas} ({error or 'too few of them'}); start more, and restart this one"
            )
        elif self.size < self._min_replicas:  # a Lighthouse that asks for fewer does not wait for others
            time.sleep(_RETRY)
        return done

    def shutdown(self) -> None:
        """Leave the job. The others continue."""
        self.manager.shutdown()
        self.transport.members.shutdown()

    def _check_state(self, state: Any) -> None:
        """Raise ValueError if the state of another replica must not be loaded. Changes nothing."""
        try:
            if self._claim and state["user"]["job"] != self.job:
                raise ValueError(f"it belongs to another job, {state['user']['job']:.32}")
            self._check(state["user"]["pufferfish"])
        except Exception as error:
            reason = error if isinstance(error, ValueError) else repr(error)
            raise ValueError(
                f"Replicas: round {self.round} of job {self.job}: refused the state of another replica: {reason}"
            ) from None

    def _check_job(self, answers: list[bytes]) -> None:
        """Raise if there are replicas of several jobs: ValueError unless this one is of the job that stays.

        It is the job of most of those with the firmest claim; of as many, the one with more rounds.
        """
        heads = [_HEAD.unpack_from(answer) for answer in answers]
        if len({job for job, _, _ in heads}) == 1:
            return
        firmest = [
            (job, round_) for job, claim, round_ in heads if claim == max(claim for _, claim, _ in heads)
        ]
        counts = Counter(job for job, _ in firmest)
        stays, _ = max(firmest, key=lambda x: (counts[x[0]], x[1]))
        if hashlib.sha256(self.job.encode()).digest() != stays:
            if self._claim:
                raise ValueError(
                    f"Replicas: this replica belongs to job {self.job}, the others to another one; give each job its own "
                    "Lighthouse, and a new job empty checkpoint folders"
                )
            self._fall_behind()
        raise LostReplica("there was a replica of another job")

    def _fall_behind(self) -> None:
        """Count as behind in the next round, and so get the state of another replica."""
        self.manager.load_state_dict({**self.manager.state_dict(), "step": 0})

    def _log_wait(self) -> None:
        _log.warning(
            "Replicas: waiting for other replicas or the Lighthouse in round %d, for %.0f s so far (min_replicas=%d)",
            self.round, time.monotonic() - (self._begun or 0.0), self._min_replicas,
        )  # fmt: skip

    def _forget_rendezvous(self) -> None:
        """Delete the addresses by which the members of this group have met: a restarted Lighthouse uses the keys again."""
        for key in self._store.list_keys():
            if "torchft/" in key:
                self._store.delete_key(key)


class LostReplica(Exception):
    """A collective has failed: a replica was lost, or the replicas differ. The round is tried again."""


class ReplicaTransport(Group):
    """Collectives of the replicas that are there now. One that fails raises `LostReplica`.

    Args:
        members: the process group of torchft, whose members change from round to round.
    """

    def __init__(self, members: ProcessGroupGloo) -> None:
        super().__init__()
        self.members = members
        self.group = None  # alone, until `move`

    def move(self) -> None:
        """Take the group of this round, and the place of this replica in it."""
        try:
            self.group = self.members.parent
        except AssertionError as error:  # aborted, and not made anew
            raise LostReplica("the replicas have no group") from error
        self.worker, self.size = self.group.rank(), self.group.size()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the messages of all replicas, which have equal lengths. They are not metered."""
        done, everyone = self._gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        done()
        return [bytes(x.numpy()) for x in everyone]

    def _sum(self, buffer: Tensor) -> Started[Tensor]:
        return self._start(super()._sum, buffer)

    def _gather(self, buffer: Tensor) -> Started[list[Tensor]]:
        return self._start(super()._gather, buffer)

    def _scatter(self, pieces: list[Tensor]) -> Started[list[Tensor]]:
        return self._start(super()._scatter, pieces)

    @staticmethod
    def _start(collective: Callable[[Any], Started[T]], data: Any) -> Started[T]:
        done, result = _without_traceback(lambda: collective(data))
        return lambda: _without_traceback(done), result


def _without_traceback(call: Callable[[], T]) -> T:
    """Return the result of a call. An error keeps no reference to the group, whose connections must be closed."""
    try:
        return call()
    except RuntimeError as error:
        message = str(error)
    raise LostReplica(message)


def digest(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a digest of some tensors: of their names, shapes, dtypes and bits.

    >>> a, b, c = torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1.0])
    >>> len({digest({"w": x}) for x in (a, b, c, c.flip(0), c.clone())})
    4
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name].detach().cpu().contiguous()
        found.update(repr((name, tuple(x.shape), str(x.dtype))).encode())
        found.update(x.view(-1).view(torch.uint8).numpy().data)
    return found.digest()
