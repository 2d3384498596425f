"""Starts a server or a cluster of processes, asks it over HTTP, and times it.

  python -m benchmarks.live --model=smollm2-135m
      One server (`python -m launch.serve`), which reads prompts and answers.
  python -m benchmarks.live --instances=prefill,decode --rate=0.5
      A router and two instances, each on another core.
  python -m benchmarks.live --instances=prefill,prefill,decode \\
      --policy=conductor:threshold=2 --prefixes=4 --shared=512
      Prompts that begin with one of four texts, routed by the caches.

Prompts are parts of Python's manual; requests arrive at random, at --rate a
second, the same ones in each call with one --seed.

It prints one JSON object: percentiles of the seconds to the first token (TTFT)
and for each later one (TPOT) as a client sees them; the requests a second for
which both were at most --scales times those of a request alone, which is sent
first (goodput); tokens of prompts that were found in caches; the server's
counters meanwhile; and a digest of all answers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import http.client
import json
import math
import os
import pathlib
import pydoc_data.topics
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringjax import fetched_models
from ringjax.data import Tokenizer
from ringjax.json_text import json_text
from ringjax.serve.cluster.times.request_times import (
  Limits,
  ServedRequest,
  attainment,
  percentiles,
)
from ringjax.serve.traces import poisson_trace

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_ALONE = "alone"
# Program that runs `python -m launch.serve` pinned to one core.
_PINNED = """
import os, runpy, sys
core = int(sys.argv.pop(1))
if hasattr(os, "sched_setaffinity"):
  os.sched_setaffinity(0, {core})
