"""Times parallel ways of prefill and decode, and the plain one.

  python -m benchmarks.ways runahead   a prompt read by several processes, by a
      chain (KV-Runahead) and by gathering all keys in each layer (TSP)
  python -m benchmarks.ways beside     attention in processes that have the
      caches, weights in this one (FastDecode)
  python -m benchmarks.ways pull       a prompt's pages that another process
      pulls, at once and page by page (KVDirect)
  python -m benchmarks.ways groups     requests answered by fewer devices than
      read them (LoongServe), each a process with the model
  python -m benchmarks.ways paired     a prompt read in one program with the
      steps of an answer (Liger), on devices of this process
  python -m benchmarks.ways rows       memory of rows in pages and in contiguous
      rows that grow (vAttention)
  python -m benchmarks.ways important  bytes read of a stored prefix, and time
      to the first token, with all of it and a quarter (IMPRESS)

Prompts are parts of Python's manual. It prints one JSON object; `same` is
whether the tokens equal those of the plain way. Another part of a prefix has
other tokens, so that `important` prints no `same`.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import multiprocessing
import pydoc_data.topics
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

import ringjax as rj
from benchmarks.serving import row_memory
from launch.planning import runahead
from ringjax import fetched_models
from ringjax.data import Tokenizer
from ringjax.json_text import json_text
from ringjax.serve import cluster


def prompts(model: str, lengths: Sequence[int]) -> list[Int[np.ndarray, " _"]]:
  """Cuts the manual into consecutive texts of `lengths` tokens, int32."""
  topics = pydoc_data.topics.topics
  text = "\n".join(topics[name] for name in sorted(topics))
  folder = fetched_models.resolve(model, "--model")
  ids = np.asarray(
    Tokenizer.load(folder).encode(text[: 8 * sum(lengths) + 4096]), np.int32
  )
  cuts = np.cumsum(lengths)
  if ids.size < cuts[-1]:
    raise SystemExit(f"ways: {cuts[-1]:,} tokens; the text has {ids.size:,}")
  return np.split(ids[: cuts[-1]], cuts[:-1])


def _runahead(flags: argparse.Namespace) -> dict[str, Any]:
  settings = runahead.Settings(
    parts=("wall",),
    tokens=(flags.tokens,),
    methods=("kvr", "tsp", "flash_tsp"),
    processes=flags.devices,
    model=flags.model,
    rounds=flags.rounds,
  )
  say = lambda line: print(line, file=sys.stderr, flush=True)
  (wall,) = runahead.run(settings, say=say)["wall"]
  tokens = [row["new_tokens"] for row in wall["methods"]]
  return {
    "tokens": wall["tokens"],
    "processes": wall["processes"],
    "same": tokens[1:] == tokens[:-1],
    "new_tokens": tokens[0],
    "methods": {
      row["method"]: {
        "seconds": row["seconds"],
        "sent_bytes": sum(row["bytes_by_link"].values()),
        "partition": row["partition"],
      }
      for row in wall["methods"]
    },
  }


def _beside(flags: argparse.Namespace) -> dict[str, Any]:
  """Measures two lengths of prompts: the traffic must not depend on them."""
  model = rj.models.load(flags.model, dtype="float32")
  contexts = []
  with rj.infer.AttentionWorkers.start(flags.devices) as workers:
    for size in (flags.tokens // 4, flags.tokens):
      texts = prompts(flags.model, [size] * flags.rows)
      reports: list[rj.infer.WorkersReport] = []
      beside = rj.infer.generate_beside(
        model, texts, workers=workers, max_new_tokens=flags.new,
        report=reports.append,
      )  # fmt: skip
      alone = rj.infer.generate(model, texts, max_new_tokens=flags.new)
      (report,) = reports
      traffic = report.traffic
      sent = traffic.sent_bytes + traffic.received_bytes
      contexts.append(
        {
          "tokens": size,
          "same": bool((beside.tokens == alone.tokens).all()),
          "step_bytes": sent / max(1, traffic.row_steps),
          "cached_bytes": size * token_bytes(model),
          "seconds": report.seconds,
          "waited_s": report.waited_s,
        }
      )
  return {"workers": flags.devices, "rows": flags.rows, "contexts": contexts}


def token_bytes(model: Any) -> int:
  """Bytes of a token's keys and values in all layers, in float32."""
  maps = (layer.attention for layer in model.config.layers)
  return sum(8 * x.kv_heads * x.head_dim for x in maps)


def _pages_in(
  ticket: str,
  address: tuple[str, int],
  key: bytes,
  page_by_page: bool,
  reader: str,
) -> tuple[float, int, str]:
  """Pulls pages in a reader's process: seconds, reads, digest of bytes."""
  start = time.perf_counter()
  offer = rj.transfer.Ticket.from_json(ticket)
  ways = [[n] for n in range(len(offer.pages))] if page_by_page else [None]
  pulls = [
    rj.transfer.pull(
      offer, address, key, pages=pages, reader=f"{reader}-{n}", patience_s=600
    )
    for n, pages in enumerate(ways)
  ]
  seconds = time.perf_counter() - start
  digest = hashlib.sha256()
  for name in pulls[0].arrays:
    digest.update(np.concatenate([x.arrays[name] for x in pulls]).tobytes())
  return seconds, sum(x.reads for x in pulls), digest.hexdigest()


