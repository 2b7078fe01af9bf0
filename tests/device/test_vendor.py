"""A vendor's package as those for torch_xla 2.9 are: a plugin, options, attributes, a custom call, tools for its cache.

Around the library of a foreign maker, which knows nothing of it.
"""

from __future__ import annotations

from pathlib import Path

import plugin
import pytest
from probes import python

pytestmark = pytest.mark.skipif(plugin.library() is None, reason=plugin.MISSING)

VENDOR = """
import os
import torch, torch_xla
from torch_xla.experimental.plugins import DevicePlugin
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

class Vendor(DevicePlugin):
    def __init__(self):
        super().__init__()
        os.environ["XLA_STABLEHLO_COMPILE"] = "1"
        torch_xla._XLAC._set_xla_all_numbers_special_scalars("VENDOR_NARROW" not in os.environ)

    def unsupported_dtypes(self):
        return (torch.float64, torch.int64) if "VENDOR_NARROW" in os.environ else ()

    def library_path(self):
        return os.environ["VENDOR_LIBRARY"]

    def client_create_options(self):
        return {"cpu_device_count": 4}

def role(tensor, name):
    shapes, dtypes, attributes = [tensor.shape], [tensor.dtype], {"vendor.role": name}
    return stablehlo_custom_call([tensor], "vendor.mark", shapes, dtypes, frontend_attributes=attributes)
"""
BEGIN = """
import concurrent.futures, re, warnings
import numpy as np
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import acme

def main_of(text):
    return text[text.index("func.func public @main"):].partition("func.func private")[0]
"""


def run(program: str, folder: Path, **environment: str) -> str:
    """What a process prints that has the plugin."""
    plugin.package(folder, "acme", {"torch_xla.plugins": "ACME = acme:Vendor"}, acme=VENDOR)
    begin = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{BEGIN}"
    environment |= {"PJRT_DEVICE": "ACME", "VENDOR_LIBRARY": str(plugin.library()), "PJRT_NAMES_AND_LIBRARY_PATHS": ""}
    return python("-c", begin + program, **environment).stdout


def test_it_trains_with_options_and_no_number_is_an_argument(tmp_path: Path) -> None:
    run(
        """
def train(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).to(device)
    x, optimizer = torch.rand(4, 8).to(device), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) * 0.3 + 0.1).square().mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync(wait=False)
    return loss.detach().cpu()

torch_xla.set_custom_compile_options({"xla_llvm_disable_expensive_passes": True})
torch.testing.assert_close(train("xla"), train("cpu"))

x = torch.rand(3, device="cpu").to("xla")
assert main_of(xm.get_stablehlo([x * 0.3 + 0.1])).partition(" -> ")[0].count("%arg") == 1

torch_xla.set_custom_compile_options({"acme_of_nobody": "3"})
y = x * 7
for _ in range(2):
    try:
        torch_xla.sync()
    except RuntimeError as error:
        assert "acme_of_nobody" in str(error) and "[compile] got" in str(error), error
    else:
        raise AssertionError("an option of nobody")
torch_xla.set_custom_compile_options({})
torch.testing.assert_close(y.cpu(), x.cpu() * 7)
""",
        tmp_path,
    )


def test_its_cache_is_read_by_its_tools_and_its_attributes_by_name(tmp_path: Path) -> None:
    run(
        f"""
from pathlib import Path
from jax._src.lib import xla_client
folder = Path({str(tmp_path / "cache")!r})
assert not torch_xla._XLAC._xla_computation_cache_is_initialized()
xr.initialize_cache(str(folder))
x = torch.arange(5.0).to("xla")
y = x * 2
torch_xla.sync()
(file,) = folder.iterdir()
device = __import__("jax").devices("acme")[0]
from torch_xla._core.compile import cache
executable = file.read_bytes()[: -cache._TAIL]
loaded = device.client.deserialize_executable(executable, xla_client.DeviceList((device,)), xla_client.CompileOptions())
assert loaded.local_devices() == [device]
assert all(concurrent.futures.ThreadPoolExecutor(8).map(lambda _: y.cpu()[4] == 8, range(20000)))  # it counts the views
xr.clear_computation_cache()
assert xr.get_num_cached_compilation_graph() == 0
y = x * 2
torch_xla.sync()
assert met.counter_value("PersistentCacheHit") == 1 and torch_xla._XLAC._xla_computation_cache_is_initialized()

(first, *_) = attributes = xr.global_runtime_device_attributes()
assert len(attributes) == 4 and first["name"] == "ACME:0" and "device_arch" not in first and first.get("none", 5) == 5

class Device:
    device_arch, dram_size_bytes = "acme", 1 << 30

own = xr._Attributes(Device(), 1)
assert own["device_arch"] == "acme" and "dram_size_bytes" in own and own.get("dram_size_bytes") == 1 << 30
""",
        tmp_path,
    )


