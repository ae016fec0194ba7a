"""Where a tier's objects lie: a folder or a bucket, read and written through obstore, encrypted or not.

Every call raises TierError with the place and the reason if the place fails.
"""

import json
import os
import re
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import obstore
import torch
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import LocalStore, ObjectStore, from_url

from holdover.errors import TierError
from holdover.store.encryption import Cipher
from holdover.store.profiles import profile_options

PROBE = "probe"
KEY_MARK = "encryption"  # names the key of an encrypted place
STAGED = re.compile(r"#\d+$")  # a file that is being written, or was when its writer was killed
REQUEST_TIMEOUT, CONNECT_TIMEOUT, RETRY_TIMEOUT = timedelta(seconds=60), timedelta(seconds=5), timedelta(seconds=20)
ENDPOINT_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
GOOGLE_VARIABLES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")  # the account's file names the server
MAX_RETRIES = 2  # then the tier is left alone for a while, and serving goes on without it
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to what was read
ABSENT = (NotFoundError, FileNotFoundError)


@dataclass(frozen=True, slots=True)
class Item:
    """An object. nbytes: as it lies there; modified: seconds since 1970."""

    path: str
    nbytes: int
    modified: float


class Place:
    """Objects by path. `shown` names the place to the user; `kind` says what it is, for messages."""

    def __init__(self, store: ObjectStore, shown: str, kind: str = "tier", cipher: Cipher | None = None) -> None:
        self._store = store
        self.shown = shown
        self.kind = kind
        self._cipher = cipher
        self.folder = Path(shown) if isinstance(store, LocalStore) else None

    @contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (OSError, BaseError) as error:
            raise TierError(f"{doing} the {self.kind} {self.shown} failed: {reason(error)}") from error

    def overhead(self, nbytes: int) -> int:
        """Bytes that an object of so many takes on top of them."""
        return 0 if self._cipher is None else self._cipher.overhead(nbytes)

    def probe(self) -> None:
        """Raises OSError or obstore's BaseError if the place can't be written, TierError if its key is another."""
        path = f"{PROBE}-{secrets.token_hex(8)}"  # others may be opening the same place
        obstore.put(self._store, path, b"holdover")
        obstore.delete(self._store, path)
        self.check_key(make=True)

    def check_key(self, make: bool = False) -> None:
        """Raises TierError if the place's segments were encrypted with another key, or are and none is given.

        make: mark the place as this key's, if it has no mark.
        """
        with self._faults("reading from"):
            try:
                mark = bytes(obstore.get(self._store, KEY_MARK).bytes()).decode(errors="replace")
            except ABSENT:
                mark = None
        mine = None if self._cipher is None else self._cipher.key_id
        if mark is None and mine is not None and make:
            with self._faults("writing to"), suppress(AlreadyExistsError):  # then another process was faster
                obstore.put(self._store, KEY_MARK, mine.encode(), mode="create", use_multipart=False)
            self.check_key()
        elif mark is not None and mine is None:
            raise TierError(
                f"the {self.kind} {self.shown} is encrypted. Give its key with --encryption-key-file or "
                "HOLDOVER_ENCRYPTION_KEY, or use another place."
            )
        elif mark is not None and mark != mine:
            raise TierError(
                f"the {self.kind} {self.shown} is encrypted with another key than the one given. Give the right key, "
                "or use another place."
            )

    def list(self, prefix: str = "segments") -> Iterator[Item]:
        """All objects below a prefix, in no order."""
        with self._faults("listing"):
            for page in obstore.list(self._store, prefix=prefix):
                for item in page:
                    yield Item(item["path"], item["size"], item["last_modified"].timestamp())

    def remove_staged(self) -> int:
        """Remove files whose writers were killed; only for who has the folder to himself. Returns how many went."""
        count = 0
        if self.folder is None:
            return 0
        with self._faults("cleaning"):
            for folder, _, files in os.walk(self.folder / "segments"):
                for file in files:
                    if STAGED.search(file):
                        (Path(folder) / file).unlink(missing_ok=True)
                        count += 1
        return count

    def read(self, path: str) -> torch.Tensor | None:
        """An object's content, uint8 [bytes], or None if it is not there. Raises DamagedSegment if its encryption does
        not hold."""
        with self._faults("reading from"):
            try:
                content = memoryview(obstore.get(self._store, path).bytes())
            except ABSENT:
                return None
        if self._cipher is not None:
            content = memoryview(self._cipher.open(path, content))
        return torch.from_numpy(np.frombuffer(content, dtype=np.uint8))

    def read_start(self, path: str, nbytes: int) -> bytes | None:
        """The first bytes of an object, or more of them, or None if it is not there. Raises DamagedSegment."""
        wanted = nbytes if self._cipher is None else self._cipher.sealed_start(nbytes)
        with self._faults("reading from"):
            try:
                got = obstore.get(self._store, path, options={"range": (0, wanted)})
                content, size = memoryview(got.bytes()), got.meta["size"]
            except ABSENT:
                return None
        return bytes(content) if self._cipher is None else bytes(self._cipher.open(path, content, size))

    def create(self, path: str, make: Callable[[], torch.Tensor]) -> bool:
        """Write an object, whole or not at all. False, and nothing changed, if there is one."""
        content = make().numpy().data
        sealed = content if self._cipher is None else self._cipher.seal(path, content)
        with self._faults("writing to"):
            try:
                obstore.put(self._store, path, sealed, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def create_note(self, path: str, content: bytes) -> bytes | None:
        """Write a small object that is not encrypted, if there is none; else what is there."""
        with self._faults("writing to"):
            try:
                obstore.put(self._store, path, content, mode="create", use_multipart=False)
                return None
            except AlreadyExistsError:
                pass
        return self.read_note(path) or b""  # it may have just gone

    def read_note(self, path: str) -> bytes | None:
        """What `create_note` has written, or None if there is nothing."""
        with self._faults("reading from"):
            try:
                return bytes(obstore.get(self._store, path).bytes())
            except ABSENT:
                return None

    def delete(self, path: str) -> int | None:
        """Remove an object. Returns how many bytes that has freed, 0 if there was none, None if it can't be known."""
        with self._faults("removing from"):
            if self.folder is not None:
                return self._unlink(self.folder / path)
            try:
                obstore.delete(self._store, path)
            except ABSENT:
                return 0
        return None

    @staticmethod
    def _unlink(file: Path) -> int:
        """Of two processes that remove one file, one alone says that it has freed its bytes."""
        staged = file.with_name(f"{file.name}#{os.getpid()}{threading.get_ident()}")
        try:
            file.rename(staged)
        except FileNotFoundError:
            return 0
        nbytes = staged.stat().st_size
        staged.unlink(missing_ok=True)
        return nbytes


def folder_place(folder: Path, kind: str = "disk tier", cipher: Cipher | None = None, make: bool = True) -> Place:
    """A local folder. make: make it, with mode 0700, if it is not there. Raises TierError."""
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        elif not folder.is_dir():
            raise TierError(f"there is no folder {folder}.")
        return Place(LocalStore(str(folder.resolve()), automatic_cleanup=False), str(folder), kind, cipher)
    except (OSError, BaseError) as error:
        raise folder_error(folder, kind, error) from None


def folder_error(folder: Path, kind: str, error: Exception) -> TierError:
    """A folder that can't be used."""
    return TierError(
        f"the {kind} {folder} can't be written ({reason(error)}). Give another folder with --tier disk:DIR:SIZE, or "
        "make this one writable."
    )


def bucket_place(url: str, kind: str = "bucket", cipher: Cipher | None = None) -> Place:
    """A bucket of S3, GCS or Azure, below the prefix in its URL. Credentials come from where the service's own tools
    take them: environment, profile, web identity, instance role. Raises TierError."""
    endpoint = _endpoint(url.partition("://")[0])
    profile = profile_options(url, endpoint is not None)
    endpoint = endpoint or profile.get("config", {}).get("endpoint", "")
    try:
        store = from_url(
            url,
            client_options={
                "timeout": REQUEST_TIMEOUT,
                "connect_timeout": CONNECT_TIMEOUT,
                "allow_http": endpoint.startswith("http://"),  # only where the user names such a server
            },
            retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT},
            **profile,
        )
        return Place(store, url, kind, cipher)
    except (OSError, ValueError, BaseError) as error:
        raise bucket_error(url, kind, error) from None


def _endpoint(scheme: str) -> str | None:
    """The server that the environment names instead of the service's own."""
    if scheme != "gs":
        variables = ENDPOINT_VARIABLES.get(scheme, ())
        return next((os.environ[each] for each in variables if os.environ.get(each)), None)
    file = next((os.environ[each] for each in GOOGLE_VARIABLES if os.environ.get(each)), None)
    if file is None:
        return None
    try:
        account = json.loads(Path(file).read_text())
        return str(account["gcs_base_url"])
    except (OSError, ValueError, LookupError, TypeError):  # obstore reads it too, and says what is wrong with it
        return None


def bucket_error(url: str, kind: str, error: Exception) -> TierError:
    """A bucket that can't be used."""
    return TierError(
        f"the {kind} {url} can't be used ({reason(error)}). Check the bucket's name and region, and the credentials "
        "in the environment or the profile."
    )


def reason(error: Exception) -> str:
    """The first line that says why: obstore appends a trace of its own."""
    text = str(error).strip() or type(error).__name__
    for line in text.splitlines():
        if "os error" in line.lower() or ("denied" in line.lower() and not line.endswith("{")):
            return line.strip().strip('",')
    return text.splitlines()[0][:300]
