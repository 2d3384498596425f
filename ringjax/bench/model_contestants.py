"""The contestants of `inference`: they read prompts, decode and load models.

Guarantees: a contestant gets a folder, tokens and cached keys, puts them in
place before the clock starts, and runs as its users run it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import ringjax as rj
from ringjax.bench.harness import Contestant, Runnable, Trial, import_torch
from ringjax.bench.timing import Skipped
from ringjax.kv.cache import KVCache, LayerKV
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.ops.attention.code_format import as_stored
from ringjax.ops.mask import Coords
from ringjax.parallel.layout import Striped
from ringjax.parallel.mesh import make_mesh

# `rj.models` and `rj.infer` load flax when they are first used, which the
# other benchmarks do without.

PARTS = ("forward", "decode", "load", "tiles")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCase:
  """One row of the benchmark: work of a whole model.

  Attributes:
    part: one of `PARTS`.
    dtype: of weights, activations and the cache.
    tokens: of the prompt, or in the cache before the first step; 0 to load.
    room: tokens that the cache has slots for.
    steps: of decoding, timed together.
    devices: of a sharded contestant.
  """

  part: str
  dtype: str
  tokens: int = 0
  room: int = 0
  steps: int = 1
  devices: int = 8

  def __str__(self) -> str:
    if self.part == "load":
      return f"load {self.dtype}"
    return f"{self.part} {self.dtype} T={self.tokens}"


@dataclasses.dataclass(frozen=True)
class ModelInputs:
  """The inputs of a row, the same for all contestants.

  Attributes:
    folder: of the model, in the dtype of the case.
    config: what it computes.
    ids: int32 [T], the prompt; one token to decode.
    keys: keys and values [L, K, T, H] in float32, to decode.
  """

  folder: pathlib.Path
  config: rj.models.TransformerConfig
  ids: np.ndarray
  keys: tuple[np.ndarray, np.ndarray] | None = None


# ---------------------------------------------------------------------------
# Ours
# ---------------------------------------------------------------------------


def _float32(logits: Any) -> np.ndarray:
  return np.asarray(logits).astype(np.float32).reshape(-1)


def _forward(case: ModelCase, given: ModelInputs) -> Runnable:
  """The call of a model on one device."""
  model = rj.models.load(given.folder, dtype=case.dtype)
  tokens = jnp.asarray(given.ids[None])
  last = jnp.full((1, 1), given.ids.size - 1, jnp.int32)
  run = lambda: model(tokens, rows=last)
  return Runnable(run, lambda: _float32(run()))


def _striped_forward(case: ModelCase, given: ModelInputs) -> Runnable:
  """The same over the devices of a mesh, each with its own tokens."""
  if given.ids.size % (2 * case.devices):
    raise Skipped(f"skipped: {given.ids.size} tokens over {case.devices}")
  mesh = make_mesh(
    (case.devices,),
    ("seq",),
    devices=jax.devices()[: case.devices],
    axis_types=AxisType.Auto,
  )
  model, layout = rj.models.load(given.folder, mesh=mesh), Striped()
  order = np.asarray(layout.order(given.ids.size, case.devices))
  tokens = jnp.asarray(given.ids[order][None])
  last = jnp.asarray(np.argsort(order)[-1:][None].astype(np.int32))
  attend = ContextParallel(mesh=mesh, axis="seq", layout=layout)
  run = lambda: model(tokens, rows=last, attend=attend)
  return Runnable(run, lambda: _float32(run()))


def _decode(case: ModelCase, given: ModelInputs, *, scan: bool) -> Runnable:
  """Steps as `generate` takes them in a session of `case.room` tokens."""
  from ringjax.infer import decode

  model = rj.models.load(given.folder, dtype=case.dtype, scan=scan)
  session = rj.infer.Session(model, case.room)
  session.cache = _filled(session.cache, given)
  token, pos = (
    jnp.asarray([x], jnp.int32) for x in (given.ids[0], case.tokens)
  )
  state = decode.DecodeState(token, pos, jnp.zeros(1, bool), None)
  stops, total = decode.stop_ids(()), jnp.int32(case.room)
  attend, sampler = CachedAttention(), rj.infer.Greedy()

  def check() -> np.ndarray:
    logits, _ = model(
      token[None], positions=pos[None], cache=session.cache, length=total
    )
    logits = _float32(logits)
    run()
    return logits

  def run() -> None:
    nonlocal state
    for _ in range(case.steps):
      after, session.cache = decode.step(
        model, attend, sampler, session.cache, state, stops, total
      )
      # The next step is on its way while this one's token is read.
      jax.device_get((state.token, state.done))
      state = after
    jax.block_until_ready(state)

  return Runnable(run, check)


def _filled(cache: KVCache, given: ModelInputs) -> KVCache:
  """The cache as if it had read the tokens whose keys are given."""
  assert given.keys is not None
  count = given.keys[0].shape[2]
  pos = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
  at = Coords(pos, (pos < count).astype(jnp.int32))
  cache = cache.allocate(at, replicated=False, sees=False)
  slots, first = [], 0
  for part in cache.slots:
    assert isinstance(part, LayerKV)
    layers = part.k.shape[0]
    put = lambda old, new, n=layers, i=first: old.at[:, 0, :, :count].set(
      as_stored(jnp.asarray(new[i : i + n]), old).astype(old.dtype)
    )
    slots.append(LayerKV(*map(put, part, given.keys)))
    first += layers
  return dataclasses.replace(cache, slots=tuple(slots))


def _load(case: ModelCase, given: ModelInputs) -> Runnable:
  run = lambda: rj.models.load(given.folder, dtype=case.dtype)
  check = lambda: _digest(np.asarray(x) for x in jax.tree.leaves(run()))
  return Runnable(run, check)


def _digest(arrays: Any) -> np.ndarray:
  """Sums that tell sets of weights apart, whatever their order and shapes."""
  found = np.zeros(3)
  for x in arrays:
    wide = x.astype(np.float32).reshape(-1)
    sums = (np.sum(f(wide), dtype=np.float64) for f in (np.abs, np.square))
    found += (wide.size, *sums)
  return found


# ---------------------------------------------------------------------------
# Peers
# ---------------------------------------------------------------------------


def _pretrained(case: ModelCase, given: ModelInputs) -> Any:
  """LlamaForCausalLM of the folder, on PyTorch's own fused attention."""
  transformers = importlib.import_module("transformers")
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  return transformers.LlamaForCausalLM.from_pretrained(
    given.folder,
    dtype=getattr(import_torch(), case.dtype),
    attn_implementation="sdpa",
  ).eval()


