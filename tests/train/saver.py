"""Processes that save steps until they are killed, for test_checkpoint.py.

  python tests/train/saver.py

Imports once and forks a process for each line of its input, a JSON object:
`root`, `count` (steps to save), and `call` and `n`, if the process is to kill
itself at the n-th call of that function of `os`. Says the process's number,
and when it is gone how it ended. The process notes in `log` what it has done.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np

from ringjax.train import Checkpoints

CALLS = ("fsync", "mkdir", "open", "rename", "replace", "rmdir", "unlink")


def state(step: int) -> dict:
  """What training has come to at a step."""
  rng = np.random.default_rng(step)
  return {
    "w": jnp.asarray(rng.standard_normal((128, 512), np.float32)),
    "b": [jnp.asarray(rng.standard_normal(100), jnp.bfloat16)],
    "step": jnp.int32(step),
  }


def arm(call: str, n: int) -> None:
  """Kills this process at the n-th call."""
  original = getattr(os, call)
  count = [0]
  lock = threading.Lock()

  def instead(*args, **kwargs):
    with lock:
      count[0] += 1
      if count[0] == n:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **kwargs)

  setattr(os, call, instead)


def save(root: str, count: int, log: str, call: str = "", n: int = 0) -> None:
  jax.config.update("jax_platforms", "cpu")
  note = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
  first = state(0)
  if call:
    arm(call, n)
  with Checkpoints(root, keep=2) as steps:
    found = steps.restore(like=first)
    at = -1 if found is None else steps.restored_step
    os.write(note, f"ready {at}\n".encode())
    for step in range(at + 1, at + 1 + count):
      steps.save(step, state(step), {"at": step})
      steps.wait()
      os.write(note, f"saved {step}\n".encode())


def main() -> None:
  for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
      status = 1
      with contextlib.suppress(BaseException):
        save(**job)
        status = 0
      os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
  if len(sys.argv) > 1:
    save(**json.loads(sys.argv[1]))
  else:
    main()
