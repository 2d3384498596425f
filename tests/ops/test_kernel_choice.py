"""The kernels that the choice knows, and their names."""

from __future__ import annotations

import pathlib

import pytest

import ringjax as rj
from ringjax.errors import OptionError
from ringjax.ops import kernel_choice


def test_every_module_that_registers_kernels_is_known():
  root = pathlib.Path(rj.__file__).parent.parent
  modules = {
    ".".join(path.relative_to(root).with_suffix("").parts)
    for path in (root / "ringjax").rglob("*.py")
    if "\nregister(" in path.read_text()
  }
  assert modules == {*kernel_choice._MODULES}


def test_the_kernels_of_every_kind_of_call_can_be_switched_off(monkeypatch):
  kinds = [kind for table in kernel_choice.tables() for kind in table.kinds]
  assert {*kinds} == {"tpu", "gpu"}
  names = {"flash_tpu", "decode_gpu", "block_product_tpu"}
  kernel_choice._parse_off.cache_clear()
  monkeypatch.setenv("RINGJAX_OFF", ",".join(names))
  assert kernel_choice.switched_off() == names
  monkeypatch.setenv("RINGJAX_OFF", "block_product")
  with pytest.raises(OptionError, match="'block_product'.*block_product_tpu"):
    kernel_choice.switched_off()
