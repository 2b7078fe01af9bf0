"""The alias model against CPU tensors: random programs and the cases that have bitten others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import on_both
from hypothesis import given, settings
from oracle import assert_same
from programs import Step, programs, run
from torch import Tensor

import torch_xla
import torch_xla.experimental


def base(device: str) -> Tensor:
    return torch.arange(24.0, device=device).reshape(4, 6)


as_on_cpu = on_both(assert_same)


def check_program(program: list[Step]) -> None:
    ours, theirs = run(program, "xla", torch_xla.sync), run(program, "cpu", lambda: None)
    if isinstance(theirs, str) or isinstance(ours, str):
        assert ours == theirs
        return
    for mine, expected in zip(ours, theirs, strict=True):
        assert_same(mine.detach(), expected)


@pytest.mark.fuzz
@given(programs)
def test_programs_of_views_and_writes(program: list[Step]) -> None:
    check_program(program)


@pytest.mark.fuzz
@settings(max_examples=settings.default.max_examples // 10)  # every operator compiles
@given(programs)
def test_programs_in_eager_mode(program: list[Step]) -> None:
    with torch_xla.experimental.eager_mode_context(True):
        check_program(program)


@as_on_cpu
def test_write_to_the_base_shows_in_its_views(device: str) -> Any:
    x = base(device)
    view = x.t()[1:3]
    x.add_(1)
    return x, view


@as_on_cpu
def test_write_through_a_view_of_a_view_shows_in_the_base(device: str) -> Any:
    x = base(device)
    y = x[1:3]
    z = y[:, 2:4]
    x.add_(1)
    z.add_(y.sum())
    y.copy_(z.sum() * torch.arange(2.0, device=device).unsqueeze(1))
    return x, y, z


@as_on_cpu
def test_a_copy_of_memory_onto_itself_is_none(device: str) -> Any:
    x = base(device)
    one, other = (x.unsqueeze(0).expand(2, 4, 6) for _ in range(2))
    one.copy_(other)  # PyTorch refuses writes to repeated elements, and this is no write
    z = torch.complex(x, x + 1)
    z.copy_(z.conj())
    z[0].copy_(z[0].conj().conj())
    z.imag.copy_(z.conj().imag)
    return x, one, z


@as_on_cpu
def test_parts_of_a_split_alias_their_base(device: str) -> Any:
    x = base(device)
    a, b = x.split(2, 0)
    a.add_(1)
    b.zero_()
    c = x.unbind(1)[2]
    c.mul_(3)
    return x, a, b, c


@as_on_cpu
def test_reshape_of_a_permuted_tensor_copies_where_cpu_copies(device: str) -> Any:
    x = base(device)
    y = x.permute(1, 0).reshape(-1)
    y += 1
    return x, y


@as_on_cpu
def test_as_strided_addresses_the_base_whatever_its_layout(device: str) -> Any:
    x = base(device)
    x.as_strided((2, 2), (6, 1), 1).mul_(0)
    y = x.t().clone()  # dense but not contiguous
    z = y.as_strided((3,), (4,), 2)
    z.add_(100)
    return x, y, z


@as_on_cpu
def test_write_to_one_row_of_an_expanded_tensor_reaches_every_row(device: str) -> Any:
    x = torch.arange(4.0, device=device)
    rows = x.expand(3, 4)
    rows[1].add_(10)
    return x, rows


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1), (3, 2)])
@as_on_cpu
def test_a_write_to_a_part_of_strides_that_repeat_elements(device: str, strides: tuple[int, int]) -> Any:
    x = base(device).flatten()
    rows = x.as_strided((3, 4), strides, 2)
    rows[1].unsqueeze(0).mul_(-3)
    return x, rows


@as_on_cpu
def test_views_of_another_dtype(device: str) -> Any:
    x = base(device)
    bits = x.view(torch.int32)
    bits[0].zero_()
    pairs = x.view(torch.float64)
    return x, bits, pairs.view(torch.float32)


@as_on_cpu
def test_real_and_imaginary_parts_are_views(device: str) -> Any:
    z = torch.complex(base(device), base(device) * 2)
    z.real.add_(1)
    z.imag[0].zero_()
    return z, torch.view_as_real(z)


@as_on_cpu
def test_data_and_detach_share_memory(device: str) -> Any:
    p = torch.nn.Parameter(base(device))
    p.data.add_(1)
    p.detach().mul_(2)
    q = torch.nn.Parameter(base(device))
    q.data = base(device) + 5
    q.data[0] = 0
    return p, q


@as_on_cpu
def test_set_shares_memory_with_its_source(device: str) -> Any:
    x, y = base(device), base(device) + 1
    x.set_(y)
    y.add_(1)
    return x, y


@pytest.mark.parametrize("sizes", [(2, 3), (24,), (5, 6), (0,)])
def test_resize(sizes: tuple[int, ...]) -> None:
    x = base("xla").resize_(*sizes)
    y = base("cpu").resize_(*sizes)
    assert x.shape == y.shape
    kept = min(x.numel(), 24)
    assert_same(x.flatten()[:kept], y.flatten()[:kept])


@as_on_cpu
def test_shape_changes_in_place(device: str) -> Any:
    x = base(device)
    y = x.view(4, 6)
    y.t_().unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    y.add_(1)
    return x, y


def test_out_argument_is_resized() -> None:
    with pytest.warns(UserWarning, match="resized"):
        out = torch.arange(3.0, device="xla")
        torch.add(base("xla"), 1, out=out)
    assert_same(out, base("cpu") + 1)


@as_on_cpu
def test_channels_last_is_kept(device: str) -> Any:
    x = torch.arange(48.0, device=device).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last)
    return x, x + 1, (x * 2).relu()


@as_on_cpu
def test_rows_written_from_themselves_in_another_order(device: str) -> Any:
    x = base(device)
    rows = x.split(3)[0]
    rows.copy_(rows.flip(0))
    rows[0] = 2
    torch_xla.sync()  # compiled: XLA:CPU fuses reads with writes in place
    return (x,)


@as_on_cpu
def test_resize_of_an_out_argument_keeps_what_surrounds_it(device: str) -> Any:
    x = base(device)
    y = x.clone()
    with pytest.warns(UserWarning, match="resized"):
        torch.mul(x.unfold(1, 2, 1), 2, out=y)
    flipped, z = x.t() * 2 + 1, x.clone()
    with pytest.warns(UserWarning, match="resized"):
        torch.mul(flipped, 2, out=z)
    return y, z


@as_on_cpu
def test_copies_of_views_keep_the_order_of_strides(device: str) -> Any:
    x = base(device).unfold(1, 2, 2).diagonal()
    return x.clone(), torch.zeros_like(x), x.to(torch.float64)


@as_on_cpu
def test_swap_of_two_slices(device: str) -> Any:
    x = base(device)
    x[[0, 1]] = x[[1, 0]]
    return (x,)


@as_on_cpu
def test_gradients_through_views_and_writes(device: str) -> Any:
    x = base(device).requires_grad_()
    y = x.clone()
    rows = y.view(3, 8)
    rows[0].mul_(2)
    column = rows.transpose(0, 1)[1]
    column.add_(x.sum())
    (y**2).sum().backward()
    assert x.grad is not None
    return x.grad, y
