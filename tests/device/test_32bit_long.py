"""``XLA_USE_32BIT_LONG``: integers of 64 bits keep their dtype for PyTorch and have 32 bits on the device."""

from __future__ import annotations

import pytest
from probes import python

START = """
import torch, torch_xla
import torch_xla.debug.metrics as met
from torch_xla import _XLAC

LIMITS = torch.iinfo(torch.int64)
DEVICE = torch.device("xla")
"""

PROGRAMS = {
    "dtypes and the device's types": """
a = torch.tensor([2, 3], device=DEVICE)
b = torch.tensor([2, 3], dtype=torch.uint64, device=DEVICE)
assert a.dtype == (a + a).dtype == torch.arange(3, device=DEVICE).dtype == torch.int64
for tensor, name in ((a + a, "s32"), (b + b, "u32")):
    assert f"xla::device_data(), {name}[2]" in _XLAC._get_xla_tensors_text([tensor])
    hlo = _XLAC._get_xla_tensors_hlo([tensor])
    assert f"{name}[2]" in hlo and "64[" not in hlo, hlo
    assert tensor.tolist() == [4, 6]
met.clear_all()
torch.zeros(1000, dtype=torch.int64).to(DEVICE)
torch_xla.sync(wait=True)
assert met.metric_data("OutboundData")[1] == 4000
""",
    "numbers that do not fit": """
a = torch.tensor([2, LIMITS.min, LIMITS.max], device=DEVICE)
least, most = -(1 << 31), (1 << 31) - 1
assert a.tolist() == [2, least, most]
assert a.masked_fill(a < 5, LIMITS.max).tolist() == [most] * 3
assert torch.where(a < 5, LIMITS.min, a).tolist() == [least, least, most]
assert torch.full((300,), LIMITS.min, device=DEVICE).unique().tolist() == [least]
assert a.max().item() == most and a.argmin().item() == 1
""",
    "operators": """
def work(device):
    x = torch.arange(12, device=device).reshape(3, 4)
    rows = torch.tensor([2, 0], device=device)
    first = x[rows], x.gather(1, x % 4), x.cumsum(1), x.sum(), x.float().mean(0), x.argsort(descending=True), x @ x.T
    more = x // 5, x % 5, x << 2, -x, x.to(torch.int32), x[x > 3], torch.nonzero(x % 2), x.prod(1)
    last = torch.bincount(rows), torch.searchsorted(x[0], rows), torch.put(x, rows, rows), x.double() / 3
    return [*first, *more, *last]
for ours, theirs in zip(work(DEVICE), work("cpu"), strict=True):
    torch.testing.assert_close(ours.cpu(), theirs)
""",
    "training": """
torch.manual_seed(0)
def losses(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Flatten(), torch.nn.Linear(24, 5)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=False)
    tokens, classes = torch.tensor([[1, 2, 3], [4, 5, 6]], device=device), torch.tensor([0, 4], device=device)
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(tokens), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        yield loss.item()
torch.testing.assert_close(list(losses(DEVICE)), list(losses("cpu")), rtol=1e-5, atol=1e-6)
assert met.counter_value("UncachedCompile") <= 2
""",
}


@pytest.mark.by_default("CPU kernels, which users have for small reads, would compute 64 bits")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.costs("processes with another variable at the import")
def test_32_bits(program: str) -> None:
    python("-c", START + program, imported=True, XLA_USE_32BIT_LONG="1")


@pytest.mark.compiled("it is about kept programs")
@pytest.mark.costs("four processes, with other variables at the import")
def test_programs_on_disk_are_told_apart(tmp_path) -> None:
    program = START + "x = torch.arange(5, device=DEVICE) + 1\ntorch_xla.sync()\nprint(x.tolist(), met.counter_names())"
    for value, expected in (("0", "Miss"), ("1", "Miss"), ("1", "Hit"), ("0", "Hit")):
        result = python(
            "-c", program, imported=True, XLA_USE_32BIT_LONG=value, XLA_PERSISTENT_CACHE_PATH=str(tmp_path)
        ).stdout
        assert "[1, 2, 3, 4, 5]" in result and f"PersistentCache{expected}" in result


def test_64_bits_by_default() -> None:
    python(
        "-c",
        START + "assert (torch.tensor([LIMITS.max], device=DEVICE) - 1).tolist() == [LIMITS.max - 1]",
        imported=True,
    )
