"""Rows of systems that need no server, of the table in `benchmarks.systems`."""

from __future__ import annotations

from typing import Any

from benchmarks.table import Figures, Row, Run, Step

_SMOL = "--model=smollm2-135m"
# SmolLM2 as a folder in bfloat16, for commands that stream layers or train.
FOLDER = Step(
  f"python -m launch.convert {_SMOL} --out=runs/smollm2 --dtype=bfloat16",
  "runs/smollm2",
)


# -----------------------------------------------------------------------------
# Figures of interest of the printed objects
# -----------------------------------------------------------------------------


def bits(printed: dict[str, Any]) -> Figures:
  """Takes bits per number and loss above dense, by kind of cache."""
  return {
    kind["name"].partition(":")[0]: {"bits": kind["bits"], "loss": kind["loss"]}
    for kind in printed["kinds"]
  }


def needles_found(printed: dict[str, Any]) -> Figures:
  """Takes hidden facts that were found and asked for, by kind of cache."""
  counts: dict[str, list[float]] = {}
  for cell in printed["cells"]:
    name = cell["cache"].partition(":calibration")[0]
    count = counts.setdefault(name, [0, 0])
    count[0] += sum(cell["scores"])
    count[1] += len(cell["scores"])
  return {name: {"found": x, "asked": n} for name, (x, n) in counts.items()}


def drafters(printed: dict[str, Any]) -> Figures:
  """Takes each drafter's medians over prompts, and whether tokens are equal."""
  return {
    name: {
      "tokens_per_call": x["tokens_per_call"]["median"],
      "speed": x["x_plain"]["median"],
      "equal": x["equal"],
    }
    for name, x in printed["summary"].items()
    if "tokens_per_call" in x and "x_plain" in x
  }


def answer(printed: dict[str, Any]) -> Figures:
  """Takes an answer's tokens, and the figures of its drafts."""
  drafts = printed["speculation"] or {}
  return {
    "prompt_tokens": printed["prompt_tokens"],
    "tokens": printed["tokens"],
    "decode_s": printed["decode_s"],
    **{
      name: drafts[name]
      for name in ("tokens_per_call", "accepted", "drafted")
      if name in drafts
    },
  }


def answers(printed: dict[str, Any]) -> Figures:
  """Takes right answers and the loss of their tokens, by model."""
  return printed["scores"]


def ways(printed: dict[str, Any]) -> Figures:
  """Takes loss and distance of the logits, by way of integer products."""
  return printed["ways"]


def two_devices(printed: dict[str, Any]) -> Figures:
  """Takes how long two devices read a prompt and how long the first waited."""
  return {
    "prompt_tokens": printed["prompt_tokens"],
    "prefill_s": printed["prefill_s"],
    "waiting": printed["two_devices"]["waiting"],
    "simulated_s": printed["two_devices"]["simulated_s"],
  }


def ranks(printed: dict[str, Any]) -> Figures:
  """Takes the answer, and the peak bytes of weights of each process."""
  return {
    "tokens": printed["tokens"],
    "token_s": printed["token_s"],
    "held": [x["peak_bytes"] for x in printed["ranks"]],
    "weights": [x["weight_bytes"] for x in printed["ranks"]],
  }


def placements(printed: dict[str, Any]) -> Figures:
  """Takes all figures, by placement."""
  return printed["placements"]


# -----------------------------------------------------------------------------
# Sentences of the rows
# -----------------------------------------------------------------------------


def says_bits(kinds: Figures, needles: Figures | None) -> str:
  """Loss by bits of three codecs, and needles that are found with them."""
  of = lambda name: f"{kinds[name]['loss']:+.3f}"
  return (
    f"loss above dense: nuq4 {of('nuq4')}, nuq3 {of('nuq3')}, nuq2 "
    f"{of('nuq2')} nat (1 x 1,024 tokens) at {kinds['nuq4']['bits']:.2f}, "
    f"{kinds['nuq3']['bits']:.2f} and {kinds['nuq2']['bits']:.2f} bits; "
    f"integers int4 {of('int4')}, int2 {of('int2')} at "
    f"{kinds['int4']['bits']:.2f} and {kinds['int2']['bits']:.2f}"
    f"{says_found(needles, 'in 2,048 tokens', 'nuq3', 'nuq2')}"
  )


