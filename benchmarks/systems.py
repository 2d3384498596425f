"""The systems: a paper's claim, and commands that show it on a real model.

Models are those of `python -m launch.fetch`: SmolLM2-135M-Instruct and Gemma 3
270M. Texts are held-out files of Python's library by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import systems_alone, systems_live
from benchmarks.table import Figures, Row, Run

_EVALUATE = "python -m launch.evaluate"
_SMOL = "--model=smollm2-135m"
_GEMMA = "--model=gemma3-270m"


# -----------------------------------------------------------------------------
# Figures of interest of the printed objects
# -----------------------------------------------------------------------------


def _perplexity(printed: dict[str, Any]) -> Figures:
  curve = printed["curves"][0]
  return {"tokens": curve["length"], "nll": curve["mean"]}


def _kinds(printed: dict[str, Any]) -> Figures:
  """Loss above dense and share of dense bytes, by kind of cache."""
  dense = printed["kinds"][0]
  return {
    kind["name"]: {
      "loss": kind["loss"],
      "bytes": kind["nbytes"] / dense["nbytes"],
    }
    for kind in printed["kinds"]
  }


def _shares(printed: dict[str, Any]) -> Figures:
  """Share of a dense cache's bytes after a prompt, by its tokens."""
  return {f"{row['tokens']}": row["share"] for row in printed["rows"]}


def _ways(printed: dict[str, Any]) -> Figures:
  return {cost["way"]: cost["nll"] for cost in printed["costs"]}


def _entropies(printed: dict[str, Any]) -> Figures:
  return {
    f"{x['splits']}{' shared' if x['shared'] else ''}": {
      "entropy": x["entropy"],
      "loss": x["loss"],
    }
    for x in printed["settings"]
  }


# -----------------------------------------------------------------------------
# Commands that several rows share
# -----------------------------------------------------------------------------

KINDS = Run(
  f"{_EVALUATE} caches {_SMOL} --lengths=1024 --rows=2 --devices=1 "
  "--cache=dense --cache=int4 --cache=int2 --cache=hadamard3 --cache=hadamard2 "
  "--cache=kivi4 --cache=kivi2 --cache=h2o:budget=.2 --cache=snapkv:budget=.2 "
  "--cache=tova:budget=.2 --cache=fastgen --cache=sinks:budget=.2 "
  "--json",
  _kinds,
)
CONTEXTS = Run(
  f"{_EVALUATE} contexts {_SMOL} --lengths=4096 --contexts=16 --rows=1 "
  "--devices=1 --json",
  _ways,
)


_BUDGETS = tuple(
  f"{policy}:budget={budget}"
  for policy in ("h2o", "snapkv")
  for budget in (".1", ".2", ".4")
)
# The question is in the window of SnapKV, and in the sums of H2O.
NEEDLE = systems_alone.needle(
  "dense",
  "int4",
  "int2",
  "kivi2",
  *_BUDGETS,
  "sinks:budget=.2",
  "fastgen",
  flags="--lengths=2048 --trials=3 --depths=0.1,0.35,0.6,0.85",
)
# Each chunk is evicted before the next one, and the question, is read.
BLIND = systems_alone.needle(
  "h2o:budget=.2",
  "h2o:budget=.4",
  "snapkv:budget=.2",
  "snapkv:budget=.4",
  flags="--lengths=2048 --trials=3 --depths=0.1,0.35,0.6,0.85 "
  "--prefill=chunked --chunk=512",
)


def _bytes(kind: str) -> Run:
  """All bytes of a kind, also those of what the text decides, as a share."""
  return Run(
    "python -m launch.plan cache --model=smollm2-135m --tokens=8192,32768 "
    f"--chip=h100 --cache={kind} --json",
    _shares,
  )


def _of(kind: str, most: str = "") -> Callable[..., str]:
  """Sentence of a kind's loss and bytes, and of the needles it finds."""

  def says(
    kinds: Figures,
    shares: Figures,
    asked: Figures | None = None,
    blind: Figures | None = None,
  ) -> str:
    base = kind.partition(":")[0]
    names = ("dense", kind, *(f"{base}:budget={x}" for x in (".1", ".4")))
    needles = systems_alone.says_found
    before = "where chunks are evicted before the question"
    return (
      f"loss {kinds[kind]['loss']:+.3f} nat above dense ({kind}, texts of "
      f"1,024 tokens); {most}{shares['8192']:.3f} of a dense cache's bytes "
      f"after 8,192 tokens, {shares['32768']:.3f} after 32,768"
      f"{needles(asked, 'in 2,048 tokens', *names)}"
      f"{needles(blind, before, *names)}"
    )

  return says