def test_a_module_has_the_axes_and_roles_of_the_user(tmp_path: Path) -> None:
    run(
        """
x = torch.arange(32.0).reshape(8, 4).to("xla")
view = x[1:]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    xr.use_spmd()
assert "[spmd] xla tensors were made before SPMD mode" in str(told[0].message) and len(told) == 1
assert view.sum().item() == sum(range(4, 32)) and torch.equal(x.cpu(), torch.arange(32.0).reshape(8, 4))

mesh = xs.Mesh(np.arange(4), (1, 4), ("batch", "model"))
w = torch.rand(8, 4).to("xla")
xs.mark_sharding(w, mesh, ("model", "batch"))
text = xm.get_stablehlo([acme.role(w, "parameter") + 1])
assert re.search(r'sdy.mesh @mesh = <\\["batch"=1, "model"=4\\]>', text), text
assert '<["batch"=1, "model"=4]>' in xm.get_stablehlo([x + 1])  # of the one mesh that there is
call = re.search(r'custom_call @vendor.mark\\(%arg0\\).*', main_of(text))
assert call and 'vendor.role = "parameter"' in call.group(0), text
y = (w * 2 + x).sum(0)
torch_xla.sync()
torch.testing.assert_close(y.cpu(), (w.cpu() * 2 + x.cpu()).sum(0))

# An update in place keeps the sharding, and the host puts the parts of what it reads together.
before, spec = w.cpu(), torch_xla._XLAC._get_xla_sharding_spec(w)
w.add_(1)
torch_xla.sync()
compiles = met.counter_value("UncachedCompile")
assert torch.equal(w.cpu(), before + 1) and torch_xla._XLAC._get_xla_sharding_spec(w) == spec != ""
assert met.counter_value("UncachedCompile") == compiles

# Over two meshes the module has neither.
v = torch.rand(8, 4).to("xla")
xs.mark_sharding(v, xs.Mesh(np.arange(4), (2, 2), ("a", "b")), ("a", "b"))
text = xm.get_stablehlo([v + w])
assert '<["m0"=2, "m1"=2]>' in text, text
torch.testing.assert_close((v + w).cpu(), v.cpu() + w.cpu())

# In an order of their own, which is no transposition of the prime lengths'.
u = torch.rand(8, 4).to("xla")
xs.mark_sharding(u, xs.Mesh(np.array([3, 1, 0, 2]), (2, 2), ("x", "y")), ("x", "y"))
text = xm.get_stablehlo([u @ torch.ones(4, 3, device="xla")])
assert re.search(r'<\\["x"=2, "y"=2\\], device_ids=\\[3, 1, 0, 2\\]>', text), text
torch.testing.assert_close((u @ torch.ones(4, 3, device="xla")).cpu(), u.cpu() @ torch.ones(4, 3))
""",
        tmp_path,
    )


def test_numbers_travel_in_types_that_the_device_has(tmp_path: Path) -> None:
    """Without float64 and int64: from the first graph on, which is cut before the client runs."""
    run(
        """
def arguments_of(*tensors):
    return main_of(xm.get_stablehlo(list(tensors))).partition(" -> ")[0]

first = arguments_of(torch.ones(3, device="xla") * 0.3)
assert "xf32>" in first and "f64" not in first, first
host = torch.arange(1.0, 7.0)
x, narrow, big = host.to("xla"), 7, 1 << 40
torch.manual_seed(1 << 35)
all = arguments_of((x * 0.3 + narrow) * big, x * 2j, torch.dropout(x, 0.5, True))
assert not re.search("[if]64", all), all
assert [all.count(f"x{kind}>") for kind in ("ui32", "i32", "complex<f32>")] == [1, 1, 1], all

torch_xla.sync()
compiles = met.counter_value("UncachedCompile") or 0
for number, narrow, big in ((0.3, 7, 1 << 40), (0.4, -9, 1 << 40), (0.4, -9, 1 << 41)):
    y = (x * number + narrow) * big
    torch_xla.sync()
    torch.testing.assert_close(y.cpu(), (host * number + narrow) * big)
assert met.counter_value("UncachedCompile") - compiles == 2  # a whole number of more than 32 bits is a constant

import jax
torch.manual_seed(1 << 35)
drawn = torch.rand(4, device="xla").cpu()
key = jax.random.wrap_key_data(np.array([8, 0], np.uint32), impl="threefry2x32")
assert np.array_equal(drawn, jax.random.uniform(key, (4,), np.float32))
q = torch.rand(1, 1, 4, 8, device="xla", requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum().backward()
assert q.grad.isfinite().all()
""",
        tmp_path,
        VENDOR_NARROW="1",
    )


def test_a_module_has_the_lines_and_modules_of_the_user(tmp_path: Path) -> None:
    """As the library tells them of what it compiled."""
    run(
        """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x))

net = Net().to("xla")
y = net(torch.rand(2, 4).to("xla"))
torch_xla.sync()
from torch_xla._core.compile import cache
(text,) = [text for e in cache._executables.values() if "tanh" in (text := e.loaded.hlo_modules()[0].to_string())]
names = re.findall(r'op_name="([^"]*)"', text)
assert any("Net/layer" in name for name in names) and any("Net/" in n and "tanh" in n for n in names), text
assert "<string>" in text and str(Net.forward.__code__.co_firstlineno + 1) in text, text
""",
        tmp_path,
        XLA_HLO_DEBUG="1",
        XLA_IR_DEBUG="1",
    )
