// What most sources include of PyTorch, parsed once per build: see setup.py. Each source still includes what it uses.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
