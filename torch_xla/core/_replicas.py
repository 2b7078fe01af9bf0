"""Devices of one process that train copies of a model, each from a thread of its own, and meet to average gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_xla._core.execute import barrier as _barrier
from torch_xla._errors import message

Flat = dict[torch.dtype, torch.Tensor]


class ReplicaError(RuntimeError):
    """Another device's loop has ended or failed while this one takes a step."""


class Replicas:
    """The threads of a loop over devices."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._changed = threading.Condition()
        self._here: dict[int, Flat] = {}
        self._step = 0
        self._all: dict[int, Flat] = {}
        self._over: set[int] = set()
        self._failed = False

    @contextmanager
    def joined(self, place: int) -> Iterator[None]:
        """A scope in which this thread is that of a device, by its place among the others."""
        _current.replicas = self, place
        try:
            with _barrier.of_device(self._devices[place].index):
                yield
        except ReplicaError:
            raise  # whoever was first has been told of
        except BaseException:
            self._note_end(place, failed=True)
            raise
        else:
            self._note_end(place)
        finally:
            _current.replicas = None

    def _note_end(self, place: int, failed: bool = False) -> None:
        with self._changed:
            self._over.add(place)
            self._failed = self._failed or failed
            self._changed.notify_all()

    def fail(self) -> None:
        """Lets nobody wait for a device any more."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def meet(self, place: int, flat: Flat) -> list[Flat]:
        """Waits until all are here, and gives what each has brought; ReplicaError where somebody cannot come."""
        with self._changed:
            step = self._step
            self._here[place] = flat
            if len(self._here) == len(self._devices):
                self._all, self._here = self._here, {}
                self._step += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._step > step or self._failed or self._over)
            if self._step == step:
                ended = [str(self._devices[place]) for place in sorted(self._over)]
                raise ReplicaError(
                    message(
                        "data_parallel",
                        f"{self._devices[place]} takes a step and the loop of {', '.join(ended) or 'another'} "
                        + ("has failed" if self._failed else "is over"),
                        expected="as many optimizer steps on each device",
                    )
                )
            return [self._all[other] for other in range(len(self._devices))]


class _Current(threading.local):
    replicas: tuple[Replicas, int] | None = None


_current = _Current()


def average(gradients: list[torch.Tensor]) -> None:
    """Averages gradients over the devices whose threads are joined, in place; does nothing elsewhere.

    Each thread has as many, in the same order as the others'.
    """
    if _current.replicas is None:
        return
    replicas, place = _current.replicas
    with torch.no_grad():
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            kinds.setdefault(gradient.dtype, []).append(gradient)
        flat_gradients = {dtype: torch.cat([g.reshape(-1) for g in members]) for dtype, members in kinds.items()}
        # Each thread computes its own, so that the devices work at the same time.
        _barrier.evaluate(list(flat_gradients.values()), wait=False)
        gathered = replicas.meet(place, flat_gradients)
        for dtype, members in kinds.items():
            sizes = [other[dtype].numel() if dtype in other else 0 for other in gathered]
            if len(set(sizes)) > 1:
                raise ValueError(message("data_parallel", f"gradients of {sizes} values", expected="the same on each"))
            # In the same order everywhere, so that the copies of the model stay equal.
            total = torch.stack([other[dtype].to(members[0].device) for other in gathered]).sum(0)
            parts = (total / len(gathered)).split([g.numel() for g in members])
            for gradient, part in zip(members, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
