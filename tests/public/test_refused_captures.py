"""`torch_xla.Graph`: what cannot be captured or replayed says so at its place, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from test_captured_graph import captured, nothing_is_captured, ones  # noqa: F401
from torch import Tensor, nn

import torch_xla
import torch_xla.core.xla_model as xm


def _recorded_elsewhere(x: Tensor) -> None:
    raised: list[BaseException] = []

    def record() -> None:
        try:
            x.add_(1)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=record)
    thread.start()
    thread.join()
    assert raised
    raise raised[0]


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("what", "refused"),
        [
            ("a read", lambda x: x.tolist()),
            ("a read", lambda x: (x + 1).sum().item()),
            ("a read", lambda x: x.cpu()),
            ("a read", lambda x: x.nonzero()),
            ("a barrier", lambda x: torch_xla.sync()),
            ("a wait", lambda x: xm.wait_device_ops()),
            ("a capture", lambda x: captured(lambda: x + 1)),
            ("a tensor that is resized", lambda x: x.untyped_storage().resize_(0)),
            ("an operator of another thread", _recorded_elsewhere),
        ],
    )
    def test_within(self, what: str, refused: Callable[[Tensor], Any]) -> None:
        x, kept = ones(3), ones(2)

        def step() -> None:
            x.add_(1)
            refused(x)

        with pytest.raises(RuntimeError, match=rf"^\[graph\] got {what}.* while a graph is captured.*, expected .*; "):
            captured(step)
        assert x.tolist() == [1] * 3 and kept.tolist() == [1] * 2
        graph, _ = captured(lambda: x.add_(1))
        graph.replay()
        assert x.tolist() == [2] * 3

    def test_the_line_is_told(self) -> None:
        x = ones(3)
        with pytest.raises(RuntimeError, match=r"got a read while a graph is captured, at .*refused_captures.py:\d+"):
            captured(lambda: x.sum().item())

    def test_a_replay_within(self) -> None:
        x = ones(3)
        graph, _ = captured(lambda: x.add_(1))
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a replay while a graph is captured"):
            captured(graph.replay)
        graph.replay()
        assert x.tolist() == [2] * 3

    def test_a_region_within(self) -> None:
        x = ones(3)
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a barrier while"):
            captured(torch_xla.compile(lambda: x + 1))

    def test_an_error_of_the_program_loses_nothing(self) -> None:
        x = ones(3)
        made = []

        def step() -> None:
            made.append(x.add_(1) * 2)
            raise KeyError("of the user's")

        with pytest.raises(KeyError, match="of the user's"):
            captured(step)
        assert x.tolist() == [1] * 3
        with pytest.raises(RuntimeError, match="made while a graph was captured"):
            made[0].tolist()

    def test_a_graph_that_cannot_be_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch_xla._core.compile import compiler

        x = ones(3)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no compiler today"):
            patch.setattr(compiler, "lower", Mock(side_effect=RuntimeError("no compiler today")))
            captured(lambda: x.mul_(1.5).erfinv_())
        assert x.tolist() == [1] * 3

    def test_memory_that_was_resized_since(self) -> None:
        x, y = ones(3), ones(3)
        graph, _ = captured(lambda: y.add_(x))
        x.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"^\[storage\] the tensor's memory was freed"):
            graph.replay()
        x.untyped_storage().resize_(100)
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a tensor that was resized since the capture"):
            graph.replay()
        assert y.tolist() == [1] * 3

    @pytest.mark.parametrize("capturable", [False, True])
    def test_optimizers_that_count_on_the_host(self, capturable: bool) -> None:
        weight = nn.Parameter(ones(3))
        optimizer = torch.optim.Adam([weight], lr=0.1, capturable=capturable)

        def step() -> None:
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()

        step()
        if capturable:
            captured(step)[0].replay()
            assert optimizer.state[weight]["step"].item() == 2
            return
        with pytest.raises(RuntimeError, match=r"^\[graph\] got a step of Adam, which changes 'step' on the host"):
            captured(step)
        assert optimizer.state[weight]["step"].item() == 1
