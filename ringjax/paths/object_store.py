"""Objects of one object storage: read by ranges, written whole, listed.

Guarantees: an object that is written appears with all its bytes or not at all,
and takes the place of an older one in one step. A request that the storage
does not serve for a while (status 408, 409, 429 or 5xx, a connection that is
reset or times out) is repeated with growing pauses, `Scheme.attempts` times in
all; then, and for any other fault, an error names the object. Listings and
sizes are never cached.
Cost: a request per call, and one for each 50 MB of an upload.

The client of each storage is its file system of fsspec: s3fs and gcsfs. Both
have exclusive creation ("create only if there is no such object": If-None-Match
of S3, ifGenerationMatch=0 of GCS), which the lock and the steps of a training
need. s3fs can also replace an object only if it has a certain version
(If-Match); gcsfs has no argument for that.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import importlib
import importlib.util
import pathlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ringjax.errors import OptionError, StorageError

_T = TypeVar("_T")
# Seconds before the second attempt; each later pause is twice as long.
FIRST_PAUSE_S = 0.5
# S3 answers 409 to a condition while another request changes the object.
_BUSY_STATUS = {"408", "409", "429", "500", "502", "503", "504"}
_BUSY_ERRNO = {
  getattr(errno, name, None)
  for name in ("EAGAIN", "EBUSY", "EIO", "EPIPE", "EREMOTEIO", "ETIMEDOUT")
}
# Classes of client libraries that a moment later may not be raised again.
_BUSY_CLASSES = (
  "ChunkedEncodingError", "ClientConnectionError", "ClientOSError",
  "ClientPayloadError", "ConnectTimeoutError", "ConnectionClosedError",
  "ConnectionError", "EndpointConnectionError", "FSTimeoutError",
  "IncompleteReadError", "ProxyError", "ReadTimeoutError",
  "ResponseStreamingError", "ServerDisconnectedError", "ServerTimeoutError",
  "TransportError",
)  # fmt: skip
_DENIED_STATUS = {"401", "403"}
_DENIED_CLASSES = (
  "DefaultCredentialsError", "NoCredentialsError", "PartialCredentialsError",
  "RefreshError", "TokenRetrievalError", "UnauthorizedSSOTokenError",
)  # fmt: skip


class Scheme(NamedTuple):
  """An object storage that addresses may name.

  Fields:
    package: Package of its client, "" if fsspec has it.
    extra: Extra of ringjax that installs the package.
    attempts: Number of times that a request is sent before it fails.
    match: Argument of its client's `pipe_file` for the version that an object
      must have to be replaced; "" if the client has none.
    credentials: Remedy for a request that the storage denies.
  """

  package: str
  extra: str
  attempts: int
  match: str
  credentials: str


SCHEMES = {
  # gcsfs repeats a request five times by itself, with pauses of up to 32 s.
  "gs": Scheme(
    "gcsfs",
    "gcs",
    2,
    "",
    "run gcloud auth application-default login, or grant it",
  ),
  "s3": Scheme(
    "s3fs",
    "s3",
    6,
    "IfMatch",
    "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or grant access",
  ),
  # Objects in this process, for tests.
  "memory": Scheme("", "", 6, "", "grant access"),
}


class ObjectFacts(NamedTuple):
  """Facts of an object that change when the object does.

  Fields:
    size: Size in bytes.
    version: Generation, digest or time of its writing.
  """

  size: int
  version: str


@runtime_checkable
class ObjectClient(Protocol):
  """The methods of a file system of fsspec that are used here."""

  def cat_file(
    self, path: str, start: int | None = None, end: int | None = None
  ) -> bytes: ...

  def pipe_file(
    self, path: str, value: bytes, mode: str = "overwrite", **options: str
  ) -> None: ...

  def put_file(self, lpath: str, rpath: str) -> None: ...

  def info(self, path: str) -> Mapping[str, Any]: ...

  def find(
    self, path: str, *, detail: bool
  ) -> Mapping[str, Mapping[str, Any]]: ...

  def ls(
    self, path: str, detail: bool = True
  ) -> Sequence[Mapping[str, Any]]: ...

  def rm_file(self, path: str) -> None: ...

  def modified(self, path: str) -> datetime.datetime: ...


class ObjectStore:
  """Objects of one scheme, by their addresses; made by `store_of`.

  Attributes:
    scheme: Properties of the storage.
  """

  def __init__(self, scheme: Scheme, client: ObjectClient):
    self.scheme = scheme
    self._files = client

  def read(self, address: str, start: int = 0, end: int | None = None) -> bytes:
    """Reads bytes `start` to `end` of an object.

    Args:
      address: Address of the object.
      start: Position of the first byte.
      end: Position after the last byte; None: the end of the object.

    Raises:
      FileNotFoundError: If there is no such object.
      StorageError: If it cannot be read, or has fewer bytes.
    """
    if end is not None and end <= start:
      return b""
    if start == 0 and end is None:
      return self._call("read", address, lambda: self._files.cat_file(address))
    data = self._call(
      "read",
      address,
      lambda: self._files.cat_file(address, start=start, end=end),
    )
    if end is not None and len(data) != end - start:
      raise _error(
        address,
        f"{len(data)} bytes from byte {start:,} on",
        f"{end - start}: the object has changed",
        "leave it alone while it is read",
      )
    return data

  def write(
    self,
    address: str,
    data: bytes,
    *,
    new: bool = False,
    replaces: ObjectFacts | None = None,
  ) -> None:
    """Writes an object.

    Args:
      address: Address of the object.
      data: Bytes of the object.
      new: Whether the object must not exist.
      replaces: Facts that the object must have, from `facts`; compared by
        storages whose client can (`Scheme.match`), ignored by others.

    Raises:
      FileExistsError: If it exists and must not, or has other facts. After a
        reset connection the object may be that of an earlier attempt of this
        call.
      StorageError: If it cannot be written.
    """
    mode = "create" if new else "overwrite"
    options: dict[str, str] = {}
    if replaces is not None and self.scheme.match:
      options[self.scheme.match] = replaces.version
    write = lambda: self._files.pipe_file(address, data, mode=mode, **options)
    try:
      self._call("write", address, write, writes=not options)
    except FileNotFoundError:
      # It was deleted meanwhile.
      raise FileExistsError(errno.EEXIST, "has changed", address) from None

  def upload(self, address: str, file: str) -> None:
    """Writes an object with the bytes of a local file.

    Raises:
      StorageError: If it cannot be written.
    """
    if not self.scheme.package:
      # fsspec would make a folder in memory, which stays.
      self.write(address, pathlib.Path(file).read_bytes())
      return
    upload = lambda: self._files.put_file(file, address)
    self._call("write", address, upload, writes=True)

  def facts(self, address: str) -> ObjectFacts | None:
    """Size and version of an object; None if there is no such object.

    Raises:
      StorageError: If the storage does not answer.
    """
    with contextlib.suppress(FileNotFoundError):
      info = self._call("look at", address, lambda: self._files.info(address))
      if _is_object(info):
        return _facts(info)
    return None

  def find(self, address: str) -> dict[str, ObjectFacts]:
    """Objects whose addresses begin with this one and "/", sorted.

    Raises:
      StorageError: If the storage does not answer.
    """
    folder = address.rstrip("/")
    infos: Mapping[str, Mapping[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError):
      infos = self._call(
        "list", address, lambda: self._files.find(folder, detail=True)
      )
    scheme = address.partition("://")[0]
    by_address = {
      f"{scheme}://{name.lstrip('/')}": _facts(info)
      for name, info in sorted(infos.items())
      if _is_object(info)
    }
    return {k: x for k, x in by_address.items() if k.startswith(f"{folder}/")}

  def names(self, address: str) -> list[str]:
    """Names of objects and of folders of objects just below, sorted.

    Raises:
      StorageError: If the storage does not answer.
    """
    infos: Sequence[Mapping[str, Any]] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      infos = self._call(
        "list", address, lambda: self._files.ls(address, detail=True)
      )
    # Some storages list the folder, or an object of that name, itself.
    own_key = address.partition("://")[2].strip("/")
    keys = {info["name"].strip("/") for info in infos} - {own_key}
    return sorted(key.rpartition("/")[2] for key in keys)

  def delete(self, address: str) -> None:
    """Deletes an object, if it exists.

    Raises:
      StorageError: If it cannot be deleted.
    """
    with contextlib.suppress(FileNotFoundError):
      self._call("delete", address, lambda: self._files.rm_file(address))

  def modified(self, address: str) -> datetime.datetime:
    """Time at which an object was written, by the clock of the storage.

    Raises:
      FileNotFoundError: If there is no such object.
      StorageError: If the storage does not answer.
    """
    return self._call("look at", address, lambda: self._files.modified(address))

  def _call(
    self,
    verb: str,
    address: str,
    call: Callable[[], _T],
    *,
    writes: bool = False,
  ) -> _T:
    """Calls the client, again while the storage is busy."""
    attempts = self.scheme.attempts
    for attempt in range(attempts):
      try:
        return call()
      except FileExistsError:
        raise
      except FileNotFoundError as error:
        if writes:
          raise _error(
            address,
            "a bucket that does not exist",
            "a bucket that can be written to",
            "create the bucket, or correct its name",
          ) from error
        raise FileNotFoundError(
          errno.ENOENT, "no such object", address
        ) from error
      except (KeyboardInterrupt, MemoryError):
        raise
      except Exception as error:
        if _status(error) == "412":
          raise FileExistsError(errno.EEXIST, "exists", address) from error
        reason = _reason(error)
        if _is_denied(error):
          raise _error(
            address,
            f"{reason} on an attempt to {verb} it",
            "credentials that permit it",
            self.scheme.credentials,
          ) from error
        if not _is_busy(error):
          raise _error(
            address,
            f"{reason} on an attempt to {verb} it",
            "an object that can be reached",
            "check bucket, name and settings of the storage",
          ) from error
        if attempt == attempts - 1:
          raise _error(
            address,
            f"{reason} on {attempts} attempts to {verb} it",
            "a storage that answers",
            "look at the network and the quota of the storage, and start again",
          ) from error
      pause_s = FIRST_PAUSE_S * 2**attempt
      # Processes that were refused together must not return together.
      time.sleep(pause_s * random.uniform(0.5, 1))
    raise AssertionError


@functools.cache
def store_of(scheme: str) -> ObjectStore:
  """The storage of a scheme, "gs", "s3" or "memory".

  Raises:
    OptionError: If the scheme is unknown, or its client is not installed.
  """
  check_scheme("path", scheme)
  options: dict[str, Any] = {
    "use_listings_cache": False,
    "skip_instance_cache": True,
  }
  if scheme == "gs":
    # `gcsfs.GCSFileSystem` asks for the kind of a bucket before each request.
    client = importlib.import_module("gcsfs.core").GCSFileSystem
  else:
    client = importlib.import_module("fsspec").get_filesystem_class(scheme)
  if scheme == "s3":
    # `_call` repeats requests; botocore and s3fs do not.
    once = {"total_max_attempts": 1, "mode": "standard"}
    options["config_kwargs"] = {"retries": once}
  filesystem = client(**options)
  if scheme == "s3":
    filesystem.retries = 1
  return ObjectStore(SCHEMES[scheme], filesystem)


def check_scheme(argument: str, address: str) -> None:
  """Raises unless the storage of an address can be used.

  Args:
    argument: Name of the argument, for an error.
    address: Address, or its scheme.

  Raises:
    OptionError: If the scheme is unknown, or its client is not installed.
  """
  name = address.partition(":")[0].lower()
  if name not in SCHEMES:
    listed = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    raise OptionError(
      argument,
      address,
      f"a path, or an address that begins {listed}",
      "mount the storage, as a file system that all hosts share, and pass the "
      "folder; or copy the files",
    )
  scheme = SCHEMES[name]
  for package in filter(None, ("fsspec", scheme.package)):
    if importlib.util.find_spec(package) is None:
      raise OptionError(
        argument,
        f"{address}, but {package} is not installed",
        f"{package}, which reads and writes {name}://",
        f"pip install 'ringjax[{scheme.extra or 'gcs'}]'",
      )


def _is_object(info: Mapping[str, Any]) -> bool:
  """False for folders, and for the objects that stand for empty ones.

  Names of these, which consoles create, end in "/".
  """
  return info["type"] == "file" and not info["name"].endswith("/")


def _facts(info: Mapping[str, Any]) -> ObjectFacts:
  """The facts in an entry of fsspec."""
  for key in ("generation", "ETag", "etag", "md5Hash", "created"):
    if info.get(key) is not None:
      return ObjectFacts(int(info["size"]), str(info[key]))
  return ObjectFacts(int(info["size"]), str(info.get("mtime", "")))


def _error(address: str, got: str, want: str, remedy: str) -> StorageError:
  shown = address if len(address) <= 120 else f"...{address[-117:]}"
  return StorageError(shown, got, want, remedy, filename=address, reason=got)


def _status(error: BaseException) -> str:
  """The HTTP status of an error of a client library, or ""."""
  response = getattr(error, "response", None)
  if isinstance(response, dict):
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    return str(status)
  for name in ("code", "status"):
    value = getattr(error, name, None)
    if value is not None:
      return str(value)
  cause = error.__cause__
  return "" if cause is None else _status(cause)


def _reason(error: BaseException) -> str:
  """The class and the text of an error, in one short line."""
  text = " ".join(str(error).split())[:90]
  return f"{type(error).__name__}{f' ({text})' if text else ''}"


def _classes(error: BaseException) -> set[str]:
  return {cls.__name__ for cls in type(error).__mro__}


def _is_denied(error: BaseException) -> bool:
  return (
    isinstance(error, PermissionError)
    or _status(error) in _DENIED_STATUS
    or not _classes(error).isdisjoint(_DENIED_CLASSES)
    # gcsfs raises a plain OSError for a status of 403.
    or str(error).startswith("Forbidden")
  )


def _is_busy(error: BaseException) -> bool:
  if isinstance(error, ConnectionError | TimeoutError):
    return True
  if _status(error) in _BUSY_STATUS:
    return True
  if not _classes(error).isdisjoint(_BUSY_CLASSES):
    return True
  return isinstance(error, OSError) and error.errno in _BUSY_ERRNO
