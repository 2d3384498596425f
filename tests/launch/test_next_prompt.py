"""launch.generate with a prompt that is read beside the first one's answer."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ringjax as rj
from ringjax.data import Tokenizer

FIRST, SECOND = "Who is grey?", "The dog is old. The cat is grey. " * 2


@pytest.mark.slow
def test_both_answers_are_those_of_separate_calls(ask, folder, tmp_path):
  file = tmp_path / "next.txt"
  file.write_text(SECOND)
  ran = ask(
    f"--model={folder}", f"--prompt={FIRST}", f"--next_prompt_file={file}",
    "--mesh=model:2", "--chunk=24", "--max_new_tokens=6", "--json",
  )  # fmt: skip
  assert ran.status == 0, ran.err
  done = json.loads(ran.out)
  tokenizer, model = Tokenizer.load(folder), rj.models.load(folder)
  texts = [FIRST, SECOND]
  ids = [tokenizer.encode(x, bos=tokenizer.adds_bos) for x in texts]
  want = rj.infer.generate(model, ids, max_new_tokens=6, stop=tokenizer.eos_ids)
  for row, answer in enumerate((done, done["next"])):
    assert answer["prompt_tokens"] == len(ids[row])
    assert answer["tokens"] == np.asarray(want[row]).tolist()
    assert answer["answer"] == tokenizer.decode(answer["tokens"])
  # A token of the first answer for each chunk of the second prompt.
  assert done["tokens_beside"] == -(-len(ids[1]) // 24)
  assert "while the second prompt was read" in ran.err


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ([], "--next_prompt_file without a prompt"),
    (["--prompt=a", "--contexts=x"], "--next_prompt_file and --contexts"),
    (["--prompt=a", "--speculate=lookup"], "--next_prompt_file and --spec"),
    (["--prompt=a", "--temperature=1"], "--next_prompt_file with sampling"),
    (["--prompt=a", "--repetition_penalty=1.5"], "and --repetition_penalty"),
    (["--prompt=a", "--mesh=seq:2"], "pass --mesh=model:2"),
    (["--prompt=a"], "pass --mesh=model:2"),
    (
      ["--mesh=model:2", "--prompt=a", "--next_prompt_file=/dev/null"],
      "without",
    ),
  ],
)
def test_what_it_cannot_do(ask, folder, tmp_path, flags, said):
  file = tmp_path / "next.txt"
  file.write_text(SECOND)
  ran = ask(f"--model={folder}", f"--next_prompt_file={file}", *flags)
  assert ran.status != 0 and said in ran.err, ran.err
