"""Faults planted one at a time, each to be caught by tests of the default run.

  python -m tests.faults                 every fault, two at a time
  python -m tests.faults slots preempt   those with these words in their names

Prints a line for each fault: caught, by which test, or survived. A fault is a
substitution in one file of a copy of the tree; `tests` are the files of the
default run that exercise it. A
survivor needs the smallest test that sees it. Exit status 1 if more than one
fault in twenty survives. `tests/mutations.py` plants faults in attention alone,
in the process of the default run itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Share of the faults that must be caught.
LEAST_CAUGHT = 0.95


@dataclasses.dataclass(frozen=True)
class Fault:
  """`old` becomes `new` in `file`; one of `tests` must fail then."""

  name: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]


def _fault(name: str, file: str, old: str, new: str, *tests: str) -> Fault:
  return Fault(name, f"ringjax/{file}", old, new, tests)


FAULTS = (
  # Masks, sequence operations, losses, mixtures.
  _fault(
    "a prefix reaches a token too far in bounds of tiles",
    "ops/mask.py",
    "(k.last < length) & always",
    "(k.last <= length) & always",
    "ops/test_mask.py",
    "ops/attention/test_exact.py",
  ),
  _fault(
    "a block of rows is short by the last row of an expert",
    "ops/experts/row_blocks.py",
    "(load + size - 1) // size * size",
    "(load + size - 2) // size * size",
    "ops/test_moe.py",
  ),
  _fault(
    "a round drops the last row that it sends to a shard",
    "ops/experts/expert_shards.py",
    "is_row = is_row & self._exists(n)",
    "is_row = is_row & self._exists(n) & (place < self.capacity - 1)",
    "ops/test_expert_shards.py",
  ),
  _fault(
    "results of a round return in the order of their experts",
    "ops/experts/expert_shards.py",
    "return None, y.astype(x.dtype)",
    "return None, y.astype(x.dtype)[jnp.argsort(received.experts[:, 0])]",
    "ops/test_expert_shards.py",
  ),
  _fault(
    "each shard gathers all experts' weights",
    "nn/feedforward.py",
    "if self.over and attend.mesh is not None:",
    "if False:",
    "infer/test_expert_shards.py",
  ),
  _fault(
    "a shift ahead reads beyond the sequence",
    "ops/recurrent/shift.py",
    "(at < shards.length + min(by, 0))",
    "(at < shards.length)",
    "ops/test_sequence.py",
  ),
  _fault(
    "padding counts as the last real token",
    "ops/recurrent/scan.py",
    "jnp.where(seg > 0, index, -1)",
    "jnp.where(seg >= 0, index, -1)",
    "ops/test_sequence.py",
    "models/test_hybrids.py",
  ),
  _fault(
    "the delta rule fades a token too late",
    "ops/recurrent/delta.py",
    "fade = jnp.exp(jnp.cumsum(decay, -2))",
    "fade = jnp.exp(jnp.cumsum(decay, -2) - decay)",
    "ops/test_delta.py",
    "nn/test_delta.py",
  ),
  _fault(
    "a dynamic rotation counts a token less",
    "ops/rope.py",
    "tokens_so_far = jnp.minimum(positions, 2**31 - 2) + 1",
    "tokens_so_far = jnp.minimum(positions, 2**31 - 2)",
    "infer/test_lengths.py::test_the_rule_of_dynamic",
  ),
  _fault(
    "YaRN's attention factor is left out",
    "ops/rope.py",
    "0.1 * weight * math.log(factor) + 1.0",
    "1.0 + 0 * factor * weight",
    "ops/test_rope.py",
  ),
  _fault(
    "equal scores of an index are left out",
    "ops/attention/cached/selection.py",
    "tied = (scores == self.score) & (pos <= self.pos)",
    "tied = (scores == self.score) & (pos < self.pos)",
    "ops/attention/test_selection.py",
  ),
  _fault(
    "contexts are not rescaled to a new maximum",
    "ops/attention/cached/separate_contexts.py",
    "weight = jnp.exp(top - finite_max(global_top))",
    "weight = jnp.ones_like(top)",
    "ops/attention/test_apart.py",
  ),
  # Processes.
  _fault(
    "the newest connection gives way",
    "parallel/door.py",
    "self._waiting.pop(next(iter(self._waiting)))",
    "self._waiting.pop(next(reversed(self._waiting)))",
    "parallel/test_door.py",
  ),
  _fault(
    "a group's secret is not compared",
    "parallel/links/connection.py",
    "authenticated = hmac.compare_digest(",
    "authenticated = True or hmac.compare_digest(",
    "parallel/test_peers.py",
    "parallel/test_live_links.py",
    "transfer/test_transfer.py",
  ),
  # Caches.
  _fault(
    "a shard gets the token of the next one",
    "kv/storage/slots.py",
    "upto = levels[:, :, None] + (others < shard).astype(jnp.int32)",
    "upto = levels[:, :, None] + (others <= shard).astype(jnp.int32)",
    "kv/test_cache_slots.py",
  ),
  _fault(
    "truncating leaves the first token that goes",
    "kv/storage/slots.py",
    "gone = self.at.pos >= end[:, None]",
    "gone = self.at.pos > end[:, None]",
    "kv/test_slots.py",
    "kv/test_cache_slots.py",
    "infer/test_sessions.py",
  ),
  _fault(
    "a recovered shard takes its last token for free",
    "kv/storage/slots.py",
    "used = jnp.max(jnp.where(by_shard > 0, index[None, None], 0), 2)",
    "used = jnp.max(jnp.where(by_shard > 0, index[None, None] - 1, 0), 2)",
    "kv/test_slots.py",
    "kv/test_cache_slots.py",
    "kv/test_drafts.py",
    "kv/test_kinds.py",
  ),
  _fault(
    "a ring buffer takes a token for padding",
    "kv/storage/window.py",
    "num_new = jnp.max(jnp.where(at.seg > 0, index + 1, 0), 1)",
    "num_new = jnp.max(jnp.where(at.seg > 0, index, 0), 1)",
    "kv/test_window.py",
  ),
  _fault(
    "the newest tokens that stay are one short",
    "kv/eviction/eviction.py",
    "(rank >= all_at.pos.shape[1] - kind.exact.recent)",
    "(rank > all_at.pos.shape[1] - kind.exact.recent)",
    "kv/test_evicting.py",
    "kv/test_kept_tokens.py",
    "kv/test_kinds.py",
  ),
  _fault(
    "snapkv averages over one neighbour less",
    "kv/policies/scores/snapkv.py",
    "jax.lax.slice_in_dim(padded, n, n + size, axis=2)",
    "jax.lax.slice_in_dim(padded, min(n, 3), min(n, 3) + size, axis=2)",
    "kv/test_policy_scores.py",
  ),
  _fault(
    "heavy hitters are not divided by the queries that saw them",
    "kv/policies/heavy_hitters.py",
    "return look.sums() / queries.astype(jnp.float32)",
    "return look.sums() + 0 * queries.astype(jnp.float32)",
    "kv/test_policy_scores.py",
  ),
  _fault(
    "a call writes into a page less than it touches",
    "kv/storage/page_pool.py",
    "pages_per_row = -(-(tokens - 1) // page) + 1",
    "pages_per_row = -(-(tokens - 1) // page)",
    "kv/test_page_pool.py",
  ),
  _fault(
    "a context begins inside the tile of the one before",
    "kv/composed/context_cache.py",
    "first += -(-per_shard // tile) * tile",
    "first += per_shard // tile * tile",
    "infer/test_contexts.py",
  ),
  _fault(
    "steps of integers are a level too small",
    "kv/codecs/integers.py",
    "/ np.float32(2**self.bits - 1))",
    "/ np.float32(2**self.bits))",
    "kv/test_codecs.py",
  ),
  _fault(
    "the largest code is never used",
    "kv/codecs/integers.py",
    "jnp.clip(codes, 0, 2**self.bits - 1)",
    "jnp.clip(codes, 0, 2**self.bits - 2)",
    "kv/test_codecs.py",
  ),
  # Generation and speculation.
  _fault(
    "a sibling's residual is not normalised",
    "infer/speculate/verifiers.py",
    "residual = jnp.where(total > 0, residual / total, target_law)",
    "residual = residual + 0 * total",
    "infer/test_verifiers.py",
  ),
  _fault(
    "a draft is accepted by the inverse of p / q",
    "infer/speculate/verifiers.py",
    "(u * at_token(q) < at_token(target_law))",
    "(u * at_token(target_law) < at_token(q))",
    "infer/test_verifiers.py",
  ),
  _fault(
    "what is left after the drafts is not drawn from",
    "infer/speculate/verifiers.py",
    "scores = jnp.log(target_law) + noise(",
    "scores = 0 * jnp.log(target_law) + noise(",
    "infer/test_verifiers.py",
  ),
  _fault(
    "lookup prefers the shortest match",
    "infer/speculate/lookup.py",
    "range(min(len(self._following), len(text)), 0, -1)",
    "range(1, min(len(self._following), len(text)) + 1)",
    "infer/test_speculate.py",
    "infer/test_verifiers.py",
  ),
  _fault(
    "a session forgets rows that were not finite",
    "infer/session.py",
    "tuple(sorted({*self._not_finite, *rows}))",
    "tuple(sorted({*rows}))",
    "infer/test_not_finite.py",
  ),
  _fault(
    "top-p keeps the share of another row",
    "infer/sampling.py",
    "target = self.top_p * jnp.sum(mass, -1, keepdims=True)",
    "target = self.top_p * jnp.sum(mass, -1, keepdims=True)[:1]",
    "infer/test_sampling.py",
    "serve/test_engine.py",
  ),
  # Data.
  _fault(
    "a copied stream shares its pending ids",
    "data/text/stream.py",
    "copy.copy(self._utf8), [*self._pending]",
    "copy.copy(self._utf8), self._pending",
    "data/test_tokens.py",
    "infer/test_stopping.py",
  ),
  _fault(
    "a piece on the edge belongs to the document before",
    "data/batches/packing.py",
    'side="right"',
    'side="left"',
    "data/test_packing.py",
  ),
  _fault(
    "documents of a later buffer are counted from 0",
    "data/batches/packing.py",
    "pieces[:, 0] += start",
    "pieces[:, 0] += 0 * start",
    "data/test_packing.py",
  ),
  _fault(
    "the end of a document reads the next one",
    "data/batches/corpus.py",
    "min(begin + stop, end)",
    "begin + stop",
    "data/test_corpus.py",
  ),
  _fault(
    "hosts read the first row of the next host",
    "data/batches/loader.py",
    "range(host * batch // hosts, (host + 1) * batch // hosts)",
    "range(host * batch // hosts, (host + 1) * batch // hosts + (hosts > 1))",
    "data/test_loader.py",
  ),
  _fault(
    "an epoch begins a row late",
    "data/batches/loader.py",
    "bisect.bisect_right(self._first, index) - 1",
    "bisect.bisect_left(self._first, index + 0) - 1",
    "data/test_loader.py",
  ),
  # Stores.
  _fault(
    "the digest of a block covers its first 64 KiB",
    "store/block_file.py",
    "digest.update(payload)",
    "digest.update(payload[: 1 << 16])",
    "store/test_tiers.py",
  ),
  _fault(
    "the disk's budget is exceeded by a block",
    "store/indexed_tier.py",
    "if self.nbytes + self._writing + size <= self.budget:",
    "if self.nbytes + self._writing <= self.budget:",
    "store/test_tiers.py",
  ),
  _fault(
    "bytes of evicted blocks stay counted",
    "store/host_tier.py",
    "self.nbytes -= len(self._blocks.pop(victim))",
    "len(self._blocks.pop(victim))",
    "store/test_tiers.py",
  ),
  _fault(
    "a block is admitted a use late",
    "store/tier_policies.py",
    "use is not None and use.count >= self.uses",
    "use is not None and use.count > self.uses",
    "store/test_tier_policies.py",
    "store/test_tiers.py",
  ),
  _fault(
    "the window of neurons is a step short",
    "store/flash/neuron_window.py",
    "while len(self._recent) > self.window or",
    "while len(self._recent) >= self.window or",
    "store/test_neurons.py",
  ),
  _fault(
    "neurons of a step that is over are forgotten though a later one has them",
    "store/flash/neuron_window.py",
    "(self._count[ids] == 0) & (self._row_of[ids] >= 0)",
    "(self._count[ids] <= 1) & (self._row_of[ids] >= 0)",
    "store/test_neurons.py",
  ),
  # Pages by pull.
  _fault(
    "a ticket waits for one reader more",
    "transfer/protocol.py",
    "if len(ended) >= ticket.readers:",
    "if len(ended) > ticket.readers:",
    "transfer/test_protocol.py",
    "transfer/test_transfer.py",
  ),
  _fault(
    "a page of another generation is read",
    "transfer/protocol.py",
    "return hold.generation if hold is not None and hold.tickets else None",
    "return hold.generation if hold is not None else None",
    "transfer/test_protocol.py",
    "transfer/test_transfer.py",
  ),
  _fault(
    "runs of pages lose their generations",
    "transfer/description.py",
    "if last[2] == generation and last[0] + last[1] == page:",
    "if last[0] + last[1] == page:",
    "transfer/test_transfer.py",
  ),
  _fault(
    "a reader's proof is not compared",
    "parallel/links/connection.py",
    "authenticated = hmac.compare_digest(proof, "
    '_proof(key, b"client", server_nonce, client_nonce))',
    "authenticated = bool(proof)",
    "transfer/test_transfer.py",
  ),
  # Links between processes.
  _fault(
    "a later reason of a link's end replaces the first",
    "parallel/links/live_link.py",
    "first = self.error is None",
    "first = True",
    "parallel/test_live_links.py",
  ),
  _fault(
    "a link beats for its own patience alone",
    "parallel/links/live_link.py",
    "if patience_s / _BEATS < self._beat_s:",
    "if patience_s / _BEATS > self._beat_s:",
    "parallel/test_live_links.py",
  ),
  _fault(
    "a group blames itself for a member that is lost",
    "parallel/links/link_group.py",
    "self.fail(str(error), blame=error.rank)",
    "self.fail(str(error), blame=None)",
    "parallel/test_live_links.py",
  ),
  # Weights.
  _fault(
    "codes have a zero point a step off",
    "models/hf/codes.py",
    "half = jnp.int32(2 ** (self.bits - 1))\n    zeros = jnp.full",
    "half = jnp.int32(2 ** (self.bits - 1) - 1)\n    zeros = jnp.full",
    "models/hf/test_packings.py",
  ),
  _fault(
    "layers fill a memory beyond its room",
    "models/weights/weight_placement.py",
    "if dealt[tier] + n <= room.get(tier, 0) * (1 + _NEAR)",
    "if dealt[tier] <= room.get(tier, 0) * (1 + _NEAR)",
    "models/test_places.py",
    "models/test_placement.py",
  ),
  # Training.
  _fault(
    "skipped steps are not counted",
    "train/step.py",
    "jnp.where(is_finite, 0, state.skipped + 1)",
    "jnp.where(is_finite, 0, state.skipped)",
    "train/test_step.py",
    "train/test_loop.py",
  ),
  _fault(
    "adapters are scaled by alpha alone",
    "train/methods/lora.py",
    "scale = self.alpha / self.rank",
    "scale = self.alpha / 1",
    "train/test_adapt.py",
  ),
  _fault(
    "steps are saved one late",
    "train/loop.py",
    "not steps_taken % config.save_every",
    "not (steps_taken - 1) % config.save_every",
    "train/test_loop.py",
  ),
  # Serving.
  _fault(
    "a preempted row shares its table with the next row of its slot",
    "serve/scheduler.py",
    "table[member.slot].copy() for table",
    "table[member.slot] for table",
    "serve/test_scheduler.py",
    "serve/test_store_engine.py",
  ),
  _fault(
    "the oldest row is preempted",
    "serve/scheduler.py",
    "(lambda rows: max(rows, key=lambda r: r.order))",
    "(lambda rows: min(rows, key=lambda r: r.order))",
    "serve/test_scheduler.py",
  ),
  _fault(
    "a page is attached without its user",
    "serve/prefix/prefix_tree.py",
    "assert block.ready and block.pages[group] is None"
    " self._held[group][block.depth % self.shards] -= 1"
    " block.pages[group] = page block.users[group] += 1",
    "self._held[group][block.depth % self.shards] -= 1"
    "\n    block.pages[group] = page",
    "serve/test_scheduler.py",
    "serve/test_store_engine.py",
    "serve/test_engine.py",
  ),
  _fault(
    "a shared page is given back a user early",
    "serve/prefix/prefix_tree.py",
    "self._more[group, shard, page] = other_rows - 1",
    "self._more[group, shard, page] = other_rows - 2",
    "serve/test_scheduler.py",
    "serve/test_engine.py",
    "serve/test_beams.py",
  ),
  _fault(
    "hypotheses share what they watch",
    "serve/beams.py",
    "watch = beam.watch.copy()",
    "watch = beam.watch",
    "serve/test_beams.py",
  ),
  _fault(
    "scores of hypotheses are not normalised",
    "serve/beams.py",
    "answer.total_logprob / size**self._request.length_penalty",
    "answer.total_logprob / size**0",
    "serve/test_beams.py",
  ),
  _fault(
    "a row's need of pages is one short",
    "serve/vattention/row_space.py",
    "self.needed[slot] = max(self.needed[slot], index + 1)",
    "self.needed[slot] = max(self.needed[slot], index)",
    "serve/test_row_space.py",
  ),
  _fault(
    "pages are read together before they are ready",
    "serve/prefix/shared_rows.py",
    "is_ready = ready[:, None] >= (last[None] + 1) * page",
    "is_ready = ready[:, None] >= last[None] * page",
    "serve/test_engine.py",
    "serve/test_scheduler.py",
  ),
  _fault(
    "a windowed prefix is loaded a page short",
    "serve/prefix/store_link.py",
    "max(0, total - -(-reach // self._tree.page))",
    "max(0, total - reach // self._tree.page)",
    "serve/test_store_engine.py",
  ),
  _fault(
    "pages of a prefix are cut from its beginning",
    "serve/prefix/prefix_transfer.py",
    "for n in range(skipped, len(self._data) // size)",
    "for n in range(0, len(self._data) // size)",
    "serve/test_prefix_transfer.py",
  ),
  _fault(
    "the time between tokens counts the first one",
    "serve/cluster/times/request_times.py",
    "/ (self.new_tokens - 1)",
    "/ self.new_tokens",
    "serve/test_placements.py",
    "serve/test_conductor.py",
    "serve/test_cluster_simulator.py",
  ),
  _fault(
    "a rate counts one request too many",
    "serve/cluster/simulate/goodput.py",
    "return (len(trace) - 1) / spent",
    "return len(trace) / spent",
    "serve/test_placements.py",
  ),
  _fault(
    "the busiest instance is chosen to decode",
    "serve/cluster/routing.py",
    "return min(with_room, key=lambda view: "
    "(view.running_tokens, view.name)).name",
    "return max(with_room, key=lambda view: "
    "(view.running_tokens, view.name)).name",
    "serve/test_cluster_simulator.py",
    "serve/test_conductor.py",
  ),
  # Planning and evaluation.
  _fault(
    "a chain waits a layer less",
    "plan/kv_runahead/recurrence.py",
    "for edge in operation.after + operation.behind if edge.back <= layer",
    "for edge in operation.after + operation.behind if edge.back < layer",
    "plan/test_schedules.py",
  ),
  _fault(
    "a pipeline fills a stage too long",
    "plan/systems/pipeline_times.py",
    "(sum(times) + (stages - 1) * max(times)) / stages",
    "(sum(times) + stages * max(times)) / stages",
    "plan/test_pipeline_times.py",
  ),
  _fault(
    "a text for perplexity is a token short",
    "eval/perplexity.py",
    "need = length + 1 - start.size",
    "need = length - start.size",
    "eval/test_eval.py",
  ),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of one fault.

  Attributes:
    fault: The fault.
    caught_by: Id of the first test that failed; None if all passed.
    seconds: Time of its tests.
    trouble: Output of a run that ended without a verdict, or "".
  """

  fault: Fault
  caught_by: str | None
  seconds: float
  trouble: str = ""


