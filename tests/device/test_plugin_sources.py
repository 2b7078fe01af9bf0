"""How a PJRT plugin is found, chosen, given its options and refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plugin
import pytest
from plugin import package
from probes import python, setting

import torch_xla.core.xla_model as xm
from torch_xla import _config
from torch_xla._core.device import client, environment, memory_stats
from torch_xla._core.device import pjrt_plugins as plugins
from torch_xla._core.job import launcher
from torch_xla.distributed import xla_multiprocessing as xmp
from torch_xla.experimental import plugins as public

NEEDS_LIBRARY = pytest.mark.skipif(plugin.library() is None, reason=plugin.MISSING)

# A library that says it has an interface, of which it has nothing.
LIBRARY = """
#include <cstddef>
struct Version { size_t size; void* next; int major, minor; };
struct Api { size_t size; void* next; Version version; void* functions[200]; };
extern "C" const Api* GetPjrtApi() {
  static Api api{SIZE, nullptr, {sizeof(Version), nullptr, MAJOR, 106}, {}};
  return &api;
}
"""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of packages in this process, whose client runs already: they are found, and not started."""

    def forget() -> None:
        for cached in (plugins._points, plugins._of_jax, plugins.platform_of):
            cached.cache_clear()

    client.hardware_devices()
    forget()
    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.delenv(plugins.NAMED, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("maker")]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    monkeypatch.undo()
    forget()


OURS = """
import os
from torch_xla.experimental.plugins import DevicePlugin

class Maker(DevicePlugin):
    def library_path(self):
        return os.environ["MAKER_LIBRARY"]

    def client_create_options(self):
        return {"cpu_device_count": int(os.environ.get("MAKER_DEVICES", "3"))}
"""
OF_JAX = """
import os
from jax._src import xla_bridge

def initialize():
    options = {"cpu_device_count": 2}
    xla_bridge.register_plugin("maker", library_path=os.environ["MAKER_LIBRARY"], options=options)
"""