def _pull(flags: argparse.Namespace) -> dict[str, Any]:
  model = rj.models.load(flags.model, dtype="float32")
  text, warm = prompts(flags.model, [flags.tokens] * 2)
  room = flags.tokens + 64
  engine = rj.serve.Engine(model, rows=1, capacity=2 * room, longest=room)
  ask = lambda ids: rj.serve.Request(prompt=ids, max_new_tokens=1)
  engine.submit(ask(warm)).result()
  start = time.perf_counter()
  engine.submit(ask(text)).result()
  read_s = time.perf_counter() - start
  key, times = secrets.token_bytes(32), {"at once": [], "page by page": []}
  copied_s, reads, digests = [], {}, set()
  sent = rj.serve.export_prefix(engine, text)
  with (
    multiprocessing.get_context("spawn").Pool(1) as pool,
    rj.transfer.Publisher(key, lease_s=600) as publisher,
  ):
    for n in range(-1, flags.rounds):
      for way, seconds in times.items():
        start = time.perf_counter()
        sent = rj.serve.export_prefix(engine, text)
        copied = time.perf_counter() - start
        digest = hashlib.sha256()
        for n_leaf in range(len(sent.layout.leaves)):
          leaf = [np.asarray(page[n_leaf]) for page in sent.pages]
          digest.update(np.stack(leaf).tobytes())
        digests.add(digest.hexdigest())
        numbers = publisher.new_numbers(len(sent.pages))
        page_by_page = way != "at once"
        ticket = publisher.publish(
          dict(zip(numbers, sent.pages, strict=True)), sent.layout,
          labels=sent.labels, readers=len(numbers) if page_by_page else 1,
        )  # fmt: skip
        took, count, pulled = pool.apply(
          _pages_in,
          (ticket.to_json(), publisher.address, key, page_by_page, str(n)),
        )
        digests.add(pulled)
        reads[way] = count
        if n >= 0:
          seconds.append(took)
          copied_s.append(copied)
  engine.close()
  return {
    "tokens": sent.tokens,
    "pages": len(sent.pages),
    "bytes": sent.tokens * token_bytes(model),
    "same": len(digests) == 1,
    "read_s": read_s,
    "copied_s": statistics.median(copied_s),
    "ways": {
      way: {"seconds": statistics.median(x), "reads": reads[way]}
      for way, x in times.items()
    },
  }


