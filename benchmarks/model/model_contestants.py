"""The contestants of `inference`: they read prompts, decode and load models.

Guarantees: a contestant gets a folder, tokens and cached keys, loads them
before the clock starts, and runs as its users run it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jaxtyping import Float, Int, PyTree

import ringjax as rj
from benchmarks.shared.harness import Contestant, Runnable, Trial, import_torch
from ringjax.bench.timing import Skipped
from ringjax.kv.cache import KVCache
from ringjax.kv.layer_spec import LayerKV
from ringjax.nn.sharding_context import CachedAttention, ContextParallel
from ringjax.ops.attention.cached.code_format import as_stored
from ringjax.ops.mask import Coords
from ringjax.parallel.layout import Striped
from ringjax.parallel.mesh import make_mesh

# `rj.models` and `rj.infer` import flax when they are first used, which the
# other benchmarks don't need.

PARTS = ("forward", "decode", "load", "tiles")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCase:
  """One row of the benchmark: work of a whole model.

  Attributes:
    part: Part of the benchmark, of `PARTS`.
    dtype: Dtype of weights, activations and the cache.
    tokens: Tokens of the prompt, or in the cache before the first step; 0 for
      part "load".
    room: Capacity of the cache in tokens.
    steps: Decode steps that are timed together.
    devices: Number of devices of a sharded contestant.
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
    folder: Folder of the model, in the dtype of the case.
    config: Config of the model.
    ids: Ids of the prompt, or of one token to decode, int32 [T].
    keys: Cached keys and values, float32 [L, K, T, H], to decode.
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


def _forward(case: ModelCase, inputs: ModelInputs) -> Runnable:
  """Builds a forward pass on one device."""
  model = rj.models.load(inputs.folder, dtype=case.dtype)
  tokens = jnp.asarray(inputs.ids[None])
  last = jnp.full((1, 1), inputs.ids.size - 1, jnp.int32)
  run = lambda: model(tokens, rows=last)
  return Runnable(run, lambda: _float32(run()))


def _striped_forward(case: ModelCase, inputs: ModelInputs) -> Runnable:
  """Builds a forward pass whose tokens are striped over a mesh."""
  if inputs.ids.size % (2 * case.devices):
    raise Skipped(f"skipped: {inputs.ids.size} tokens over {case.devices}")
  mesh = make_mesh(
    (case.devices,),
    ("seq",),
    devices=jax.devices()[: case.devices],
    axis_types=AxisType.Auto,
  )
  model, layout = rj.models.load(inputs.folder, mesh=mesh), Striped()
  order = np.asarray(layout.order(inputs.ids.size, case.devices))
  tokens = jnp.asarray(inputs.ids[order][None])
  last = jnp.asarray(np.argsort(order)[-1:][None].astype(np.int32))
  attend = ContextParallel(mesh=mesh, axis="seq", layout=layout)
  run = lambda: model(tokens, rows=last, attend=attend)
  return Runnable(run, lambda: _float32(run()))


