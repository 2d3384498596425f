"""Runs a model on disk with accelerate, in a process; see `offloading`.

Run by its path, with any Python that has torch, transformers and accelerate:

  python offload_peer.py FOLDER SCRATCH

It answers each line `ROWS PROMPT NEW` with one of JSON: seconds, the peak bytes
of the process, and the peak without pages of files, which the system can evict
at any time.
"""

import pathlib
import sys
import threading
import time

from ringjax.json_text import json_text


class MemoryWatch:
  """Peak memory of this process, sampled 50 times a second.

  The system reports the peak of all bytes, but only the current bytes of
  written memory (without pages of files, which it can evict at any time).
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
    fields = {x.split(":")[0]: x.split()[1:2] for x in lines}
    number = lambda name: int(fields[name][0]) * 1024
    written_bytes = number("RssAnon") + number("RssShmem")
    self._written = max(self._written, written_bytes)
    return number("VmHWM")

  def peaks(self) -> dict[str, int]:
    """Peak bytes of all memory and of written memory, by name."""
    return {"peak": self._look(), "written": self._written}


def main(folder: str, scratch: str) -> None:
  """Answers lines until the input ends."""
  memory = MemoryWatch()
  # ringjax does not depend on these packages.
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
    record = {"seconds": seconds, **memory.peaks()}
    print(json_text(record), flush=True)


if __name__ == "__main__":
  # The folder of this file has modules whose names clash with other packages.
  del sys.path[0]
  main(*sys.argv[1:])
