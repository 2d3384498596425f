"""A model on disk by accelerate, in a process of its own; see `offloading`.

Run by its path, with any Python that has torch, transformers and accelerate:

  python offload_peer.py FOLDER SCRATCH

It answers each line `ROWS PROMPT NEW` with one of JSON: seconds, the most
bytes that the process had, and how many of them are no pages of files, which
the system can take back at any time.
"""

import pathlib
import sys
import threading
import time

from ringjax.json_text import json_text


class MemoryWatch:
  """The most bytes that this process had, looked at 50 times a second.

  The system knows the most of all, and of what is written to (not a page of a
  file, which it can take back at any time) how much there is now.
  """

  def __init__(self) -> None:
    self._written = 0
    threading.Thread(target=self._watch, daemon=True).start()

  def _watch(self) -> None:
    while True:
      self._look()
      time.sleep(0.02)

  def _look(self) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    found = {x.split(":")[0]: x.split()[1:2] for x in lines}
    number = lambda name: int(found[name][0]) * 1024
    now = number("RssAnon") + number("RssShmem")
    self._written = max(self._written, now)
    return number("VmHWM")

  def peaks(self) -> dict[str, int]:
    """By name: all bytes, and those that are written to."""
    return {"peak": self._look(), "written": self._written}


def main(folder: str, scratch: str) -> None:
  """Answers lines until there are no more."""
  memory = MemoryWatch()
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
  print(json_text({"ready": True}), flush=True)
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
    found = {"seconds": seconds, **memory.peaks()}
    print(json_text(found), flush=True)


if __name__ == "__main__":
  # Files beside this one are modules of ringjax, whose names others have too.
  del sys.path[0]
  main(*sys.argv[1:])
