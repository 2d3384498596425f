"""A model's repr fits a screen."""

from __future__ import annotations

import ringjax as rj
from tests import checkpoints


def test_repr_is_a_few_lines_and_names_the_layers(tmp_path):
  model = rj.models.load(checkpoints.write("gemma3_text", tmp_path / "m"))
  lines = repr(model).splitlines()
  assert len(lines) <= 20 and str(model) == repr(model)
  text = "\n".join(lines)
  assert f"vocabulary {model.config.vocab}" in text and "float32" in text
  windowed = [
    n
    for n, x in enumerate(model.config.layers)
    if "Window" in repr(x.attention.mask)
  ]
  (line,) = [x for x in lines if "Window(" in x]
  assert f"layers {windowed[0]}" in line
