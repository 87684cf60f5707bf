"""AdapterTable: finds the adapter that a request names, and the present version of its files. InlineAdapters:
adapters whose weights come with requests, stored in the run directory.

    incoming/TENANT-CLIENT-TASK-DIGEST-SIZE   parts received so far, by any tokenizer
    kept/TENANT-KIND-TASK              complete; the scheduler decides whether it is kept, and removes it
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import time
from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

import msgspec

from runtime.base.errors import AdapterNotResident, Forbidden, InvalidRequest, Overloaded, RequestError
from runtime.checkpoint.adapters.cpu_limit import CpuLimit, TookTooLong
from runtime.checkpoint.adapters.lora_config import CONFIG_FILE, WEIGHTS_FILE
from runtime.checkpoint.adapters.prompt_table import AdapterFiles, read_files
from runtime.checkpoint.weight_files import header_bytes
from runtime.ring.adapters_file import AdaptersFile, KeptAdapter, incoming_in, kept_in, read_kept, write_kept
from runtime.ring.tenants import OWNER, Tenant
from runtime.wire.messages import ControlRequest
from runtime.wire.plan import NO_LORA, AdapterPiece, AdapterRef

PARAM = "lora_request"
TABLE_PARAM = "prompt_adapter_request"
TASK = {"lora": "task", "prompt": "table"}
"""Prefix of the names of adapters that came with requests, before their number."""
MAX_KNOWN = 4096
"""Maximum number of directories whose version is remembered."""
PARAMS = {"lora": "lora_config", "prompt": "prompt_tuning_config"}
INCOMING_S = 600.0
"""Seconds without a new part after which an upload is given up."""
MAX_UPLOADS = 256
"""Maximum number of uploads at once: each takes at least its part of the room, since it has a config and a
directory, however small its weights are.
"""
MAX_UPLOAD_CONFIG_BYTES = 1 << 18
"""Maximum size of the config that a tenant sends, which takes up to 17 ms to decode."""
MAX_UPLOAD_HEADER_BYTES = 1 << 19
"""Maximum size of the header of weights that a tenant sends: two tensors of 1,500 modules, or 45 ms."""
READ_S = 0.05
"""CPU time for a tenant's upload to be read. Those of 882 modules take 7 ms, with a hundred patterns 36."""
NO_SUCH_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors of a directory that the caller has named or filled. All others are the server's."""
PieceAnswer: TypeAlias = dict[str, int | bool]

logger = logging.getLogger(__name__)


