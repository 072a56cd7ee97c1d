"""`StateServer`: sends the state of a replica to one that joins, as safetensors and JSON."""

import json
import socket
import struct
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import safetensors.torch
from torchft.checkpointing import CheckpointTransport

from ...checkpoint.packing import pack, storable, unpack


class StateServer(CheckpointTransport[Any]):  # type: ignore[misc]
    """A checkpoint transport for torchft's Manager. Unlike those of torchft, it does not pickle.

    State consists of dicts, lists, tuples, None, bools, numbers, strings and tensors. The received tensors are on the CPU.

    Args:
        hostname: name or address by which other replicas reach this one.

    >>> import torch
    >>> server, limit = StateServer("127.0.0.1"), timedelta(seconds=5)
    >>> server.send_checkpoint([1], 3, {"w": torch.ones(2), "lr": 0.1}, limit)
    >>> server.recv_checkpoint(0, server.metadata(), 3, limit)
    {'w': tensor([1., 1.]), 'lr': 0.1}
    >>> server.shutdown()
    """

    def __init__(self, hostname: str | None = None) -> None:
        self._staged: tuple[int, bytes] | None = None  # the step and the state
        self._changed = threading.Condition()
        self._hostname = hostname or socket.gethostname()
        self._server = _Server(("", 0), _Handler)
        self._server.owner = self
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
        """Return the state that another replica offers, waiting for it if need be."""
        seconds = timeout.total_seconds()
        try:
            with urlopen(f"{metadata}/{step}/{seconds:g}", timeout=seconds + 1) as answer:
                data = answer.read()
        except HTTPError as error:
            raise OSError(f"{metadata}: no state of step {step} within {seconds:g} s") from error
        return decode(data)

    def shutdown(self, wait: bool = True) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()

    def wait_for(self, step: int, seconds: float) -> bytes | None:
        """Return the state of this step once it is offered; None if that takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._staged is not None and self._staged[0] == step, seconds)
            return self._staged[1] if self._staged is not None and self._staged[0] == step else None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: StateServer


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        try:
            _, step, seconds = self.path.split("/")
            data = self.server.owner.wait_for(int(step), float(seconds))
        except ValueError:
            self.send_error(400)
            return
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def encode(state: Any) -> bytes:
    """Return nested state as bytes: the length of the JSON text, the text, and the tensors as safetensors.

    >>> decode(encode({"a": (1, float("inf"))}))
    {'a': (1, inf)}
    """
    tree, tensors = pack(state, "the state of a replica")
    text = json.dumps(tree, allow_nan=False).encode()
    return struct.pack(">Q", len(text)) + text + safetensors.torch.save(storable(tensors))


def decode(data: bytes) -> Any:
    """Return the state that `encode` has packed."""
    if len(data) < 8:
        raise ValueError(f"the state of a replica is incomplete: {len(data)} bytes")
    (length,) = struct.unpack(">Q", data[:8])
    if len(data) < 8 + length:
        raise ValueError(f"the state of a replica is incomplete: {len(data)} bytes, of {8 + length} or more")
    return unpack(json.loads(data[8 : 8 + length]), safetensors.torch.load(data[8 + length :]))
