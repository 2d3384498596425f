"""Memory of each device to read a prompt with ring attention.

Compiles a model's forward pass of one prompt for some numbers of CPU devices,
from shapes alone: no weight is read and nothing is run. Prints a JSON object
with the bytes that each device's program needs in addition to its weights, by
tokens and by devices:

  python -m benchmarks.ring_memory --tokens=4096,32768 --devices=1,8
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax as rj
from ringjax.json_text import json_text
from ringjax.models.gguf.gguf_folder import open_model


def program_bytes(config: Mapping[str, Any], tokens: int, devices: int) -> int:
  """Bytes of one device, without weights, to read a prompt of `tokens`."""
  mesh = Mesh(np.array(jax.devices()[:devices]), ("seq",))
  model = rj.models.abstract(config, dtype=jnp.float32, mesh=mesh)
  attend = rj.models.ContextParallel(mesh=mesh, axis="seq", strategy="ring")

  def read(model: Any, ids: jax.Array) -> jax.Array:
    rows = jnp.full((1, 1), tokens - 1, jnp.int32)
    return model(ids, attend=attend, rows=rows)

  ids = jax.ShapeDtypeStruct(
    (1, tokens), jnp.int32, sharding=NamedSharding(mesh, P(None, "seq"))
  )
  needs: Any = jax.jit(read).lower(model, ids).compile().memory_analysis()
  return int(needs.temp_size_in_bytes)


def main() -> None:
  """Compiles the programs and prints their bytes."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", default="gemma3-270m")
  parser.add_argument("--tokens", default="4096,32768")
  parser.add_argument("--devices", default="1,8")
  flags = parser.parse_args()
  tokens, devices = (
    [int(x) for x in text.split(",")] for text in (flags.tokens, flags.devices)
  )
  jax.config.update("jax_num_cpu_devices", max(devices))
  config = open_model(flags.model).config
  table = {
    length: {count: program_bytes(config, length, count) for count in devices}
    for length in tokens
  }
  print(json_text({"model": flags.model, "bytes": table}))


if __name__ == "__main__":
  main()
