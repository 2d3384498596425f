"""Paths of the file system and addresses of objects, read and written alike."""

from ringjax.errors import StorageError
from ringjax.paths.object_array import ObjectArray
from ringjax.paths.object_log import ObjectLog
from ringjax.paths.object_path import ObjectPath, ObjectReader
from ringjax.paths.object_store import SCHEMES, ObjectFacts
from ringjax.paths.places import (
  AnyPath,
  as_path,
  check_writable,
  filling,
  open_binary,
  replacing,
  upload_folder,
)