@NEEDS_LIBRARY
@pytest.mark.own_client("each has an interpreter of its own, and a plugin")
class TestOneThatRuns:
    """Interpreters of their own: a process has one client."""

    def ran(self, folder: Path, program: str, **env: str) -> str:
        begin = f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
        begin += "import torch, torch_xla, torch_xla.runtime as xr, torch_xla.core.xla_model as xm\n"
        begin += "from torch_xla.experimental import plugins\n"
        env = {
            plugins.NAMED: "",
            "PJRT_DEVICE": "Maker",
            "MAKER_LIBRARY": str(plugin.library()),
            "XLA_HOST_COMPUTE": "never",
        } | env
        return python("-c", begin + program, imported=True, **env).stdout

    def test_of_both_groups(self, tmp_path: Path) -> None:
        program = """
assert xr.device_type() == "Maker" and not {"maker", "maker_jax"} & set(sys.modules)
x = torch.ones(2, 3, device="xla:2") + 1
assert x.sum().item() == 12 and "maker" in sys.modules
assert plugins.using_dynamic_plugins() and type(plugins.default()).__name__ == "Maker"
counts = xr.addressable_device_count(), xr.global_device_count(), torch.xla.device_count(), len(torch_xla.devices())
assert counts == (3, 3, 3, 3) and xr.addressable_runtime_device_count() == xr.global_runtime_device_count() == 3
assert xm.xla_device_hw("xla:1") == "Maker" and torch.xla.get_device_name(2) == "Maker:2"
attributes = xr.runtime_device_attributes("xla:1")
assert attributes["name"] == "Maker:1" and attributes["device_kind"] == xm.xla_device_kind()
assert xr.global_runtime_device_attributes()[1] == attributes and xr.host_index() == 0
try:
    xm.get_memory_info()
except RuntimeError as error:
    print(error)
print(torch_xla.debug.memory.live_tensors("xla:2")[0].nbytes)
try:
    plugins.register_plugin("maker", plugins.default())
except RuntimeError as error:
    print(error)
"""
        package(tmp_path, "maker", {"torch_xla.plugins": "maker = maker:Maker"}, maker=OURS)
        alone = self.ran(tmp_path, program)
        # JAX finds a package of its own group by itself, and the client has the options of ours.
        package(tmp_path, "maker-jax", {"jax_plugins": "maker = maker_jax"}, maker_jax=OF_JAX)
        assert self.ran(tmp_path, program) == alone
        assert alone.splitlines() == [
            "[memory] got no statistics of memory from Maker:0; ask torch_xla.debug.memory.live_tensors() what tensors "
            "hold",
            "24",
            "[device] got a plugin for 'maker', whose devices are in use; register it before them",
        ]

    def test_of_jax_alone_and_registered_by_a_script(self, tmp_path: Path) -> None:
        package(tmp_path, "maker-jax", {"jax_plugins": "maker = maker_jax"}, maker_jax=OF_JAX)
        program = """
x = torch.ones(3, device="xla:1") + 1
assert x.sum().item() == 6 and xr.addressable_device_count() == 2 and not plugins.using_dynamic_plugins()
"""
        self.ran(tmp_path, program)
        program = f"""
{OURS}
    def requires_xla_coordinator(self):
        return True

plugins.use_dynamic_plugins()
plugins.register_plugin("MINE", Maker())
xr.set_device_type("mine")
assert xr.device_type() == "mine" and plugins.default().physical_chip_count() == 1
assert (torch.ones(3, device="xla:3") + 1).sum().item() == 6 and xr.addressable_device_count() == 4
import jax
assert jax.process_count() == 1 and jax.distributed.is_initialized()
"""
        self.ran(tmp_path / "none", program, PJRT_DEVICE="CPU", MAKER_DEVICES="4")

    def test_after_jax_was_used(self, tmp_path: Path) -> None:
        package(tmp_path, "maker", {"torch_xla.plugins": "maker = maker:Maker"}, maker=OURS)
        program = """
import jax
jax.devices()
try:
    torch.ones(3, device="xla").tolist()
except RuntimeError as error:
    print(error)
"""
        assert self.ran(tmp_path, program) == (
            "[device] got PJRT_DEVICE=maker, but this process already uses JAX, which takes no further plugins; create "
            "the first xla tensor before using JAX\n"
        )

    def test_options_from_the_environment(self, tmp_path: Path) -> None:
        (tmp_path / "maker.json").write_text(
            f'{{"library_path": "{plugin.library()}", "create_options": {{"cpu_device_count": 3}}}}'
        )
        program = "assert (torch.ones(3, device='xla:2') + 1).sum().item() == 6 and xr.addressable_device_count() == 3"
        self.ran(tmp_path, program, PJRT_NAMES_AND_LIBRARY_PATHS=f"maker:{tmp_path}/maker.json")

    def test_an_option_of_no_type(self, tmp_path: Path) -> None:
        program = f"""
{OURS}
for wrong in ([1.5], {{}}):
    Maker.client_create_options = lambda self: {{"cpu_device_count": wrong}}
    plugins.register_plugin("maker", Maker())
    try:
        torch.ones(3, device="xla").tolist()
    except RuntimeError as error:
        print(error)
"""
        assert self.ran(tmp_path, program).splitlines() == [
            f"[device] got client_create_options()={{'cpu_device_count': {value}}} of plugin 'maker', expected text, "
            "numbers, booleans or lists of whole numbers by name; correct Maker"
            for value in ("[1.5]", "{}")
        ]

    @pytest.mark.parametrize(
        ("ending", "status"),
        [("", 0), ("sys.exit(3)", 3), ("raise ValueError('mine')", 1), ("end.start()", 0)],
        ids=["end", "exit", "raise", "thread"],
    )
    def test_exit_with_work_under_way(self, tmp_path: Path, ending: str, status: int) -> None:
        package(tmp_path, "maker", {"torch_xla.plugins": "maker = maker:Maker"}, maker=OURS)
        program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import threading, torch, torch_xla

def work():
    x = torch.full((400, 400), 1e-3, device="xla")
    for _ in range(30):
        x = x @ x + 1e-3
        torch_xla.sync()

end = threading.Thread(target=work)
work()
{ending}
"""
        env = {plugins.NAMED: "", "PJRT_DEVICE": "maker", "MAKER_LIBRARY": str(plugin.library())}
        done = python("-c", program, imported=True, check=False, **env)
        assert done.returncode == status and ("ValueError: mine" in done.stderr) == (status == 1), done.stderr


class TestOneThatDoesNot:
    def test_libraries(self, tmp_path: Path) -> None:
        if shutil.which("g++") is None:
            pytest.skip("no g++ to make libraries with")
        source = tmp_path / "library.cpp"
        source.write_text(LIBRARY)
        made = {"major": "-DMAJOR=7 -DSIZE=1128", "small": "-DMAJOR=0 -DSIZE=40", "empty": "-DMAJOR=0 -DSIZE=1128"}
        for name, flags in made.items():
            command = ["g++", "-shared", "-fPIC", *flags.split(), str(source), "-o", f"{tmp_path}/{name}.so"]
            subprocess.run(command, check=True)
        subprocess.run(["g++", "-shared", "-xc++", "/dev/null", "-o", f"{tmp_path}/none.so"], check=True)
        (tmp_path / "text.so").write_text("no library")
        program = f"""