def substituted(fault: Fault, root: pathlib.Path = ROOT) -> str:
  """The text of the fault's file with the fault in it.

  White space is free, so that a formatter loses no fault.

  Raises:
    ValueError: `old` is not in the file exactly once.
  """
  text = (root / fault.file).read_text()
  tokens = map(re.escape, re.findall(r"\w+|[^\w\s]", fault.old))
  changed, count = re.subn(r"\s*".join(tokens), lambda _: fault.new, text)
  if count != 1:
    raise ValueError(f"{fault.file}: {count} places for {fault.name!r}")
  return changed


def run(fault: Fault, tree: pathlib.Path) -> Outcome:
  """Plant a fault in a copy of the tree, and run its tests of the default run.

  Args:
    fault: The fault.
    tree: Root of the copy; it is as before afterwards.
  """
  path, start = tree / fault.file, time.monotonic()
  healthy = path.read_text()
  path.write_text(substituted(fault, tree))
  try:
    done = subprocess.run(
      [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
        "--durations=0", "--durations-min=999",
        *(f"tests/{name}" for name in fault.tests),
      ],
      cwd=tree,
      env=os.environ | {"PYTHONPATH": str(tree)},
      capture_output=True,
      text=True,
    )  # fmt: skip
  finally:
    path.write_text(healthy)
  seconds = time.monotonic() - start
  failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
  if done.returncode == 1 and failed is not None:
    return Outcome(fault, failed[1], seconds)
  if done.returncode == 0:
    return Outcome(fault, None, seconds)
  if failed is not None or done.returncode < 0:
    return Outcome(fault, failed[1] if failed else "a crash", seconds)
  return Outcome(
    fault, None, seconds, done.stdout[-2000:] + done.stderr[-2000:]
  )


