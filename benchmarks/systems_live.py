"""Rows of systems whose claim is about processes that share work.

`benchmarks/live.py` starts servers and asks them over HTTP;
`benchmarks/ways.py` times parallel ways of prefill and decode and the plain
one.
"""

from __future__ import annotations

from typing import Any

from benchmarks.table import Figures, Row, Run

_LIVE = "python -m benchmarks.live --model=smollm2-135m"
_WAYS = "python -m benchmarks.ways"


def _live(printed: dict[str, Any]) -> Figures:
  """Figures of a server as its clients see them."""
  counted = printed["counted"]
  return {
    "requests": printed["requests"],
    "failed": len(printed["failed"]),
    "ttft": {p: printed["ttft_s"][p] for p in ("p50", "p90")},
    "tpot": {p: printed["tpot_s"][p] for p in ("p50", "p90")},
    "in_time": printed["in_time"],
    "goodput": printed["goodput"],
    "alone": printed["alone"],
    "hits": printed["cached_tokens"] / printed["prompt_tokens"],
    "new_tokens": printed["new_tokens"],
    "seconds": printed["seconds"],
    "moved_bytes": counted.get("moved_bytes_total", 0),
    "fetched": counted.get("prefixes_fetched_total", 0),
    "keys_read": counted.get("keys_read_total", 0),
    "keys_seen": counted.get("keys_referenced_total", 0),
    "answers": printed["answers"],
  }


def _times(x: Figures) -> str:
  return (
    f"TTFT p50 {x['ttft']['p50']:.1f} s, p90 {x['ttft']['p90']:.1f}; TPOT p50 "
    f"{x['tpot']['p50']:.2f}, p90 {x['tpot']['p90']:.2f}"
  )


def answers_clause(*runs: Figures) -> str:
  """Whether all answers are equal, as a clause of a sentence."""
  equal = len({x["answers"] for x in runs}) == 1
  return "the same answers" if equal else "OTHER answers"


def _split_says(split: Figures, combined: Figures) -> str:
  bytes_per_request = split["moved_bytes"] / max(1, split["requests"])
  return (
    f"one reads, one answers: {_times(split)}, {split['in_time']['5']:.0%} "
    f"within 5 times what a request takes alone, {bytes_per_request / 1e6:.1f} "
    f"MB moved for each; two that do both: {_times(combined)}, "
    f"{combined['in_time']['5']:.0%}; {answers_clause(split, combined)}"
    + (
      ". Two that do both are sooner on two shared cores: there prefill and "
      "decode compete for the same cores in whatever process they are"
      if combined["ttft"]["p50"] < split["ttft"]["p50"]
      else ""
    )
  )


def _routed(policy: str) -> Run:
  return Run(
    f"{_LIVE} --instances=prefill,prefill,decode --policy={policy} "
    "--requests=20 --rate=0.5 --prefixes=4 --shared=512 --prompt=32 --new=4 "
    '--longest=1024 --server="--rows=8 --capacity=8192"',
    _live,
  )


_POLICIES = ("random", "load", "conductor:threshold=2")


def _routes_say(*runs: Figures) -> str:
  names = [policy.partition(":")[0] for policy in _POLICIES]
  parts = [
    f"{name} {x['hits']:.0%} of tokens found, TTFT p50 {x['ttft']['p50']:.1f} s"
    for name, x in zip(names, runs, strict=True)
  ]
  return (
    f"two readers, one that answers: {'; '.join(parts)}, "
    f"{runs[-1]['fetched']:.0f} prefixes fetched; {answers_clause(*runs)}"
  )


def _shared(shared_reads: str) -> Run:
  return Run(
    f"{_LIVE} --requests=8 --rate=inf --shared=512 --prompt=16 --new=24 "
    f'--longest=1024 --server="--rows=8 --capacity=8192 '
    f'--shared_reads={shared_reads}"',
    _live,
  )


