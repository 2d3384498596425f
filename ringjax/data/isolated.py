"""Another process for what a hostile file may make hang, swell or abort.

Guarantees: `run` returns what a script answered, or says in one word group why
there is no answer, within the limits of time and memory, whatever the script's
libraries did with their input. The script's process has no share in this one:
if it is killed, nothing is lost here. Cost: the start of a Python, 50 to 100
ms.

Limits of processor time and memory are those of POSIX; elsewhere only the
limit of wall time holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# What a script does before it looks at its input.
_LIMITS = """\
import json, sys
try:
  import resource
except ImportError:
  resource = None
def limit(memory_bytes, cpu_s):
  if resource is not None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
"""


class ChildError(Exception):
  """The child gave no answer; the text says why. Never leaves this package."""


def run(
  script: str,
  request: bytes,
  *,
  memory_bytes: int,
  cpu_s: int,
  wall_s: float,
  answer_bytes: int,
) -> Any:
  """What `script` writes to its standard output, read as JSON.

  Args:
    script: Python; `limit` is defined before it, and called with the limits.
    request: what the script reads from `sys.stdin.buffer`.
    memory_bytes: the most address space it may have.
    cpu_s: the most processor time it may take, its imports included.
    wall_s: the most time that passes here, on a machine that is busy.
    answer_bytes: the longest answer that is looked at.

  Raises:
    ChildError: it was killed, failed, or answered too much or not in JSON.
  """
  code = f"{_LIMITS}limit({memory_bytes}, {cpu_s})\n{script}"
  # The child finds the libraries where this process finds them.
  env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
  env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
  env["PYTHONIOENCODING"] = "utf-8"
  # One thread each: stacks of threads count as memory here.
  env["TOKENIZERS_PARALLELISM"] = "false"
  try:
    done = subprocess.run(
      [sys.executable, "-P", "-c", code],
      input=request,
      capture_output=True,
      timeout=wall_s,
      env=env,
      check=False,
    )
  except subprocess.TimeoutExpired:
    raise ChildError(f"no answer within {wall_s:g} s") from None
  except OSError as error:
    raise ChildError(f"no process could be started: {error}") from error
  if done.returncode:
    raise ChildError(_why(done.returncode, done.stderr, memory_bytes, cpu_s))
  if len(done.stdout) > answer_bytes:
    raise ChildError(f"more than {answer_bytes} bytes of output")
  try:
    return json.loads(done.stdout)
  except ValueError:
    raise ChildError("an answer that is not JSON") from None


def _why(code: int, stderr: bytes, memory_bytes: int, cpu_s: int) -> str:
  said = stderr.decode("utf-8", "replace")
  if code < 0 and -code in (9, 24):  # SIGKILL, SIGXCPU
    return f"more than {cpu_s} s of processor time"
  if "MemoryError" in said or "memory allocation" in said:
    return f"more than {memory_bytes >> 20} MB of memory"
  if code < 0:
    return f"killed by signal {-code}"
  lines = said.strip().splitlines() or [f"exit status {code}"]
  return lines[-1][:200]