STREAM = Run(
  "python -m benchmarks.endless_stream --model=smollm2-135m --tokens=12288",
  lambda printed: printed,
)


def _stream_says(
  kinds: Figures, shares: Figures, stream: Figures, asked: Figures | None
) -> str:
  def losses(kind: str) -> str:
    return " ".join(f"{loss:.2f}" for loss in stream["losses"][kind])

  return (
    f"{_of('sinks:budget=.2')(kinds, shares, asked)}; a stream of "
    f"{stream['tokens']:,} tokens beyond a context of 8,192, loss of each "
    "1,024: positions in the cache "
    f"{losses('sinks:budget=512,positions=cache')}; positions in the text "
    f"{losses('sinks:budget=512')}; all tokens, as far as they go "
    f"{losses('dense')}"
  )


def _long(prefill: str, devices: int) -> Run:
  return Run(
    f"{_EVALUATE} perplexity {_SMOL} --dtype=float32 --lengths=4096 --rows=1 "
    f"--prefill={prefill} --devices={devices} --json",
    _perplexity,
  )


def _whole_context(prefill: str, devices: int) -> Run:
  # Eight CPU devices, which each hold all weights, take more than 23 GB.
  return Run(
    f"{_EVALUATE} perplexity {_GEMMA} --dtype=float32 --lengths=32768 --rows=1 "
    f"--prefill={prefill} --devices={devices} --json",
    _perplexity,
  )


def _code_found(prefill: str, devices: int) -> Run:
  return Run(
    f"{_EVALUATE} needle {_GEMMA} --dtype=float32 --task=passkey --trials=1 "
    f"--lengths=16000 --depths=0.1,0.5,0.9 --prefill={prefill} "
    f"--devices={devices} --json",
    systems_alone.needles_found,
  )


MEMORY = Run(
  f"python -m benchmarks.ring_memory {_GEMMA} --tokens=4096,32768 "
  "--devices=1,8",
  lambda printed: printed["bytes"],
)


def _same_loss(one_device: Figures, four_devices: Figures) -> str:
  return (
    f"SmolLM2, {four_devices['tokens']:,} tokens: {four_devices['nll']:.5f} "
    f"nat on four devices, {one_device['nll']:.5f} on one"
  )


def _ring(
  one_device: Figures,
  four_devices: Figures,
  memory: Figures,
  context_on_one: Figures | None,
  context_on_four: Figures | None,
  code_on_one: Figures | None,
  code_on_four: Figures | None,
) -> str:
  megabytes = lambda tokens, count: f"{memory[tokens][count] / 1e6:,.0f} MB"
  context = ""
  if context_on_one is not None and context_on_four is not None:
    context = (
      f"; Gemma 3, {context_on_four['tokens']:,} tokens: "
      f"{context_on_four['nll']:.5f} nat on four devices, "
      f"{context_on_one['nll']:.5f} on one"
    )
  if code_on_one is not None and code_on_four is not None:
    places = {"four devices": code_on_four, "one": code_on_one}
    counts = " and on ".join(
      f"{place} {asked['']['found']:.0f} of {asked['']['asked']}"
      for place, asked in places.items()
    )
    context += f"; a code in 16,000 tokens: found on {counts}"
  return (
    f"{_same_loss(one_device, four_devices)}{context}; Gemma 3 beside its "
    f"weights, compiled: 32,768 tokens take {megabytes('32768', '8')} on each "
    f"of eight devices and {megabytes('32768', '1')} on one, where 4,096 take "
    f"{megabytes('4096', '1')}"
  )


BLOCKWISE = Run(
  f"python -m benchmarks.blockwise_memory {_SMOL} --tokens=4096,32768",
  lambda printed: printed["bytes"],
)


def _blockwise(memory: Figures) -> str:
  def gigabytes(tokens: str) -> str:
    dense, attention, blockwise = (
      f"{memory[tokens][way] / 1e9:,.2f}"
      for way in ("dense", "attention", "blockwise")
    )
    return (
      f"{blockwise} GB, {attention} with blockwise attention alone, {dense} "
      "with dense attention"
    )

  return (
    "a training step of one layer of SmolLM2 and its logits, compiled for one "
    "device, takes beside weights and gradients for 4,096 tokens "
    f"{gigabytes('4096')}; for 32,768 tokens {gigabytes('32768')}"
  )