def _shared_says(exact: Figures, never: Figures) -> str:
  return (
    f"8 answers after 512 common tokens read {exact['keys_read']:,.0f} of "
    f"{exact['keys_seen']:,.0f} keys, {never['keys_read']:,.0f} where each row "
    f"reads its own; TPOT p50 {exact['tpot']['p50']:.3f} s and "
    f"{never['tpot']['p50']:.3f}; {answers_clause(exact, never)}"
    + (
      ". Fewer keys read make no step shorter here: after 512 tokens "
      "attention is about an eighth of the operations of a step of this model"
      if exact["tpot"]["p50"] >= never["tpot"]["p50"]
      else ""
    )
  )


def _split(instances: str) -> Run:
  return Run(
    f"{_LIVE} --instances={instances} --requests=10 --rate=0.5 --prompt=256 "
    "--new=16 --longest=512 "
    '--server="--rows=8 --capacity=8192"',
    _live,
  )


def _figures(printed: dict[str, Any]) -> Figures:
  return printed


def _way(command: str) -> Run:
  return Run(f"{_WAYS} {command}", _figures)


def _tokens(x: Figures) -> str:
  return "the same tokens" if x["same"] else "OTHER tokens"


def _prefill(printed: dict[str, Any]) -> Figures:
  (row,) = printed["methods"]
  return {"seconds": row["seconds"], "new_tokens": row["new_tokens"]}


def _chain_says(alone: Figures, chain: Figures) -> str:
  names = {
    "kvr": "a chain",
    "tsp": "TSP",
    "flash_tsp": "TSP without masked tiles",
  }
  parts = [
    f"{words} {x['seconds']:.2f} s, {x['sent_bytes'] / 1e6:.1f} MB sent"
    for name, words in names.items()
    if (x := chain["methods"].get(name))
  ]
  equal = chain["same"] and chain["new_tokens"] == alone["new_tokens"]
  chained = chain["methods"]["kvr"]
  partition = chained["partition"]
  why = ""
  if chained["seconds"] >= chain["methods"]["tsp"]["seconds"]:
    why = (
      ". The chain is later here: both processes share one memory, so that "
      "sending less saves little"
      + (", and its parts were even" if len({*partition}) == 1 else "")
    )
  return (
    f"{chain['tokens']:,} tokens, {chain['processes']} processes with a core "
    f"each: {'; '.join(parts)}; the chain's parts have "
    f"{' and '.join(map(str, partition))} tokens; one process with both cores "
    f"{alone['seconds']:.2f} s; {'the same' if equal else 'ANOTHER'} first "
    f"token{why}"
  )


def _pull_says(x: Figures) -> str:
  at_once, paged = x["ways"]["at once"], x["ways"]["page by page"]
  return (
    f"{x['tokens']:,} tokens, {x['bytes'] / 1e6:.1f} MB in {x['pages']} pages: "
    f"pulled by another process in {at_once['seconds'] * 1e3:.0f} ms, "
    f"{x['bytes'] / at_once['seconds'] / 1e9:.2f} GB/s ({at_once['reads']} "
    f"read), page by page in {paged['seconds'] * 1e3:.0f} ms ({paged['reads']} "
    f"reads), read anew in {x['read_s'] * 1e3:,.0f} ms; "
    f"{'the same' if x['same'] else 'OTHER'} bytes"
  )


def _beside_says(x: Figures) -> str:
  parts = [
    f"{y['step_bytes'] / 1e3:.0f} kB a token after {y['tokens']} tokens, "
    f"whose keys and values are {y['cached_bytes'] / 1e6:.1f} MB "
    f"({_tokens(y)})"
    for y in x["contexts"]
  ]
  return f"{x['workers']} processes attend: {'; '.join(parts)}"


