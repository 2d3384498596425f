"""launch.generate in two processes: the answers of one on the same mesh."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Bytes
from tests.launch.conftest import together

FIRST = "def read(path):\n"
SECOND = "class Reader:\n  def __init__(self, path, size):\n    self.path = "
DOCUMENTS = ("import os\n", "def first(x):\n  return x[0]\n", "class A: pass\n")


def check(folder, *flags, fields=("tokens",)):
  """Figures of two processes, which are those of one."""
  argv = ("-m", "launch.generate", f"--model={folder}", "--json", *flags)
  (alone,) = together(*argv, processes=1)
  first, second = together(*argv, processes=2)
  assert [x.status for x in (alone, first, second)] == [0] * 3, (alone, first)
  assert second.out == ""
  expected, result = json.loads(alone.out), json.loads(first.out)
  for name in fields:
    assert result[name] == expected[name], name
  return expected, result, first.err


@pytest.mark.slow
@pytest.mark.parametrize(
  ("combine", "mesh"),
  [("parallel", "seq:4"), ("recompute:fraction=0.3", "data:1,seq:2,model:2"),
   ("select:keep=2", "seq:2,model:2")],
)  # fmt: skip
def test_contexts(folder, tmp_path, combine, mesh):
  """Two processes find what one has stored, and compute nothing again."""
  documents = tmp_path / "documents"
  documents.mkdir()
  for n, text in enumerate(DOCUMENTS):
    (documents / f"{n}.txt").write_text(text)
  flags = (
    f"--contexts={documents}", f"--combine={combine}", "--prompt=What is A?",
    f"--mesh={mesh}", "--max_new_tokens=6",
  )  # fmt: skip
  check(folder, *flags)
  store = f"--store={tmp_path / 'store'}"
  _, _, err = check(folder, *flags, store)
  assert "contexts: 3, 3 of them read before; 0 tokens computed" in err


@pytest.mark.slow
def test_an_encoder_reads_contexts(folder, tmp_path):
  """On the devices of both processes."""
  documents = tmp_path / "documents"
  documents.mkdir()
  for n, text in enumerate(DOCUMENTS):
    (documents / f"{n}.txt").write_text(text)
  encoder = rj.models.cepe.Encoder(
    layers=1, width=32, heads=2, hidden=64, chunk=16
  )
  with_encoder = rj.models.cepe.with_encoder(rj.models.load(folder), encoder)
  rj.models.save(with_encoder, tmp_path / "model")
  Bytes(chat_template=None).save(tmp_path / "model")
  check(
    tmp_path / "model", f"--contexts={documents}", "--combine=cepe",
    "--prompt=What is A?", "--mesh=seq:2,model:2", "--max_new_tokens=6",
  )  # fmt: skip


@pytest.mark.slow
def test_entropy(folder):
  expected, result, _ = check(
    folder, f"--prompt={SECOND}", "--mesh=seq:2,model:2", "--entropy",
    "--max_new_tokens=4",
  )  # fmt: skip
  np.testing.assert_allclose(
    result["entropy"]["by_layer"], expected["entropy"]["by_layer"], atol=1e-5
  )


@pytest.mark.slow
def test_the_next_prompt_is_read_beside_an_answer(folder, tmp_path):
  file = tmp_path / "next.txt"
  file.write_text(SECOND)
  check(
    folder, f"--prompt={FIRST}", f"--next_prompt_file={file}", "--mesh=model:2",
    "--chunk=24", "--max_new_tokens=6", fields=("tokens", "tokens_beside"),
  )  # fmt: skip
