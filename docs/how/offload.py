"""Steps of a model by placement: python docs/how/offload.py FOLDER PLACEMENT.

Makes a model of random weights in FOLDER if there is none.
"""

import pathlib
import sys
import time

import jax.numpy as jnp
import numpy as np

import ringjax as rj

CONFIG = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 128,
  "num_hidden_layers": 24,
  "hidden_size": 1024,
  "intermediate_size": 3584,
  "num_attention_heads": 16,
  "num_key_value_heads": 4,
  "max_position_embeddings": 4096,
}


def high_water() -> int:
  """The most bytes that this process had."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmHWM"))


folder, placement = sys.argv[1:]
if not pathlib.Path(folder).exists():
  rj.models.save(rj.models.create(CONFIG, dtype=jnp.bfloat16), folder)
  print("made the model; measure in a process of its own")
  sys.exit()
before = high_water()
model = rj.models.load(folder, placement=placement)
for rows in (1, 32):
  prompts, times = np.ones((rows, 16), np.int32), []
  note = lambda _, times=times: times.append(time.monotonic())
  rj.infer.generate(model, prompts, max_new_tokens=3)
  read = model.placement_report().bytes_read
  rj.infer.generate(model, prompts, max_new_tokens=9, stream=note)
  found = model.placement_report()
  step = (times[-1] - times[0]) / 8
  print(
    f"{placement}, {rows} rows: {step:.2f} s a step, {rows / step:.2f} "
    f"tokens/s, {(found.bytes_read - read) / 9e9:.2f} GB read a step, "
    f"waited {found.waited_s:.1f} s, grown by "
    f"{(high_water() - before) / 1e6:,.0f} MB"
  )