class InlineAdapters:
    """Adapters whose weights come with requests. Used in the tokenizer's thread only. Every tenant that may
    generate may upload adapters for its own key.
    """

    def __init__(self, folder: Path, max_rank: int, max_bytes: int) -> None:
        """Store adapters in `folder`. max_bytes: of one adapter's weights."""
        self._folder = folder
        self._max_rank = max_rank
        self._max_bytes = max_bytes

    def path_of(self, kind: str, number: int, tenant: str) -> Path:
        """Return the directory of a tenant's weights. Raises AdapterNotResident."""
        path = self._path(kind, tenant, number)
        if not path.is_dir():
            raise not_resident(kind, number)
        return path

    def take(self, piece: AdapterPiece, client: int, tenant: str) -> PieceAnswer | AdapterPiece:
        """Take a part of an upload by a client of the tenant. Returns the answer for the client or, once all
        parts are there, the message for the scheduler. Raises InvalidRequest for a fault of the caller's,
        Overloaded if there is no room now, and RequestError if the disk fails or is full.
        """
        if piece.size > self._max_bytes:
            raise InvalidRequest(
                f"{PARAMS[piece.kind]}: weights of {piece.size} bytes; the cache has {self._max_bytes} "
                "(--lora-host-cache-size)",
                param=PARAMS[piece.kind],
                code="request_too_large",
            )
        kept = read_kept(self._path(piece.kind, tenant, piece.task_id))
        if kept is not None:
            if kept.digest != piece.digest:
                raise _refused(piece, f"task_id {piece.task_id} stands for other weights")
            return {"is_resident": True}
        incoming = incoming_in(self._folder)
        name = f"{_who(tenant)}-{client:x}-{piece.task_id:x}-{piece.digest[:16]}-{piece.size:x}"
        try:
            if piece.folder:
                shutil.rmtree(
                    incoming / name, ignore_errors=True
                )  # the question whether the weights are there has begun it
                source = incoming / piece.folder
                if source.parent != incoming or not piece.folder[0].isalnum() or not source.is_dir():
                    raise _refused(piece, "there is no such directory")
                return self._place(source, piece, tenant)
            return self._append(incoming / name, piece, tenant)
        except OSError as error:
            shutil.rmtree(incoming / (piece.folder or name), ignore_errors=True)
            if error.errno in NO_SUCH_FILE:
                raise _refused(piece, f"the weights cannot be read: {error.strerror}") from None
            logger.error("the weights of an adapter cannot be kept in %s: %s", incoming, error.strerror)
            param = PARAMS[piece.kind]
            raise RequestError(
                f"{param}: the server cannot keep the weights ({error.strerror}); this is no fault of the "
                "request, and its log says where",
                param=param,
            ) from None

    def _append(self, folder: Path, piece: AdapterPiece, tenant: str) -> PieceAnswer | AdapterPiece:
        if piece.config:
            if tenant != OWNER and len(piece.config) > MAX_UPLOAD_CONFIG_BYTES:
                raise _too_large(piece, "a config", len(piece.config), MAX_UPLOAD_CONFIG_BYTES)
            shutil.rmtree(folder, ignore_errors=True)
            self._make_room(folder.parent, piece, _who(tenant))
            folder.mkdir(parents=True, mode=0o700)
            (folder / CONFIG_FILE).write_bytes(piece.config)
            (folder / WEIGHTS_FILE).touch()
            return {"is_resident": False, "offset": 0}
        file = folder / WEIGHTS_FILE
        there = file.stat().st_size if file.exists() else -1
        if piece.offset + len(piece.data) > piece.size or not piece.data:
            raise _refused(piece, "a piece beyond the end")
        if there == piece.offset:
            with file.open("ab") as out:
                out.write(piece.data)
            os.utime(folder)  # the time of the latest progress
        elif there < piece.offset + len(piece.data):  # if not less, the piece was sent again after a restart
            raise _refused(piece, "the pieces are not in order; send them again")
        if piece.offset + len(piece.data) < piece.size:
            return {"is_resident": False, "offset": piece.offset + len(piece.data)}
        return self._place(folder, piece, tenant)

    def _place(self, source: Path, piece: AdapterPiece, tenant: str) -> AdapterPiece:
        """Check a complete directory, and move it to where requests look for it."""
        try:
            weights = source / WEIGHTS_FILE
            if weights.is_symlink() or weights.stat().st_size != piece.size:
                raise _refused(piece, "the weights are not as long as was said")
            try:
                config = self._read(source, piece, tenant)
            except InvalidRequest as error:
                reason = error.message.replace(f"the adapter in {source}", PARAMS[piece.kind])
                reason = reason.replace(f"{source}/", "")
                raise InvalidRequest(reason, param=PARAMS[piece.kind], code=error.code) from None
            # The time is part of the version: the same weights have the same one whenever they come, so
            # that what the KV cache holds of them is found again.
            time_ns = int(piece.digest[:15], 16)
            os.utime(weights, ns=(time_ns, time_ns))
            num_bytes = piece.size + (source / CONFIG_FILE).stat().st_size
            write_kept(source, KeptAdapter(piece.digest, piece.task_id, config.num_rows, num_bytes))
            path = self._path(piece.kind, tenant, piece.task_id)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            source.rename(path)
        except BaseException:
            shutil.rmtree(source, ignore_errors=True)
            raise
        return msgspec.structs.replace(
            piece, config=b"", data=b"", folder="", num_rows=config.num_rows, path=str(path)
        )

    def _read(self, source: Path, piece: AdapterPiece, tenant: str) -> AdapterFiles:
        """Read a complete directory. Raises InvalidRequest, also where that would take a tenant's long."""
        if tenant == OWNER:
            return read_files(source, self._max_rank, is_table=piece.kind == "prompt")
        num_bytes = header_bytes(source / WEIGHTS_FILE)
        if num_bytes > MAX_UPLOAD_HEADER_BYTES:
            raise _too_large(piece, "a header", num_bytes, MAX_UPLOAD_HEADER_BYTES)
        try:
            with CpuLimit(READ_S):
                return read_files(source, self._max_rank, is_table=piece.kind == "prompt")
        except TookTooLong:
            raise _refused(piece, "its names and patterns take too long to read") from None

    def _make_room(self, incoming: Path, piece: AdapterPiece, who: str) -> None:
        """Give up uploads that make no progress and, for a tenant that stays within an equal part of the
        room, those of tenants with more that have rested longest. Raises Overloaded if there is no room then.
        """
        least = self._max_bytes // MAX_UPLOADS
        needed = max(piece.size, least)
        sizes: dict[str, dict[Path, int]] = {who: {}}
        for changed_s, folder in _by_age(incoming):
            if time.time() - changed_s > INCOMING_S:
                shutil.rmtree(folder, ignore_errors=True)
            elif "-" in folder.name:
                holder, *_, size = folder.name.split("-")
                sizes.setdefault(holder, {})[folder] = max(int(size, 16), least)
        sums = {holder: sum(own.values()) for holder, own in sizes.items()}
        part = self._max_bytes // len(sums)
        while sum(sums.values()) + needed > self._max_bytes:
            most = max(sums, key=lambda each: sums[each])
            if sums[who] + needed > part or sums[most] <= part:
                raise Overloaded(
                    f"{PARAMS[piece.kind]}: others send as much as may come at once; try again later"
                )
            folder = next(iter(sizes[most]))
            sums[most] -= sizes[most].pop(folder)
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, kind: str, tenant: str, task_id: int) -> Path:
        return kept_in(self._folder) / f"{_who(tenant)}-{kind}-{task_id}"


