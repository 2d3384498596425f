"""The law of a compiled program: it sends and writes only what it must.

A case is a phase of a model's life, a family, a mesh and a kind of cache. Its
program is compiled for eight CPU devices from shapes alone and read
instruction by instruction:

* a collective of each kind carries at most the bytes that a formula states;
* no instruction writes an array as large as one layer's cache, one layer's
  experts or the embedding;
* a donated cache stays in place: temporaries are smaller than one layer's.

A fault names the instruction, its shape and the line of source that made it.
A new family, mesh, kind or phase is one entry of a table here.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ringjax.bench import steps
from ringjax.bench.program import CompiledInstruction, CompiledProgram
from ringjax.kv.base import bytes_each
from ringjax.kv.cache import LayerCacheSpec, LayerKV
from ringjax.kv.state import StateShape
from tests import checkpoints
from tests.contracts import program_calls

# Instructions that give another name to an array, or start what others end.
_NAMES = frozenset(
  {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while",
    "conditional", "call", "after-all", "opt-barrier", "partition-id",
    "replica-id", "domain", "add-dependency",
  }
)  # fmt: skip
# Instructions that write a part of their first operand, in place: XLA inserts
# a `copy` where it can't.
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})

MESHES: Mapping[str, tuple[tuple[str, int], ...]] = {
  "seq": (("seq", 8),),
  "model": (("model", 8),),
  "seq_model": (("seq", 2), ("model", 4)),
  "data_seq": (("data", 2), ("seq", 4)),
  "data_seq_model": (("data", 2), ("seq", 2), ("model", 2)),
}
# Meshes on which the experts of a mixture are sharded.
EXPERT_MESHES: Mapping[str, tuple[tuple[str, int], ...]] = {
  "seq_expert": (("seq", 2), ("expert", 4)),
  "all_axes": (("data", 1), ("seq", 2), ("model", 2), ("expert", 2)),
}
# Meshes of few cases.
OTHER_MESHES: Mapping[str, tuple[tuple[str, int], ...]] = {
  "replica_seq": (("replica", 2), ("seq", 4)),
  "data_model": (("data", 4), ("model", 2)),
}

_SMALL = {
  "hidden_size": 256,
  "intermediate_size": 512,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 32,
  "num_hidden_layers": 4,
  "vocab_size": 16384,
  "max_position_embeddings": 1 << 20,
}


def _config(name: str, **more: Any) -> dict[str, Any]:
  """A family's config in larger sizes."""
  return checkpoints.config(name) | _SMALL | more


FAMILIES: Mapping[str, dict[str, Any]] = {
  "dense": _config("llama3"),
  "one_kv_head": _config("llama3", num_key_value_heads=1),
  "mixture": _config(
    "mixtral", num_local_experts=16, router_aux_loss_coef=0
  ),
  "latent": _config(
    "deepseek_v3", num_key_value_heads=8, kv_lora_rank=64, q_lora_rank=64,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, head_dim=16,
    first_k_dense_replace=4,
  ),
  "windowed": _config(
    "gemma3_text", num_hidden_layers=6, sliding_window=1024,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
  ),
}  # fmt: skip
# Families of few cases: layers with states, an index of keys, and heads that a
# mesh axis does not divide.
OTHER_FAMILIES: Mapping[str, dict[str, Any]] = {
  "two_kv_heads": _config("llama3", num_key_value_heads=2),
  "three_heads": _config(
    "llama3", num_attention_heads=3, num_key_value_heads=3
  ),
  "hybrid": _config(
    "qwen3_next", num_experts=16, moe_intermediate_size=512,
    shared_expert_intermediate_size=64, linear_num_key_heads=8,
    linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
  ),
  "indexed": _config(
    "deepseek_v32", num_key_value_heads=8, kv_lora_rank=64, q_lora_rank=64,
    qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, head_dim=16,
    index_head_dim=32, index_n_heads=8, index_topk=64,
    layer_types=["indexed_attention"] * 4, mlp_layer_types=["dense"] * 4,
    first_k_dense_replace=4,
  ),
}  # fmt: skip