def main(argv: list[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("words", nargs="*", help="words of faults' names")
  parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
  parser.add_argument("--list", action="store_true", help="only print names")
  given = parser.parse_args(argv)
  faults = [
    fault
    for fault in FAULTS
    if not given.words
    or any(w in f"{fault.name} {fault.file}" for w in given.words)
  ]
  if given.list:
    print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
    return 0
  local = threading.local()
  outcomes: list[Outcome] = []
  with tempfile.TemporaryDirectory(prefix="ringjax-faults-") as folder:

    def work(fault: Fault) -> Outcome:
      if not hasattr(local, "tree"):
        local.tree = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "tree"
        shutil.copytree(
          ROOT, local.tree, ignore=shutil.ignore_patterns(".*", "_build")
        )
      return run(fault, local.tree)

    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
      for outcome in pool.map(work, faults):
        outcomes.append(outcome)
        verdict = outcome.caught_by or (
          "NO VERDICT" if outcome.trouble else "SURVIVED"
        )
        print(
          f"{len(outcomes):3}/{len(faults)} {outcome.seconds:6.1f} s  "
          f"{outcome.fault.file}: {outcome.fault.name}: {verdict}",
          flush=True,
        )
        if outcome.trouble:
          print(outcome.trouble)
  caught = sum(x.caught_by is not None for x in outcomes)
  print(f"caught {caught} of {len(outcomes)} faults")
  for outcome in outcomes:
    if outcome.caught_by is None:
      print(f"  survived: {outcome.fault.file}: {outcome.fault.name}")
  return int(caught < LEAST_CAUGHT * len(outcomes))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
