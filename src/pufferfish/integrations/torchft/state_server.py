"""`StateServer`: sends the state of a replica to one that joins, as safetensors and JSON."""

import json
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import safetensors.torch
from torchft.checkpointing import CheckpointTransport

from ...checkpoint.files import pack, storable, unpack

#: Bytes that are sent at a time: each part has the whole time-out.
_PART = 1 << 20


class StateServer(CheckpointTransport[Any]):  # type: ignore[misc]
    """A checkpoint transport for torchft's Manager. Unlike those of torchft, it does not pickle.

    State consists of dicts, lists, tuples, None, bools, numbers, strings and tensors. The received tensors are on the CPU.

    Args:
        hostname: name or address by which other replicas reach this one. The server listens only there.
        timeout: seconds after which a connection on which nothing happens is closed.
        check: is called with a received state, and raises ValueError to refuse it.

    >>> import torch
    >>> server, limit = StateServer("127.0.0.1"), timedelta(seconds=5)
    >>> server.send_checkpoint([1], 3, {"w": torch.ones(2), "lr": 0.1}, limit)
    >>> server.recv_checkpoint(0, server.metadata(), 3, limit)
    {'w': tensor([1., 1.]), 'lr': 0.1}
    >>> server.shutdown()
    """

    def __init__(
        self,
        hostname: str,
        timeout: float = 60.0,
        check: Callable[[Any], None] = lambda state: None,
    ) -> None:
        self.timeout = timeout
        self._check = check
        self._staged: tuple[int, bytes] | None = None  # the step and the state
        self._changed = threading.Condition()
        self._hostname = hostname
        try:
            self._server = ThreadingHTTPServer((hostname, 0), partial(_Handler, self))
        except OSError as error:
            raise ValueError(
                f"hostname={hostname!r} is not an address of this machine ({error}); pass the name or address by "
                "which other replicas reach it"
            ) from error
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="StateServer", daemon=True
        ).start()

    def metadata(self) -> str:
        """Return the address of this server."""
        return f"http://{self._hostname}:{self._server.server_address[1]}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Offer a state. It is copied, so that it may change afterwards."""
        data = encode(state_dict)
        with self._changed:
            self._staged = step, data
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Free the offered state. A request for it that has begun is still answered."""
        with self._changed:
            self._staged = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state that another replica offers, waiting for it if need be.

        Raises:
            OSError: the other replica does not send it.
            ValueError: it is malformed, or refused by `check`.
        """
        state = decode(_read(metadata, step, timeout.total_seconds()))
        self._check(state)
        return state

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, step: int, seconds: float) -> bytes | None:
        """Return the state of this step once it is offered; None if that takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged is not None and self._staged[0] == step, seconds)
            return self._staged[1] if self._staged is not None and self._staged[0] == step else None


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, owner: StateServer, *args: Any) -> None:
        self.owner = owner
        super().__init__(*args)  # answers the request

    def setup(self) -> None:
        self.request.settimeout(self.owner.timeout)
        super().setup()

    def do_GET(self) -> None:
        try:
            _, step, seconds = self.path.split("/")
            # In this order, NaN is no limit either.
            data = self.owner.wait_for(int(step), min(self.owner.timeout, float(seconds)))
        except ValueError:
            self.send_error(400)
            return
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for start in range(0, len(data), _PART):
            self.wfile.write(memoryview(data)[start : start + _PART])

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _read(address: str, step: int, seconds: float) -> bytes:
    """Return what the server at `address` sends. Unlike urllib, this follows no redirect and uses no proxy."""
    url = urlsplit(address)
    if url.scheme != "http" or url.hostname is None:
        raise ValueError(f"{address!r} is not the address of a StateServer")
    with closing(HTTPConnection(url.hostname, url.port, timeout=seconds + 1)) as connection:
        try:
            connection.request("GET", f"/{step}/{seconds:g}")
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(
                    f"{address}: no state of step {step} within {seconds:g} s (HTTP {answer.status})"
                )
            return answer.read()
        except HTTPException as error:  # such as an answer that ends too early
            raise OSError(f"{address}: {error!r}") from error


def encode(state: Any) -> bytes:
    """Return nested state as bytes: the length of the JSON text, the text, and the tensors as safetensors.

    >>> decode(encode({"a": (1, float("inf"))}))
    {'a': (1, inf)}
    """
    tree, tensors = pack(state, "the state of a replica")
    text = json.dumps(tree, allow_nan=False).encode()
    return struct.pack(">Q", len(text)) + text + safetensors.torch.save(storable(tensors))


def decode(data: bytes) -> Any:
    """Return the state that `encode` has packed; ValueError if it is malformed, in whatever way."""
    try:
        (length,) = struct.unpack(">Q", data[:8])
        return unpack(json.loads(data[8 : 8 + length]), safetensors.torch.load(data[8 + length :]))
    except Exception as error:
        raise ValueError(f"the state of a replica is malformed ({type(error).__name__}: {error})") from error