class Sizes(NamedTuple):
  """Sizes of a case, on one device where an axis shards them.

  Fields:
    rows: Rows of a call, B.
    tokens: Tokens of a row that a call computes, T.
    layers: Number of layers.
    heads: Query heads, N.
    value: Numbers of a head's value, J; of latent attention those of a latent.
    keys: Numbers of a token's keys and values in a layer.
    embed: Width of the model, D.
    vocab: Size of the vocabulary, V.
    seq: Shards of the sequence.
    model: Shards of the heads.
    data: Shards of the rows.
    weights: Bytes of a device's weights.
    states: Bytes of a device's recurrent states.
    expert: Shards of the experts.
    slots: Slots of a row's cache.
    index: Numbers of a token's index queries and their weights.
    index_key: Numbers of a token's key of an index.
    chosen: Keys that an index chooses for a query; 0 without one.
    tied: Bytes of a device's embedding that is the head, too; else 0.
    by_query: Whether queries are sharded in the place of heads, which the
      shards do not divide.
    ordered: Numbers of a token that all recurrent layers bring into order and
      back.
  """

  rows: int
  tokens: int
  layers: int
  heads: int
  value: int
  keys: int
  embed: int
  vocab: int
  seq: int
  model: int
  data: int
  weights: int = 0
  states: int = 0
  expert: int = 1
  slots: int = 0
  index: int = 0
  index_key: int = 0
  chosen: int = 0
  tied: int = 0
  by_query: bool = False
  ordered: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
  """A kind of program and its law.

  Attributes:
    builder: Function of `ringjax.bench.steps` that builds it.
    options: Options of the builder.
    tokens: Tokens of a row that are computed; None: all.
    sends: Most bytes that each kind of collective may carry on one device, over
      all loops; kinds without an entry may only carry `SLACK` bytes.
    large: Bytes from which an array is large, if not as large as one layer's
      cache, its experts or the embedding.
    trains: Whether the program updates a training state, not a cache.
    copies_states: Whether it may copy recurrent states.
  """

  builder: Callable[..., Any]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  tokens: int | None = 1
  sends: Callable[[Sizes], dict[str, float]]
  large: Callable[[Sizes], int] | None = None
  trains: bool = False
  copies_states: bool = False


# Tokens of a tile of a pattern, and queries of a row at which it is measured.
TILE, SAMPLES = 128, 32
# Bytes of coordinates, lengths and flags.
SLACK = 1 << 14
# Tokens of a chunk of a prompt.
CHUNK = 1024
# Tokens of a shard in a step of the loss.
LOSS_BLOCK = 1024
# Tokens of a shard in a block of a feedforward.
BLOCK = 2048
# Most bytes of an index's scores that are held at once, for several queries.
SCORES = 64 << 20
# Slots of a cache that a chunk reads at once.
SEGMENT = 8192
# Bytes of tiles of keys, values and scores, and of a layer's copied weights.
TILES = 4 << 20


def few_tokens(s: Sizes) -> dict[str, float]:
  """A call of few tokens over a sharded cache: sums of partial results.

  Each layer has a maximum and a sum over the sequence's shards, and two sums
  over the heads' shards; the head's logits and the embedding have one each. An
  index's best scores and their slots are gathered from the sequence's shards.
  """
  rows = 4 * s.rows * s.tokens
  over_seq = rows * s.heads * (s.value + 2) if s.seq > 1 else 0
  over_model = 2 * rows * s.embed if s.model > 1 else 0
  over_experts = rows * s.embed if s.expert > 1 else 0
  ends = rows * (s.embed + 2 * s.vocab) if s.model > 1 else 0
  best = 2 * rows * s.seq * s.chosen if s.seq > 1 else 0
  # Every device has the logits of all rows, so that each process can read them.
  logits = rows * s.data * s.vocab if s.data > 1 else 0
  return {
    "all-reduce": s.layers * (over_seq + over_model + over_experts) + ends,
    "all-gather": s.layers * best + ends + logits,
  }