def _decode(
  case: ModelCase, inputs: ModelInputs, *, scan: bool, default: bool = False
) -> Runnable:
  """Builds decode steps as in `generate`, with `case.room` slots.

  With `default` the weights are loaded without a dtype, as a user does who
  gives none: on a CPU 16-bit weights are held in float32 if memory allows.
  """
  from ringjax.infer import decode

  dtype = None if default else case.dtype
  model = rj.models.load(inputs.folder, dtype=dtype, scan=scan)
  session = rj.infer.Session(model, case.room)
  session.cache = _filled(session.cache, inputs)
  token, pos = (
    jnp.asarray([x], jnp.int32) for x in (inputs.ids[0], case.tokens)
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
      next_state, session.cache = decode.step(
        model, attend, sampler, session.cache, state, stops, total
      )
      # The next step runs on the device while this one's token is read.
      jax.device_get((state.token, state.done))
      state = next_state
    jax.block_until_ready(state)

  return Runnable(run, check)


def _filled(cache: KVCache, inputs: ModelInputs) -> KVCache:
  """Fills a cache with the given keys and values."""
  assert inputs.keys is not None
  count = inputs.keys[0].shape[2]
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
    slots.append(LayerKV(*map(put, part, inputs.keys)))
    first += layers
  return dataclasses.replace(cache, slots=tuple(slots))


def cached_keys(
  folder: pathlib.Path, ids: Int[np.ndarray, " S"]
) -> tuple[Float[np.ndarray, "L K S H"], Float[np.ndarray, "L K S H"]]:
  """Reads tokens with a model; returns the float32 keys and values of them."""
  model = rj.models.load(folder, dtype="float32")
  pos = jnp.arange(ids.size, dtype=jnp.int32)
  cache = rj.infer.Session(model, ids.size).cache
  _, cache = jax.jit(lambda x, tokens, cache: x(
    tokens[None], positions=pos[None], cache=cache,
    rows=jnp.zeros((1, 1), jnp.int32), length=jnp.int32(ids.size),
  ))(model, jnp.asarray(ids), cache)  # fmt: skip
  parts = [part for part in cache.slots if isinstance(part, LayerKV)]
  k, v = (
    np.concatenate(
      [np.asarray(getattr(part, name))[:, 0, :, : ids.size] for part in parts]
    )
    for name in ("k", "v")
  )
  return k.astype(np.float32), v.astype(np.float32)


def _load(case: ModelCase, inputs: ModelInputs) -> Runnable:
  run = lambda: rj.models.load(inputs.folder, dtype=case.dtype)
  check = lambda: _digest(np.asarray(x) for x in jax.tree.leaves(run()))
  return Runnable(run, check)


def _digest(arrays: PyTree) -> np.ndarray:
  """Sums that identify a set of weights in any order and shapes."""
  digest = np.zeros(3)
  for x in arrays:
    flat = x.astype(np.float32).reshape(-1)
    sums = (np.sum(f(flat), dtype=np.float64) for f in (np.abs, np.square))
    digest += (flat.size, *sums)
  return digest


# ---------------------------------------------------------------------------
# Peers
# ---------------------------------------------------------------------------


def _pretrained(case: ModelCase, inputs: ModelInputs) -> Any:
  """Loads the family's causal model with PyTorch's fused attention."""
  transformers = importlib.import_module("transformers")
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  return transformers.AutoModelForCausalLM.from_pretrained(
    inputs.folder,
    dtype=getattr(import_torch(), case.dtype),
    attn_implementation="sdpa",
  ).eval()


def _peer_forward(
  case: ModelCase, inputs: ModelInputs, *, threads: int | None = None
) -> Runnable:
  torch, model = import_torch(), _pretrained(case, inputs)
  tokens = torch.from_numpy(inputs.ids.astype(np.int64))[None]

  def run() -> Any:
    import_torch(threads)
    with torch.inference_mode():
      return model(tokens, use_cache=False, logits_to_keep=1).logits

  return Runnable(run, lambda: _float32(run().float().numpy()))


def _peer_decode(
  case: ModelCase, inputs: ModelInputs, *, threads: int | None = None
) -> Runnable:
  """Builds greedy calls of the model with a `DynamicCache`."""
  torch, model = import_torch(), _pretrained(case, inputs)
  cache = importlib.import_module("transformers").DynamicCache(
    config=model.config
  )
  assert inputs.keys is not None
  dtype = getattr(torch, case.dtype)
  for i, (k, v) in enumerate(zip(*inputs.keys, strict=True)):
    k, v = (torch.from_numpy(x).to(dtype)[None] for x in (k, v))
    cache.update(k, v, i)
  token = torch.from_numpy(inputs.ids[:1].astype(np.int64))[None]

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


def _peer_load(case: ModelCase, inputs: ModelInputs) -> Runnable:
  run = lambda: _pretrained(case, inputs)

  def check() -> np.ndarray:
    # Tied weights are one parameter.
    parameters = run().parameters()
    return _digest(x.detach().float().numpy() for x in parameters)

  return Runnable(run, check)


def _safetensors(case: ModelCase, inputs: ModelInputs) -> Runnable:
  """Builds a load of each file by `safetensors.numpy.load_file`."""
  reader = importlib.import_module("safetensors.numpy")
  files = sorted(inputs.folder.glob("*.safetensors"))
  run = lambda: [reader.load_file(file) for file in files]
  check = lambda: _digest(x for file in run() for x in file.values())
  return Runnable(run, check)


def torch_threads() -> int | None:
  """Number of threads of PyTorch; None if it is not installed."""
  try:
    return import_torch().get_num_threads()
  except ImportError:
    return None


def _import_safetensors() -> types.ModuleType:
  return importlib.import_module("safetensors.numpy")


def _import_transformers() -> types.ModuleType:
  importlib.import_module("torch")
  return importlib.import_module("transformers")


def _contestant(
  imports: Callable[[], Any] = lambda: None,
  *,
  ours: bool = False,
  sharded: bool = False,
  **builders: Callable[[ModelCase, ModelInputs], Runnable],
) -> Contestant:
  """Creates a contestant with a builder for each part that it runs."""
  return Contestant(
    lambda case, inputs: builders[case.part](case, inputs),
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
  "default": _contestant(
    ours=True, decode=functools.partial(_decode, scan=True, default=True)
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
