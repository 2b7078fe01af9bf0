"""Small whole numbers stay on the host until a program takes them."""

import pytest
import torch

import torch_xla
from torch_xla.debug import metrics


def sent():
    data = metrics.metric_data("OutboundData")
    return data[0] if data else 0


def test_tokens_that_no_program_takes_are_not_sent():
    before = sent()
    tokens = torch.tensor([[3, 1, 2]]).to("xla")
    assert tokens.cpu().tolist() == [[3, 1, 2]]
    assert sent() == before


def test_a_program_takes_them_once():
    table, tokens = torch.randn(5, 4), torch.tensor([3, 1])
    on_device, taken = table.to("xla"), tokens.to("xla")
    torch_xla.sync()
    before = sent()
    for _ in range(2):
        result = on_device[taken]
        torch_xla.sync()
        torch.testing.assert_close(result.cpu(), table[tokens])
    assert sent() == before + 1


def test_what_the_program_does_to_the_source_is_not_seen():
    tokens = torch.tensor([1, 2, 3])
    held = tokens.to("xla")
    tokens.add_(1)
    read = held.cpu()
    read.mul_(0)
    assert held.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_writes_and_views(dtype):
    numbers = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=dtype)
    held = numbers.to("xla")
    clone, part = held.clone(), held[:, 1:]
    held[0, 0] = 0
    part.fill_(1)
    expected = numbers.clone()
    expected[0, 0] = 0
    expected[:, 1:].fill_(1)
    assert torch.equal(held.cpu(), expected) and torch.equal(clone.cpu(), numbers)


def test_large_and_fractional_ones_are_sent_at_once():
    before = sent()
    kept = torch.zeros(1 << 17, dtype=torch.int64).to("xla"), torch.zeros(3).to("xla")
    assert sent() == before + len(kept)