def around(s: Sizes) -> dict[str, float]:
  """A prompt: keys go around the ring, sums of heads over their shards.

  Keys of an index go around it before them. Recurrent layers bring their
  inputs into order and their outputs back, and gather each shard's state.
  """
  tokens = 4 * s.rows * s.tokens // s.seq
  # With two coordinates a token, and where keys are chosen its number.
  numbers = s.keys + 2
  if s.index_key:
    numbers += 1 + s.index_key + 3
  ring = tokens * numbers * (s.seq - 1)
  over_model = 2 * tokens * s.embed if s.model > 1 else 0
  ends = 2 * tokens * s.embed + 4 * s.rows * 2 * (s.vocab + s.embed)
  return {
    "collective-permute": s.layers * ring,
    "all-reduce": s.layers * over_model + ends,
    "all-gather": (ends if s.model > 1 else 0)
    + 2 * tokens * s.seq
    + 2 * s.seq * s.states,
    "all-to-all": tokens * s.ordered,
  }


def tiles_around(s: Sizes) -> dict[str, float]:
  """A prompt by chosen tiles: keys go around the ring twice, values once.

  The first time they are alone, for XAttention's estimates, with the extents of
  their squares. Coordinates of tiles are gathered, and of some sampled queries
  of each layer the queries and log-sum-exps.
  """
  dense = around(s)
  tokens = 4 * s.rows * s.tokens // s.seq
  # Keys are half of the numbers; a square of 8 tokens has six coordinates.
  again = tokens * (s.keys // 2 + 6 / 8) * (s.seq - 1)
  samples = 4 * s.rows * SAMPLES * s.heads * (s.value + 2)
  tiles = 4 * s.rows * s.tokens // TILE * 6
  return {
    **dense,
    "collective-permute": dense["collective-permute"] + s.layers * again,
    "all-reduce": dense["all-reduce"] + s.layers * 4 * samples,
    "all-gather": dense["all-gather"] + s.layers * (4 * samples + tiles),
  }


def train_step(s: Sizes) -> dict[str, float]:
  """Keys around the ring twice, their gradients once, and each weight once.

  The backward pass sends keys again, and their float32 gradients to their
  owners. The gradient of each weight is summed over the shards of tokens and
  rows once, after all steps of the loss and of a feedforward.

  Findings that stand: over data and seq these are two sums, one after another;
  a tied embedding has one for each of its two uses.
  Over the shards of the heads a layer has eight sums of its tokens: two
  forward, one of them again for the backward pass, and backward one for each of
  the queries, keys, values and the feedforward's two inputs, where one for the
  first three and one for the others would do.
  """
  tokens = 4 * s.rows * s.tokens // s.seq
  ring = tokens * (2 * (s.keys + 2) * (s.seq - 1) + s.keys * s.seq)
  over_model = 8 * tokens * s.embed if s.model > 1 else 0
  ends = 4 * tokens * s.embed if s.model > 1 else 0
  stages = (s.seq > 1) + (s.data > 1)
  return {
    "collective-permute": s.layers * ring,
    "all-reduce": s.layers * over_model + ends + stages * (s.weights + s.tied),
    "all-gather": ends + 2 * tokens * s.seq,
  }


def chunk(s: Sizes) -> dict[str, float]:
  """A chunk over a sharded cache: queries travel, and so do their results.

  Each shard gets the chunk's queries of all shards; a maximum of each query and
  head is exchanged, and sums with their divisors return.

  An index's queries are gathered over the shards of the heads and of the
  sequence. Where the shards do not divide the heads of keys, queries are
  sharded in the place of heads: an exchange before attention, and one after it.
  """
  rows = 4 * s.rows * s.tokens
  ends = 8 * s.rows * s.data * (s.vocab + s.embed)
  results = rows * s.heads * (s.value + 1) // s.seq if s.seq > 1 else 0
  queries = rows * s.heads * s.value if s.seq > 1 else 0
  largest = rows * s.heads if s.seq > 1 else 0
  over_model = 2 * rows * s.embed // s.seq if s.model > 1 else 0
  embedded = 2 * rows * s.embed // s.seq if s.model > 1 else 0
  exchanged = 2 * rows * s.heads * s.value // s.seq if s.by_query else 0
  return {
    # Each shard gets the states that the shards before it end with.
    "all-gather": s.layers * (queries + 2 * s.index * rows)
    + ends
    + 2 * s.seq * s.states,
    "collective-permute": s.states,
    "reduce-scatter": s.layers * results,
    "all-reduce": s.layers * (largest + over_model) + embedded + ends,
    "all-to-all": s.layers * exchanged,
  }


def served(s: Sizes) -> dict[str, float]:
  """An engine's call: sums as of few tokens, over pages.

  All devices of `data` have the pool, so each gets the keys of all rows, and
  every device has the tokens that are chosen. Each shard of the sequence has
  the slots of all tokens, of two groups of layers. Where heads of keys do not
  divide, queries of prompts are sharded, as in a chunk.

  A finding that stands: all devices have the recurrent states of all rows, so
  that those of a shard of rows or heads are gathered.
  """
  of_few = few_tokens(s)
  tokens = 4 * s.rows * s.data * s.tokens
  keys = s.layers * tokens * s.keys if s.data > 1 else 0
  last = tokens * s.embed if s.data > 1 else 0
  slots = 8 * tokens * s.seq
  exchanged = 2 * tokens * s.heads * s.value if s.by_query else 0
  gathered = keys + last + slots + 2 * s.states
  return {
    "all-reduce": of_few["all-reduce"],
    "all-gather": of_few["all-gather"] + gathered,
    "all-to-all": s.layers * exchanged,
  }


def served_trees(s: Sizes) -> dict[str, float]:
  """Also moves keys of the accepted path to the places of a chain."""
  of_few = served(s)
  moved = 4 * s.rows * s.data * s.tokens * s.keys if s.seq > 1 else 0
  return {**of_few, "all-reduce": of_few["all-reduce"] + s.layers * moved}


def pages(s: Sizes) -> int:
  """More than the keys of the pages that a prompt's chunk reads at once."""
  return 4 * s.rows * s.keys * 1024


def segments(s: Sizes) -> int:
  """More than the keys and values of a segment of a cache, decoded."""
  return 5 * s.rows * s.keys * SEGMENT


def index_scores(s: Sizes) -> int:
  """More than the index's scores of some queries and a shard's keys.

  A chunk's queries choose keys 16 or more at a time, whose scores take at most
  `SCORES` bytes, in whole tiles of keys a few more.
  """
  return max(segments(s), SCORES * 17 // 16, 68 * s.rows * s.slots) + 1


def head_scores(s: Sizes) -> int:
  """More than activations, and the index's scores of some queries."""
  return max(activations(s), SCORES) + 1


def step_of_loss(s: Sizes) -> int:
  """More than the logits of a step of the loss, and the inputs of all layers.

  A training step keeps the inputs of layers for its backward pass.
  """
  inputs = 6 * s.layers * s.rows * s.tokens // s.seq * s.embed
  return max(inputs, 6 * s.rows * LOSS_BLOCK * s.vocab // s.model)


def activations(s: Sizes) -> int:
  """More than any array of a shard's own tokens in one layer.

  A token of a mixture is copied for each of its experts.
  """
  tokens = 4 * s.rows * s.tokens // s.seq
  return 3 * tokens * max(s.embed, s.keys)


PHASES: Mapping[str, Phase] = {
  "decode": Phase(builder=steps.decode, sends=few_tokens),
  # No codes of weights are gathered.
  "decode_codes": Phase(
    builder=steps.decode,
    options={"coded_bits": 4},
    sends=few_tokens,
  ),
  "verify": Phase(
    builder=steps.verify,
    options={"drafted": 4},
    tokens=5,
    sends=few_tokens,
  ),
  "verify_tree": Phase(
    builder=steps.verify,
    options={"drafted": 4, "tree": True},
    tokens=5,
    sends=few_tokens,
  ),
  "prefill": Phase(
    builder=steps.prefill,
    options={"strategy": "striped"},
    tokens=None,
    sends=around,
    large=activations,
  ),
  **{
    f"tiles_{method}": Phase(
      builder=program_calls.tiled_prompt,
      options={"pattern": "xattention,threshold=.9", "method": method},
      tokens=None,
      sends=tiles_around,
      large=activations,
    )
    for method in ("striped", "zigzag", "ring")
  },
  "chunk": Phase(
    builder=steps.prefill,
    options={"strategy": "striped", "chunk": CHUNK},
    tokens=CHUNK,
    sends=chunk,
    large=segments,
  ),
  "train": Phase(
    builder=steps.train,
    options={"strategy": "striped", "loss_block": LOSS_BLOCK, "block": BLOCK},
    tokens=None,
    sends=train_step,
    large=step_of_loss,
    trains=True,
  ),
  **{
    f"serve_{what}": Phase(
      builder=program_calls.engine_call,
      options={"what": what},
      tokens=tokens,
      sends=sends,
      large=pages if what in ("prompts", "step") else None,
      copies_states=True,
    )
    for what, tokens, sends in (
      ("prompts", program_calls.PIECE, served),
      ("answers", 1, served),
      ("drafts", 1 + program_calls.DRAFTED, served),
      ("trees", 1 + program_calls.DRAFTED, served_trees),
      # Tiles of all tokens of a call for prompts, and a call for answers.
      ("step", 1 + program_calls.PIECE, served),
    )
  },
  # Calls over caches of all kinds.
  **{
    f"cached_{what}": Phase(
      builder=program_calls.cached_call,
      options={"what": what} | ({"chunk": CHUNK} if what == "chunk" else {}),
      tokens=tokens,
      sends=chunk if what == "chunk" else few_tokens,
      large=segments if what == "chunk" else None,
    )
    for what, tokens in zip(program_calls.CACHED, (1, CHUNK, 5, 5), strict=True)
  },
}


# Bytes from which an array is large, where it depends on the family.
LARGE: Mapping[tuple[str, str], Callable[[Sizes], int]] = {
  # More experts of a token than there are in the mixture's case.
  ("prefill", "hybrid"): lambda s: 2 * activations(s),
  ("prefill", "indexed"): head_scores,
  ("chunk", "indexed"): index_scores,
  ("serve_prompts", "indexed"): index_scores,
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One program.

  Attributes:
    phase: Name of an entry of `PHASES`.
    family: Name of an entry of `FAMILIES`.
    mesh: Name of an entry of `MESHES`.
    cache: Kind of the cache.
    rows: Number of rows.
    capacity: Tokens of a row's cache.
  """

  phase: str
  family: str = "dense"
  mesh: str = "seq"
  cache: str = "dense"
  rows: int = 2
  capacity: int = 65536

  def __str__(self) -> str:
    rows = f"{self.rows}_rows"
    return "-".join((self.phase, self.family, self.mesh, self.cache, rows))


class Reading(NamedTuple):
  """A compiled program and the sizes by which it is judged.

  Fields:
    program: Its instructions.
    temporaries: Bytes of its temporary buffers on a device.
    aliased: Bytes of arguments that results are written to.
    cache: Bytes of the cache on a device.
    large: Bytes from which an array is large.
    sizes: Sizes of the case.
  """

  program: CompiledProgram
  temporaries: int
  aliased: int
  cache: int
  large: int
  sizes: Sizes


def read(case: Case) -> Reading:
  """Compile a case's program for eight CPU devices."""
  phase = PHASES[case.phase]
  config = {**FAMILIES, **OTHER_FAMILIES}[case.family]
  axes = dict({**MESHES, **EXPERT_MESHES, **OTHER_MESHES}[case.mesh])
  built = phase.builder(
    jax.devices()[: math.prod(axes.values())],
    tokens=case.capacity,
    mesh=[list(pair) for pair in axes.items()],
    batch=case.rows,
    dtype="float32",
    model=config,
    shard=None,
    experts="expert" if "expert" in axes else None,
    **({} if phase.trains else {"cache": case.cache}),
    **phase.options,
  )
  compiled = built.function.trace(*built.arguments).lower().compile()
  model, cache = _parts(built.arguments)
  analysis = compiled.memory_analysis()
  assert analysis is not None
  kinds = model.kinds
  layers = len(model.config.layers)
  shape = next(x for x in kinds if isinstance(x, LayerCacheSpec))
  data = axes.get("data", 1) * axes.get("replica", 1)
  share = axes.get("model", 1)
  heads = config["num_attention_heads"]
  kv_heads, keys = _keys(model, config)
  sizes = Sizes(
    rows=case.rows if case.rows % data else case.rows // data,
    tokens=case.capacity if phase.tokens is None else phase.tokens,
    layers=layers,
    heads=heads // share if heads % share == 0 else heads,
    value=shape.value or shape.key,
    keys=keys // (share if kv_heads % share == 0 else 1),
    embed=model.config.embed,
    vocab=model.config.vocab,
    seq=axes.get("seq", 1),
    model=share,
    data=data,
    weights=bytes_each(model),
    index=config.get("index_n_heads", 0)
    * (config.get("index_head_dim", 0) + 1),
    index_key=config.get("index_head_dim", 0),
    chosen=config.get("index_topk", 0),
    tied=4 * config["vocab_size"] * model.config.embed // share
    if model.head is None
    else 0,
    by_query=kv_heads % share > 0 and kv_heads > 1,
    expert=axes.get("expert", 1),
    slots=case.capacity // axes.get("seq", 1),
    ordered=sum(
      x.layers
      * (
        (
          sum(heads * dim for heads, dim in x.convolved)
          + x.heads * x.value
          # Rates and gates.
          + 2 * x.heads
        )
        // share
        # The document.
        + 1
      )
      for x in kinds
      if isinstance(x, StateShape)
    ),
    states=bytes_each(
      [x for x in getattr(cache, "slots", ()) if not isinstance(x, LayerKV)]
    ),
  )
  cache_bytes = bytes_each(cache)
  # Coordinates of recorded queries are new arrays, 12 bytes a query.
  renewed = bytes_each(getattr(cache, "watch", ()))
  experts = config.get("num_local_experts", config.get("num_experts", 0))
  of_experts = [
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize // x.shape[0]
    for x in jax.tree.leaves(model)
    if experts and x.ndim == 4 and x.shape[1] == experts
  ]
  embedding = 4 * sizes.vocab * sizes.embed // share
  large = min([cache_bytes // layers // 2, embedding, *of_experts])
  if phase.large is not None:
    large = LARGE.get((case.phase, case.family), phase.large)(sizes)
  return Reading(
    CompiledProgram(compiled.as_text()),
    analysis.temp_size_in_bytes,
    analysis.alias_size_in_bytes,
    cache_bytes - renewed - (sizes.states if phase.copies_states else 0),
    large,
    sizes,
  )


def _parts(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
  """The model, and what the program updates: a cache or a training state."""
  first = arguments[0]
  if hasattr(first, "params"):
    return first.params, first
  return first, next(x for x in arguments[1:] if hasattr(x, "slots"))


def _keys(model: Any, config: Mapping[str, Any]) -> tuple[int, int]:
  """Heads that a ring sends of a token, and their numbers.

  Of latent attention the row travels: the latent and the rotated key, whole on
  each shard of the heads.
  """
  shape = next(x for x in model.kinds if isinstance(x, LayerCacheSpec))
  if shape.value:
    return shape.heads, shape.heads * (shape.key + shape.value)
  return 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]


class Fault(NamedTuple):
  """Something that a program does and need not do.

  Fields:
    what: The excess, in words.
    where: Instruction and the traced operation that made it.
  """

  what: str
  where: str

  def __str__(self) -> str:
    return f"{self.what}\n    {self.where}"


def faults(case: Case) -> list[Fault]:
  """Compile a case and list all that its phase does not allow."""
  return judged(read(case), PHASES[case.phase])


def judged(reading: Reading, phase: Phase) -> list[Fault]:
  """List all that a compiled program does and its phase does not allow."""
  return [
    *_sends(reading, phase.sends(reading.sizes)),
    *_writes(reading),
    *_copies(reading, phase.large is None),
  ]


def sent(program: CompiledProgram) -> dict[str, float]:
  """Bytes of each kind of collective on one device, over all loops."""
  total: dict[str, float] = {}
  for _, instruction, times in _collectives(program):
    assert instruction.kind is not None
    total[instruction.kind] = (
      total.get(instruction.kind, 0) + _sent_bytes(instruction) * times
    )
  return total


def _collectives(
  program: CompiledProgram,
) -> list[tuple[str, CompiledInstruction, int]]:
  return [
    (name, instruction, program.times[name])
    for name, instructions in program.computations.items()
    for instruction in instructions.values()
    if instruction.kind is not None and program.times[name]
  ]


def _sent_bytes(instruction: CompiledInstruction) -> float:
  # The result of a start includes its operand.
  starts = instruction.op.endswith("-start")
  return instruction.bytes / (2 if starts else 1)


def _sends(reading: Reading, allowed: Mapping[str, float]) -> list[Fault]:
  program = reading.program
  found = []
  for kind, total in sent(program).items():
    limit = allowed.get(kind, 0) + SLACK
    if total <= limit:
      continue
    largest = max(
      (x for x in _collectives(program) if x[1].kind == kind),
      key=lambda x: _sent_bytes(x[1]) * x[2],
    )
    found.append(
      Fault(
        f"{kind} carries {total:,.0f} bytes, at most {limit:,.0f} are due",
        f"{largest[2]} times {where(largest[1])}",
      )
    )
  return found


def _writes(reading: Reading) -> list[Fault]:
  program = reading.program
  fused = _fused(program)
  return [
    Fault(
      f"{instruction.nbytes:,} bytes are written {program.times[name]} times, "
      f"{reading.large:,} are large",
      where(instruction),
    )
    for name, instructions in program.computations.items()
    if program.times[name] and name not in fused
    for instruction in instructions.values()
    if instruction.op not in _NAMES
    and instruction.nbytes >= reading.large
    and not _in_place(program, instruction)
  ]


def _copies(reading: Reading, whole: bool) -> list[Fault]:
  found = []
  if reading.aliased < reading.cache - SLACK:
    found.append(
      Fault(
        f"{reading.aliased:,} bytes are updated in place, "
        f"the cache has {reading.cache:,}",
        "the whole program",
      )
    )
  if whole and reading.temporaries >= reading.large + TILES:
    found.append(
      Fault(
        f"temporary buffers take {reading.temporaries:,} bytes, "
        f"{reading.large:,} are large",
        "the whole program",
      )
    )
  return found


def _fused(program: CompiledProgram) -> set[str]:
  """Computations whose instructions write no array of their own."""
  return {
    callee
    for instructions in program.computations.values()
    for instruction in instructions.values()
    for attribute in ("calls", "to_apply")
    if instruction.op != "call" and (callee := instruction.called(attribute))
  }


def _in_place(program: CompiledProgram, one: CompiledInstruction) -> bool:
  if one.op in _IN_PLACE:
    return True
  inner = program.computations.get(one.called("calls"), {})
  if one.op != "fusion" or not inner:
    return False
  root = next(x for x in inner.values() if x.root)
  while root.op == "bitcast" and root.operands:
    root = inner[root.operands[0]]
  if root.op == "tuple":
    return all(inner[x].op in _IN_PLACE for x in root.operands)
  return root.op in _IN_PLACE


def where(one: CompiledInstruction) -> str:
  """Name, shape and source of an instruction."""
  file = re.search(r'source_file="([^"]*)"', one.text)
  line = re.search(r"source_line=(\d+)", one.text)
  source = f" ({file[1]}:{line[1]})" if file and line else ""
  return f"{one.op} {one.shape} by {one.op_name or one.name}{source}"
