"""Storages of xla tensors: what PyTorch and others read from them, and that copies keep who shares what."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from agreement import exactly, on_both
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

import torch_xla
import torch_xla.debug.metrics as met

as_on_cpu = on_both(exactly)


def base(device: str = "xla") -> torch.Tensor:
    return torch.arange(6.0, device=device)


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


class TestWhatIsRead:
    def test_size_and_device(self) -> None:
        storage = base()[2:].untyped_storage()
        assert storage.nbytes() == 24 and storage.device == torch.device("xla:0")
        assert bytes(storage.tolist()) == bytes(base("cpu").untyped_storage().tolist())
        assert storage.cpu().tolist() == storage.tolist()

    def test_addresses_tell_aliases_apart(self) -> None:
        x, y = base(), base()
        assert x.data_ptr() == x.view(2, 3).t().data_ptr() == x.untyped_storage().data_ptr() != y.data_ptr()
        assert x[2:].data_ptr() == x.data_ptr() + 8
        assert torch._C._is_alias_of(x, x.detach()) and not torch._C._is_alias_of(x, y)
        identify = torch_xla._XLAC._xla_get_tensor_id
        assert identify(x) == identify(x[2:]) != identify(y)

    def test_no_bytes_have_no_address(self) -> None:
        assert torch.empty(0, device="xla").data_ptr() == 0

    def test_wrapper_does_not_keep_the_storage_alive(self) -> None:
        x = base()
        reference = StorageWeakRef(x.untyped_storage())
        assert not reference.expired()
        del x
        assert reference.expired()
        assert base().tolist() == [0, 1, 2, 3, 4, 5]  # a dead storage that is still referred to disturbs no barrier

    def test_fake_tensors_of_bases_and_views(self) -> None:
        x = base()
        y = x.view(2, 3).t()
        with torch._subclasses.FakeTensorMode() as mode:
            whole, view = mode.from_tensor(x), mode.from_tensor(y)
            assert (whole + 1).device == torch.device("xla:0")
            assert view.stride() == (1, 3) and torch._C._is_alias_of(whole, view)


# PyTorch loads its forward-mode formulas with it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
class TestForwardMode:
    def test_jvp(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            y[1:].mul_(2)
            return y.view(2, 3).t() @ x[:2]

        ours = torch.func.jvp(f, (base(),), (base() + 1,))
        theirs = torch.func.jvp(f, (base("cpu"),), (base("cpu") + 1,))
        torch.testing.assert_close([t.cpu() for t in ours], list(theirs))

    def test_tangent_of_a_view(self) -> None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(base(), torch.ones(6, device="xla"))
            view = dual.view(2, 3)[1]
            view.mul_(3)
            assert forward_ad.unpack_dual(dual).tangent.tolist() == [1, 1, 1, 3, 3, 3]


class TestSetAndResize:
    def test_set_addresses_a_storage(self) -> None:
        x = base()
        y = torch.empty(0, device="xla").set_(x.untyped_storage(), 1, (2, 2), (2, 1))
        y.zero_()
        assert x.tolist() == [0, 0, 0, 0, 0, 5]
        z = torch.empty(0, device="xla").set_(x.untyped_storage())
        assert z.shape == (6,) and z.data_ptr() == x.data_ptr()

    @pytest.mark.parametrize(("dtype", "nbytes"), [(torch.int32, 6), (torch.float64, 12), (torch.int64, 17)])
    @as_on_cpu
    def test_set_leaves_bytes_that_make_no_element(self, device: str, dtype: torch.dtype, nbytes: int) -> Any:
        x = torch.arange(nbytes, dtype=torch.uint8, device=device)
        y = torch.empty(0, dtype=dtype, device=device)
        y.set_(x.untyped_storage(), 0, (nbytes // y.element_size(),), (1,))
        before = y.clone()
        y.fill_(7)
        return [before, x, y]

    def test_set_refuses_a_storage_of_the_host(self) -> None:
        with pytest.raises(RuntimeError, match='storage on different device "cpu"'):
            torch.empty(0, device="xla").set_(base("cpu").untyped_storage(), 0, (2,), (1,))

    def test_freed_storage_gets_its_memory_back(self) -> None:
        x = base()
        view, storage = x[2:], x.untyped_storage()
        assert storage.resize_(0) is storage and storage.nbytes() == 0 and x.data_ptr() == 0
        torch_xla.sync()
        with pytest.raises(RuntimeError, match="freed by resize_"):
            view.tolist()
        storage.resize_(24)
        x.copy_(base() + 1)
        assert view.tolist() == [3, 4, 5, 6]

    @as_on_cpu
    def test_grown_storage_keeps_its_aliases(self, device: str) -> Any:
        x = torch.arange(6.0, device=device).view(2, 3).t()
        view, flipped = x[1:], x.t()
        x.untyped_storage().resize_(40)
        longer = torch.empty(0, device=device).set_(x.untyped_storage(), 0, (10,), (1,))
        longer[6:] = 9
        view.add_(10)
        flipped[0].mul_(2)
        return [x, view, flipped, longer]

    @as_on_cpu
    def test_resized_out_shares_memory_with_its_views(self, device: str) -> Any:
        out = torch.arange(6.0, device=device)
        view = out[1:3]
        with pytest.warns(UserWarning, match="resized"):
            torch.add(torch.ones(2, 2, device=device), 1, out=out)
        return [out, view]


class TestCopies:
    def check(self, pair: list[torch.Tensor]) -> None:
        x, view = pair
        assert x.device == view.device == torch.device("xla:0") and view.stride() == (1, 3)
        x.add_(100)
        assert view.tolist() == [[100, 103], [101, 104], [102, 105]]

    def test_deepcopy(self) -> None:
        x = base()
        pair = [x, x.view(2, 3).t()]
        self.check(copy.deepcopy(pair))
        self.check(copy.deepcopy(pair[::-1])[::-1])
        assert x.tolist() == [0, 1, 2, 3, 4, 5]

    def test_deepcopy_costs_no_graph(self) -> None:
        x = base() + 1
        before = met.counter_value("UncachedCompile")
        made = copy.deepcopy([x, x[1:]])
        assert met.counter_value("UncachedCompile") == before
        assert made[1].tolist() == [2, 3, 4, 5, 6]

    def test_pickle(self) -> None:
        x = base()
        made = pickle.loads(pickle.dumps([x, x.view(2, 3).t()]))  # pickle by itself keeps no sharing on CPU either
        assert made[0].tolist() == [0, 1, 2, 3, 4, 5] and made[1].tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_saving_sees_the_latest_value(self) -> None:
        x = base()
        first = pickle.dumps(x)
        x.add_(1)
        assert pickle.loads(pickle.dumps(x)).tolist() == [1, 2, 3, 4, 5, 6]
        assert pickle.loads(first).tolist() == [0, 1, 2, 3, 4, 5]

    def test_shallow_copy_shares_memory(self) -> None:
        x = base().requires_grad_()
        y = copy.copy(x)
        assert y.requires_grad and y.is_leaf and y.data_ptr() == x.data_ptr()

    def test_conjugates(self) -> None:
        z = torch.complex(base(), base() + 1)
        for made in (copy.deepcopy([z, z.conj()]), pickle.loads(pickle.dumps([z, z.conj()]))):
            torch.testing.assert_close(made[1].cpu(), z.cpu().conj())

    def test_tied_parameters_of_a_module(self) -> None:
        module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]).to("xla")
        module[1].weight = module[0].weight
        state = saved_and_loaded(module.state_dict())
        assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr() != state["0.bias"].data_ptr()


def test_a_new_storage_like_one_is_empty():
    new = base().untyped_storage().new()
    assert new.nbytes() == 0 and new.device.type == "xla"
    assert base().untyped_storage().new().data_ptr() == torch.ones(2).untyped_storage().new().data_ptr() == 0


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
class TestWhatIsMade:
    @pytest.mark.parametrize("device", ["cpu", "xla", "xla:1"])
    def test_storages(self, device: str) -> None:
        assert torch.UntypedStorage(8, device=device).nbytes() == 8
        assert torch.UntypedStorage(device=device).nbytes() == 0
        assert torch.UntypedStorage([1, 2], device=device).tolist() == [1, 2]
        assert len(torch.TypedStorage(3, dtype=torch.float64, device=device, _internal=True)) == 3
        made = torch.UntypedStorage(8, device=torch.device(device))
        assert type(made) is torch.UntypedStorage and made.device == torch.empty(0, device=device).device

    @pytest.mark.parametrize(
        "copied",
        [
            torch.UntypedStorage.clone,
            copy.copy,
            copy.deepcopy,
            lambda storage: storage.clone().cpu().to(device=storage.device),
            lambda storage: saved_and_loaded(storage, weights_only=False)._untyped_storage,
        ],
    )
    @pytest.mark.parametrize("device", ["cpu", "xla"])
    def test_tensors_of_storages_that_others_gave(self, device: str, copied: Any) -> None:
        x = base(device)
        made = copied(x.untyped_storage())
        one, two = (torch.empty(0, device=device).set_(made, *place) for place in ((), (2, (2, 2), (1, 2))))
        one.mul_(2)
        assert one.tolist() == [0, 2, 4, 6, 8, 10] and two.tolist() == [[4, 8], [6, 10]]
        assert x.tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("device", ["cpu", "xla"])
    def test_a_copy_of_a_tensor_has_the_storage_that_was_copied_beside_it(self, device: str) -> None:
        x = base(device)
        for given in ([x, x.storage(), x[2:]], [x.untyped_storage(), x, x[2:]]):
            first, second, view = copy.deepcopy(given)
            view.fill_(9)
            values = [torch.empty(0, device=device).set_(made) for made in (first, second) if made is not view]
            assert [value.tolist() for value in values] == [[0, 1, 9, 9, 9, 9]] * 2
            assert x.tolist() == [0, 1, 2, 3, 4, 5]

    @pytest.mark.parametrize("device", ["cpu", "xla"])
    def test_parts_of_storages(self, device: str) -> None:
        part = base(device).untyped_storage()[4:12]
        assert part.device == base(device).device and part.tolist() == [0, 0, 128, 63, 0, 0, 0, 64]
        assert torch.empty(0, device=device).set_(part).tolist() == [1, 2]


class Wrapped(torch.Tensor):
    """A wrapper as libraries of quantized weights make them: its memory is that of its parts."""

    part: torch.Tensor

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.device)

    def __init__(self, part: torch.Tensor) -> None:
        self.part = part

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = torch.utils._pytree.tree_map_only(Wrapped, lambda x: x.part, (args, kwargs or {}))
        made = Wrapped(op(*given[0], **given[1]))
        if op in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return torch.utils._python_dispatch.return_and_correct_aliasing(op, args, kwargs or {}, made)
        return made


class TestWrappers:
    def check(self, made: Any, device: str = "xla:0") -> None:
        assert type(made) is Wrapped and made.part.tolist() == [0, 1, 2, 3, 4, 5]
        assert made.device == made.part.device == made.detach().device == torch.device(device)

    def test_pickled_and_copied(self) -> None:
        self.check(pickle.loads(pickle.dumps(Wrapped(base()))))
        self.check(copy.deepcopy(Wrapped(base())))
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(Wrapped(base("cpu")))
        self.check(copy.deepcopy(module.to("xla")).weight.detach())