def says_found(figures: Figures | None, text: str, *kinds: str) -> str:
  """Facts that were found with kinds of caches; "" before it has run."""
  if figures is None:
    return ""
  counts = ", ".join(
    f"{kind} {figures[kind]['found']:.0f} of {figures[kind]['asked']}"
    for kind in kinds
    if kind in figures
  )
  return f"; needles found {text}: {counts}"


def says_drafters(names: Figures) -> str:
  """Tokens a call and speed by drafter; why `self` is not sooner."""
  equal = all(x["equal"] for x in names.values())
  return "; ".join(
    [
      *(
        f"{name} {x['tokens_per_call']:.2f} tokens a call, {x['speed']:.2f} "
        "times as fast as plain"
        for name, x in names.items()
      ),
      "each draft has all 5 tokens, where by default (adapt) those that cost "
      "time pause",
      "all tokens as without drafts" if equal else "NOT the same tokens",
    ]
  ) + (
    ". `self` is slower than plain decoding: each drafted token is "
    "a step of the whole model, and only its cache is smaller"
    if "self" in names and names["self"]["speed"] < 1
    else ""
  )


def says_drafted(
  plain: Figures, short: Figures, long: Figures, plain_long: Figures | None
) -> str:
  """Tokens a call by the prompt's length, and whether they are the same."""
  drafted = [short, long]
  return "; ".join(
    [
      *(
        f"after {x['prompt_tokens']:,} tokens {x['tokens_per_call']:.2f} "
        f"tokens a call, {x['accepted']} of {x['drafted']} drafted ones stay"
        for x in drafted
      ),
      *(
        f"{'the same' if x['tokens'] == y['tokens'] else 'NOT the same'} "
        f"{len(x['tokens'])} tokens as without drafts after "
        f"{x['prompt_tokens']:,}"
        for x, y in ((plain, short), (plain_long, long))
        if x is not None
      ),
    ]
  )


def says_answers(scores: Figures) -> str:
  """Loss and right answers by model."""
  return "; ".join(
    f"{name} {x['loss']:.3f} nat a token, {x['right']:.1%} right"
    for name, x in scores.items()
  )


def says_ways(losses: Figures, two: Figures | None) -> str:
  """Loss above floats, and distance, by way; two devices once they have run."""
  floats = losses["floats"]["loss"]
  return "; ".join(
    f"{name}: loss {x['loss'] - floats:+.4f} nat, logits {x['distance']:.1%} "
    "away"
    for name, x in losses.items()
    if name != "floats"
  ) + (
    f"; two devices read {two['prompt_tokens']:,} tokens in "
    f"{two['prefill_s']:.1f} s, of which the first waits {two['waiting']:.0%}; "
    "with the times of these parts the paper's rule takes "
    f"{two['simulated_s']['waits']:.1f} s, order of arrival "
    f"{two['simulated_s']['fifo']:.1f}, chunk by chunk "
    f"{two['simulated_s']['serial']:.1f}"
    if two
    else ""
  )


def says_ranks(window: Figures, whole: Figures) -> str:
  """Memory with a window and without, and whether the answer is the same."""
  megabytes = lambda sizes: ", ".join(f"{x / 1e6:.0f}" for x in sizes)
  equal = window["tokens"] == whole["tokens"]
  return (
    f"three processes held {megabytes(window['held'])} MB of weights of "
    f"{megabytes(window['weights'])}, {window['token_s']:.2f} s a token "
    f"against {whole['token_s']:.2f} with all in memory; "
    f"{'the same' if equal else 'NOT the same'} {len(whole['tokens'])} tokens"
  )


def says_placements(by_name: Figures) -> str:
  """Tokens a second by placement and rows, and bytes read."""
  parts = []
  for name, x in by_name.items():
    (small_rows, slow), (large_rows, fast) = sorted(
      x["rows"].items(), key=lambda item: int(item[0])
    )
    parts.append(
      f"{name}: {x['weights']['device'] / 1e6:.0f} MB of layers on the device, "
      f"{slow['tokens_per_s']:.1f} tokens/s of {small_rows} row, "
      f"{fast['tokens_per_s']:.1f} of {large_rows}"
      + (
        f", {fast['read_per_step'] / 1e6:.0f} MB read a step"
        if fast["read_per_step"]
        else ""
      )
    )
  equal = all(x["equal"] for y in by_name.values() for x in y["rows"].values())
  return "; ".join(
    [*parts, "all tokens equal" if equal else "NOT the same tokens"]
  )


