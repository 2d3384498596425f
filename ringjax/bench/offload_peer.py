"""A model on disk by accelerate, in a process of its own; see `offloading`.

Run by its path, with any Python that has torch, transformers and accelerate:

  python offload_peer.py FOLDER SCRATCH

It answers each line `ROWS PROMPT NEW` with one of JSON: seconds, and the most
bytes that the process had.
"""

import json
import pathlib
import sys
import time


def high_water() -> int:
  """The most bytes that this process had."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))


def main(folder: str, scratch: str) -> None:
  """Answers lines until there are no more."""
  # None of these is a dependency of ringjax.
  import torch  # pyrefly: ignore
  from transformers import AutoModelForCausalLM  # pyrefly: ignore

  model = AutoModelForCausalLM.from_pretrained(
    folder,
    dtype=torch.bfloat16,
    device_map={
      "model.embed_tokens": "cpu", "model.norm": "cpu",
      "model.rotary_emb": "cpu", "lm_head": "cpu", "model.layers": "disk",
    },
    offload_folder=scratch,
  )  # fmt: skip
  print(json.dumps({"ready": True}), flush=True)
  for line in sys.stdin:
    rows, prompt, new = map(int, line.split())
    tokens = torch.ones((rows, prompt), dtype=torch.long)
    start = time.monotonic()
    with torch.no_grad():
      model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
      )
    seconds = time.monotonic() - start
    found = {"seconds": seconds, "peak": high_water()}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
  # Files beside this one are modules of ringjax, whose names others have too.
  del sys.path[0]
  main(*sys.argv[1:])
