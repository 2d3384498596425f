"""Codecs: how a cache stores a key or a value in fewer bytes."""

from ringjax.kv.codecs.calibration import Calibrated, Calibration
from ringjax.kv.codecs.code_book import CodeBook
from ringjax.kv.codecs.codec import Codec, VectorCodec
from ringjax.kv.codecs.floats import Floats
from ringjax.kv.codecs.hadamard import Hadamard
from ringjax.kv.codecs.integers import Integers

__all__ = [
  "Calibrated",
  "Calibration",
  "CodeBook",
  "Codec",
  "Floats",
  "Hadamard",
  "Integers",
  "VectorCodec",
]
