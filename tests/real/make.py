"""Writes facts.json: what transformers computes of the models of launch.fetch.

  python tests/real/make.py smollm2-135m=FOLDER/model.gguf

Needs torch, transformers, gguf and accelerate. The facts are numbers and ids
only.
"""

from __future__ import annotations

import json
import pathlib
import sys

FACTS = pathlib.Path(__file__).with_name("facts.json")
TEXT = (
  "A ring of devices holds a long text: each of them keeps a part of the keys "
  "and passes it on, so that after one turn every query has met every key. "
  "Nothing is left out and nothing is counted twice.\n\n"
  "def turn(parts):\n  return parts[1:] + parts[:1]\n\n"
  "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
  "敏捷的棕色狐狸跳过了懒狗。 1,234.5 + 0.5 = 1,235."
)
CHAT = [
  {"role": "user", "content": "What is the capital of France?"},
  {"role": "assistant", "content": "Paris."},
  {"role": "user", "content": "And of Italy?"},
]


def facts(path: str) -> dict:
  """Of one model."""
  import torch
  import transformers

  file = pathlib.Path(path)
  how = dict(gguf_file=file.name)
  tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **how)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, dtype=torch.float32, **how
  ).eval()
  ids = tokenizer(TEXT)["input_ids"]
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0].double()
    logprobs = torch.log_softmax(logits[:-1], -1)
    said = logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    start = torch.tensor([ids[:40]])
    answer = model.generate(start, max_new_tokens=24, do_sample=False)[0, 40:]
  chat = None
  if tokenizer.chat_template:
    chat = tokenizer.apply_chat_template(
      CHAT, tokenize=False, add_generation_prompt=True
    )
  return {
    "ids": ids,
    "logprobs": [round(float(x), 5) for x in said],
    "answer": answer.tolist(),
    "chat": chat,
  }


if __name__ == "__main__":
  result = json.loads(FACTS.read_text()) if FACTS.exists() else {}
  for argument in sys.argv[1:]:
    name, _, path = argument.partition("=")
    result[name] = facts(path)
  FACTS.write_text(json.dumps(result, indent=1) + "\n")