def _rows_say(x: Figures, dense: Figures | None) -> str:
  grown = x["layouts"]["contiguous"]
  mib = lambda n: f"{n / 2**20:.0f} MiB"
  return (
    f"{x['rows']} rows of {x['longest']:,} tokens: {mib(grown['resident'])} "
    f"resident at most of {mib(grown['reserved'])} reserved, {grown['waste']} "
    f"tokens wasted in a row, {grown['maps']} maps of which "
    f"{grown['background']} ahead and {grown['waited']} waited for; "
    f"{_tokens(x)} as in pages"
    + (
      "; contiguous rows that `jax.nn.dot_product_attention` reads give "
      f"{_tokens(dense)} too"
      if dense
      else ""
    )
  )


def _groups_say(x: Figures, changed: Figures | None) -> str:
  steps = [
    f"{len(read['group'])} then {len(read['answers'])}" for read in x["reads"]
  ]
  lengths = " and ".join(f"{n:,}" for n in x["prompts"])
  return (
    f"prompts of {lengths} tokens over {x['instances']} processes with room "
    f"for {x['slots']} tokens each, processes that read, then answer: "
    f"{'; '.join(steps)}; {x['moved_tokens']} tokens moved, "
    f"{x['kept_bytes'] / 1e6:.1f} MB stayed where the ring left them, "
    f"{x['bytes_sent'] / 1e6:.1f} MB between processes; {_tokens(x)}"
    + (
      f"; slots for {changed['reserve']} tokens of an answer at a time, and "
      f"process {changed['leave']} leaves: {changed['grows']} joined, "
      f"{changed['moved_tokens']} tokens moved, {_tokens(changed)}"
      if changed
      else ""
    )
  )


def _paired_says(x: Figures) -> str:
  return (
    f"{x['beside']} tokens of an answer came while a prompt of {x['tokens']:,} "
    f"was read, on {x['devices']} devices of one process: "
    f"{x['together_s']:.1f} s, one after the other {x['apart_s']:.1f} s; "
    f"{_tokens(x)}. Cores of one processor have no links to hide"
  )


def _important_says(x: Figures, read: Figures | None) -> str:
  full = x["losses"]["1.0"]["few probes"]
  parts = [
    f"{float(part):.0%} kept {y['few probes'] - full:+.3f} nat (each head its "
    f"own {y['own'] - full:+.3f}, drawn {y['random'] - full:+.3f}, the newest "
    f"{y['newest'] - full:+.3f})"
    for part, y in x["losses"].items()
    if part != "1.0"
  ]
  return (
    "loss of tokens that only the prefix tells, above that with all of it: "
    + "; ".join(parts)
    + (
      f"; of {read['tokens']:,} stored tokens, "
      + ", ".join(
        f"{float(part):.0%}: {y['bytes'] / 1e6:.1f} MB read, first token after "
        f"{y['ttft_s']:.2f} s"
        for part, y in read["parts"].items()
      )
      if read
      else ""
    )
  )