# -----------------------------------------------------------------------------
# Commands
# -----------------------------------------------------------------------------

_CALIBRATION = Step(
  f"python -m launch.calibrate {_SMOL} --dtype=float32 --rows=8 --length=512 "
  "--out=runs/smollm2-nuq-float32",
  "runs/smollm2-nuq-float32/kv_calibration.safetensors",
)
_RANGES = Step(
  f"python -m launch.calibrate {_SMOL} --rows=8 --length=512 --ranges "
  "--out=runs/smollm2-ranges",
  "runs/smollm2-ranges/activation_ranges.safetensors",
)
_DRAFT = Step(
  "python -m launch.train --config=configs/drafts/longspec.py --mesh=seq:1 "
  "--init_from=runs/smollm2 --out=runs/longspec --config.draft.window=256 "
  "--config.draft_training.longest=7680 --config.stages[0].batch=2 "
  "--config.stages[0].length=512 --config.optimizer.learning_rate=1e-3 "
  "--config.optimizer.end_learning_rate=1e-4 --config.log_every=25 "
  "--config.save_every=50",
  "runs/longspec/draft",
)
_BY_DRAFT = (
  "--speculate=longspec:model=runs/longspec/draft,count=4,adapt=false "
)
BITS = Run(
  f"python -m launch.evaluate caches {_SMOL} --lengths=1024 --rows=1 "
  "--devices=1 --cache=dense --cache=int8 --cache=int4 --cache=int2 "
  "--cache=hadamard4 --cache=hadamard3 --cache=hadamard2 "
  "--cache=nuq4:calibration=runs/smollm2-nuq-float32 "
  "--cache=nuq3:calibration=runs/smollm2-nuq-float32 "
  "--cache=nuq2:calibration=runs/smollm2-nuq-float32 --json",
  bits,
  (_CALIBRATION,),
)


def needle(*kinds: str, flags: str, before: tuple[Step, ...] = ()) -> Run:
  """Facts found in a text: a task that SmolLM2 answers with a dense cache."""
  caches = " ".join(f"--cache={kind}" for kind in kinds)
  return Run(
    f"python -m launch.evaluate needle {_SMOL} --devices=1 "
    f"--task=passkey_noise {flags} {caches} --json",
    needles_found,
    before,
  )


_NEEDLE = needle(
  *(f"nuq{n}:calibration=runs/smollm2-nuq-float32" for n in (3, 2)),
  flags="--lengths=2048 --trials=3 --depths=0.1,0.35,0.6,0.85",
  before=(_CALIBRATION,),
)
# Python sources of some 600 and 7,400 tokens, and the beginning of a function.
_DRAFTED = tuple(
  Run(
    f"python -m launch.generate {_SMOL} --devices=1 --prompt_file={file} "
    f"--raw --prompt='def read(' --max_new_tokens=48 {flags}--json",
    answer,
    steps,
  )
  for file, flags, steps in (
    ("docs/how/offload.py", "", ()),
    ("docs/how/offload.py", _BY_DRAFT, (FOLDER, _DRAFT)),
    ("launch/prefill.py", _BY_DRAFT, (FOLDER, _DRAFT)),
    ("launch/prefill.py", "", ()),
  )
)
_WINDOWS = tuple(
  Run(
    "python -m launch.generate --model=runs/smollm2 --dtype=float32 "
    f"--processes=3 --window={window} --prompt='The capital of France is' "
    "--raw --max_new_tokens=8 --json",
    ranks,
    (FOLDER,),
  )
  for window in (4, 0)
)
_SPECULATION = Run(
  f"python -m launch.bench speculate {_SMOL} --parts=summary "
  "--contestants=lookup,self --drafted=5 --requests=1 --prompt_tokens=256 "
  "--new_tokens=24 --rounds=3 --json=runs/speculation.json",
  drafters,
  file="runs/speculation.json",
)
_LINKS = Step(
  "python -m launch.train --config=configs/train/kvlink.py --mesh=seq:1 "
  "--init_from=runs/smollm2 --out=runs/kvlink --config.lora.rank=16 "
  "--config.optimizer.learning_rate=2e-3 "
  "--config.optimizer.end_learning_rate=2e-4 --config.optimizer.warmup=5 "
  "--config.stages[0].steps=25 --config.stages[0].batch=8 "
  "--config.stages[0].length=72 --config.log_every=5 --config.save_every=10",
  "runs/kvlink/model",
)
_LINKED = Run(
  "python -m benchmarks.linked_documents --base=runs/smollm2 "
  "--trained=runs/kvlink/model",
  answers,
  (FOLDER, _LINKS),
)
_INTEGERS = Run(
  "python -m benchmarks.integer_products --ranges=runs/smollm2-ranges "
  "--tokens=512 --rows=1",
  ways,
  (_RANGES,),
)
_TWO_DEVICES = Run(
  f"python -m launch.generate {_SMOL} --dtype=float32 --devices=2 --chunk=128 "
  "--integer=runs/smollm2-ranges:shadow=16,prune=0.85,devices=2,rule=fifo "
  "--prompt_file=docs/how/offload.py --raw --prompt='def read(' "
  "--max_new_tokens=1 --json",
  two_devices,
  (_RANGES,),
)
_OFFLOADED = Run(
  "python -m benchmarks.offloaded --model=runs/smollm2 "
  "--placements=device,host,disk --rows=1,8",
  placements,
  (FOLDER,),
)

