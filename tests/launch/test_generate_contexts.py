"""launch.generate about texts of a folder, each read apart."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Tokenizer
from ringjax.eval import context_statistics
from ringjax.infer import contexts

TEXTS = {"a.txt": "The cat is grey. " * 3, "b.txt": "The dog is old."}
QUESTION = "Who is grey?"


@pytest.fixture
def texts(tmp_path):
  found = tmp_path / "texts"
  found.mkdir()
  for name, text in TEXTS.items():
    (found / name).write_text(text)
  return found


@pytest.mark.long
def test_texts_are_read_once(ask, folder, texts, tmp_path):
  asked = (
    f"--model={folder}", f"--contexts={texts}", f"--prompt={QUESTION}",
    "--json", "--max_new_tokens=4", f"--store={tmp_path / 'kept'}",
  )  # fmt: skip
  first, again = ask(*asked), ask(*asked)
  assert first.status == again.status == 0, first.err + again.err
  assert "0 of them read before" in first.err
  assert "2 of them read before; 0 tokens computed" in again.err
  done = json.loads(first.out)
  assert done["contexts"]["contexts"] == 2
  assert json.loads(again.out)["tokens"] == done["tokens"]
  tokenizer, model = Tokenizer.load(folder), rj.models.load(folder)
  ids = [tokenizer.encode(f"{text}\n\n") for text in TEXTS.values()]
  prefix = tuple(int(n) for n in tokenizer.encode("\n\n", bos=True))
  want = rj.infer.generate(
    model, [tokenizer.encode(QUESTION)], max_new_tokens=4, contexts=ids,
    combine=contexts.Parallel(prefix=prefix), stop=tokenizer.eos_ids,
  )  # fmt: skip
  assert done["tokens"] == np.ravel(want)[: len(done["tokens"])].tolist()


@pytest.mark.slow
def test_entropy_of_an_answer_behind_selected_contexts(ask, folder, texts):
  ran = ask(
    f"--model={folder}", f"--contexts={texts}", f"--prompt={QUESTION}",
    "--json", "--max_new_tokens=3", "--mesh=seq:1", "--combine=select:keep=1",
    "--entropy",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  done = json.loads(ran.out)
  entropy, new = done["entropy"], done["tokens"]
  tokenizer, model = Tokenizer.load(folder), rj.models.load(folder)
  prefix = tuple(int(n) for n in tokenizer.encode("\n\n", bos=True))
  combine = contexts.Selection(keep=1, prefix=prefix)
  ids = [tokenizer.encode(f"{text}\n\n") for text in TEXTS.values()]
  seen = np.concatenate([tokenizer.encode(QUESTION), new[:-1]])
  session = rj.infer.context_session(model, ids, combine, capacity=seen.size)
  want = context_statistics(session, seen.astype(np.int32))
  assert entropy["queries"] == len(new)
  for layer, heads in zip(want.layers, entropy["by_layer"], strict=True):
    assert layer is not None
    means = np.asarray(layer.entropy)[0, -len(new) :].mean(0)
    np.testing.assert_allclose(heads, means, atol=1e-4)
  assert f"{entropy['mean']:.4f} nats" in ran.err
  # The question looks at fewer keys than with all contexts.
  whole = rj.infer.context_session(
    model, ids, contexts.Parallel(prefix=prefix), capacity=seen.size
  )
  every = context_statistics(whole, seen.astype(np.int32))
  mean = np.mean([np.asarray(x.entropy)[0, -len(new) :] for x in every.layers])
  assert entropy["mean"] < mean


@pytest.mark.slow
def test_all_as_one_text(ask, folder, texts, tmp_path):
  ran = ask(
    f"--model={folder}", f"--contexts={texts}", f"--prompt={QUESTION}",
    "--json", "--max_new_tokens=4", "--combine=full",
  )  # fmt: skip
  done = json.loads(ran.out)
  file = tmp_path / "whole.txt"
  file.write_text("\n\n" + "\n\n".join(TEXTS.values()))
  whole = ask(
    f"--model={folder}", f"--prompt_file={file}", f"--prompt={QUESTION}",
    "--json", "--max_new_tokens=4",
  )  # fmt: skip
  same = ("tokens", "prompt_tokens")
  assert [done[n] for n in same] == [json.loads(whole.out)[n] for n in same]


@pytest.mark.slow
def test_a_model_without_link_tokens(ask, folder, texts):
  ran = ask(
    f"--model={folder}", f"--contexts={texts}", f"--prompt={QUESTION}",
    "--max_new_tokens=2", "--combine=kvlink",
  )  # fmt: skip
  assert ran.status == 0
  assert "no links.json" in ran.err and "without link tokens" in ran.err


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (["--contexts=x"], "--contexts without --prompt"),
    (["--combine=ape"], "--combine without --contexts"),
    (["--contexts=x", "--prompt=y", "--combine=best"], "best"),
    (["--entropy", "--prompt=y", "--cache=int4"], "--entropy and --cache"),
    (["--entropy", "--prompt=y", "--memory=1GB"], "--entropy and --memory"),
    (["--entropy", "--prompt=y", "--wire=bfloat16"], "--entropy and --wire"),
    (["--prompt=y", "--adapter=/dev/null"], "without adapter_config.json"),
    (
      ["--entropy", "--contexts=x", "--prompt=y", "--combine=cepe"],
      "--entropy and --combine=cepe",
    ),
    (
      ["--entropy", "--contexts=x", "--prompt=y", "--mesh=seq:2"],
      "--entropy and --contexts on 2 devices",
    ),
    (
      ["--contexts=x", "--prompt=y", "--combine=full", "--store=z"],
      "--store and --combine=full",
    ),
  ],
)
def test_wrong_flags(ask, folder, flags, says):
  ran = ask(f"--model={folder}", *flags)
  assert ran.status != 0 and says in ran.err


@pytest.mark.slow
def test_the_important_part_of_a_document(ask, folder, tmp_path):
  file = tmp_path / "document.txt"
  file.write_text("\n\n".join(TEXTS.values()) + "\n\n")
  asked = (
    f"--model={folder}", f"--prompt_file={file}", f"--prompt={QUESTION}",
    "--json", "--max_new_tokens=4", "--mesh=seq:1",
  )  # fmt: skip
  want = json.loads(ask(*asked).out)
  store = f"--store={tmp_path / 'kept'}"
  first, again = (ask(*asked, store, "--important=1") for _ in range(2))
  assert first.status == again.status == 0, first.err + again.err
  assert "read now" in first.err and "read before" in again.err
  for ran in (first, again):
    done = json.loads(ran.out)
    assert done["tokens"] == want["tokens"]
    assert done["prompt_tokens"] == want["prompt_tokens"]
  some = ask(*asked, store, "--important=0.2")
  assert some.status == 0 and "read before" in some.err, some.err


@pytest.mark.parametrize(
  ("more", "said"),
  [
    ((), "--important without --store"),
    (("--store=x", "--prompt_file=f"), "--important without --store"),
    (("--store=x", "--prompt=q", "--prompt_file=f", "--cache=int4"),
     "--important and --cache"),
    (("--store=x", "--prompt=q", "--prompt_file=f", "--placement=host"),
     "--important and --placement"),
  ],
)  # fmt: skip
def test_important_with_what_it_cannot_do(ask, folder, more, said):
  ran = ask(f"--model={folder}", "--important=0.5", *more)
  assert ran.status != 0 and said in ran.err, ran.err