ROWS: tuple[Row, ...] = (
  Row(
    name="distserve",
    system="DistServe",
    paper="2401.09670",
    claim="Instances that read prompts and others that answer hold up no "
    "answer by a prompt, and serve more requests within their limits.",
    published="2.0 to 4.6 times the rate of vLLM within 90 % of the limits "
    "(chats, OPT-13B to 175B)",
    runs=(_split("prefill,decode"), _split("both,both")),
    says=_split_says,
  ),
  Row(
    name="mooncake",
    system="Mooncake",
    paper="2407.00079",
    claim="A conductor that knows which instance has which prefix finds more "
    "of the prompts in caches, and first tokens come sooner.",
    published="mean TTFT 19.65 s random, 5.27 by load, 3.58 and 3.07 by caches",
    runs=tuple(map(_routed, _POLICIES)),
    says=_routes_say,
  ),
  Row(
    name="chunkattention",
    system="ChunkAttention",
    paper="2402.15220",
    claim="What prompts have in common is stored once, and read once a step "
    "for all of them, exactly.",
    published="attention 3.2 to 4.8 times as fast as PagedAttention after "
    "1,024 to 4,096 common tokens",
    runs=(_shared("exact"), _shared("never")),
    says=_shared_says,
  ),
  Row(
    name="kvr",
    system="KV-Runahead",
    paper="2405.05329",
    claim="A chain of processes with uneven parts of a prompt has the first "
    "token sooner than processes that gather all keys in each layer, and sends "
    "less.",
    published="1.42 times as fast as TSP (Llama 7B, 16k tokens, 4 A100)",
    runs=(
      Run(
        "python -m launch.prefill --model=smollm2-135m --method=kvr "
        "--devices=1 --context=512 --rounds=1 --json",
        _prefill,
      ),
      _way("runahead --tokens=512 --devices=2 --rounds=1"),
    ),
    says=_chain_says,
  ),
  Row(
    name="kvdirect",
    system="KVDirect",
    paper="2501.14743",
    claim="Who answers pulls the pages of a prompt; pages side by side come in "
    "one read.",
    published="about 22 GB/s; 55 % less time for a request",
    runs=(_way("pull --tokens=256"),),
    says=_pull_says,
  ),
  Row(
    name="fastdecode",
    system="FastDecode",
    paper="2403.11421",
    claim="Attention runs beside the caches; what travels for a token does not "
    "grow with the context.",
    published="1.88 to 5.04 times vLLM's throughput with the same GPU",
    runs=(_way("beside --tokens=128 --new=4"),),
    says=_beside_says,
  ),
  Row(
    name="vattention",
    system="vAttention",
    paper="2405.04437",
    claim="A row is contiguous in address space, and gets memory as it grows, "
    "before a step needs it.",
    published="decoding up to 1.99 times as fast as vLLM's paged attention",
    runs=(_way("rows --tokens=256 --rows=2"),),
    more=(_way("rows --tokens=64 --rows=1 --new=4 --layouts=pages,dense"),),
    says=_rows_say,
  ),
  Row(
    name="loongserve",
    system="LoongServe",
    paper="2404.09526",
    claim="Many instances read a prompt, few answer it, and no key moves when "
    "their number changes.",
    published="up to 5.81 times DistServe's throughput, giving up devices "
    "costs less than 2 %",
    runs=(_way("groups --devices=3 --tokens=192 --new=4"),),
    more=(
      _way("groups --devices=3 --tokens=48 --new=12 --reserve=4 --leave=0"),
    ),
    says=_groups_say,
  ),
  Row(
    name="liger",
    system="Liger",
    paper="PPoPP 2024",
    claim="While one request's layers are summed over devices another one's "
    "products run.",
    published="36 % less latency than a pipeline at its throughput, 1.34 times "
    "the throughput of plain tensor parallelism",
    runs=(_way("paired --devices=3 --tokens=128 --new=8 --rounds=1"),),
    says=_paired_says,
  ),
  Row(
    name="impress",
    system="IMPRESS",
    paper="FAST 2025",
    claim="A few heads tell which part of a stored prefix a question needs; "
    "the rest stays on disk.",
    published="first tokens 1.2 to 2.8 times sooner, 0.2 % less accurate with "
    "25 to 50 % of the prefix",
    runs=(
      Run(
        "python -m benchmarks.important_prefix --again --tokens=512 --texts=4 "
        "--question=24 --continuation=8 --probes=3 --parts=1,0.5,0.25,0.1 "
        "--json",
        _figures,
      ),
    ),
    more=(_way("important --tokens=512 --rounds=1"),),
    says=_important_says,
  ),
  Row(
    name="cepe",
    system="CEPE",
    paper="2402.16617",
    claim="A small encoder reads contexts in parallel for a frozen decoder.",
    published="128k tokens at 9.9 times the throughput of a decoder that is as "
    "long",
    unless="the encoder and its cross-attention are trained for one decoder, "
    "on 20 billion tokens in the paper; neither model here has one "
    "(`configs/train/cepe.py` trains one)",
  ),
)
