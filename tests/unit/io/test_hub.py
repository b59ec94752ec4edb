"""Hub ids: which folder a name gives, from the cache and from a server, and what refuses it."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io import hub as hub_module
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.hub import (
    OFFLINE,
    fetch_file,
    hub_origin,
    is_hub_id,
    resolve_source,
)
from specpilot_cli.schema.w12_manifest import HubSource
from tests.unit.convert_w12.conftest import convert, digests, weights
from tests.unit.io.hub_server import COMMIT, REPO, Hub, serve


@pytest.fixture(autouse=True)
def _nothing_is_known_of_any_hub() -> None:
    hub_module._no_answer.cache_clear()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache, and no network."""
    folder = tmp_path / "hub-cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def cached(cache: Path) -> Path:
    """A snapshot of `REPO` as the Hub's client leaves it: links into `blobs/`, a `main` ref."""
    from specpilot_cli.io.safetensors_stream import write_safetensors

    repo = cache / "models--acme--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    write_safetensors(repo / "blobs" / "aa11", {"model.up_proj.weight": weights(1, 256, 192)}, {})
    (repo / "blobs" / "bb22").write_text('{"model_type": "test"}', encoding="utf-8")
    (repo / "blobs" / "cc33").write_bytes(b"pickled weights")
    for name, blob in (
        ("model.safetensors", "aa11"),
        ("config.json", "bb22"),
        ("pytorch_model.bin", "cc33"),
    ):
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob))
    return snapshot


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one repository, and a client that may ask it."""
    with serve({"config.json": b"{}", "model.safetensors": b"weights"}) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield server


def test_a_folder_is_itself_even_if_it_looks_like_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_source("acme/tiny") == Path("acme/tiny")


@pytest.mark.parametrize("source", [REPO, f"{REPO}@main", f"{REPO}@{COMMIT}"])
def test_offline_the_cache_answers(source: str, cached: Path) -> None:
    assert resolve_source(source) == cached


def test_converting_a_snapshot_leaves_the_cache_alone_and_names_the_commit(
    cached: Path, tmp_path: Path
) -> None:
    before = digests(cached.parent.parent)
    done = convert(resolve_source(REPO), tmp_path / "w12")
    assert digests(cached.parent.parent) == before
    assert not any(file.is_symlink() for file in (tmp_path / "w12").rglob("*"))
    assert done.left_out == ("pytorch_model.bin",)
    assert done.manifest is not None
    assert done.manifest.source_hub == HubSource(repo=REPO, revision=COMMIT)
    assert done.manifest.source_name == REPO


def test_a_conversion_into_the_cache_is_refused(cached: Path) -> None:
    with pytest.raises(InputError, match=r"symbolic link|overlaps"):
        convert(cached, cached / "model.safetensors", force=True)


def test_a_manifest_of_a_plain_folder_names_no_repository(cached: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors"):
        (plain / name).write_bytes((cached / name).read_bytes())
    convert(plain, tmp_path / "w12")
    text = (tmp_path / "w12" / "w12_manifest.json").read_text(encoding="utf-8")
    assert '"source_name": "plain"' in text
    assert "source_hub" not in text


@pytest.mark.parametrize(
    "folder",
    [f"models--acme--tiny/snapshots/{COMMIT[:12]}", f"datasets--acme--tiny/snapshots/{COMMIT}",
     f"models--acme--tiny/{COMMIT}", "model"],
)  # fmt: skip
def test_other_folders_have_no_origin(folder: str, tmp_path: Path) -> None:
    assert hub_origin(tmp_path / folder) is None


@pytest.mark.parametrize(
    "ref", ["../../..", f"../../models--other--one/snapshots/{COMMIT}", "main"]
)
def test_a_ref_that_leads_out_of_the_snapshots_is_refused(ref: str, cached: Path) -> None:
    repo = cached.parent.parent
    (repo / "refs" / "main").write_text(ref, encoding="utf-8")
    (repo / "snapshots" / ref).mkdir(parents=True, exist_ok=True)
    with pytest.raises(InputError, match=f"is no snapshot of `{REPO}`"):
        resolve_source(REPO)


def test_a_snapshot_that_is_a_link_is_refused(cached: Path, tmp_path: Path) -> None:
    cached.rename(tmp_path / COMMIT)
    cached.symlink_to(tmp_path / COMMIT)
    with pytest.raises(InputError, match=f"is no snapshot of `{REPO}`"):
        resolve_source(REPO)


@pytest.mark.parametrize("source", ["missing", "./a/b", "/no/such/folder", "a/b/c", "a/b@", "~/x"])
def test_what_is_no_folder_and_no_hub_id(source: str, cache: Path) -> None:
    with pytest.raises(InputError, match="no such model folder") as caught:
        resolve_source(source)
    assert "owner/name" in str(caught.value.hint)


def test_a_file_is_no_folder_and_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "tiny").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no such model folder"):
        resolve_source("acme/tiny")


def test_a_name_the_hub_would_not_accept(cache: Path) -> None:
    with pytest.raises(InputError, match="not a hub id"):
        resolve_source("acme/ti--ny")


@pytest.mark.parametrize("source", ["acme/other", f"{REPO}@v2"])
def test_offline_and_not_cached(source: str, cached: Path) -> None:
    with pytest.raises(MachineError, match="not completely in the Hub cache"):
        resolve_source(source)


def test_a_cached_snapshot_without_its_weights_is_refused_by_name(cached: Path) -> None:
    (cached / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no safetensors weights"):
        open_hf_folder(resolve_source(REPO))


def test_without_the_extra(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MachineError, match="needs huggingface_hub") as caught:
        resolve_source(REPO)
    assert "specpilot[hub]" in str(caught.value.hint)
    assert caught.value.where == REPO


def test_only_files_of_the_checkpoint_are_fetched(hub: Hub) -> None:
    wanted = {
        "config.json": b"{}", "model-00001-of-00001.safetensors": b"weights",
        "model.safetensors.index.json": b"{}", "tokenizer.json": b"{}", "tokenizer.model": b"t",
        "merges.txt": b"m", "chat_template.jinja": b"c", "modeling_tiny.py": b"p",
        "LICENSE": b"l", "1_Pooling/config.json": b"{}",
    }  # fmt: skip
    unwanted = {
        "pytorch_model.bin": b"x", "tiny.gguf": b"x", "onnx/model.onnx": b"x",
        "onnx/config.json": b"x", "consolidated.safetensors": b"x", "consolidated.00.pth": b"x",
        "original/params.json": b"x", "fp16/model.safetensors": b"x", "optimizer.pt": b"x",
    }  # fmt: skip
    hub.files = {**wanted, **unwanted}
    folder = resolve_source(REPO)
    assert set(digests(folder)) == set(wanted)
    assert all((folder / name).read_bytes() == data for name, data in wanted.items())
    fetched = {path.partition(f"/resolve/{COMMIT}/")[2] for _, path in hub.requests}
    assert fetched - {""} == set(wanted)


def test_a_second_resolution_fetches_nothing(hub: Hub) -> None:
    first = resolve_source(REPO)
    hub.requests.clear()
    assert resolve_source(REPO) == first
    assert not [path for _, path in hub.requests if "/resolve/" in path]


def test_a_failed_fetch_says_what_to_do_without_a_network(hub: Hub) -> None:
    hub.error = (503, {})
    with pytest.raises(MachineError, match="cannot fetch") as caught:
        resolve_source(REPO)
    assert "Got" not in str(caught.value)
    assert "HF_HUB_OFFLINE=1" in str(caught.value.hint)


def test_when_the_hub_is_down_the_cache_answers(cached: Path, hub: Hub) -> None:
    hub.error = (503, {})
    assert resolve_source(REPO) == cached


@pytest.mark.parametrize(
    ("source", "answer", "kind", "message"),
    [
        ("acme/other", None, InputError, "neither a folder here nor a repository"),
        (f"{REPO}@no-such-branch", None, InputError, "no branch, tag or commit"),
        (REPO, (403, {"X-Error-Code": "GatedRepo"}), MachineError, "gated"),
        (REPO, (401, {"X-Error-Code": "RepoNotFound"}), InputError, "neither a folder"),
        (REPO, (503, {}), MachineError, "cannot fetch"),
    ],
)
def test_what_the_hub_refuses(
    source: str,
    answer: tuple[int, dict[str, str]] | None,
    kind: type[Exception],
    message: str,
    hub: Hub,
) -> None:
    hub.error = answer
    with pytest.raises(kind, match=message) as caught:
        resolve_source(source)
    assert getattr(caught.value, "hint", None)


@pytest.fixture(params=["refuses", "never answers", "never ends a header"])
def unreachable(
    request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """A list that grows with every attempt to reach a Hub that cannot be asked."""
    attempts: list[int] = []
    connect = socket.socket.connect
    over = threading.Event()

    def serve_one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            text = b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 10_000
            for byte in text if request.param == "never ends a header" else b"":
                if over.wait(0.02):
                    return
                connection.sendall(bytes([byte]))
            over.wait()

    def accept() -> None:
        with suppress(OSError):  # the listener is shut
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    def counted(self: socket.socket, address: tuple[str, int]) -> None:
        if address[1] == port:
            attempts.append(1)
        connect(self, address)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        monkeypatch.setattr(socket.socket, "connect", counted)
        thread = threading.Thread(target=accept)
        if request.param != "refuses":
            listener.listen()
            thread.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        yield attempts
        over.set()
        if thread.ident is not None:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_hub_that_cannot_be_asked_is_asked_once(unreachable: list[int], cached: Path) -> None:
    """Whatever is resolved after that, and however many files: the cache answers, or nothing.

    The Hub's own client tries six times for each file, with 23 seconds of pauses.
    """
    assert resolve_source(REPO) == cached
    assert fetch_file(REPO, "config.json") == cached / "config.json"
    for source in (f"{REPO}@v2", "acme/other"):
        with pytest.raises(MachineError, match=f"cannot fetch `{source}` from the Hub") as caught:
            resolve_source(source)
        assert f"the Hub at {constants.ENDPOINT} does not answer" in str(caught.value)
        assert "HF_HUB_OFFLINE=1" in str(caught.value.hint)
    reason = fetch_file("acme/other", "config.json")
    assert isinstance(reason, str)
    assert "does not answer" in reason
    assert len(unreachable) == 1


def test_a_hub_that_answers_is_asked_only_once_whether_it_does(hub: Hub) -> None:
    resolve_source(REPO)
    resolve_source(REPO)
    assert hub.requests.count(("HEAD", "/")) == 1


def test_a_ref_that_is_not_text_is_a_damaged_cache(cached: Path) -> None:
    (cached.parents[1] / "refs" / "main").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MachineError, match="cache of `acme/tiny` is damaged") as caught:
        resolve_source(REPO)
    assert "models--acme--tiny/refs" in (caught.value.hint or "")


def test_one_file_comes_from_the_cache(cached: Path) -> None:
    found = fetch_file(f"{REPO}@main", "config.json")
    assert isinstance(found, Path)
    assert found.read_text(encoding="utf-8") == '{"model_type": "test"}'
    assert fetch_file(REPO, "tokenizer.json") == OFFLINE


def test_one_file_is_fetched_alone(hub: Hub, cache: Path) -> None:
    found = fetch_file(REPO, "config.json")
    assert isinstance(found, Path)
    assert found.read_bytes() == b"{}"
    assert not list(cache.rglob("*.safetensors"))
    assert fetch_file(REPO, "tokenizer.json") == "the repository has no tokenizer.json"
    with pytest.raises(InputError, match="neither a folder here nor a repository on the Hub"):
        fetch_file("acme/other", "config.json")


def test_one_file_of_nothing_known(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch_file(REPO, "config.json") == OFFLINE
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fetch_file(REPO, "config.json") == "huggingface_hub is not installed"
    with pytest.raises(InputError, match="not a hub id: `just-a-name`"):
        fetch_file("just-a-name", "config.json")
    assert not is_hub_id("just-a-name")
    assert is_hub_id("owner/name@v1")
