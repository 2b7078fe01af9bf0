"""Loaders: order, overlap, barriers, failures, early ends."""

import collections
import dataclasses
import gc
import threading
import time
import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torch_xla
import torch_xla.distributed.parallel_loader as pl
import torch_xla.utils.utils as xu


def forks(test):
    """Forking beside threads warns; outside of tests the package silences JAX's warning."""
    for text in ("ignore:os.fork:RuntimeWarning", "ignore:This process .* is multi-threaded:DeprecationWarning"):
        test = pytest.mark.filterwarnings(text)(test)
    return test


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("torch_xla-loader")]


def assert_threads_end():
    deadline = time.monotonic() + 10
    while loader_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not loader_threads()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert_threads_end()


def numbers(count=10, batch_size=3, **kwargs):
    return DataLoader(TensorDataset(torch.arange(count), torch.arange(count) * 10), batch_size=batch_size, **kwargs)


def test_batches_in_order_with_the_last_partial_one():
    loader = pl.MpDeviceLoader(numbers(), "xla")
    assert len(loader) == 4
    for _ in range(2):
        batches = list(loader)
        assert [x.tolist() for x, _ in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
        assert all(x.device == torch.device("xla:0") and y[-1] == x[-1] * 10 for x, y in batches)


@pytest.mark.parametrize("threads", [1, 4])
def test_order_is_kept_by_any_number_of_copying_threads(threads):
    loader = pl.MpDeviceLoader(
        numbers(200, 1), "xla", host_to_device_transfer_threads=threads, device_prefetch_size=3, loader_prefetch_size=2
    )
    assert [x.item() for x, _ in loader] == list(range(200))


def test_device_without_an_index_is_the_current_one_of_the_calling_thread():
    try:
        torch_xla.device(2)
        (x, _), *_ = pl.MpDeviceLoader(numbers(), "xla")
        assert x.device == torch.device("xla:2")
    finally:
        torch_xla.device(0)


def test_several_devices_take_turns():
    devices = ["xla:0", "xla:1", "xla:2"]
    loader = pl.ParallelLoader(numbers(20, 1), devices, batchdim=0)
    lanes = [loader.per_device_loader(device) for device in devices]
    assert [len(lane) for lane in lanes] == [7, 7, 6]
    assert loader.per_device_samples() == 6
    for number, lane in enumerate(lanes):
        batches = [x for x, _ in lane]
        assert [x.item() for x in batches] == list(range(number, 20, 3))
        assert all(x.device.index == number for x in batches)
    with pytest.raises(ValueError, match=r"got device xla:3, expected one of"):
        loader.per_device_loader("xla:3")


def test_nested_containers_keep_their_types():
    point = collections.namedtuple("point", "x y")

    class Wrapped(xu.DataWrapper):
        def __init__(self, tensor):
            self.tensor = tensor

        def get_tensors(self):
            return [self.tensor]

        def from_tensors(self, tensors):
            return Wrapped(tensors[0])

    @dataclasses.dataclass
    class Record:
        tensor: torch.Tensor
        text: str

    t = torch.ones(2)
    batch = {
        "pair": (t, 1),
        "point": point(t, "b"),
        "ordered": collections.OrderedDict(a=t),
        "default": collections.defaultdict(list, {"a": [t]}),
        "record": Record(t, "text"),
        "wrapped": Wrapped(t),
        "none": None,
        "float": torch.ones((), dtype=torch.float64),
    }
    (sent,) = pl.MpDeviceLoader([batch], "xla")
    assert sent["pair"][0].device.type == "xla" and isinstance(sent["pair"], tuple) and sent["pair"][1] == 1
    assert isinstance(sent["point"], point) and sent["point"].x.device.type == "xla"
    assert type(sent["ordered"]) is collections.OrderedDict and sent["ordered"]["a"].device.type == "xla"
    assert sent["default"].default_factory is list and sent["default"]["a"][0].device.type == "xla"
    assert type(sent["record"]) is Record and sent["record"].tensor.device.type == "xla"
    assert sent["wrapped"].tensor.device.type == "xla"
    assert sent["none"] is None and sent["float"].dtype == torch.float64
    assert sent["pair"][0] is sent["point"].x  # sharing is kept
    assert batch["pair"][0].device.type == batch["record"].tensor.device.type == "cpu"


def test_a_lone_tensor_and_things_without_tensors():
    assert [x.tolist() for x in pl.MpDeviceLoader([torch.ones(2)], "xla")] == [[1, 1]]
    assert list(pl.MpDeviceLoader(["text", 3], "xla")) == ["text", 3]
    assert list(pl.MpDeviceLoader([], "xla")) == []


@pytest.mark.parametrize(("per_execution", "barriers"), [(1, 7), (2, 4), (3, 3)])
def test_one_barrier_per_batches_per_execution(counted, per_execution, barriers):
    # Six batches, and one barrier at the end.
    with counted("MarkStep", barriers):
        for _ in pl.MpDeviceLoader(numbers(6, 1), "xla", batches_per_execution=per_execution):
            pass


def test_the_loop_trains_without_a_barrier_of_its_own(compiles):
    weight = torch.zeros(3, device="xla")
    torch_xla.sync()
    with compiles(1):
        for x, _ in pl.MpDeviceLoader(numbers(12, 3), "xla"):
            weight += x
    assert weight.tolist() == [18, 22, 26]


class Slow(Dataset):
    """Each item takes 20 ms, and may fail."""

    def __init__(self, fail_at=None):
        self.fail_at = fail_at
        self.asked = []

    def __len__(self):
        return 50

    def __getitem__(self, index):
        self.asked.append(index)
        if index == self.fail_at:
            return self.explode()
        time.sleep(0.02)
        return torch.tensor(index)

    def explode(self):
        raise ZeroDivisionError("no such sample")


def test_reading_overlaps_with_the_loop():
    loader = pl.MpDeviceLoader(
        DataLoader(Slow(), batch_size=1), "xla", loader_prefetch_size=50, device_prefetch_size=50
    )
    start = time.perf_counter()
    for _ in loader:
        time.sleep(0.02)
    # One after the other it would be 2 s.
    assert time.perf_counter() - start < 1.8


def test_prefetching_is_bounded():
    dataset = Slow()
    loader = iter(
        pl.MpDeviceLoader(DataLoader(dataset, batch_size=1), "xla", loader_prefetch_size=2, device_prefetch_size=3)
    )
    next(loader)
    time.sleep(0.6)
    # One was taken, 3 are on the device, 2 wait on the host, one each is in the hands of a thread.
    assert len(dataset.asked) <= 1 + 3 + 2 + 2


@forks
@pytest.mark.parametrize("workers", [0, 1])
def test_a_failing_dataset_raises_in_the_loop_with_its_traceback(workers):
    seen = []
    with pytest.raises(ZeroDivisionError, match="no such sample") as caught:
        for x in pl.MpDeviceLoader(DataLoader(Slow(fail_at=2), batch_size=1, num_workers=workers), "xla"):
            seen.append(x.item())
    assert seen == [0, 1]
    text = "".join(traceback.format_exception(caught.value))
    assert "explode" in text and "_read" in text


def test_a_failing_copy_raises_in_the_loop():
    class Broken(xu.DataWrapper):
        def get_tensors(self):
            return [torch.ones(1)]

        def from_tensors(self, tensors):
            raise LookupError("cannot rebuild")

    loader = iter(pl.MpDeviceLoader([torch.ones(1), Broken(), torch.ones(1)], "xla"))
    assert next(loader).item() == 1
    with pytest.raises(LookupError, match="cannot rebuild"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_every_device_hears_of_a_failure():
    loader = pl.ParallelLoader(DataLoader(Slow(fail_at=0), batch_size=1), ["xla:0", "xla:1"])
    lanes = [loader.per_device_loader(device) for device in ("xla:0", "xla:1")]
    for lane in lanes:
        try:
            next(lane)
        except (ZeroDivisionError, StopIteration) as error:
            assert lane is not lanes[0] or isinstance(error, ZeroDivisionError)


def test_break_stops_the_threads():
    for _ in pl.MpDeviceLoader(DataLoader(Slow(), batch_size=1), "xla", device_prefetch_size=1, loader_prefetch_size=1):
        break
    assert_threads_end()


def test_an_error_in_the_loop_stops_the_threads():
    def run():
        for _ in pl.MpDeviceLoader(numbers(100, 1), "xla", device_prefetch_size=1, loader_prefetch_size=1):
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert_threads_end()


def test_close_stops_the_threads_at_once():
    loader = pl.MpDeviceLoader(numbers(100, 1), "xla", device_prefetch_size=1, loader_prefetch_size=1)
    lane = iter(loader)
    next(lane)
    assert loader._parallel_loader is not None
    loader.close()
    assert not loader_threads()
    with pytest.raises(StopIteration):
        next(lane)


def test_loops_over_the_same_loader_may_nest():
    loader = pl.MpDeviceLoader(numbers(4, 2), "xla")
    assert [(a.tolist(), b.tolist()) for a, _ in loader for b, _ in loader] == [
        ([0, 1], [0, 1]),
        ([0, 1], [2, 3]),
        ([2, 3], [0, 1]),
        ([2, 3], [2, 3]),
    ]


def test_shuffling_follows_the_seed_whatever_the_loop_draws():
    def order():
        torch.manual_seed(3)
        results = []
        for x, _ in pl.MpDeviceLoader(numbers(20, 5, shuffle=True, generator=torch.Generator().manual_seed(1)), "xla"):
            torch.rand(3)
            results += x.tolist()
        return results

    assert order() == order()


def test_iterable_datasets_have_no_length():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    loader = pl.MpDeviceLoader(DataLoader(Stream(), batch_size=2), "xla")
    assert [x.tolist() for x in loader] == [[0, 1], [2]]
    with pytest.raises(TypeError):
        len(loader)


@forks
def test_forked_workers_beside_a_living_client():
    torch.ones(1, device="xla").item()
    loader = pl.MpDeviceLoader(numbers(20, 5, num_workers=2), "xla")
    for _ in range(2):
        assert [x.sum().item() for x, _ in loader] == [10, 35, 60, 85]


def test_the_attributes_that_libraries_touch():
    inner = numbers()
    loader = pl.MpDeviceLoader(inner, "xla", batches_per_execution=2)
    assert loader._loader is inner
    assert loader._parallel_loader_kwargs == {"batches_per_execution": 2}
    assert loader.batch_sampler is inner.batch_sampler and loader.batch_size == 3
    assert loader.dataset is inner.dataset
    replaced = pl.MpDeviceLoader(type("L", (), {"dataset": 1})(), "xla")
    replaced.dataset = 5
    assert replaced._loader.dataset == 5
    with pytest.raises(AttributeError, match="'_missing'"):
        loader._missing  # noqa: B018
    with pytest.raises(AttributeError, match="missing"):
        loader.missing  # noqa: B018


def test_subclasses_may_wrap_the_iteration_as_accelerate_does():
    class Wrapper(pl.MpDeviceLoader):
        def __init__(self, dataloader, device):
            super().__init__(dataloader, device)
            self._rng_types = getattr(self._loader, "rng_types", None)

        def __iter__(self):
            return super().__iter__()

        @property
        def batch_sampler(self):
            return self._loader.batch_sampler

    loader = Wrapper(numbers(), torch_xla.device())
    assert [x[0].item() for x, _ in loader] == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"device_prefetch_size": 0}, "device_prefetch_size=0"),
        ({"batches_per_execution": -1}, "batches_per_execution=-1"),
    ],
)
def test_bad_sizes(kwargs, text):
    with pytest.raises(ValueError, match=rf"\[loader\] {text}, expected 1 or more"):
        iter(pl.MpDeviceLoader(numbers(), "xla", **kwargs))
    with pytest.raises(TypeError, match=r"\[loader\] input_sharding=.*, expected a ShardingSpec"):
        iter(pl.MpDeviceLoader(numbers(), "xla", input_sharding=object()))


