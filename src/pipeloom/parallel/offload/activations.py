"""`OffloadedActivations`: the tensors that forwards save, in a store until their backwards.

Hooks on saved tensors record each storage once, also where several tensors view it. Parameters, buffers, the batch and
keys and values of slices have other owners, so offloading them would free nothing. Small storages are not worth a
transfer. The leaf of the graph that is the stage's input stays, without its values.

A tensor may be unpacked several times, by a split backward and by autograd: each time it is made from its storage.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.autograd.split_backward import Repeatable
from pipeloom.engine.activation_mover import ActivationMover, Key
from pipeloom.engine.overlap_times import OverlapTimes, Wait
from pipeloom.errors import RunError
from pipeloom.ir import Action, Op
from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.offload.store import Region, Store, aligned, open_store, queued_work
from pipeloom.parallel.options import OffloadActivations, OffloadTarget

_MOST_WRITES = 2  # queued or running; activations that wait for a write still take memory


@dataclass(eq=False, slots=True)
class _Piece:
    """One storage; None while it is offloaded."""

    storage: torch.UntypedStorage | None
    num_bytes: int
    device: torch.device


class _Watched:
    """A saved tensor that must not change in place: with hooks, autograd leaves this check to them."""

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._alias, self._version = tensor.detach(), tensor._version  # which has the same counter, and no graph

    def check(self) -> None:
        """Raises what autograd would."""
        now = self._alias._version
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._alias.type()} {list(self._alias.shape)}] is at version {now}; expected version "
                f"{self._version} instead"
            )


class _Noted(Repeatable):
    """A tensor in a storage that may be offloaded; watched while it is in memory."""

    __slots__ = ("dtype", "offset", "piece", "shape", "stride", "watched")

    def __init__(self, piece: _Piece, tensor: Tensor) -> None:
        self.piece, self.dtype = piece, tensor.dtype
        self.offset, self.shape, self.stride = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.watched: _Watched | None = _Watched(tensor)

    def tensor(self) -> Tensor:
        if self.watched is not None:
            self.watched.check()
        storage = self.piece.storage
        if storage is None:
            raise RunError(
                f"saved tensor of shape {tuple(self.shape)}, {self.dtype}, is still offloaded: its backward runs "
                "before its RELOAD. For your own program, run pipeloom.check(program); otherwise this is a bug of "
                "pipeloom."
            )
        made = torch.empty(0, dtype=self.dtype, device=self.piece.device)
        return made.set_(storage, self.offset, self.shape, self.stride)


class _Left(Repeatable):
    """A tensor that stays in memory."""

    __slots__ = ("_tensor", "_watched")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._watched = tensor, _Watched(tensor)

    def tensor(self) -> Tensor:
        self._watched.check()
        return self._tensor


@dataclass(eq=False)
class _Entry:
    """The tensors that one forward saved.

    Attributes:
        pieces: by storage (``_cdata``), until they are offloaded.
        noted: all tensors in them, until some are offloaded.
        leaves: inputs whose values are offloaded, with these values.
        region: of the store.
        placed: offloaded pieces, each with its part of the region, in whole pages.
        written, back: the transfers.
    """

    pieces: dict[int, _Piece] = field(default_factory=dict)
    noted: list[_Noted] = field(default_factory=list)
    leaves: list[tuple[Tensor, _Noted]] = field(default_factory=list)
    region: Region | None = None
    placed: list[tuple[_Piece, Region]] = field(default_factory=list)
    written: Future[None] | None = None
    back: Future[None] | None = None


class OffloadedActivations(ActivationMover):
    """The activations of one rank. Ranks of one process may share the store. Storages below `least_bytes` stay."""

    def __init__(self, store: Store, least_bytes: int) -> None:
        self._mover = Mover(store)
        self._least_bytes = least_bytes
        self._entries: dict[Key, _Entry] = {}
        self._writes: deque[Future[None]] = deque()
        self.times = OverlapTimes()
        self.moved_bytes = 0

    @property
    def wait_seconds(self) -> float:  # type: ignore[override]
        return self._mover.wait_seconds

    @contextmanager
    def catching(self, key: Key) -> Iterator[None]:
        entry = self._entries[key] = _Entry()
        with saved_tensors_hooks(partial(self._pack, entry), methodcaller("tensor")):
            yield

    def _pack(self, entry: _Entry, tensor: Tensor) -> _Noted | _Left:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.untyped_storage().nbytes() < self._least_bytes:
            return _Left(tensor)
        return self._note(entry, tensor)

    def _note(self, entry: _Entry, tensor: Tensor) -> _Noted:
        storage = tensor.untyped_storage()
        piece = _Piece(storage, storage.nbytes(), storage.device)
        noted = _Noted(entry.pieces.setdefault(storage._cdata, piece), tensor)
        entry.noted.append(noted)
        return noted

    def offload(self, key: Key, leaves: Sequence[Tensor], held: Set[int]) -> None:
        entry = self._entries[key]
        for leaf in leaves:
            storage = leaf.untyped_storage()
            if storage._cdata not in held and storage.nbytes() >= self._least_bytes:
                entry.leaves.append((leaf, self._note(entry, leaf)))
        # Gathered parameters are freed by resizing their storages, so storages of another size are theirs.
        there = [(piece, piece.storage) for number, piece in entry.pieces.items() if number not in held]
        pieces = [piece for piece, storage in there if storage is not None and storage.nbytes() == piece.num_bytes]
        entry.pieces.clear()
        going, noted = set(map(id, pieces)), entry.noted
        entry.noted = []
        if not pieces:
            return
        for one in noted:
            if id(one.piece) in going and one.watched is not None:
                one.watched.check()
                one.watched = None  # it would hold the storage
        while len(self._writes) >= _MOST_WRITES:
            self._wait(self._writes.popleft())
        entry.region, offset = self._mover.store.reserve(sum(aligned(piece.num_bytes) for piece in pieces)), 0
        for piece in pieces:
            entry.placed.append((piece, entry.region.part(offset, aligned(piece.num_bytes))))
            offset += aligned(piece.num_bytes)
        for leaf, _ in entry.leaves:
            leaf.data = leaf.new_empty(0)
        self.moved_bytes += 2 * sum(piece.num_bytes for piece in pieces)
        action = Action(key[0], Op.OFFLOAD, *key[1:])
        entry.written = self._mover.write(self._write, action, entry, queued_work(pieces[0].device))
        self._writes.append(entry.written)

    def _write(self, action: Action, entry: _Entry, ready: Wait) -> None:
        ended = self.times.started(action)
        ready()
        for piece, region in entry.placed:
            assert piece.storage is not None
            self._mover.store.write(region, torch.empty(0, dtype=torch.uint8, device=piece.device).set_(piece.storage))
            piece.storage = None
        ended()

    def reload(self, key: Key) -> None:
        entry = self._entries[key]
        if entry.region is None:
            return
        # Allocated here: GPU memory belongs to the stream that allocates it.
        rooms = [torch.empty(piece.num_bytes, dtype=torch.uint8, device=piece.device) for piece, _ in entry.placed]
        action = Action(key[0], Op.RELOAD, *key[1:])
        entry.back = self._mover.read(self._read, action, entry, rooms, queued_work(rooms[0].device))

    def _read(self, action: Action, entry: _Entry, rooms: list[Tensor], ready: Wait) -> None:
        assert entry.written is not None
        entry.written.result()
        ready()
        ended = self.times.started(action)
        for (piece, region), room in zip(entry.placed, rooms, strict=True):
            self._mover.store.read(region, room)
            piece.storage = room.untyped_storage()
        ended()

    def _wait(self, move: Future[None]) -> None:
        with self.times.waiting():
            self._mover.wait(move)

    def arrive(self, key: Key) -> None:
        entry = self._entries.pop(key)
        if entry.region is None:
            return
        if entry.back is None:
            raise RunError(
                f"activations of {key} are still offloaded: RELOAD must come before the backward. Check the program."
            )
        self._wait(entry.back)
        for leaf, noted in entry.leaves:
            leaf.data = noted.tensor()
        self._mover.store.release(entry.region)

    def forget(self) -> None:
        for entry in self._entries.values():
            for move in (entry.written, entry.back):
                if move is not None:
                    with suppress(Exception):  # raised where it was awaited
                        move.result()
            if entry.region is not None:
                self._mover.store.release(entry.region)
        self._entries.clear()
        self._writes.clear()

    def close(self) -> None:
        self._mover.close()


def open_activation_offload(options: OffloadActivations, device: torch.device) -> Callable[[], ActivationMover]:
    """A function that makes the mover of each rank of this process. The ranks share one store.

    Raises:
        InputError: the offload target is the device's own memory.
    """
    target = OffloadTarget.parse(options.where)
    target.check_device(device.type, f"offload={options.where!r}", "activations")
    store = open_store(target)
    return lambda: OffloadedActivations(store, options.least_bytes)