def _peer_forward(
  case: ModelCase, given: ModelInputs, *, threads: int | None = None
) -> Runnable:
  torch, model = import_torch(), _pretrained(case, given)
  tokens = torch.from_numpy(given.ids.astype(np.int64))[None]

  def run() -> Any:
    import_torch(threads)
    with torch.inference_mode():
      return model(tokens, use_cache=False, logits_to_keep=1).logits

  return Runnable(run, lambda: _float32(run().float().numpy()))


def _peer_decode(
  case: ModelCase, given: ModelInputs, *, threads: int | None = None
) -> Runnable:
  """Calls of the model with a `DynamicCache`, greedy."""
  torch, model = import_torch(), _pretrained(case, given)
  cache = importlib.import_module("transformers").DynamicCache(
    config=model.config
  )
  assert given.keys is not None
  dtype = getattr(torch, case.dtype)
  for i, (k, v) in enumerate(zip(*given.keys, strict=True)):
    k, v = (torch.from_numpy(x).to(dtype)[None] for x in (k, v))
    cache.update(k, v, i)
  token = torch.from_numpy(given.ids[:1].astype(np.int64))[None]

  def step() -> Any:
    nonlocal token
    with torch.inference_mode():
      logits = model(
        token, past_key_values=cache, use_cache=True, logits_to_keep=1
      ).logits
      token = logits[:, -1].argmax(-1, keepdim=True)
      token.item()
    return logits

  def run() -> None:
    import_torch(threads)
    for _ in range(case.steps):
      step()

  def check() -> np.ndarray:
    logits = _float32(step().float().numpy())
    run()
    return logits

  return Runnable(run, check)


def _peer_load(case: ModelCase, given: ModelInputs) -> Runnable:
  run = lambda: _pretrained(case, given)

  def check() -> np.ndarray:
    # Tied weights are one parameter.
    found = run().parameters()
    return _digest(x.detach().float().numpy() for x in found)

  return Runnable(run, check)


def _safetensors(case: ModelCase, given: ModelInputs) -> Runnable:
  """`safetensors.numpy.load_file` of each file: NumPy arrays by name."""
  reader = importlib.import_module("safetensors.numpy")
  files = sorted(given.folder.glob("*.safetensors"))
  run = lambda: [reader.load_file(file) for file in files]
  check = lambda: _digest(x for file in run() for x in file.values())
  return Runnable(run, check)


def torch_threads() -> int | None:
  """Threads of PyTorch, or None where it is not installed."""
  try:
    return import_torch().get_num_threads()
  except ImportError:
    return None


def _import_safetensors() -> Any:
  return importlib.import_module("safetensors.numpy")


def _import_transformers() -> Any:
  importlib.import_module("torch")
  return importlib.import_module("transformers")


def _contestant(
  imports: Callable[[], Any] = lambda: None,
  *,
  ours: bool = False,
  sharded: bool = False,
  **builders: Callable[[ModelCase, ModelInputs], Runnable],
) -> Contestant:
  """A contestant with a builder for each part that it takes part in."""
  return Contestant(
    lambda case, given: builders[case.part](case, given),
    ours=ours,
    sharded=sharded,
    one_device=ours and not sharded,
    parts=tuple(builders),
    load=imports,
  )


CONTESTANTS: dict[str, Contestant] = {
  "ringjax": _contestant(
    ours=True,
    forward=_forward,
    decode=functools.partial(_decode, scan=True),
    load=_load,
  ),
  "unrolled": _contestant(
    ours=True, decode=functools.partial(_decode, scan=False)
  ),
  "striped": _contestant(ours=True, sharded=True, forward=_striped_forward),
  "transformers": _contestant(
    _import_transformers,
    forward=_peer_forward,
    decode=_peer_decode,
    load=_peer_load,
  ),
  "transformers_1": _contestant(
    _import_transformers,
    forward=functools.partial(_peer_forward, threads=1),
    decode=functools.partial(_peer_decode, threads=1),
  ),
  "safetensors": _contestant(_import_safetensors, load=_safetensors),
}


def trial(name: str, case: ModelCase, given: ModelInputs) -> Trial:
  """Builds a contestant of a case and runs it once."""
  return CONTESTANTS[name].trial(case, given)