def test_parameters_and_gradients_flags_survive():
    parameter = torch.nn.Parameter(torch.ones(2))
    (sent,) = pl.MpDeviceLoader([[parameter, torch.ones(1, requires_grad=True)]], "xla")
    assert isinstance(sent[0], torch.nn.Parameter) and sent[0].device.type == "xla"
    assert sent[1].requires_grad and sent[1].is_leaf


def test_batches_of_any_length_become_batches_of_a_few(compiles):
    batches = [torch.arange(1.0, 1 + 2 * n).reshape(2, n) for n in (3, 4, 5, 7, 8, 2)]
    means = []
    with compiles(2):
        for x, mask in pl.MpDeviceLoader(batches, "xla", pad_to=pl.Buckets([8, 4], mask=True)):
            means.append((x * mask).sum() / mask.sum())
    for actual, batch in zip(means, batches, strict=True):
        torch.testing.assert_close(actual.cpu(), batch.mean())


def test_padding_reaches_what_has_the_length():
    pair = collections.namedtuple("pair", ("words", "labels"))

    @dataclasses.dataclass
    class Record:
        words: torch.Tensor
        labels: torch.Tensor

    words, labels, other = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.ones(2, 5)
    buckets = pl.Buckets([4], value=9, values={"labels": -100, 1: -100}, mask="mask")
    batch = {"words": words, "labels": labels, "other": [other], "name": "n"}
    sent = [*pl.MpDeviceLoader([batch], "xla", pad_to=buckets)]
    assert sent[0]["words"].tolist() == [[1, 1, 1, 9]] * 2 and sent[0]["labels"].tolist() == [[1, 1, 1, -100]] * 2
    assert sent[0]["other"][0].shape == (2, 5) and sent[0]["name"] == "n"
    assert sent[0]["mask"].tolist() == [[True, True, True, False]] * 2
    plain = pl.Buckets(4, value=9, values={"labels": -100, 1: -100})
    made = plain.pad(pair(words, labels))
    assert isinstance(made, pair) and made.words[0, 3] == 9
    assert plain.pad(Record(words, labels)).labels[1, 3] == -100
    assert plain.pad([words, labels])[1][0, 3] == -100
    one_tensor = plain.pad({"words": words, "labels": words})
    assert one_tensor["words"][0, 3] == 9 and one_tensor["labels"][0, 3] == -100
    whole = torch.ones(2, 4)
    assert plain.pad(whole) is whole and plain.pad("text") == "text"
    assert pl.Buckets(4, dim=0).pad(other).tolist() == [[1] * 5, [1] * 5, [0] * 5, [0] * 5]


def test_lengths_that_fit_no_bucket():
    with pytest.raises(ValueError, match=r"\[loader\] a batch of length 5 in dimension 1, expected at most 4, the"):
        list(pl.MpDeviceLoader([torch.ones(2, 5)], "xla", pad_to=[2, 4]))
    with pytest.raises(ValueError, match=r"\[loader\] pad_to=\[0\], expected lengths of 1 or more"):
        pl.MpDeviceLoader([], "xla", pad_to=[0])
    with pytest.raises(ValueError, match=r"to which pad_to is to add a mask, expected a dict"):
        pair = collections.namedtuple("pair", ("a",))
        list(pl.MpDeviceLoader([pair(torch.ones(2, 3))], "xla", pad_to=pl.Buckets(4, mask="m")))