ROWS: tuple[Row, ...] = (
  Row(
    name="blockwise",
    system="Blockwise Parallel Transformer",
    paper="2305.19370",
    claim="Attention and feedforward computed a block of tokens at a time need "
    "no memory for scores and hidden activations of all tokens.",
    published="contexts up to 32 times as long as with dense attention, 4 "
    "times as long as with blockwise attention alone",
    runs=(BLOCKWISE,),
    says=_blockwise,
  ),
  Row(
    name="ring",
    system="Ring Attention",
    paper="2310.01889",
    claim="Contexts as long as devices are many, exactly, while blocks of keys "
    "travel around a ring.",
    published="a context of 512 times the length with 512 devices",
    runs=(_long("blockwise", 1), _long("ring", 4), MEMORY),
    more=(
      _whole_context("blockwise", 1),
      _whole_context("ring", 4),
      _code_found("blockwise", 1),
      _code_found("ring", 4),
    ),
    says=_ring,
  ),
  Row(
    name="striped",
    system="Striped Attention",
    paper="2311.09431",
    claim="Tokens dealt like cards give all devices the same causal work.",
    published="up to 1.45 times as fast as the ring at 256k tokens",
    runs=(_long("blockwise", 1), _long("striped", 4)),
    says=_same_loss,
  ),
  Row(
    name="kivi",
    system="KIVI",
    paper="2402.02750",
    claim="2 bits by channel for keys and by token for values, with the newest "
    "tokens exact, lose almost nothing.",
    published="2.6 times less peak memory",
    runs=(KINDS, _bytes("kivi2")),
    more=(NEEDLE,),
    says=lambda kinds, *figures: (
      f"{_of('kivi2')(kinds, *figures)}; plain int2 "
      f"{kinds['int2']['loss']:+.3f}"
    ),
  ),
  Row(
    name="h2o",
    system="H2O",
    paper="2306.14048",
    claim="A fifth of the tokens, those of the largest summed attention beside "
    "the newest, is enough.",
    published="20 % of the cache",
    runs=(KINDS, _bytes("h2o:budget=.2")),
    more=(NEEDLE, BLIND),
    says=_of("h2o:budget=.2"),
  ),
  Row(
    name="snapkv",
    system="SnapKV",
    paper="2404.14469",
    claim="The last queries of a prompt show which keys an answer reads.",
    published="8.2 times less memory at 16k tokens",
    runs=(KINDS, _bytes("snapkv:budget=.2")),
    more=(NEEDLE, BLIND),
    says=_of("snapkv:budget=.2"),
  ),
  Row(
    name="fastgen",
    system="FastGen",
    paper="2310.01801",
    claim="Each head's own policy, chosen by what its attention looks like.",
    published="half of the cache at 65B",
    runs=(KINDS, _bytes("fastgen")),
    more=(NEEDLE,),
    says=_of("fastgen", "where every head keeps all, "),
  ),
  Row(
    name="sinks",
    system="StreamingLLM",
    paper="2309.17453",
    claim="The first tokens beside a window keep a stream going.",
    published="a stream of 4M tokens at a steady perplexity",
    runs=(KINDS, _bytes("sinks:budget=.2"), STREAM),
    more=(NEEDLE,),
    says=_stream_says,
  ),
  Row(
    name="ape",
    system="APE",
    paper="2502.05431",
    claim="A shared prefix, a temperature and a scale bring contexts that were "
    "read apart near to contexts read in sequence.",
    published="98 % of sequential accuracy with retrieved texts",
    runs=(CONTEXTS,),
    says=lambda x: (
      f"16 contexts: {x['ape']:.2f} nat, parallel {x['parallel']:.2f}, "
      f"two contexts chosen by each query {x['select']:.2f}, "
      f"as one text {x['full']:.2f}, without {x['none']:.2f}"
    ),
  ),
  Row(
    name="recompute",
    system="CacheBlend and moved keys",
    paper="2405.16444",
    claim="A part of the tokens computed again repairs contexts read apart.",
    published="15 % of the tokens",
    runs=(CONTEXTS,),
    says=lambda x: (
      f"16 contexts: moved {x['moved']:.2f} nat, recompute "
      f"{x['recompute']:.2f}, as one text {x['full']:.2f}"
    ),
  ),
  Row(
    name="entropy",
    system="Attention entropy",
    paper="2412.16545",
    claim="Attention over chunks encoded apart has more entropy, and loses by "
    "it; a shared prefix lowers both.",
    published="entropy and loss rise together with the number of chunks",
    runs=(
      Run(
        f"{_EVALUATE} entropy {_SMOL} --splits=1,4,16 --context=2048 --rows=2 "
        "--devices=1 --json",
        _entropies,
      ),
    ),
    says=lambda x: "; ".join(
      f"{name}: {y['entropy']:.2f} nat of entropy, loss {y['loss']:.2f}"
      for name, y in x.items()
    ),
  ),
  *systems_alone.ROWS,
  *systems_live.ROWS,
)