import torch, torch_xla
from torch_xla._core.device import client
from torch_xla.experimental import plugins

class Plugin(plugins.DevicePlugin):
    def __init__(self, path):
        self.path = path

    def library_path(self):
        return self.path

for name in ("major", "small", "empty", "none", "text", "absent"):
    plugins.register_plugin(name, Plugin(f"{tmp_path}/{{name}}.so"))
    client._chosen = name
    for _ in range(2):
        try:
            torch.ones(3, device="xla").tolist()
        except RuntimeError as error:
            print(error)
"""
        program += """
client._chosen = "cpu"  # which JAX cannot start either
try:
    torch.ones(3, device="xla").tolist()
except RuntimeError as error:
    print(error)
"""
        *lines, beside = python("-c", program, imported=True, **{plugins.NAMED: ""}).stdout.splitlines()
        assert beside.startswith(
            "[device] got another plugin beside PJRT_DEVICE=CPU, and JAX starts all (Unable to ini"
        )
        why = {
            "major": "it has version 7.106 of PJRT's interface",
            "small": "it has version 0.106 of PJRT's interface in 40 bytes, where version 0.29 had 776",
            "empty": "it has version 0.106 of PJRT's interface without functions up to PJRT_Client_Create",
            "none": f"NOT_FOUND: GetPjrtApi not found in {tmp_path}/none.so",
            "text": f"INTERNAL: Failed to open {tmp_path}/text.so: {tmp_path}/text.so: file too short",
            "absent": f"INTERNAL: Failed to open {tmp_path}/absent.so: {tmp_path}/absent.so: cannot open shared object "
            "file: No such file or directory",
        }
        assert lines[::2] == lines[1::2]
        end = f"expected one made for jaxlib {metadata.version('jaxlib')}; install one that fits, or set PJRT_DEVICE to"
        for line, (name, text) in zip(lines[::2], why.items(), strict=True):
            got = f"got plugin {name!r} ({tmp_path}/{name}.so), which JAX cannot use: {text}"
            assert line == f"[device] {got}, {end} another"

    @pytest.mark.parametrize(
        ("module", "why"),
        [
            ("import nowhere_at_all", r"got ModuleNotFoundError \(No module named 'nowhere_at_all'\) from plugin"),
            ("def Maker(): raise ValueError('mine')", r"got ValueError \(mine\) from plugin 'maker', entry point"),
            ("Maker = dict", r"plugin 'maker' \(entry point maker_a:Maker of a\) is \{\}, expected a torch_xla\.exp"),
            ("", r"got AttributeError \(module 'maker_a' has no attribute 'Maker'\) from plugin 'maker', entry point "),
        ],
    )
    def test_entry_points(self, found: Path, module: str, why: str) -> None:
        package(found, "a", {"torch_xla.plugins": "maker = maker_a:Maker"}, maker_a=module)
        with pytest.raises(RuntimeError, match=rf"^\[device\] {why}"):
            plugins.give_to_jax("maker")
        assert "\n" not in str(pytest.raises(RuntimeError, plugins.find, "MAKER").value)

    @pytest.mark.parametrize(
        ("module", "why"),
        [
            ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
            ("pass", r"it has no function initialize\(\), by which JAX registers it"),
        ],
    )
    def test_entry_points_of_jax(self, found: Path, module: str, why: str) -> None:
        package(found, "b", {"jax_plugins": "maker = maker_b"}, maker_b=module)
        with pytest.raises(RuntimeError, match=rf"^\[device\] got plugin 'maker' \(maker_b\), .*: {why}, expected one"):
            plugins.give_to_jax("maker")

    @pytest.mark.parametrize("group", ["torch_xla.plugins", "jax_plugins"])
    def test_two_of_one_name(self, found: Path, group: str) -> None:
        for name in ("c", "d"):
            package(found, name, {group: f"maker = maker_{name}"})
        with pytest.raises(RuntimeError, match=r"several plugins named 'maker': maker_. of . and .*; uninstall all b"):
            plugins.give_to_jax("maker")

    def test_one_without_a_library(self, found: Path) -> None:
        public.register_plugin("maker", public.DevicePlugin())
        with pytest.raises(RuntimeError, match=r"'maker' \(DevicePlugin\), .* it does not override library_path\(\)"):
            plugins.give_to_jax("maker")

    def test_one_that_jax_is_not_to_start(self, found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        with pytest.raises(
            RuntimeError, match=r"got JAX_PLATFORMS=cpu and PJRT_DEVICE=Maker, expected maker among the"
        ):
            plugins.give_to_jax("Maker")

    def test_what_is_registered(self, found: Path) -> None:
        with pytest.raises(TypeError, match=r"plugin 'maker' is 3, expected a torch_xla\.experimental\.plugins\.Devic"):
            public.register_plugin("maker", 3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"got a plugin named 'Tpu', which is JAX's own; register it under ano"):
            public.register_plugin("Tpu", public.DevicePlugin())

    def test_a_name_that_nobody_knows(self, found: Path) -> None:
        package(found, "e", {"torch_xla.plugins": "one = e:One", "jax_plugins": "two = e"})
        public.register_plugin("Three", public.DevicePlugin())
        assert plugins.available() == ["CPU", "two", "one", "three"] and plugins.find("four") is None
        assert plugins.platform_of("TWO") == "two" and plugins.platform_of("four") == "four"
        with setting(_config.XLA_REGISTER_INSTALLED_PLUGINS, False):
            plugins._points.cache_clear()
            assert plugins.available() == ["CPU", "two", "three"]
        with pytest.raises(KeyError):
            public.default()
        with setting(_config.PJRT_LIBRARY_PATH, "/a/library.so"):
            library = plugins.find("LIBRARY")
            assert library is not None and library.library_path() == "/a/library.so"


def test_a_plugin_says_how_it_is_launched(found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Maker(public.DevicePlugin):
        calls: list[Any] = []

        def library_path(self) -> str:
            raise OSError("not here")

        def physical_chip_count(self) -> int:
            return 3

        def configure_single_process(self) -> None:
            self.calls.append("one")

        def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
            self.calls.append((local_rank, local_world_size))

    public.register_plugin("maker", Maker())
    monkeypatch.setattr(client, "device_type", lambda: "maker")
    assert launcher.processes_of_host() == 3
    xmp.spawn(lambda index: Maker.calls.append(f"in {index}"), nprocs=1)
    monkeypatch.setattr(environment, "rank_info", lambda: environment.RankInfo(5, 6, 2, 3, 1))
    assert public.default().host_index() == 1
    with pytest.raises(RuntimeError, match="OSError: not here"):
        plugins.give_to_jax("maker")
    assert Maker.calls == ["one", "in 0", (2, 3)]


def test_a_device_that_says_nothing_of_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], counted: Callable[..., Any]
) -> None:
    def unable(self: Any = None) -> Any:
        raise RuntimeError("UNIMPLEMENTED")

    with counted("MemoryUnknown", 2):
        loaded = SimpleNamespace(get_compiled_memory_stats=unable)
        assert memory_stats.compiled_stats(loaded) is memory_stats.compiled_stats(loaded) is None
    told = "torch_xla: no memory figures of programs here, so XLA_MEMORY_LIMIT_MB does nothing: UNIMPLEMENTED\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr(client, "jax_device", lambda index: SimpleNamespace(memory_stats=unable))
    monkeypatch.setattr(client, "is_own_cpu", lambda: False)
    with pytest.raises(RuntimeError, match=r"^\[memory\] got no statistics of memory from .*live_tensors\(\)"):
        xm.get_memory_info("xla:0")


@NEEDS_LIBRARY
def test_another_library_or_option_is_another_plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch_xla import _jax_internals

    path, options = tmp_path / "library", {"speed": 1}
    monkeypatch.setattr(plugins, "_library_at", lambda address: str(path))
    monkeypatch.setattr(_jax_internals, "client_options", lambda platform: options)

    def identity(content: bytes, speed: int) -> str:
        plugins.identity.cache_clear()
        path.write_bytes(content)
        options["speed"] = speed
        return plugins.identity("maker")

    found = [identity(b"a", 1), identity(b"b", 1), identity(b"a", 2), identity(b"a", 1)]
    plugins.identity.cache_clear()
    assert len(set(found)) == 3 and found[0] == found[3] and plugins.identity("CPU") == ""
