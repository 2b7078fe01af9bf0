// What every source includes of PyTorch, parsed once where each is compiled by itself: see build.py. Each source still
// includes what it uses. pybind11 and torch/library.h are left out: what they define in headers would be compiled into
// each object.
#include <ATen/ATen.h>
