"""What Python code does with a tensor works on device xla as it does on the CPU."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.runtime as xr

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


def on_xla(values: Any, **options: Any) -> torch.Tensor:
    return torch.tensor(values, **options).to("xla")


def outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """What a call gives, tensors as CPU tensors, or how it fails."""
    try:
        value = call()
    except Exception as error:
        return type(error).__name__, str(error).replace("torch.xla.", "torch.")
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}", value.detach().cpu().tolist()
    return type(value).__name__, value


def same_as_cpu(call: Callable[[torch.Tensor], Any], values: Any) -> None:
    """Asserts that a call does with a tensor on xla what it does with one on the CPU."""
    host = torch.as_tensor(values)
    assert outcome(lambda: call(host.to("xla"))) == outcome(lambda: call(host.clone()))


def grid() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4)


class TestCopies:
    def test_deepcopy_of_a_tensor(self) -> None:
        x = on_xla([1.0, 2.0])
        made = copy.deepcopy(x)
        made.add_(1)
        assert x.tolist() == [1.0, 2.0]
        assert made.tolist() == [2.0, 3.0]

    def test_deepcopy_of_a_pending_view(self) -> None:
        x = on_xla([[1.0, 2.0], [3.0, 4.0]]) * 2
        made = copy.deepcopy(x.t()[1:])
        assert made.tolist() == [[4.0, 8.0]]

    def test_deepcopy_of_a_parameter(self) -> None:
        made = copy.deepcopy(nn.Parameter(on_xla([1.0])))
        assert type(made) is nn.Parameter
        assert made.requires_grad and made.is_leaf and made.device.type == "xla"

    def test_deepcopy_of_a_module_keeps_its_ties(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("xla")
        module[1].weight = module[0].weight
        made = copy.deepcopy(module)
        assert made[1].weight is made[0].weight is not module[0].weight
        assert torch.equal(made[0].weight, module[0].weight)

    def test_deepcopy_of_a_result_is_refused_as_on_the_cpu(self) -> None:
        with pytest.raises(RuntimeError, match="created explicitly by the user"):
            copy.deepcopy(on_xla([1.0]).requires_grad_() * 2)


class TestPickle:
    # PyTorch itself cannot pickle the others.
    @pytest.mark.parametrize("dtype", [t for t in DTYPES if "float8" not in str(t) and t != torch.uint16], ids=str)
    def test_tensor(self, dtype: torch.dtype) -> None:
        host = torch.tensor([1, 0, 3]).to(dtype)
        made = pickle.loads(pickle.dumps(host.to("xla")))
        assert made.device.type == "xla" and made.dtype == dtype
        assert made.cpu().view(torch.uint8).tolist() == host.view(torch.uint8).tolist()

    @pytest.mark.parametrize("asks", [False, True])
    def test_gradient_flag(self, asks: bool) -> None:
        made = pickle.loads(pickle.dumps(on_xla([1.0, 2.0]).requires_grad_(asks)))
        assert made.requires_grad is asks
        assert made.is_leaf and made.tolist() == [1.0, 2.0]

    def test_parameter_and_module(self) -> None:
        parameter = pickle.loads(pickle.dumps(nn.Parameter(on_xla([1.0]))))
        assert type(parameter) is nn.Parameter and parameter.device.type == "xla"
        module = nn.Linear(2, 2).to("xla")
        assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)

    def test_device_index(self) -> None:
        assert pickle.loads(pickle.dumps(torch.ones(2, device="xla:1"))).device == torch.device("xla:1")


def saved(value: Any, **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return file


class TestSaveAndLoad:
    @pytest.mark.parametrize("weights_only", [False, True])
    def test_functions_that_say_the_place(self, weights_only: bool) -> None:
        x = on_xla([1.0, 2.0, 3.0])
        value = {"x": x, "part": x[1:], "p": nn.Parameter(on_xla([4.0])), "host": torch.tensor([5.0])}
        asked: list[str] = []

        def keep(storage: torch.UntypedStorage, location: str) -> Any:
            asked.append(location)
            return storage

        def clones(storage: torch.UntypedStorage, location: str) -> Any:
            return storage.clone() if location.startswith("xla") else None

        for function, place in (
            (keep, "cpu"),
            (lambda storage, location: None, "xla"),
            (lambda storage, location: storage if location == "cpu" else None, "xla"),
            (clones, "cpu"),
            (torch.serialization.default_restore_location, "xla"),
        ):
            loaded = torch.load(saved(value), map_location=function, weights_only=weights_only)
            assert [loaded[name].device.type for name in value] == [place, place, place, "cpu"]
            assert [loaded[name].tolist() for name in value] == [[1, 2, 3], [2, 3], [4], [5]]
            assert type(loaded["p"]) is nn.Parameter and loaded["p"].requires_grad
            loaded["x"].mul_(10)
            assert function is clones or loaded["part"].tolist() == [20, 30]
        assert set(asked) == {"cpu", "xla:0"}

    def test_module_and_its_ties(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[1].weight = module[0].weight
        loaded = torch.load(saved(module), map_location="xla", weights_only=False)
        assert loaded[1].weight is loaded[0].weight
        torch.testing.assert_close(loaded(torch.ones(1, 2, device="xla")).cpu(), module(torch.ones(1, 2)))

    def test_a_device_that_is_not_there(self) -> None:
        with pytest.raises(RuntimeError, match=r"\[load\] got a value for xla:99, expected one of the \d+ devices"):
            torch.load(saved(torch.ones(2)), map_location="xla:99", weights_only=False)
        torch.load(saved(torch.ones(2)), map_location="cpu")  # PyTorch remembers the place of a load that failed

    def test_state_dict_round_trips(self) -> None:
        source, target = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
        source.to("xla")
        target.load_state_dict(source.state_dict())
        assert target[0].weight.device.type == "cpu"
        assert torch.equal(target[0].weight, source[0].weight.cpu())
        target.load_state_dict(source.state_dict(), assign=True)
        assert target[0].weight.device.type == "xla"
        source.load_state_dict(torch.load(saved(target.state_dict()), map_location="cpu"))
        assert torch.equal(target[0].weight, source[0].weight)

    def test_optimizer_state(self) -> None:
        module = nn.Linear(2, 2).to("xla")
        optimizer, other = (torch.optim.Adam(module.parameters()) for _ in range(2))
        module(torch.ones(3, 2, device="xla")).sum().backward()
        optimizer.step()
        other.load_state_dict(torch.load(saved(optimizer.state_dict())))
        mean = other.state_dict()["state"][0]["exp_avg"]
        assert mean.device.type == "xla"
        assert torch.equal(mean, optimizer.state_dict()["state"][0]["exp_avg"])


class TestHostValues:
    @pytest.mark.parametrize(
        "call",
        [
            torch.Tensor.tolist,
            torch.Tensor.item,
            bool,
            int,
            float,
            complex,
            len,
            list,
            lambda x: [row.tolist() for row in x],
            lambda x: 2 in x,
            lambda x: 99 in x,
            lambda x: [10, 20, 30, 40, 50][x],
            lambda x: f"{x:.2f}",
            lambda x: torch.is_nonzero(x),
            lambda x: x.numpy(force=True).tolist(),
        ],
    )
    @pytest.mark.parametrize("values", [3, 2.5, 1 + 2j, True, [1, 2], [[1.5, 2.0]], [4], []], ids=str)
    def test_conversions(self, call: Callable[[torch.Tensor], Any], values: Any) -> None:
        if call is list:
            same_as_cpu(lambda x: [row.tolist() for row in list(x)], values)
        else:
            same_as_cpu(call, values)

    def test_numpy_needs_the_host(self) -> None:
        x = on_xla([1.0, 2.0])
        for call in (np.asarray, torch.Tensor.numpy, lambda t: np.array([t])):
            with pytest.raises(TypeError, match="can't convert xla:0 device type tensor to numpy"):
                call(x)
        assert np.asarray(x.cpu()).tolist() == [1.0, 2.0]
        with pytest.raises(TypeError, match="numpy"):
            x.add(np.ones(2))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_dtypes_are_kept(self, dtype: torch.dtype) -> None:
        host = torch.tensor([1, 0, 3]).to(dtype)
        there = host.to("xla")
        assert there.dtype == dtype
        assert there.cpu().view(torch.uint8).tolist() == host.view(torch.uint8).tolist()
        assert torch.ones(2, device="xla").to(dtype).cpu().view(torch.uint8).tolist() == (
            torch.ones(2).to(dtype).view(torch.uint8).tolist()
        )

    def test_wide_types_are_not_cut(self) -> None:
        assert on_xla(2**53 + 1).item() == 2**53 + 1
        assert on_xla([2**62 + 1]).add(1).item() == 2**62 + 2
        assert on_xla(1 + 2**-50, dtype=torch.float64).mul(1).item() == 1 + 2**-50

    def test_reading_twice_and_after_a_write(self) -> None:
        x = on_xla([1.0])
        assert (x.item(), x.add_(1).item(), x.item()) == (1.0, 2.0, 2.0)


class TestPrinting:
    @pytest.mark.parametrize(
        "host",
        [
            torch.tensor([1.0, 2.0]),
            torch.tensor([]),
            torch.empty(0, 3),
            torch.tensor([True, False]),
            torch.tensor([1 + 2j]),
            torch.tensor(3),
            torch.tensor([1, 2], dtype=torch.int32),
            torch.tensor([1.0]).bfloat16(),
            torch.tensor([1e10, 1e-10, float("nan"), float("inf")]),
            torch.arange(5000.0),
            torch.arange(40000).reshape(200, 200),
        ],
        ids=lambda t: f"{t.dtype}-{tuple(t.shape)}",
    )
    def test_as_on_the_cpu_with_the_device(self, host: torch.Tensor) -> None:
        shown = repr(host.to("xla"))
        assert "device='xla:0'" in shown
        assert "".join(shown.replace("device='xla:0'", "").split()).replace(",", "") == (
            "".join(repr(host).split()).replace(",", "")
        )

    def test_gradient_information(self) -> None:
        x = on_xla([1.0]).requires_grad_()
        assert repr(x) == "tensor([1.], device='xla:0', requires_grad=True)"
        assert repr(x * 2) == "tensor([2.], device='xla:0', grad_fn=<MulBackward0>)"
        assert repr(nn.Parameter(x.detach())).startswith("Parameter containing:\ntensor([1.], device='xla:0'")

    def test_in_text(self) -> None:
        assert f"{on_xla(3.5)} {on_xla(3.5):.2f} {on_xla([1.0])}" == "3.5 3.50 tensor([1.], device='xla:0')"


class TestMoves:
    def test_device_and_dtype_in_one_call(self) -> None:
        x = torch.ones(2)
        assert x.to("xla", torch.float64).dtype == torch.float64
        there = x.to(device="xla", dtype=torch.int32, non_blocking=True, copy=True)
        assert (there.dtype, there.tolist()) == (torch.int32, [1, 1])
        assert there.to("cpu", torch.float16).dtype == torch.float16
        assert x.to(there).dtype == torch.int32 and x.to(there).device.type == "xla"
        assert there.to("xla:0") is there and there.cpu().device.type == "cpu"
        assert there.is_xla and not there.is_cpu and there.get_device() == 0

    def test_the_host_may_change_what_it_sent(self) -> None:
        x = torch.ones(4)
        there = x.to("xla", non_blocking=True)
        x.zero_()
        assert there.tolist() == [1.0] * 4

    def test_between_devices(self) -> None:
        x = on_xla([1.0, 2.0]) * 2
        there = x.to("xla:1")
        there.add_(1)
        assert there.device == torch.device("xla:1")
        assert (x.tolist(), there.tolist()) == ([2.0, 4.0], [3.0, 5.0])
        x.copy_(there, non_blocking=True)
        assert x.tolist() == [3.0, 5.0]
        with pytest.raises(RuntimeError, match="two devices, xla:0 and xla:1"):
            x + there

    def test_copy_both_ways_and_through_views(self) -> None:
        x, host = on_xla([1.0, 2.0]), torch.zeros(2)
        host.copy_(x)
        x[:1].copy_(torch.tensor([9.0]))
        host[1:].copy_(x[:1])
        assert (host.tolist(), x.tolist()) == ([1.0, 9.0], [9.0, 2.0])

    def test_host_tensors_do_not_mix_in_but_numbers_do(self) -> None:
        x = on_xla([1.0, 2.0])
        with pytest.raises(RuntimeError, match="at least two devices, xla:0 and cpu"):
            x + torch.ones(2)
        assert (x + torch.tensor(1.0)).tolist() == [2.0, 3.0]

    def test_pinned_memory_is_not_needed(self) -> None:
        assert not on_xla([1.0]).is_pinned()

    def test_set_data(self) -> None:
        x = on_xla([1.0, 2.0]).requires_grad_()
        x.data.add_(1)
        assert x.tolist() == [2.0, 3.0]
        x.data = on_xla([5.0, 6.0, 7.0])
        assert x.shape == (3,) and x.is_leaf and x.tolist() == [5.0, 6.0, 7.0]
        x.data = torch.zeros(2)
        assert x.device.type == "cpu" and x.tolist() == [0.0, 0.0]


class TestExchange:
    def test_with_jax_and_numpy(self) -> None:
        import jax.numpy as jnp

        from torch_xla.utils import dlpack

        for source in (jnp.arange(3.0), np.arange(3.0, dtype=np.float32), torch.arange(3.0), on_xla([0.0, 1.0, 2.0])):
            capsule = dlpack.to_dlpack(source) if getattr(source, "is_xla", False) else source
            made = dlpack.from_dlpack(capsule)
            assert made.device.type == "xla" and made.tolist() == [0.0, 1.0, 2.0]
        assert torch.from_dlpack(jnp.arange(3)).to("xla").tolist() == [0, 1, 2]

    def test_the_protocol_itself_refuses(self) -> None:
        on_a_gpu = xr.device_type() == "CUDA"  # whose tensors PyTorch's protocol gives away
        if on_a_gpu:
            assert torch.from_dlpack(on_xla([1.0])).is_cuda
        for call in (np.from_dlpack,) if on_a_gpu else (torch.from_dlpack, np.from_dlpack):
            with pytest.raises((ValueError, RuntimeError, BufferError), match="(?i)dlpack|device"):
                call(on_xla([1.0]))


class TestEquality:
    def test_identity_and_elements(self) -> None:
        x = on_xla([1.0, 2.0])
        assert hash(x) == id(x) and {x: 1}[x] == 1
        assert (x == on_xla([1.0, 3.0])).tolist() == [True, False]
        assert (x != x).tolist() == [False, False]
        assert torch.equal(x, x.clone()) and not torch.equal(x, x + 1) and not torch.equal(x, x[:1])
        assert torch.allclose(x, x + 1e-9) and not torch.allclose(x, x + 1)
        torch.testing.assert_close(x, x.clone())


class TestNumbers:
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: x % 3,
            lambda x: torch.fmod(x, 2.5),
            lambda x: torch.copysign(x, -1.0),
            lambda x: torch.xlogy(x, 3.0),
            lambda x: torch.special.xlog1py(3.0, x),
            lambda x: torch.special.zeta(x + 2, 3.0),
            lambda x: torch.special.chebyshev_polynomial_t(x, 3),
            lambda x: x.long() & 2,
            lambda x: (x > 1) ^ True,
            lambda x: torch.bitwise_left_shift(2, x.int()),
        ],
    )
    @pytest.mark.parametrize("compiled", [True, False])
    def test_in_the_place_of_tensors(self, call: Callable[[torch.Tensor], torch.Tensor], compiled: bool) -> None:
        host = torch.arange(9) % 7 / 2
        made = call(host.to("xla"))
        if compiled:
            torch_xla.sync()
        torch.testing.assert_close(made.cpu(), call(host), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        "call",
        [
            lambda z: z.conj(),
            lambda z: z.conj() + z,
            lambda z: z.conj()[0] * 2,
            lambda z: z.conj().imag,
            lambda z: z @ z.mH,
            lambda z: torch.view_as_real(z.conj().resolve_conj()),
            lambda z: z.clone().conj().mul_(2 + 1j),
        ],
    )
    def test_lazy_conjugation(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        host = torch.tensor([[1 + 2j, 3 - 1j]])
        torch.testing.assert_close(call(host.to("xla")).cpu(), call(host).resolve_conj().resolve_neg())


class TestFactories:
    @pytest.mark.parametrize(
        "make",
        [
            lambda d: torch.tensor([1, 2], device=d),
            lambda d: torch.tensor([torch.tensor(1.0, device=d), 2.0], device=d),
            lambda d: torch.as_tensor([1.5], device=d),
            lambda d: torch.as_tensor(np.ones(2), device=d),
            lambda d: torch.asarray([1, 2], device=d),
            lambda d: torch.zeros(2, dtype=torch.int8, device=d),
            lambda d: torch.full((2,), 7, device=d),
            lambda d: torch.arange(1, 9, 3, device=d),
            lambda d: torch.arange(0.5, 2, 0.25, device=d),
            lambda d: torch.linspace(0, 1, 5, device=d),
            lambda d: torch.eye(2, 3, device=d),
            lambda d: torch.tril_indices(2, 2, device=d),
            lambda d: torch.scalar_tensor(2, device=d),
            lambda d: torch.randperm(5, device=d).sort()[0],
            lambda d: torch.hann_window(4, device=d),
        ],
    )
    def test_on_the_device(self, make: Callable[[str], torch.Tensor]) -> None:
        assert make("xla").device.type == "xla"
        torch.testing.assert_close(make("xla").cpu(), make("cpu"))

    @pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
    def test_like(self, name: str) -> None:
        like = getattr(torch, f"{name}_like")
        x = on_xla([[1.0, 2.0]])
        assert like(x).device == x.device and like(x).shape == x.shape
        assert like(x, dtype=torch.float64).dtype == torch.float64
        assert like(x, device="cpu").device.type == "cpu"
        assert like(x.cpu(), device="xla").device.type == "xla"

    def test_new(self) -> None:
        x = on_xla([1, 2])
        for made in (x.new_zeros(2), x.new_ones(2), x.new_empty(2), x.new_full((2,), 3), x.new_tensor([1, 2])):
            assert made.device == x.device and made.dtype == torch.int64
        assert x.new_zeros(2, dtype=torch.float32, device="cpu").device.type == "cpu"
        assert x.new_empty_strided((2, 2), (1, 2)).stride() == (1, 2)

    def test_default_device(self) -> None:
        torch.set_default_device("xla")
        try:
            assert torch.get_default_device().type == "xla"
            for made in (torch.ones(2), torch.tensor([1]), torch.rand(2), nn.Linear(2, 2).weight):
                assert made.device.type == "xla"
            assert torch.ones(2, device="cpu").device.type == "cpu"
        finally:
            torch.set_default_device(None)
        assert torch.ones(2).device.type == "cpu"

    def test_device_context(self) -> None:
        with torch.device("xla"):
            assert torch.ones(2).device.type == nn.Linear(2, 2).weight.device.type == "xla"
            with torch.device("cpu"):
                assert torch.ones(2).device.type == "cpu"

    def test_context_of_another_device(self) -> None:
        with torch.device("xla:1"):
            assert torch.arange(2).device == torch.device("xla:1")
