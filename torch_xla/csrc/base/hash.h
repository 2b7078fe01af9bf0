// A 128-bit running hash, stable across processes (nothing but values goes in, never an address).
#pragma once
#include <cstdint>
#include <cstring>
#include <string_view>

namespace torch_xla {

struct Hash {
  uint64_t hi = 0x9ae16a3b2f90404fULL;
  uint64_t lo = 0xc3a5c85c97cb3127ULL;

  void mix(uint64_t v) {
    hi = (hi ^ v) * 0x9fb21c651e98df25ULL;
    hi ^= hi >> 32;
    lo = (lo + v) * 0xff51afd7ed558ccdULL;
    lo ^= lo >> 29;
  }
  void mix(const Hash& other) {
    mix(other.hi);
    mix(other.lo);
  }
  void mix(double d) {
    uint64_t bits = 0;
    std::memcpy(&bits, &d, sizeof(bits));
    mix(bits);
  }
  void mix(std::string_view s) {
    uint64_t h = 0xcbf29ce484222325ULL;
    for (const char c : s) {
      h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
    mix(h);
    mix(static_cast<uint64_t>(s.size()));
  }
  bool operator==(const Hash& other) const { return hi == other.hi && lo == other.lo; }
};

struct HashHasher {
  size_t operator()(const Hash& h) const { return h.hi ^ h.lo; }
};

}  // namespace torch_xla
