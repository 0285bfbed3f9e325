"""torchvision's download, run as it is against a server on this machine: only the address is changed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from torchvision.models import MobileNet_V3_Small_Weights

from polyclinic.core.errors import WeightsError
from polyclinic.models.weights.load import adopt_weights, download_weights
from tests.models.networks import fresh, logits, pictures, theirs

NAME = "mobilenet_v3_small"
Publish = Callable[[object], str]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not news."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "site").mkdir()
    handler = partial(QuietHandler, directory=str(tmp_path / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def publish(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Write a checkpoint, name it by its hash as torchvision does, and point torchvision there."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def write(content: object) -> str:
        path = tmp_path / "site" / "weights.pth"
        torch.save(content, path)
        name = f"weights-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.pth"
        path.rename(path.with_name(name))
        monkeypatch.setattr(MobileNet_V3_Small_Weights.DEFAULT.value, "url", f"{address}/{name}")
        return name

    return write


def test_downloaded_weights_give_torchvisions_logits(publish: Publish, capfd: pytest.CaptureFixture[str]) -> None:
    source = theirs(NAME)
    publish(source.state_dict())
    classifier, images = fresh(NAME), pictures(NAME, 3)
    adopt_weights(classifier, download_weights(NAME), "torchvision")
    torch.testing.assert_close(logits(classifier, images), logits(source, images))
    assert capfd.readouterr().out == ""


def test_a_second_call_reads_the_cache(publish: Publish, tmp_path: Path) -> None:
    name = publish({"weight": torch.arange(3.0)})
    first = download_weights(NAME)
    (tmp_path / "site" / name).unlink()
    assert torch.equal(first["weight"], download_weights(NAME)["weight"])


def test_a_file_that_is_not_the_published_one_is_refused(publish: Publish, tmp_path: Path) -> None:
    name = publish({"weight": torch.ones(3)})
    with (tmp_path / "site" / name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(WeightsError, match=r"invalid hash value .*; set `weights` to a local safetensors file"):
        download_weights(NAME)


def test_a_checkpoint_with_code_in_it_is_refused(publish: Publish) -> None:
    publish({"weight": os.getcwd})
    with pytest.raises(WeightsError, match="Weights only load failed"):
        download_weights(NAME)


@pytest.mark.parametrize("content", [[torch.ones(1)], {"epoch": 3}])
def test_a_checkpoint_that_is_no_set_of_tensors_is_refused(publish: Publish, content: object) -> None:
    publish(content)
    with pytest.raises(WeightsError, match="not a set of named tensors"):
        download_weights(NAME)


def test_no_answer_is_refused_with_the_way_out(
    publish: Publish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = publish({"weight": torch.ones(3)})
    (tmp_path / "site" / name).unlink()
    with pytest.raises(WeightsError, match="404"):
        download_weights(NAME)
    with ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        closed = server.server_port
    monkeypatch.setattr(MobileNet_V3_Small_Weights.DEFAULT.value, "url", f"http://127.0.0.1:{closed}/w-00.pth")
    with pytest.raises(WeightsError, match=r"refused.*; set `weights` to a local safetensors file instead"):
        download_weights(NAME)


def test_a_network_that_torchvision_does_not_know_is_refused() -> None:
    with pytest.raises(WeightsError, match="torchvision has no weights for 'cnn_a'"):
        download_weights("cnn_a")
