"""``XLA_HLO_DEBUG=1``: module paths, operators and the user's lines in HLO."""

import re

import pytest
from probes import python

SCRIPT = """
import torch
import torch_xla
from torch_xla._core.compile import cache


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.attn(x))  # line 13


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x):
        try:
            self.encoder.layers[1](None)
        except TypeError:
            pass  # the path is that of this module again
        return self.encoder(x).exp()


model = Model().to("xla")
x = torch.ones(3, 4).to("xla")
torch_xla.sync()
cache.clear()
(model(x) * 2).sum().backward()
torch_xla.sync()
(executable,) = cache._executables.values()
print(executable.loaded.hlo_modules()[0].to_string())
pending = [model(x)]
hlo, text = torch_xla._XLAC._get_xla_tensors_hlo(pending), torch_xla._XLAC._get_xla_tensors_text(pending)
assert 'op_name="jit(graph)/Model/encoder/layers/0/attn/linear/dot_general" stack_frame_id=' in hlo, hlo
assert f"f32[3,4], scope=Model/encoder/layers/1, at {__file__}:13\\n" in text, text
"""


@pytest.mark.costs("programs of some hundred operators")
def test_hlo_speaks_of_modules_and_lines(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(SCRIPT)
    done = python(path, devices=1, timeout=300, imported=True, XLA_HLO_DEBUG="1")
    names = set(re.findall(r'op_name="jit\(graph\)/([^"]*)"', done.stdout))
    for layer in (0, 1):
        path_of_layer = f"Model/encoder/layers/{layer}"
        assert {f"{path_of_layer}/attn/linear/dot_general", f"{path_of_layer}/tanh/tanh"} <= names
        # An operator of the backward pass belongs to the module of its forward operator.
        assert {f"{path_of_layer}/attn/linear_backward/dot_general", f"{path_of_layer}/tanh_backward/mul"} <= names
    assert {"Model/exp/exp", "mul.Tensor/mul"} <= names
    places = set(re.findall(r"function_name_id=(\d+) line=(\d+)", done.stdout))
    files, functions = (
        dict(re.findall(r'^(\d+) "(.*)"$', part, re.MULTILINE))
        for part in re.findall(r"^File?Names\n((?:.*\n)*?)FunctionNames\n((?:.*\n)*?)FileLocations", done.stdout, re.M)[
            0
        ]
    )
    assert str(path) in files.values()
    lines = {(functions[number], int(line)) for number, line in places}
    assert {("forward", 13), ("forward", 37), ("<module>", 44)} <= lines
    assert "backward" not in dict(lines)  # its operators have the line that called it