ROWS: tuple[Row, ...] = (
  Row(
    name="kvquant",
    system="KVQuant",
    paper="2401.18079",
    claim="Levels fitted to a channel's numbers, with 1 % of them kept exact, "
    "hold keys and values in 3 bits almost without a loss.",
    published="LLaMA-7B, perplexity 5.68: 5.69 with nuq4, 5.75 with nuq3, 6.01 "
    "with nuq2; integers of 3 bits 10.87",
    runs=(BITS,),
    more=(_NEEDLE,),
    says=says_bits,
  ),
  Row(
    name="speculation",
    system="Speculative decoding",
    paper="2211.17192",
    claim="Drafts that the model checks in one call give several tokens a "
    "call, and the same ones.",
    published="2 to 3 times as fast (T5-XXL, by a draft model of 77M)",
    runs=(_SPECULATION,),
    says=says_drafters,
  ),
  Row(
    name="longspec",
    system="LongSpec",
    paper="2502.17421",
    claim="A block that reads the target's last keys drafts for long contexts "
    "from a window of its own.",
    published="3.5 to 4.5 tokens a call of 13B, up to 3.26 times as fast",
    runs=_DRAFTED[:3],
    more=_DRAFTED[3:],
    says=says_drafted,
  ),
  Row(
    name="kvlink",
    system="KVLink",
    paper="2502.16002",
    claim="Trained tokens after documents that were read apart link them.",
    published="Llama-3.2-1B on NaturalQuestions: 45.0 % right, 18.6 with "
    "documents apart, 46.9 with full attention",
    runs=(_LINKED,),
    says=says_answers,
  ),
  Row(
    name="npu",
    system="llm.npu",
    paper="2407.05858",
    claim="Integer products with one scale a layer, and their outliers "
    "computed beside, lose about 1 % of accuracy; prompts are read in chunks.",
    published="about -1 % of accuracy, prompts 22 times as fast on a phone",
    runs=(_INTEGERS,),
    more=(_TWO_DEVICES,),
    says=says_ways,
  ),
  Row(
    name="window",
    system="TPI-LLM",
    paper="2410.00531",
    claim="Processes that keep a few blocks of their part of the weights run a "
    "model that none of them could hold.",
    published="Llama-2-70B in 3.1 GB for each of 8 devices, 26 s a token",
    runs=_WINDOWS,
    says=says_ranks,
  ),
  Row(
    name="offload",
    system="FlexGen",
    paper="2303.06865",
    claim="With weights in host memory or on disk, blocks of rows that share "
    "each read make up for the reads.",
    published="OPT-30B on a T4: 7.32 tokens/s against 0.62",
    runs=(_OFFLOADED,),
    says=says_placements,
  ),
  Row(
    name="flash",
    system="LLM in a Flash",
    paper="2312.11514",
    claim="Of a ReLU model only neurons that a token activates are read from "
    "flash.",
    published="OPT-6.7B with half of its weights in memory, 20 times as fast "
    "as reading all on a GPU",
    unless="it needs a model whose neurons are zero for most tokens, and the "
    "models here have SiLU and GELU; [a small ReLU model](how/flash.md) shows "
    "it",
  ),
)
