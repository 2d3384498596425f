"""Models and tokenizers by their name on the hub, from a server on loopback."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import ringjax as rj
from ringjax import hub as hub_names
from ringjax.errors import OptionError
from ringjax.models import tiny
from tests.models.hf import mock_hub

NAME = "owner/tiny"


@pytest.fixture
def hub(tmp_path, monkeypatch):
  from huggingface_hub import constants

  with mock_hub.serve() as server:
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
      constants,
      "HUGGINGFACE_CO_URL_TEMPLATE",
      server.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    server.repos[NAME] = {
      path.name: path.read_bytes()
      for path in tiny.path().iterdir()
      if path.is_file()
    } | {
      "pytorch_model.bin": b"not wanted",
      "original/params.json": b"{}",
      "consolidated.safetensors": b"a second form of the weights",
      "README.md": b"A model.",
    }
    yield server


def equal(a, b):
  return all(
    np.array_equal(x, y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def test_a_name_loads_the_files_that_a_model_needs_and_no_others(hub):
  assert equal(rj.models.load(NAME), rj.models.load(tiny.path()))
  names = set(hub.downloads())
  assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
  assert not names & {
    "pytorch_model.bin",
    "params.json",
    "consolidated.safetensors",
    "README.md",
  }
  tokenizer = rj.data.Tokenizer.load(NAME)
  assert tokenizer.decode(tokenizer.encode("def main():")) == "def main():"
  assert tokenizer.name == NAME
  # A file that is there is not downloaded again.
  assert len(hub.downloads()) == len(names)


def test_a_tokenizer_is_read_without_the_weights(hub):
  rj.data.Tokenizer.load(f"hf://{NAME}@v1")
  assert "model.safetensors" not in hub.downloads()


def test_a_folder_comes_before_a_name(hub, tmp_path):
  (tmp_path / "owner").mkdir()
  assert hub_names.hub_name(NAME) is None
  assert hub_names.hub_name(f"hf://{NAME}") == hub_names.HubName(NAME)
  with pytest.raises(Exception, match="owner/tiny"):
    rj.models.load(NAME)
  assert not hub.requests
  assert hub_names.hub_name("a/b/c") is None
  assert hub_names.hub_name("../b") is None
  assert hub_names.hub_name("/b") is None


def test_a_download_that_broke_off_is_resumed(hub):
  # The library keeps whole parts of 10 MB.
  hub.repos[NAME]["model.safetensors"] += b"\0" * (12 << 20)
  hub.cut = 11 << 20
  with pytest.raises(rj.CheckpointFormatError):
    rj.models.load(NAME)
  ranges = [
    asked
    for method, path, asked in hub.requests
    if method == "GET" and path.endswith("model.safetensors")
  ]
  assert len(ranges) == 2 and ranges[1] == f"bytes={10 << 20}-"


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("owner/none", "check the name, or set HF_TOKEN"),
    ("owner/gated", "accept the conditions at .*/owner/gated"),
    ("owner/tiny@v9", "whose revision does not exist"),
    ("owner/unsafe", "pytorch_model.bin only"),
    ("owner/empty", "without weights"),
    ("owner/quants", "append :FILE, for instance owner/quants:a.gguf"),
    ("owner/quants:c.gguf", "a.gguf, b.gguf"),
  ],
)
def test_what_the_hub_does_not_give_is_an_error_that_says_what_to_do(
  hub, name, message
):
  hub.repos |= {
    "owner/gated": {},
    "owner/unsafe": {"config.json": b"{}", "pytorch_model.bin": b""},
    "owner/empty": {"README.md": b""},
    "owner/quants": {"a.gguf": b"", "b.gguf": b""},
  }
  hub.refused["owner/gated"] = 403, "GatedRepo"
  with pytest.raises(OptionError, match=message):
    rj.models.load(name)


def test_a_token_opens_a_gated_model(hub, monkeypatch):
  hub.refused[NAME], hub.tokens = (403, "GatedRepo"), {"hf_secret"}
  with pytest.raises(OptionError, match="HF_TOKEN"):
    rj.models.load(NAME)
  monkeypatch.setenv("HF_TOKEN", "hf_secret")
  assert rj.models.load(NAME).config.family == "smollm3"


def test_without_the_hub_the_cache_is_read_if_it_is_whole(hub, caplog):
  with pytest.raises(OptionError, match="revision"):
    rj.models.load(tiny.path(), revision="main")
  model = rj.models.load(NAME, revision="main")
  hub.down = True
  assert equal(rj.models.load(NAME), model)
  assert "as it is in the cache" in caplog.text
  with pytest.raises(OptionError, match="not whole in"):
    rj.models.load("owner/other")


def test_weights_that_are_not_in_the_cache_are_not_taken_for_there(hub):
  rj.data.Tokenizer.load(NAME)
  hub.down = True
  assert rj.data.Tokenizer.load(NAME).vocab_size
  with pytest.raises(OptionError, match="not whole in"):
    rj.models.load(NAME)


def test_files_of_a_cache_that_may_be_others_are_not_taken(hub):
  hub.repos["owner/quants"] = {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}
  hub.repos["owner/both"] = {
    "config.json": b"{}", "model.safetensors": b"", "a.gguf": b"GGUF",
    "x-00001-of-00002.gguf": b"", "model.fp16.safetensors": b"",
  }  # fmt: skip
  name = hub_names.hub_name
  for text in ("owner/quants:a.gguf", "owner/quants:b.gguf"):
    hub_names.download(name(text))
  hub_names.download(name("owner/both:a.gguf"))
  hub_names.download(name("owner/both:x-00001-of-00002.gguf"))
  hub.down = True
  for text in (
    "owner/quants",
    "owner/both",
    "owner/both:x-00001-of-00002.gguf",
  ):
    with pytest.raises(OptionError, match="not whole in"):
      hub_names.download(name(text))
  assert hub_names.download(name("owner/quants:b.gguf")).name == "b.gguf"


def test_one_set_of_weights_is_downloaded(hub):
  hub.repos[NAME]["model.fp16.safetensors"] = b"another set"
  rj.models.load(NAME)
  assert "model.fp16.safetensors" not in hub.downloads()


def test_a_gguf_file_of_several(hub):
  pytest.importorskip("gguf")
  hub.repos["owner/quants"] = {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}
  path = hub_names.download(hub_names.hub_name("owner/quants:b.gguf"))
  assert path.name == "b.gguf" and hub.downloads() == ["b.gguf"]


def test_a_model_that_is_pushed_loads_by_its_name(hub, monkeypatch, tmp_path):
  model = rj.models.load(tiny.path())
  with pytest.raises(OptionError, match="token with write access"):
    rj.models.push(model, "me/mine")
  hub.tokens = {"hf_secret"}
  monkeypatch.setenv("HF_TOKEN", "hf_secret")
  report = tmp_path / "report.json"
  report.write_text(
    '{"text": "a | b", "rows": [{"length": 8, "nll": 1.23456}, {"length": 9}]}'
  )
  address = rj.models.push(
    model, "me/mine", message="Say so", report=report, max_shard_bytes=10**6
  )
  assert address.startswith(f"{hub.url}/me/mine/commit/")
  (commit,) = hub.commits
  assert commit["message"] == "Say so"
  card = hub.repos["me/mine"]["README.md"].decode()
  assert "- text: a \\| b" in card and "| 8 | 1.235 |" in card
  assert "| 9 |  |" in card
  again = rj.models.load("me/mine")
  assert equal(again, model)
  assert rj.data.Tokenizer.load("me/mine").vocab_size == model.config.vocab
  # A card that is there is kept; weights in fewer files replace the others.
  hub.repos["me/mine"]["README.md"] = b"My own words."
  for nbytes in (10**8, 2 * 10**6):
    rj.models.push(model, "me/mine", max_shard_bytes=nbytes)
    assert hub.repos["me/mine"]["README.md"] == b"My own words."
    assert equal(rj.models.load("me/mine"), model)
  with pytest.raises(OptionError, match="revision"):
    rj.models.push(model, "me/mine", revision="v9")


@pytest.mark.parametrize("report", ["none.json", "list.json"])
def test_reports_and_names_that_are_none_are_refused_before_the_upload(
  hub, tmp_path, report
):
  model = rj.models.load(tiny.path())
  (tmp_path / "list.json").write_text("[1]")
  with pytest.raises(OptionError, match="report"):
    rj.models.push(model, "me/mine", report=tmp_path / report)
  with pytest.raises(OptionError, match="repo"):
    rj.models.push(model, "mine")
  assert not hub.requests


def test_fetch_downloads_a_model_of_the_hub(hub, capsys):
  from launch import fetch

  assert fetch.run([NAME]) == 0
  assert "model.safetensors" in hub.downloads()
  assert capsys.readouterr().out.strip().endswith(mock_hub.COMMIT)
  assert fetch.run(["owner/none"]) == 2
  assert "check the name" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["az://bucket/run", "file:///a", "xy:/a"])
def test_addresses_of_other_storage_are_refused_and_make_no_folder(
  path, tmp_path, monkeypatch
):
  from launch import train
  from launch.shared import common

  monkeypatch.chdir(tmp_path)
  model = rj.models.load(tiny.path())
  for call in (
    lambda: rj.models.load(path),
    lambda: rj.models.save(model, path),
    lambda: rj.data.Tokenizer.load(path),
    lambda: rj.train.Checkpoints(path),
    lambda: common.parse("train", train.define, [f"--out={path}"]),
  ):
    with pytest.raises(Exception, match="mount the storage"):
      call()
  assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_script_takes_a_name(hub, capsys):
  from launch import generate
  from launch.shared import common

  words = [f"--model={NAME}", "--prompt=def", "--max_new_tokens=4", "--json"]
  values = common.parse("generate", generate.define, words)
  assert values.model == NAME and not hub.requests
  assert generate.run(values) == 0
  assert "model.safetensors" in hub.downloads()
