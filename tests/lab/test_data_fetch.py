"""`fetch` against a real server that fails in the usual ways."""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pufferfish.lab.data.dataset import Dataset, Download, fetch, read_files
from pufferfish.lab.tasks import cifar10, language, multi30k
from pufferfish.planning.text import display_progress

pytestmark = pytest.mark.timeout(60)
CONTENT = bytes(range(256)) * 2000
HALF = len(CONTENT) // 2


@dataclass
class Server:
    """Serves one file. `cuts` has the number of bytes after which each of the next replies breaks off."""

    content: bytes = CONTENT
    ranges: bool = True
    length: bool = True  # whether it is announced
    cuts: list[int] = field(default_factory=list)
    requested: list[str | None] = field(default_factory=list)
    port: int = 0

    def dataset(self, **settings: object) -> Dataset:
        known = {"size": len(self.content), "sha256": hashlib.sha256(self.content).hexdigest()}
        known |= {"url": f"http://127.0.0.1:{self.port}/it.bin"}
        download = Download(file="it.bin", **(known | settings))  # type: ignore[arg-type]
        return Dataset(name="tiny", files={"it": ("it.bin",)}, archives=(), downloads=(download,))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    it = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            range_header = self.headers.get("Range")
            it.requested.append(range_header)
            first = (
                int(range_header.removeprefix("bytes=").removesuffix("-"))
                if range_header and it.ranges
                else 0
            )
            if self.path != "/it.bin":
                self.send_error(404)
                return
            if first >= len(it.content):
                self.send_error(416)
                return
            self.send_response(206 if first else 200)
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(it.content) - 1}/{len(it.content)}")
            if it.length:
                self.send_header("Content-Length", str(len(it.content) - first))
            self.end_headers()
            with suppress(ConnectionError):  # the client may have enough
                self.wfile.write(it.content[first:][: it.cuts.pop(0) if it.cuts else None])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        it.port = http.server_port
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield it
        http.shutdown()
        thread.join()


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "tiny").iterdir()}


def test_whole_and_only_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        assert fetch(server.dataset(), tmp_path) == tmp_path / "tiny"
    assert files_in(tmp_path) == {"it.bin": CONTENT}
    assert server.requested == [None]
    assert read_files(server.dataset(), tmp_path)["it"].data == CONTENT


def test_resumes_by_itself(server: Server, tmp_path: Path) -> None:
    server.cuts = [HALF]
    fetch(server.dataset(), tmp_path)
    assert files_in(tmp_path) == {"it.bin": CONTENT}
    assert server.requested == [None, f"bytes={HALF}-"]


def test_a_partial_file_is_kept_for_the_next_attempt(server: Server, tmp_path: Path) -> None:
    server.cuts = [HALF, 0]
    with pytest.raises(OSError, match=rf"it\.bin: .*closed early.*{HALF:,} bytes are kept"):
        fetch(server.dataset(), tmp_path)
    assert files_in(tmp_path) == {"it.bin.part": CONTENT[:HALF]}
    fetch(server.dataset(), tmp_path)
    assert files_in(tmp_path) == {"it.bin": CONTENT}
    assert server.requested[-1] == f"bytes={HALF}-"


def test_a_server_without_ranges(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = [HALF], False
    fetch(server.dataset(), tmp_path)
    assert files_in(tmp_path) == {"it.bin": CONTENT}


def test_a_complete_partial_file_is_renamed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "it.bin.part").write_bytes(CONTENT)
    fetch(server.dataset(), tmp_path)
    assert files_in(tmp_path) == {"it.bin": CONTENT}


@pytest.mark.parametrize(
    ("wrong", "message"), [({"sha256": "0" * 64}, "SHA-256"), ({"size": 5}, "more than the expected 5 bytes")]
)
def test_a_wrong_file_is_removed(
    server: Server, tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"it\.bin: .*{message}.*removed"):
        fetch(server.dataset(**wrong), tmp_path)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("known_length", [False, True])
def test_no_more_than_the_declared_size_is_received(
    server: Server, tmp_path: Path, known_length: bool
) -> None:
    server.length = known_length
    received: list[float] = []

    @contextmanager
    def display(text: str, total: float | None) -> Iterator[Callable[[float], None]]:
        yield received.append

    with display_progress(display), pytest.raises(ValueError, match="more than the expected 70,000 bytes"):
        fetch(server.dataset(size=70_000), tmp_path)
    assert sum(received) == 70_001
    assert files_in(tmp_path) == {}


def test_nothing_is_written_through_a_link(server: Server, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "tiny" / "it.bin.part").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"it\.bin\.part: it is a link.*remove it"):
        fetch(server.dataset(), tmp_path)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_the_text_in_a_gzip_file_is_checked(server: Server, tmp_path: Path) -> None:
    server.content = gzip.compress(b"a\nb\n\n")  # empty lines at the end are ignored
    known = {"sha256": None, "size": None}
    fetch(server.dataset(**known, content_sha256=hashlib.sha256(b"a\nb\n").hexdigest()), tmp_path / "right")
    with pytest.raises(ValueError, match="SHA-256 of its content"):
        fetch(
            server.dataset(**known, content_sha256=hashlib.sha256(b"a\nc\n").hexdigest()), tmp_path / "wrong"
        )
    server.content = server.content[:-3]
    with pytest.raises(ValueError, match="damaged"):
        fetch(server.dataset(**known, content_sha256="0" * 64), tmp_path / "broken")
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["it.bin"]


def test_no_such_address(server: Server, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the server returned 404") as raised:
        fetch(server.dataset(url=f"http://127.0.0.1:{server.port}/other"), tmp_path)
    assert "put it.bin into" in str(raised.value)
    assert files_in(tmp_path) == {}


def test_no_network(server: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(OSError, match=r"not reachable .*put it\.bin into") as raised:
        fetch(server.dataset(url=f"http://127.0.0.1:{port}/it.bin"), tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "dataset", [cifar10.DATASET, language.WIKITEXT2, multi30k.DATASET, language.ENWIK8], ids=lambda d: d.name
)
def test_downloads_can_be_read(dataset: Dataset) -> None:
    readable = {*dataset.archives, *(name for names in dataset.files.values() for name in names)}
    assert {download.file for download in dataset.downloads} <= readable
    for download in dataset.downloads:
        assert download.url.startswith("https://")
        assert download.sha256 or download.content_sha256