runpy.run_module("launch.serve", run_name="__main__", alter_sys=True)
"""


class ServerError(Exception):
  """A process ended, or was not ready in time; the text ends with its log."""


class Processes:
  """Processes of launch.serve, which all end with the `with` block.

  Attributes:
    folder: Folder of their logs.
    patience_s: Seconds that a process may take to get ready.
  """

  def __init__(self, folder: pathlib.Path, patience_s: float):
    self.folder, self.patience_s = folder, patience_s
    self._started: list[tuple[subprocess.Popen[bytes], pathlib.Path]] = []

  def __enter__(self) -> Processes:
    return self

  def __exit__(self, *_: object) -> None:
    processes = [process for process, _ in self._started]
    for process in processes:
      process.terminate()
    for process in processes:
      try:
        process.wait(10)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

  def start(self, *flags: str, core: int | None = None) -> pathlib.Path:
    """Starts a process; returns the path of its log."""
    log = self.folder / f"{len(self._started)}.log"
    argv = [sys.executable, "-m", "launch.serve"]
    if core is not None:
      argv[1:] = ["-c", _PINNED, str(core)]
    with log.open("wb") as file:
      process = subprocess.Popen(
        [*argv, *flags],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=file,
        # Ctrl-C reaches only this process, which then ends the others.
        start_new_session=True,
      )
    self._started.append((process, log))
    return log

  def wait_for(self, log: pathlib.Path, pattern: str) -> str:
    """Waits for a pattern in a log; returns the first group of the match.

    Raises:
      ServerError: If a process ends, or the time is over.
    """
    deadline = time.monotonic() + self.patience_s
    while True:
      for process, process_log in self._started:
        if process.poll() is not None:
          words = process_log.read_text("utf-8", "replace")[-2000:]
          raise ServerError(f"status {process.returncode}: {words}")
      text = log.read_text("utf-8", "replace")
      if match := re.search(pattern, text):
        return match[1]
      if time.monotonic() > deadline:
        raise ServerError(f"nothing like {pattern!r} in: {text[-2000:]}")
      time.sleep(0.1)


def start(processes: Processes, asked: argparse.Namespace) -> int:
  """Starts a server or cluster; returns its port once it is healthy."""
  cores = sorted(getattr(os, "sched_getaffinity", lambda _: {0})(0))
  model = [f"--model={asked.model}"]
  if asked.longest:
    model.append(f"--longest={asked.longest}")
  engine = [f"--dtype={asked.dtype}", *shlex.split(asked.server)]
  if asked.instances == [_ALONE]:
    front = processes.start(*model, *engine, "--port=0")
  else:
    key = processes.folder / "key"
    key.write_bytes(secrets.token_bytes(32))
    cluster = [*model, f"--cluster_key={key}", "--silence=60"]
    front = processes.start(
      "--role=router", "--port=0", "--cluster_port=0",
      f"--policy={asked.policy}", *shlex.split(asked.router), *cluster,
    )  # fmt: skip
    join = processes.wait_for(front, r"instances join at (\S+)")
    logs = [
      processes.start(
        f"--role={role}", f"--join={join}", f"--name={role}{n}",
        *cluster, *engine, core=cores[n % len(cores)],
      )
      for n, role in enumerate(asked.instances)
    ]  # fmt: skip
    for log in logs:
      processes.wait_for(log, r"(joined) the router")
  port = int(processes.wait_for(front, r"serving at http://[^ ]*:(\d+)/v1"))
  deadline = time.monotonic() + asked.patience
  while _get(port, "/health")[0] != 200:
    if time.monotonic() > deadline:
      raise ServerError(f"not healthy: {_get(port, '/health')[1]}")
    time.sleep(0.1)
  return port


def _get(port: int, path: str) -> tuple[int, str]:
  link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
  with contextlib.closing(link):
    link.request("GET", path)
    reply = link.getresponse()
    return reply.status, reply.read().decode()


def metrics(port: int) -> dict[str, float]:
  """Counters of a server without labels, by name."""
  counters = {}
  for line in _get(port, "/metrics")[1].splitlines():
    name, _, value = line.rpartition(" ")
    if name.endswith("_total") and not name.startswith("#"):
      counters[name.removeprefix("ringjax_")] = float(value)
  return counters


def _events(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
  """Yields the events of a stream, without its end mark."""
  for line in reply:
    data = line.decode().removeprefix("data:").strip()
    if line.startswith(b"data:") and data != "[DONE]":
      yield json.loads(data)


def ask(
  port: int, prompt: Sequence[int], new: int, *, number: int = 0
) -> tuple[ServedRequest, str]:
  """Streams a greedy completion; returns its times and its text."""
  arrival, first, last = time.monotonic(), math.nan, math.nan
  text, usage, why = "", {}, ""
  body = {
    "prompt": list(map(int, prompt)),
    "max_tokens": new,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
  }
  link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
  with contextlib.closing(link):
    link.request(
      "POST",
      "/v1/completions",
      json.dumps(body, allow_nan=False),
      {"content-type": "application/json"},
    )
    reply = link.getresponse()
    if reply.status != 200:
      why = f"{reply.status}: {reply.read().decode()[:500]}"
    else:
      for event in _events(reply):
        why = why or str(event.get("error") or "")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
          # The first event may be empty.
          if choice["text"]:
            last = time.monotonic()
            first = last if math.isnan(first) else first
            text += choice["text"]
  details = usage.get("prompt_tokens_details") or {}
  served = ServedRequest(
    number=number,
    arrival_s=arrival,
    prompt_tokens=len(prompt),
    new_tokens=usage.get("completion_tokens", 0),
    cached_tokens=details.get("cached_tokens", 0),
    first_token_s=first,
    last_token_s=last,
    rejected=why,
  )
  return served, text


def prompts(asked: argparse.Namespace) -> list[list[int]]:
  """Ids of each prompt: a shared text, then a separate one."""
  topics = pydoc_data.topics.topics
  text = "\n".join(topics[name] for name in sorted(topics))
  folder = fetched_models.resolve(asked.model, "--model")
  count = asked.prefixes * asked.shared + asked.requests * asked.prompt
  # A token of this text has more than two bytes in most vocabularies.
  ids = list(Tokenizer.load(folder).encode(text[: 8 * count]))
  if len(ids) < count:
    raise SystemExit(
      f"live: {count:,} tokens of prompts; the manual has {len(ids):,}: pass "
      "fewer --requests, or a smaller --prompt or --shared"
    )
  size = asked.shared
  heads = [ids[n * size : (n + 1) * size] for n in range(asked.prefixes)]
  pieces = ids[asked.prefixes * size :]
  draw = np.random.default_rng(asked.seed)
  numbers = draw.integers(0, asked.prefixes, asked.requests)
  return [
    heads[number] + pieces[n * asked.prompt : (n + 1) * asked.prompt]
    for n, number in enumerate(numbers)
  ]


def measure(port: int, asked: argparse.Namespace) -> dict[str, Any]:
  """Sends requests at their arrival times; returns figures of the answers."""
  texts = prompts(asked)
  trace = poisson_trace(
    rate=asked.rate, requests=asked.requests, prompt_tokens=asked.prompt,
    new_tokens=asked.new, spread=asked.spread, seed=asked.seed,
  )  # fmt: skip
  # The first of two requests compiles remaining programs; use the second.
  alone = [ask(port, texts[0][::-1][n:], asked.new)[0] for n in (0, 1)][1]
  counters, start_s = metrics(port), time.monotonic()

  def send(n: int) -> tuple[ServedRequest, str]:
    time.sleep(max(0.0, start_s + trace[n].arrival - time.monotonic()))
    return ask(port, texts[n], trace[n].new_tokens, number=n)

  with concurrent.futures.ThreadPoolExecutor(asked.requests) as pool:
    answers = list(pool.map(send, range(asked.requests)))
  seconds = time.monotonic() - start_s
  counted = {
    name: value - counters.get(name, 0.0)
    for name, value in metrics(port).items()
    if value != counters.get(name, 0.0)
  }
  served = [times for times, _ in answers]
  if all(times.rejected for times in served):
    raise ServerError(f"no request was answered: {served[0].rejected}")
  in_time = {}
  for scale in asked.scales:
    limits = Limits(ttft_s=scale * alone.ttft_s, tpot_s=scale * alone.tpot_s)
    in_time[f"{scale:g}"] = attainment(served, limits)
  joined = "\0".join(text for _, text in answers)
  return {
    "instances": asked.instances,
    "requests": len(served),
    "failed": [x.rejected for x in served if x.rejected],
    "seconds": seconds,
    **percentiles(served, (50, 90, 99)),
    "alone": {"ttft_s": alone.ttft_s, "tpot_s": alone.tpot_s},
    "in_time": in_time,
    "goodput": {
      scale: share * len(served) / seconds for scale, share in in_time.items()
    },
    "prompt_tokens": sum(x.prompt_tokens for x in served),
    "cached_tokens": sum(x.cached_tokens for x in served),
    "new_tokens": sum(x.new_tokens for x in served),
    "counted": counted,
    "answers": hashlib.sha256(joined.encode()).hexdigest(),
  }


def options(argv: Sequence[str] | None) -> argparse.Namespace:
  """Parses flags; None for those of the process."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  to = parser.add_argument
  to("--model", default="smollm2-135m")
  to("--dtype", default="float32")
  to("--instances", type=lambda x: x.split(","), default=[_ALONE],
     help="roles of launch.serve; alone: no router")  # fmt: skip
  to("--policy", default="shortest", help="of the router")
  to("--router", default="", help="more flags of the router, in one text")
  to("--server", default="", help="more flags of what has a model")
  to("--longest", type=int, default=2048)
  to("--requests", type=int, default=24)
  to("--rate", type=float, default=1.0, help="requests a second, or inf")
  to("--prefixes", type=int, default=1, help="texts that prompts begin with")
  to("--shared", type=int, default=0, help="tokens of such a text")
  to("--prompt", type=int, default=256, help="further tokens of a prompt")
  to("--new", type=int, default=32, help="tokens of an answer, on average")
  to("--spread", type=float, default=0.0, help="of the logs of their numbers")
  to("--scales", type=lambda x: [float(n) for n in x.split(",")],
     default=[2.0, 5.0, 10.0], help="limits, of times alone")  # fmt: skip
  to("--seed", type=int, default=0)
  to("--patience", type=float, default=900.0, help="seconds to get ready in")
  return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
  """Measures and prints; see the module's docstring."""
  flags = options(argv)
  # Exit normally on SIGTERM, so that the other processes end, too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  try:
    with (
      tempfile.TemporaryDirectory() as folder,
      Processes(pathlib.Path(folder), flags.patience) as processes,
    ):
      figures = measure(start(processes, flags), flags)
  except ServerError as error:
    print(f"live: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    return 130
  print(json_text(figures, indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
