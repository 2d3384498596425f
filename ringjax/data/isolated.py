"""A subprocess for input with which a hostile file could exhaust or crash one.

Guarantees: `run` returns what a script wrote, or raises with the reason, within
the limits of time and memory, whatever the script's libraries do with their
input. If the subprocess is killed, this process is not affected.
Cost: the start of a Python, 50 to 100 ms.

Limits of processor time and memory are those of POSIX; elsewhere only the
limit of wall time holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Run by a script before it reads its input.
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
  """The subprocess did not answer, for the reason in the text.

  Raised and caught inside of this package alone.
  """


def run(
  script: str,
  request: bytes,
  *,
  memory_bytes: int,
  cpu_s: int,
  wall_s: float,
  answer_bytes: int,
) -> Any:
  """Runs a script and returns its standard output, parsed as JSON.

  Args:
    script: Python; `limit` is defined before it, and called with the limits.
    request: what the script reads from `sys.stdin.buffer`.
    memory_bytes: the most address space it may have.
    cpu_s: the most processor time it may take, its imports included.
    wall_s: the most wall time, which counts on a busy machine.
    answer_bytes: the longest answer that is parsed.

  Raises:
    ChildError: it was killed, failed, or answered too much or not in JSON.
  """
  code = f"{_LIMITS}limit({memory_bytes}, {cpu_s})\n{script}"
  # The same search path of modules as here.
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
  text = stderr.decode("utf-8", "replace")
  if code < 0 and -code in (9, 24):  # SIGKILL, SIGXCPU
    return f"more than {cpu_s} s of processor time"
  if "MemoryError" in text or "memory allocation" in text:
    return f"more than {memory_bytes >> 20} MB of memory"
  if code < 0:
    return f"killed by signal {-code}"
  lines = text.strip().splitlines() or [f"exit status {code}"]
  return lines[-1][:200]
