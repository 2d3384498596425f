"""Rows of systems that serve, and the drivers that make their figures."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

import pytest

from benchmarks import live, systems_live, ways
from ringjax.models import small

ROWS = {row.name: row for row in systems_live.ROWS}


def served(**more):
  """What benchmarks.live prints."""
  return {
    "instances": ["alone"],
    "requests": 8,
    "failed": [],
    "seconds": 16.0,
    "ttft_s": {"p50": 1.5, "p90": 2.5, "p99": 3.0},
    "tpot_s": {"p50": 0.25, "p90": 0.5, "p99": 0.75},
    "alone": {"ttft_s": 0.5, "tpot_s": 0.1},
    "in_time": {"2": 0.25, "5": 0.75, "10": 1.0},
    "goodput": {"2": 0.125, "5": 0.375, "10": 0.5},
    "prompt_tokens": 4000,
    "cached_tokens": 1000,
    "new_tokens": 64,
    "counted": {},
    "answers": "abc",
    **more,
  }


def way(**more):
  return {"same": True, "tokens": 512, **more}


PRINTED = {
  "distserve": (
    [served(counted={"moved_bytes_total": 16e6}), served()],
    ["p90 2.5", "75% within 5", "2.0 MB moved", "the same answers"],
  ),
  "mooncake": (
    [
      served(cached_tokens=400),
      served(),
      served(cached_tokens=2000, counted={"prefixes_fetched_total": 3}),
    ],
    ["random 10%", "load 25%", "conductor 50%", "3 prefixes fetched"],
  ),
  "chunkattention": (
    [
      served(counted={"keys_read_total": 10, "keys_referenced_total": 1000}),
      served(counted={"keys_read_total": 900}, answers="x"),
    ],
    ["read 10 of 1,000 keys, 900", "OTHER answers"],
  ),
  "kvr": (
    [
      {"methods": [{"seconds": 2.0, "new_tokens": [5]}]},
      way(
        processes=2,
        new_tokens=[5],
        methods={
          name: {"seconds": 1.5, "sent_bytes": 3e6, "partition": [300, 212]}
          for name in ("kvr", "tsp")
        },
      ),
    ],
    [
      "a chain 1.50 s, 3.0 MB",
      "TSP 1.50",
      "300 and 212 tokens",
      "cores 2.00 s",
      "the same first",
    ],
  ),
  "kvdirect": (
    [
      way(
        bytes=24_000_000,
        pages=16,
        read_s=4.0,
        copied_s=0.1,
        ways={
          "at once": {"seconds": 0.02, "reads": 1},
          "page by page": {"seconds": 0.08, "reads": 16},
        },
      )
    ],
    ["24.0 MB in 16 pages", "20 ms, 1.20 GB/s (1 read)", "80 ms (16 reads)"],
  ),
  "fastdecode": (
    [
      {
        "workers": 2,
        "rows": 4,
        "contexts": [
          way(step_bytes=3000, cached_bytes=2_000_000),
          way(step_bytes=3000, cached_bytes=8_000_000, same=False),
        ],
      }
    ],
    ["3 kB a token after 512", "8.0 MB (OTHER tokens)"],
  ),
  "vattention": (
    [
      way(
        rows=4,
        longest=2048,
        layouts={
          name: {
            "resident": size << 20,
            "reserved": 64 << 20,
            "waste": 31,
            "maps": 9,
            "background": 4,
            "waited": 0,
          }
          for name, size in (("pages", 64), ("contiguous", 12))
        },
      ),
      way(same=False),
    ],
    [
      "reads give OTHER tokens",
      "12 MiB resident at most of 64 MiB",
      "0 waited for",
      "the same tokens",
    ],
  ),
  "loongserve": (
    [
      way(
        instances=3,
        slots=208,
        prompts=[192, 24],
        reads=[
          {"group": [0, 1, 2], "answers": [0, 1]},
          {"group": [2], "answers": [2]},
        ],
        moved_tokens=0,
        kept_bytes=9e6,
        bytes_sent=4e6,
        grows=1,
      ),
      way(reserve=4, leave=0, grows=2, moved_tokens=48),
    ],
    [
      "process 0 leaves: 2 joined, 48 tokens moved",
      "192 and 24 tokens",
      "3 then 2; 1 then 1",
      "0 tokens moved",
      "4.0 MB",
    ],
  ),
  "liger": (
    [way(devices=3, beside=8, together_s=4.0, apart_s=4.5)],
    ["8 tokens of an answer", "3 devices", "4.0 s, one after the other 4.5"],
  ),
  "impress": (
    [
      {
        "losses": {
          "1.0": {"few probes": 2.0},
          "0.5": dict.fromkeys(("few probes", "own", "random", "newest"), 2.25),
        },
        "vectors": {},
      },
      {
        "tokens": 512,
        "parts": {
          "1.0": {"ttft_s": 2.0, "bytes": 23e6},
          "0.25": {"ttft_s": 1.5, "bytes": 18e6},
        },
      },
    ],
    ["25%: 18.0 MB read, first token after 1.50 s", "50% kept +0.250 nat"],
  ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_row_says_what_its_commands_printed(name):
  objects, words = PRINTED[name]
  row = ROWS[name]
  figures = [
    run.pick(printed)
    for run, printed in zip(row.runs + row.more, objects, strict=True)
  ]
  text = row.says(*json.loads(json.dumps(figures)))
  for word in words:
    assert word in text, text
  # Commands that add to a row may not have run yet.
  short = row.says(*figures[: len(row.runs)], *(None for _ in row.more))
  assert (len(short) < len(text)) == bool(row.more)


def test_a_claim_that_does_not_hold_here_has_its_reason():
  slow = served(ttft_s={"p50": 3.0, "p90": 4.0})
  says = lambda name, *objects: ROWS[name].says(
    *(run.pick(x) for run, x in zip(ROWS[name].runs, objects, strict=True))
  )
  assert "compete for the same cores" in says("distserve", slow, served())
  assert "compete" not in says("distserve", served(), slow)
  late = served(tpot_s={"p50": 0.5, "p90": 0.5})
  assert "an eighth" in says("chunkattention", late, served())
  assert "an eighth" not in says("chunkattention", served(), late)
  alone, chain = PRINTED["kvr"][0]
  kvr, tsp = chain["methods"]["kvr"], chain["methods"]["tsp"]
  for partition, even in (([300, 212], False), ([256, 256], True)):
    methods = {"kvr": kvr | {"partition": partition}, "tsp": tsp}
    said = says("kvr", alone, chain | {"methods": methods})
    assert "The chain is later here" in said
    assert ("its parts were even" in said) == even
    methods["tsp"] = tsp | {"seconds": 9.0}
    said = says("kvr", alone, chain | {"methods": methods})
    assert "later" not in said and "were even" not in said


def test_every_row_is_shown_above():
  assert {name for name, row in ROWS.items() if row.runs} == set(PRINTED)


class _Answers(http.server.BaseHTTPRequestHandler):
  """A server that streams three tokens, or refuses long answers."""

  def do_POST(self):
    size = int(self.headers["content-length"])
    body = json.loads(self.rfile.read(size))
    self.send_response(429 if body["max_tokens"] > 3 else 200)
    self.end_headers()
    if body["max_tokens"] > 3:
      self.wfile.write(b"too many")
      return
    usage = {
      "completion_tokens": 3,
      "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2},
    }
    for event in ("", "a", "b", "c", None):
      choices = [] if event is None else [{"text": event}]
      data = json.dumps({"choices": choices, "usage": event is None and usage})
      self.wfile.write(f"data: {data}\n\n".encode())
      self.wfile.flush()
      # The first event has no token.
      time.sleep(0.1 * (event == ""))
    self.wfile.write(b"data: [DONE]\n\n")

  def log_message(self, format, *args):
    pass


@contextlib.contextmanager
def _serving():
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  try:
    yield server.server_port
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def test_times_begin_with_the_first_token():
  with _serving() as port:
    times, text = live.ask(port, [1, 2, 3, 4], 3)
    assert text == "abc" and times.rejected == ""
    assert times.ttft_s >= 0.1 and times.tpot_s >= 0
    assert (times.new_tokens, times.cached_tokens) == (3, 2)
    refused, _ = live.ask(port, [1], 4)
    assert refused.rejected == "429: too many"


def test_prompts_share_as_many_tokens_as_asked():
  folder = small.path()
  asked = live.options(
    [f"--model={folder}", "--requests=6", "--prefixes=2", "--shared=20",
     "--prompt=9"]
  )  # fmt: skip
  ids = live.prompts(asked)
  assert {len(x) for x in ids} == {29}
  assert len({tuple(x[:20]) for x in ids}) == 2
  assert len({tuple(x[20:]) for x in ids}) == 6
  assert [len(x) for x in ways.prompts(str(folder), [7, 3])] == [7, 3]


@pytest.mark.slow
def test_a_cluster_answers_as_one_server(capsys):
  pytest.importorskip("uvicorn")
  flags = [
    f"--model={small.path()}", "--requests=4", "--rate=inf", "--prompt=40",
    "--new=4", "--longest=128", "--server=--rows=2 --capacity=512",
  ]  # fmt: skip
  printed = []
  for more in ([], ["--instances=prefill,decode"]):
    assert live.main([*flags, *more]) == 0
    printed.append(json.loads(capsys.readouterr().out))
  alone, split = printed
  assert alone["answers"] == split["answers"] and not split["failed"]
  assert alone["new_tokens"] == split["new_tokens"] == 16
  assert split["counted"]["requests_moved_total"] == 4
  assert split["ttft_s"]["p50"] > 0 and split["in_time"].keys() == {
    "2", "5", "10",
  }  # fmt: skip


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(capsys):
  pytest.importorskip("uvicorn")
  flags = [f"--model={small.path()}", "--server=--rows=0", "--requests=1"]
  assert live.main(flags) == 1
  assert "--rows" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
  "flags",
  [
    ["beside", "--tokens=32", "--new=3", "--rows=2"],
    ["groups", "--devices=3", "--tokens=64", "--new=4"],
    [
      "groups",
      "--devices=3",
      "--tokens=48",
      "--new=12",
      "--reserve=4",
      "--leave=0",
    ],
    ["important", "--tokens=256", "--rounds=1"],
    ["paired", "--tokens=32", "--new=4", "--rounds=1"],
    ["pull", "--tokens=96", "--rounds=1"],
    ["rows", "--tokens=32", "--new=4", "--rows=2"],
    ["rows", "--tokens=32", "--new=4", "--rows=1", "--layouts=pages,dense"],
    ["runahead", "--tokens=64", "--rounds=1"],
  ],
  ids=" ".join,
)
def test_a_way_gives_the_tokens_of_the_plain_one(flags, capsys):
  assert ways.main([*flags, f"--model={small.path()}"]) == 0
  printed = json.loads(capsys.readouterr().out)
  if "parts" in printed:
    assert printed["parts"]["0.25"]["bytes"] < printed["parts"]["1.0"]["bytes"]
    return
  assert all(x["same"] for x in printed.get("contexts", [printed]))
  if "--leave=0" in flags:
    assert printed["grows"] and printed["moved_tokens"]