def _by_age(folder: Path) -> list[tuple[float, Path]]:
    """Return the directories in a directory with the times of their last changes, the oldest first. One that
    another tokenizer removes or completes meanwhile is left out.
    """
    found: list[tuple[float, Path]] = []
    for each in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            found.append((each.stat().st_mtime, each))
    return sorted(found)


def _who(tenant: str) -> str:
    """Return the part of the names of directories that stands for a tenant."""
    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest() if tenant else "owner"


def _too_large(piece: AdapterPiece, what: str, num_bytes: int, limit: int) -> InvalidRequest:
    return _refused(piece, f"{what} of {num_bytes} bytes; an adapter that is sent may have {limit}")


def _refused(piece: AdapterPiece, what: str) -> InvalidRequest:
    param = PARAMS[piece.kind]
    return InvalidRequest(f"{param}: {what}", param=param)


def not_resident(kind: str, number: int) -> AdapterNotResident:
    """Return the error for a task id whose adapter or prompt table is not kept."""
    what = f"the weights of task_id {number}" if kind == "lora" else "the vectors"
    param = PARAMS[kind]
    return AdapterNotResident(f"{param}: {what} are not kept, or no longer; send them again", param=param)


class AdapterTable:
    """Adapters that requests may name. listed: adapters served by name; None: no adapters are served. inline:
    adapters that came with requests.
    """

    def __init__(
        self,
        listed: AdaptersFile | None = None,
        max_rank: int = 0,
        inline: InlineAdapters | None = None,
    ) -> None:
        self._listed = listed
        self._max_rank = max_rank
        self._inline = inline
        self._versions: OrderedDict[tuple[str, str], tuple[object, AdapterFiles]] = OrderedDict()

    def resolved(self, asked: AdapterRef | None, tenant: str) -> AdapterRef | None:
        """Return the adapter with its path and version. Raises InvalidRequest if it cannot be served,
        Forbidden for a path given by a tenant other than the owner.
        """
        if asked is None:
            return None
        if self._listed is None:
            raise InvalidRequest(NO_LORA, param=PARAM, code="lora_not_enabled")
        if not asked.name:
            return self._of_task(asked, tenant, "lora")
        if not asked.path:
            known = self._listed.read().get(asked.name)
            if known is None:
                raise InvalidRequest(
                    f"lora_request: there is no adapter {asked.name!r:.100}",
                    param=PARAM,
                    code="unknown_adapter",
                )
            asked = AdapterRef(asked.name, known.id, "", known.path, known.pinned)
        elif tenant != OWNER:
            raise Forbidden("lora_request: this key may name adapters of the launch, and no paths")
        else:
            asked = msgspec.structs.replace(asked, pinned=False)
        return _with_files(asked, self._known(asked.path, "lora", PARAM))

    def resolved_table(self, asked: AdapterRef | None, tenant: str) -> AdapterRef | None:
        """Return a prompt table with its version and size. Raises as `resolved`."""
        if asked is None:
            return None
        if self._listed is None:
            raise InvalidRequest(NO_LORA, param=TABLE_PARAM, code="lora_not_enabled")
        if not asked.name:
            return self._of_task(asked, tenant, "prompt")
        if tenant != OWNER:
            raise Forbidden(f"{TABLE_PARAM}: this key may name no paths")
        return _with_files(
            msgspec.structs.replace(asked, pinned=False), self._known(asked.path, "prompt", TABLE_PARAM)
        )

    def put(self, message: ControlRequest, tenant: Tenant) -> PieceAnswer | ControlRequest:
        """Handle a put_adapter call of a tenant. Returns the answer for the caller or, once all parts are
        there, the call to be passed to the scheduler. Raises Forbidden, and as `InlineAdapters.take`.
        """
        piece = message.adapter
        assert piece is not None
        if not tenant.may("user"):
            raise Forbidden("lora_config: this key may not generate")
        if self._inline is None:
            raise InvalidRequest(NO_LORA, param=PARAMS[piece.kind], code="lora_not_enabled")
        taken = self._inline.take(piece, message.client, message.tenant)
        return msgspec.structs.replace(message, adapter=taken) if isinstance(taken, AdapterPiece) else taken

    def _of_task(self, asked: AdapterRef, tenant: str, kind: str) -> AdapterRef:
        assert self._inline is not None
        path = str(self._inline.path_of(kind, asked.id, tenant))
        try:
            known = self._known(path, kind, PARAMS[kind])
        except InvalidRequest:  # it was removed meanwhile
            raise not_resident(kind, asked.id) from None
        return _with_files(AdapterRef(f"{TASK[kind]}-{asked.id}", asked.id, "", path), known)

    def _known(self, path: str, kind: str, param: str) -> AdapterFiles:
        """Return the properties of an adapter's files, which are read again if they have changed."""
        stamp = _stamp(path)
        known = self._versions.get((kind, path))
        if known is None or known[0] != stamp:
            try:
                known = stamp, read_files(Path(path), self._max_rank, is_table=kind == "prompt")
            except InvalidRequest as error:
                raise InvalidRequest(error.message, param=param, code=error.code) from None
            self._versions[kind, path] = known
            if len(self._versions) > MAX_KNOWN:
                self._versions.popitem(last=False)
        return known[1]


def _with_files(ref: AdapterRef, files: AdapterFiles) -> AdapterRef:
    return msgspec.structs.replace(
        ref, version=files.version, num_rows=files.num_rows, num_virtual=files.num_virtual
    )


def _stamp(path: str) -> object:
    """Return size and time of the files; None if one is missing, which is then checked anew, and refused,
    each time.
    """
    try:
        both = [os.stat(os.path.join(path, name)) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):
        return None
    return tuple((each.st_size, each.st_mtime_ns, each.st_ino) for each in both)
