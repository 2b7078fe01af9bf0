"""Compiling: it takes what it needs, and nothing of JAX that the user sees is changed."""

from __future__ import annotations

import os
import select
import termios

import jax
import jax.numpy as jnp
import pytest
import torch
from probes import python

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache, compiler, interruptible
from torch_xla._core.graph import graph

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def step() -> torch.Tensor:
    y = torch.arange(24.0).reshape(4, 6).to("xla").tanh() * 2.5
    torch_xla.sync()
    return y


class TestTheUsersJax:
    def test_the_environment_is_not_written(self) -> None:
        step()  # what PyTorch imports for it may write a folder of its own
        cache.clear()
        before = dict(os.environ)
        step()
        assert dict(os.environ) == before

    def test_64_bit_types_stay_off_for_it(self) -> None:
        wide = torch.arange(3).to("xla") * 5_000_000_000 + torch.arange(3, device="xla")
        torch_xla.sync()
        assert wide.tolist() == [0, 5_000_000_001, 10_000_000_002]
        assert not jax.config.jax_enable_x64
        assert jnp.arange(3).dtype == jnp.int32
        assert (jnp.arange(3.0) * 2).dtype == jnp.float32
        assert jax.jit(lambda: jnp.zeros(3) + 1)().dtype == jnp.float32

    def test_64_bit_types_stay_on_for_it(self) -> None:
        with jax.enable_x64(True):
            narrow = step()
            assert jnp.arange(3).dtype == jnp.int64
        assert narrow.dtype == narrow.cpu().dtype == torch.float32
        assert not jax.config.jax_enable_x64

    def test_its_settings_do_not_reach_our_numbers(self) -> None:
        with jax.numpy_dtype_promotion("strict"):
            x = torch.linspace(0, 1, 64).reshape(8, 8).to("xla")
            y = x @ x + torch.arange(8, device="xla")
            torch_xla.sync()
        torch.testing.assert_close(y.cpu(), x.cpu() @ x.cpu() + torch.arange(8))


@pytest.mark.own_client("programs call the host")
def test_an_executable_knows_whether_it_must_be_waited_for() -> None:
    x = torch.linspace(0, 1, 6).to("xla")
    for y, waits in ((x.sin(), False), (torch.special.airy_ai(x), True)):
        cut = _bindings.Cut.of_tensors([y]).preview()
        lowered = compiler.lower(graph.describe(cut), "graph")
        assert compiler.compile_lowered(cut, lowered, "graph").program.waits == waits


class TestSlowCompiles:
    """The line of a compile that takes long, and an interrupt of one."""

    def script(self, code: str, terminal: bool) -> str:
        """Output of a program, run on a terminal of a hundred columns or on a pipe."""
        prelude = (
            "import sys, time\nfrom torch_xla._core.compile import interruptible\n"
            "interruptible._PATIENCE_SECONDS = 0.2\n"
        )
        if not terminal:
            done = python("-c", prelude + code, imported=True)
            return done.stdout + done.stderr
        import pty

        main, other = pty.openpty()
        termios.tcsetwinsize(other, (30, 100))
        there = f"import os\nfor place in (1, 2): os.dup2(os.open({os.ttyname(other)!r}, os.O_RDWR), place)\n"
        python("-c", there + prelude + code, imported=True)
        seen = b""
        while select.select([main], [], [], 0)[0]:
            seen += os.read(main, 4096)
        os.close(main)
        os.close(other)
        return seen.decode()

    def test_a_line_on_a_terminal(self) -> None:
        text = self.script("print(interruptible.call(lambda: time.sleep(1.5) or 5, 'compiling train'))", terminal=True)
        assert "compiling train 00:01" in text and text.strip().endswith("5")
        assert "compiling" not in self.script(
            "interruptible.call(lambda: time.sleep(0.5), 'compiling train')", terminal=False
        )

    def test_nothing_where_it_is_quick(self) -> None:
        assert self.script("print(interruptible.call(lambda: 5, 'compiling train'))", terminal=True).strip() == "5"

    def test_what_it_raises_is_raised(self) -> None:
        def fail() -> None:
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            interruptible.call(fail, "compiling")
        assert "ValueError: late" in self.script(
            "def fail():\n    time.sleep(0.6)\n    raise ValueError('late')\n"
            "try: interruptible.call(fail, 'x')\nexcept ValueError as e: print(f'{type(e).__name__}: {e}')",
            terminal=True,
        )

    def test_interrupts_come_out_as_themselves(self) -> None:
        """However they fall into the start of the thread and the waits for it."""
        code = (
            "import signal\nfrom collections import Counter\nclass Stop(BaseException): pass\n"
            "def stop(*_): raise Stop\n"
            "signal.signal(signal.SIGALRM, stop)\nfound, end, turn = Counter(), time.monotonic() + 2.5, 0\n"
            "while time.monotonic() < end:\n    turn += 1\n"
            "    try:\n        signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 400 * 1e-6)\n"
            "        try: interruptible.call(lambda: time.sleep(0.0002), 'x')\n"
            "        finally: signal.setitimer(signal.ITIMER_REAL, 0)\n"
            "    except BaseException as error: found[type(error).__name__] += 1\n"
            "print(sorted(found))"
        )
        assert "['Stop']" in self.script(code, terminal=False).splitlines()
