"""Downloads from a server on this machine that breaks off, sends wrong parts or changes the file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from manymax.study.data import download
from manymax.study.data.download import DownloadError, digest, fetch, get
from manymax.study.data.sources.base import File, Source
from manymax.study.files import FolderBusy, locked

CONTENT = bytes(range(256)) * 40  # 10,240 bytes


class Server(ThreadingHTTPServer):
    """Serves `content`; the attributes say what goes wrong."""

    content = CONTENT
    etag: str | None = '"one"'
    ranges = True  # whether it can send a part
    breaks_after: int | None = None  # number of bytes after which the connection closes
    length = True  # whether it says how long the file is
    status: int | None = None  # answer every request with this status
    shift = 0  # send a part that begins this many bytes after the one asked for
    redirect: str | None = None  # send every request there
    endless = False  # send the content again and again, until the client hangs up

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if server.status is not None:
            self.send_error(server.status)
            return
        if server.redirect is not None:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            self.end_headers()
            return
        start = 0
        if wanted and server.ranges and self.headers.get("If-Range") == server.etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-")) + server.shift
            if start >= len(server.content):
                self.send_error(416)
                return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
        if server.etag:
            self.send_header("ETag", server.etag)
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body if server.breaks_after is None else body[: server.breaks_after])
            while server.endless:
                self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def file(server: Server, checksum: str | None = f"md5:{hashlib.md5(CONTENT).hexdigest()}") -> File:
    return File(server.url, "data.bin", checksum)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("length", [True, False])
def test_a_file_arrives_with_progress(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: bool
) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_CHUNK", 1000)
    server.length = length
    reports: list[tuple[str, int, int | None]] = []
    sentence = fetch(file(server), tmp_path, lambda *report: reports.append(report))
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["data.bin"]
    assert "10,240 bytes; the checksum is right (md5:" in sentence
    assert reports[0] == ("data.bin", 1000, 10_240 if length else None)
    assert [done for _, done, _ in reports] == [*range(1000, 10_001, 1000), 10_240]


def test_a_file_that_exists_is_checked_and_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    fetch(file(server), tmp_path)
    assert "exists already; the checksum is right" in fetch(file(server), tmp_path)
    assert len(server.asked) == 1
    (tmp_path / "data.bin").write_bytes(b"damaged")
    fetch(file(server), tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_is_resumed(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.breaks_after, server.ranges = 4000, ranges
    with pytest.raises(DownloadError, match=r"4,000 .*bytes are kept; the same command continues from there"):
        fetch(file(server), tmp_path)
    assert not (tmp_path / "data.bin").exists()
    server.breaks_after = None
    fetch(file(server), tmp_path)
    assert server.asked == [None, "bytes=4000-"]
    assert (tmp_path / "data.bin").read_bytes() == CONTENT
    assert names(tmp_path) == ["data.bin"]


def test_a_download_may_be_interrupted_many_times(server: Server, tmp_path: Path) -> None:
    server.breaks_after = 3000
    for kept in (3000, 6000, 9000):
        with pytest.raises(DownloadError, match=f"{kept:,} bytes are kept"):
            fetch(file(server), tmp_path)
    fetch(file(server), tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_parts_of_two_versions_are_never_joined(server: Server, tmp_path: Path) -> None:
    server.breaks_after = 4000
    with pytest.raises(DownloadError):
        fetch(file(server, None), tmp_path)
    server.breaks_after, server.content, server.etag = None, CONTENT[::-1], '"two"'
    fetch(file(server, None), tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[::-1]


def test_a_kill_after_the_new_tag_leaves_no_bytes_of_the_old_version(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.breaks_after = 4000
    with pytest.raises(DownloadError):
        fetch(file(server, None), tmp_path)
    server.breaks_after, server.content, server.etag = None, CONTENT[::-1], '"two"'

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(file(server, None), tmp_path)
    fetch(file(server, None), tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_tag_a_download_begins_again(server: Server, tmp_path: Path, etag: str | None) -> None:
    server.breaks_after, server.etag = 4000, etag
    with pytest.raises(DownloadError):
        fetch(file(server), tmp_path)
    server.breaks_after = None
    fetch(file(server), tmp_path)
    assert server.asked == [None, None]
    assert (tmp_path / "data.bin").read_bytes() == CONTENT


def test_a_part_that_is_complete_is_downloaded_again(server: Server, tmp_path: Path) -> None:
    """As after a kill between the last byte and the rename: the server has nothing after that byte."""
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    (tmp_path / "data.bin.part.tag").write_text(json.dumps(server.etag))
    fetch(file(server), tmp_path)
    assert server.asked == ["bytes=10240-", None]
    assert names(tmp_path) == ["data.bin"]


def test_another_part_than_asked_for_is_refused(server: Server, tmp_path: Path) -> None:
    server.breaks_after = 4000
    with pytest.raises(DownloadError):
        fetch(file(server), tmp_path)
    server.breaks_after, server.shift = None, 7
    with pytest.raises(DownloadError, match="another part than the one asked for"):
        fetch(file(server), tmp_path)
    assert not (tmp_path / "data.bin").exists()


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(
        DownloadError, match=r"the checksum is md5:\w+, but the publisher's is md5:0000\. .* nothing was kept"
    ):
        fetch(file(server, "md5:0000"), tmp_path)
    assert names(tmp_path) == []


def test_a_wrong_checksum_does_not_replace_an_existing_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"old")
    with pytest.raises(DownloadError):
        fetch(file(server, "sha256:0000"), tmp_path)
    assert (tmp_path / "data.bin").read_bytes() == b"old"


def test_without_a_checksum_the_first_download_counts(server: Server, tmp_path: Path) -> None:
    checksum = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    assert f"its publisher gives no checksum; {checksum} was noted" in fetch(file(server, None), tmp_path)
    assert f"the same as at the first download ({checksum})" in fetch(file(server, None), tmp_path)
    (tmp_path / "data.bin").unlink()
    server.content = CONTENT[:-1]
    with pytest.raises(DownloadError, match="that of the first download is sha256:"):
        fetch(file(server, None), tmp_path)
    assert names(tmp_path) == ["checksums.json"]


@pytest.mark.parametrize("status", [404, 500, 503])
def test_an_error_status_is_reported(server: Server, tmp_path: Path, status: int) -> None:
    server.status = status
    with pytest.raises(DownloadError, match=f"data.bin: the server answers {status} .* Try again later"):
        fetch(file(server), tmp_path)
    assert names(tmp_path) == []


def test_an_error_keeps_what_has_arrived(server: Server, tmp_path: Path) -> None:
    server.breaks_after = 4000
    with pytest.raises(DownloadError):
        fetch(file(server), tmp_path)
    server.status = 503
    with pytest.raises(DownloadError, match="503"):
        fetch(file(server), tmp_path)
    server.status = server.breaks_after = None
    fetch(file(server), tmp_path)
    assert server.asked[-1] == "bytes=4000-"


@pytest.mark.parametrize("length", [True, False])
def test_a_body_without_an_end_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: bool
) -> None:
    """Where the server says how long it is, nothing is read beyond that."""
    monkeypatch.setattr(download, "LARGEST_DOWNLOAD", 100_000)
    monkeypatch.setattr(download, "DOWNLOAD_CHUNK", 1000)
    server.endless, server.length = True, length
    if length:
        fetch(file(server), tmp_path)
        assert names(tmp_path) == ["data.bin"]
    else:
        written: list[int] = []
        with pytest.raises(DownloadError, match="sends more than 100,000 bytes"):
            fetch(file(server), tmp_path, lambda _, done, __: written.append(done))
        assert max(written) <= 100_000
        assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["file:///etc/passwd", "data:text/plain,abc"])
def test_a_redirect_leads_to_no_file(server: Server, tmp_path: Path, place: str) -> None:
    server.redirect = place
    with pytest.raises(DownloadError, match="302"):
        fetch(file(server, None), tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("tag", [True, False])
def test_links_in_a_folder_of_others_are_not_followed(server: Server, tmp_path: Path, tag: bool) -> None:
    """Who can write to the cache could otherwise have files of this user overwritten, or longer by a download."""
    mine, cache = tmp_path / "mine.txt", tmp_path / "cache"
    mine.write_text("mine")
    cache.mkdir()
    (cache / "data.bin.part").symlink_to(mine)
    if tag:
        (cache / "data.bin.part.tag").write_text(json.dumps(server.etag))
    else:
        (cache / "data.bin.part.tag").symlink_to(mine)
    fetch(file(server), cache)
    assert mine.read_text() == "mine"
    assert names(cache) == ["data.bin"]
    assert not (cache / "data.bin").is_symlink()


def test_two_downloads_at_once_do_not_share_a_part(server: Server, tmp_path: Path) -> None:
    source = Source("mine", "a set", (file(server),))
    with locked(tmp_path / "mine"), pytest.raises(FolderBusy, match="another process is working in"):
        get(source, tmp_path)
    get(source, tmp_path)
    (tmp_path / "mine" / ".lock").unlink()
    get(source, tmp_path)  # all is there
    assert names(tmp_path / "mine") == ["data.bin"]


def test_no_server(tmp_path: Path) -> None:
    with Server() as server:
        url = server.url
    with pytest.raises(DownloadError, match=r"the connection failed \(.*\). Try again later"):
        fetch(File(url, "data.bin"), tmp_path)


def test_a_source_gets_a_folder_of_its_own(server: Server, tmp_path: Path) -> None:
    source = Source("mine", "a set", (file(server), File(server.url, "other.bin")))
    assert len(get(source, tmp_path)) == 2
    assert all(path.is_file() for path in source.paths(tmp_path))
    assert names(tmp_path / "mine") == [".lock", "checksums.json", "data.bin", "other.bin"]


def test_a_folder_that_cannot_be_written_to(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(DownloadError, match=r"mine cannot be written to: File exists"):
        get(Source("mine", "a set", (file(server),)), tmp_path)


def test_a_full_disk(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_write", full)
    with pytest.raises(DownloadError, match="mine cannot be written to: No space left on device"):
        get(Source("mine", "a set", (file(server),)), tmp_path)


@pytest.mark.parametrize("kind", ["md5", "sha256", "git"])
def test_checksums(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "DOWNLOAD_CHUNK", 1000)
    path = tmp_path / "a"
    path.write_bytes(CONTENT)
    expected = {
        "md5": hashlib.md5(CONTENT).hexdigest(),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "git": hashlib.sha1(b"blob 10240\0" + CONTENT).hexdigest(),
    }
    assert digest(path, kind) == expected[kind]
