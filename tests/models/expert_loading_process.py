"""The program of a process of test_expert_loading.py.

  python tests/models/expert_loading_process.py PORT RANK FOLDER

Loads FOLDER/small, so that imports are over, and then FOLDER/model with its
experts sharded over two processes; prints the bytes that it has read, and
whether its experts are those of the folder.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np


def bytes_read() -> int:
  """Bytes that this process has read so far, of files of any kind."""
  lines = pathlib.Path("/proc/self/io").read_text().splitlines()
  return int(dict(line.split(": ") for line in lines)["rchar"])


def main(root: pathlib.Path) -> dict[str, object]:
  import ringjax as rj

  mesh = rj.make_mesh((2,), ("expert",))
  rules = rj.models.Rules(experts="expert")
  load = lambda name: rj.models.load(root / name, mesh=mesh, rules=rules)
  load("small")
  before = bytes_read()
  model = load("model")
  nbytes = bytes_read() - before
  alone = rj.models.load(root / "model")
  equal = [
    np.array_equal(shard.data, np.asarray(whole)[shard.index])
    for x, whole in zip(
      jax.tree.leaves(model), jax.tree.leaves(alone), strict=True
    )
    for shard in x.addressable_shards
  ]
  return {"bytes": nbytes, "equal": all(equal), "arrays": len(equal)}


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 1)
  port, rank = sys.argv[1], int(sys.argv[2])
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
  print("RESULT", json.dumps(main(pathlib.Path(sys.argv[3]))))
  jax.distributed.shutdown()