def _groups(flags: argparse.Namespace) -> dict[str, Any]:
  count, size = flags.devices, flags.tokens
  texts = prompts(flags.model, [size, size // 8])
  # One process has room for the long prompt and its answer.
  slots = size + 2 * flags.new
  if flags.reserve is not None:
    # Later tokens of the long prompt's answer need another process.
    slots = size + flags.reserve
  leaving = [] if flags.leave is None else [flags.leave]
  with cluster.ElasticWorkers.start(
    flags.model, count, slots=slots, dtype="float32"
  ) as workers:

    def watch(event: dict[str, Any]) -> None:
      # The first step follows the prompts.
      if event["event"] == "step" and leaving:
        workers.leave(leaving.pop())

    served = workers.serve(
      texts,
      flags.new,
      policy=workers.policy(steps=max(flags.new // 4, 1)),
      reserve=flags.reserve,
      watch=watch,
    )
  model = rj.models.load(flags.model, dtype="float32")
  alone = [
    rj.infer.generate(model, [text], max_new_tokens=flags.new).tokens[0]
    for text in texts
  ]
  return {
    "instances": count,
    "slots": slots,
    "reserve": flags.reserve,
    "leave": flags.leave,
    "prompts": [len(text) for text in texts],
    "reads": [
      {"group": event["group"], "answers": event["answers"]}
      for event in served.events
      if event["event"] == "read"
    ],
    "same": all(
      answer.tokens == tokens.tolist()
      for answer, tokens in zip(served.answers, alone, strict=True)
    ),
    **dataclasses.asdict(served.counts),
    "kept_bytes": served.counts.kept_tokens * token_bytes(model),
    "bytes_sent": sum(served.bytes_sent.values()),
    "seconds": served.seconds,
  }


def _paired(flags: argparse.Namespace) -> dict[str, Any]:
  mesh = rj.make_mesh((flags.devices,), ("model",), ring="model")
  model = rj.models.load(flags.model, mesh=mesh, dtype="float32")
  first, second = prompts(flags.model, [64, flags.tokens])
  chunk, steps = flags.tokens // flags.new, flags.new
  room = 64 + flags.new + 8
  together_times, apart_times, equal, paired = [], [], True, None
  for n in range(-1, flags.rounds):
    session = rj.infer.Session(model, capacity=room)
    rj.infer.generate(model, [first], max_new_tokens=1, cache=session)
    start = time.perf_counter()
    paired = rj.infer.prefill_beside(model, [second], session, chunk=chunk)
    jax.block_until_ready(paired.logits)
    took = time.perf_counter() - start
    reader = rj.infer.Session(model, capacity=flags.tokens + 256)
    start = time.perf_counter()
    read = rj.infer.generate(
      model, [second], max_new_tokens=1, cache=reader, prefill="chunked",
      chunk=chunk,
    )  # fmt: skip
    apart_s, at = time.perf_counter() - start, []
    new = rj.infer.generate(
      model, [first], max_new_tokens=1 + steps,
      stream=lambda _, at=at: at.append(time.perf_counter()),
    )  # fmt: skip
    # From the first token on: it exists before the other prompt arrives.
    apart_s += at[-1] - at[0]
    equal &= bool((new.tokens[:, 1:] == paired.answers.tokens).all())
    equal &= int(np.argmax(paired.logits[0])) == int(read.tokens[0, 0])
    if n >= 0:
      together_times.append(took)
      apart_times.append(apart_s)
  assert paired is not None
  return {
    "devices": flags.devices,
    "tokens": flags.tokens,
    "same": equal,
    "beside": int(paired.answers.tokens.shape[1]),
    "together_s": statistics.median(together_times),
    "apart_s": statistics.median(apart_times),
  }


def _rows(flags: argparse.Namespace) -> dict[str, Any]:
  settings = row_memory.RowMemorySettings(
    model=flags.model, rows=flags.rows, requests=2 * flags.rows,
    prompt_tokens=flags.tokens // 4, new_tokens=flags.new, longest=2048,
    capacity=8192,
  )  # fmt: skip
  layouts, answers = {}, []
  for layout in flags.layouts.split(","):
    layouts[layout], tokens = row_memory.served(layout, settings)
    answers.append(tokens)
  return {
    "rows": flags.rows,
    "longest": settings.longest,
    "same": answers[1:] == answers[:-1],
    "layouts": layouts,
  }


def _important(flags: argparse.Namespace) -> dict[str, Any]:
  """Times first tokens after all of a stored prefix, and after a quarter."""
  model = rj.models.load(flags.model, dtype="float32")
  document, question = prompts(flags.model, [flags.tokens, 24])
  room, parts = flags.tokens + 64, {}
  with tempfile.TemporaryDirectory() as folder:

    def ask(important: float) -> dict[str, float]:
      # Opened anew, so that nothing is in host memory.
      with rj.store.Store(disk=(folder, 1 << 32)) as store:
        start = time.perf_counter()
        prefixes = rj.infer.contexts.ImportantPrefixes(
          model, store=store, important=important
        )
        session = prefixes.session([document], [question], capacity=room)
        rj.infer.generate(model, [question], max_new_tokens=1, cache=session)
        seconds = time.perf_counter() - start
        return {"ttft_s": seconds, "bytes": prefixes.counters.chunk_bytes}

    ask(1.0)
    for part in (1.0, 0.25):
      measured = [ask(part) for _ in range(1 + flags.rounds)][1:]
      parts[str(part)] = {
        name: statistics.median(x[name] for x in measured)
        for name in measured[0]
      }
  return {"tokens": flags.tokens, "parts": parts}


_WAYS = {
  "important": _important,
  "runahead": _runahead,
  "beside": _beside,
  "pull": _pull,
  "groups": _groups,
  "paired": _paired,
  "rows": _rows,
}
# Ways that need several devices in this process; the others need one.
_SEVERAL = ("paired",)


def main(argv: Sequence[str] | None = None) -> int:
  """Measures and prints; see the module's docstring."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  to = parser.add_argument
  to("way", choices=_WAYS)
  to("--model", default="smollm2-135m")
  to("--devices", type=int, default=2, help="or processes that share the work")
  to("--tokens", type=int, default=1024, help="of a prompt")
  to("--rows", type=int, default=4, help="prompts at a time")
  to("--new", type=int, default=16, help="tokens of an answer")
  to("--rounds", type=int, default=3, help="timed ones")
  to("--layouts", default="pages,contiguous", help="of rows")
  to("--reserve", type=int, help="slots of an answer at a time, for groups")
  to("--leave", type=int, help="process of groups that leaves")
  flags = parser.parse_args(argv)
  # A process that has computed can't have more devices than it had.
  now = jax.config.values["jax_num_cpu_devices"]
  if flags.way in _SEVERAL and now < flags.devices:
    jax.config.update("jax_num_cpu_devices", flags.devices)
  print(json_text(_WAYS[flags.way](flags), indent=1))
  return 0


if __name__ == "__main__":
  sys.exit(main())
